"""The products of "fused" by cuBLAS: rows of each other rank, which are sent, then the own ones.

A kernel adds the ranks' partials of own rows, which cuBLAS rounds as our kernels do; or these rows
are left to our kernel, which adds as it multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copy_push import CopyPush
from tdx.kernels.library_product import LibraryProduct, library_product, refused
from tdx.kernels.operand import Operand, elements
from tdx.kernels.product import blocks_for, least_us
from tdx.kernels.reduced_product import ReducedProduct
from tdx.kernels.scattered_rows import sum_tile, wait_each
from tdx.kernels.select import constants, engines_us
from tdx.kernels.tile_product import known
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Bound

if TYPE_CHECKING:
    from tdx.kernels.matmul_reduce_scatter import Fused

__all__ = ["LibrarySums", "bind_library_sums"]

_WIDTH = 64  # most columns of a tile that are added at a time
# How many times as many turns of tiles cuBLAS may take, in products for each rank, as our kernel,
# which waits and adds as well; on two and four H100s
_IDLE = 1.09


@triton.jit(do_not_specialize=["chunks", "tiles", "last_tiles"])
def count_kernel(finished, world, chunks, tiles, last_tiles):
    """Count as finished what fused_kernel computes for others, as calls of it may follow.

    `tiles` for each chunk of a peer but the last.
    """
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    lanes = tl.arange(0, 32)
    for first in range(0, ranks * chunks, 32):
        word = first + lanes
        count = tl.where(word % chunks == chunks - 1, last_tiles, tiles)
        others = (word < ranks * chunks) & (word // chunks != me)
        word = tl.minimum(word, ranks * chunks - 1)
        tdl.notify(finished + word, me, world, count, op="add", when=others)


@triton.jit(do_not_specialize=["rows", "whole", "columns", "chunks"])
def sum_kernel(
    c, bias, partials, outgoing, made, signals, credit, epoch, world, rows, whole, columns, chunks,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr, OWN_CHUNK: tl.constexpr,
):  # fmt: skip
    """Add the own tiles in `outgoing` and the peers' in `partials` as they arrive.

    c, rows, whole, chunks, CHUNK and OWN_CHUNK: as fused_kernel has them.
    """
    columns = known(columns, EVEN)
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    sound = tdl.no_fault(world)
    tiles_n = tl.cdiv(columns, BN)
    part = me.to(tl.int64) * rows
    mine = outgoing + part * columns
    own = c
    count = rows
    if OWN_CHUNK > 0:
        own += part * columns
        count = tl.minimum(rows, whole - part).to(tl.int32)
    rm = tl.arange(0, BM)
    rn = tl.arange(0, WIDTH)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BM) * tiles_n, tl.num_programs(0)):
        row, col = tile // tiles_n, tile % tiles_n
        ok = tdl.wait_all(credit, ranks, world, tl.load(epoch)) & sound
        ok = wait_each(signals + row * BM // CHUNK, ranks, chunks, world, epoch, ok)
        for piece in range(0, BN // WIDTH):
            first = tl.cast(col, tl.int64) * BN + piece * WIDTH
            corner = mine + tl.cast(row, tl.int64) * BM * columns + first
            at = rm[:, None] * columns + rn[None, :]
            inside = (rm[:, None] < count - row * BM) & (rn[None, :] < columns - first)
            sum_tile(
                own, bias, tl.load(corner + at, mask=inside, other=0.0), partials, row,
                col * (BN // WIDTH) + piece, rows, count, columns, world, ok, BM, WIDTH,
                HAS_BIAS, ACTIVATION,
            )  # fmt: skip
        if OWN_CHUNK > 0:
            tdl.notify(made + row * BM // OWN_CHUNK, me, world, 1, op="add")
    tdl.wait_all(credit, ranks, world, tl.load(epoch))
    for chunk in range(0, chunks):
        wait_each(signals + chunk, ranks, chunks, world, epoch, sound)  # see copy_push.py


def bind_library_sums(
    plan: ReducedProduct, fused: Fused, layout: Sequence[Any]
) -> LibrarySums | None:
    """What is called as fused_kernel, and sends; None if that is to run.

    `layout`: of the operands; see Way.
    """
    given, steps, bias, _, aligned = layout
    group, own, push, config = plan.group, plan.partial_product, fused.push, plan.config
    whole, n, k, *strides = plan._sizes(given)
    reason = ""
    if n * config.block_m >= 1 << 31:
        return None  # our kernel says so
    if push is None:
        reason = "there is nothing to send"
    elif whole != group.size * fused.rows:
        reason = f"{whole} rows are no multiple of the {group.size} ranks"
    if push is None or reason:
        if plan.product.library:
            raise refused(f'{reason}; "unfused" takes it')
        return None
    chunks = len(fused.counts)
    share, parts = _share(plan, fused)
    rows = fused.rows // parts
    begin = rows * strides[0] * plan.dtype.itemsize  # bytes to the next rows of a
    made = rows * n * own.out_dtype.itemsize
    scales = 4 * rows * steps[0]
    aligned = aligned and not any(x % 16 for x in (begin, made, scales))
    multiply = library_product(
        plan.world, own, plan.pinned, (rows, n, k, *strides), steps, plan.dtype, aligned,
        share != "none",
    )  # fmt: skip
    if multiply is None:
        return None
    plan.use(multiply.memory)
    _, outgoing, finished, *_, handle = fused.shared
    counts = fused.counts
    count = plan.bind(
        count_kernel, 1, (), finished, handle, chunks, counts[0], counts[-1], num_warps=1
    )
    ours = share == "others"
    blocks = push.blocks
    last = fused.kernel(plan, layout, True) if ours else _bind_sum(plan, fused, bias, blocks)
    order = [(group.rank + hop) % group.size for hop in range(1, group.size + (not ours))]
    products = [
        (rank, rank * parts + part, range(part * chunks // parts, (part + 1) * chunks // parts))
        for rank in order
        for part in range(parts)
    ]
    return LibrarySums(
        multiply, group.rank, products, push, count, last, ours, outgoing, (begin, made, scales)
    )


def _bind_sum(plan: ReducedProduct, fused: Fused, bias: np.dtype, beside: int) -> Bound:
    """sum_kernel, which is called with c and the bias, beside so many blocks of others."""
    config, (_, n) = plan.config, plan.shape_b
    partials, outgoing, _, *others = fused.shared
    # Where a kernel that waits takes all multiprocessors signals behind copies may not come (H100)
    blocks = blocks_for(plan.world, config.tiles(fused.rows, n), beside)
    return plan.bind(
        sum_kernel, blocks, (plan.product.out_dtype, bias), partials, outgoing, *others,
        fused.rows, elements(plan.shape_a[:-1]), n, len(fused.counts),
        BM=config.block_m, BN=config.block_n, WIDTH=min(_WIDTH, config.block_n),
        EVEN=n % 16 == 0, CHUNK=fused.chunk, OWN_CHUNK=fused.own_chunk,
        num_warps=config.num_warps, **plan.product.constants,
    )  # fmt: skip


def _share(plan: ReducedProduct, fused: Fused) -> tuple[str, int]:
    """What cuBLAS should multiply, and in how many products of the rows of one rank.

    "all", rows of "others", or "none" (all, if it was asked for). Two products, of which one
    travels while the next is made, unless they take longer than one, as they do of float8. Our
    kernel adds own rows as it multiplies them: so it has these, of types of 2 bytes, if the
    products hide what is sent and blocks have tiles. If not, it has all sums of one peer, and those
    that are gathered meanwhile. It also has what would leave blocks idle, a product at a time.
    """
    backend, size, config = plan.world.backend, plan.group.size, plan.config
    k, n = plan.shape_b
    if plan.product.scaled or backend != "cuda":
        return "all", 1
    blocks, rows = plan.world.driver.resident_blocks(), fused.rows
    one, halves = _turns(rows, n, blocks), 2 * _turns(rows // 2, n, blocks)
    parts = 2 if rows % (2 * fused.chunk) == 0 and halves <= one else 1
    each = halves if parts > 1 else one
    own, whole = (_turns(height, n, blocks, config.block_n) for height in (rows, size * rows))
    sent = (size - 1) * rows * n * plan.partial_dtype.itemsize
    multiplying = least_us(plan.world, plan.dtype.itemsize, size * rows, n, k)
    hidden = plan.dtype.itemsize == 2 and engines_us(backend, sent) < multiplying
    share, turns = "none", 0.0
    if hidden and 2 * config.tiles(rows, n) > blocks and (size > 2 or parts > 1):
        share, turns = "others", (size - 1) * each + own
    elif size > 2 and not fused.own_chunk:
        share, turns = "all", size * each
    return share if turns <= _IDLE * whole else "none", parts


def _turns(rows: int, columns: int, blocks: int, width: int = 0) -> float:
    """Turns of tiles of the most columns that a product takes, in tiles of `width`, or the best."""
    limits = constants("cuda")
    times = limits.tile_times
    height = -(-rows // limits.tile[0])
    widths = [width] if width else list(times)
    return min(
        -(-height * -(-columns // each) // blocks) * times.get(each, each / max(times))
        for each in widths
    )


class LibrarySums:
    """The `products`, each of another rank's rows followed by its copies, and `last`.

    A product has a rank, the number of its rows among all, and their chunks. `last` is called with
    all that a call was given if own rows are `ours`, else with c and the bias.
    """

    def __init__(
        self, multiply: LibraryProduct, rank: int, products: Sequence[tuple[int, int, range]],
        push: CopyPush, count: Bound, last: Bound, ours: bool, outgoing: Array,
        steps: tuple[int, int, int],
    ):  # fmt: skip
        self._multiply, self._rank, self._products = multiply, rank, products
        self._push, self._count, self._last = push, count, last
        self._first = 0 if ours else 4
        self._outgoing, self._steps = outgoing, steps

    def __call__(self, stream: int, *operands: Operand) -> None:
        """Queue them, for a, b, their scales, c and the bias."""
        a, b, scale_a, scale_b, c, _ = operands
        begin, made, scales = self._steps
        self._count(self._push.begin(stream))
        for rank, at, chunks in self._products:
            self._multiply.at(
                stream, a.address + at * begin, b.address, self._outgoing._address + at * made,
                0, scale_a.address + at * scales, scale_b.address,
            )  # fmt: skip
            if rank != self._rank:
                self._push.send(stream, rank, chunks)
        self._push.rest(stream, c)
        self._last(stream, *operands[self._first :])

    def prepare(self, *operands: Operand) -> None:
        """Load the last kernel."""
        self._last.prepare(*operands[self._first :])
