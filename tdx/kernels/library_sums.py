"""The products of "fused" by cuBLAS: rows of each other rank, which are sent, then the own ones.

Where several peers gather the sums they do so in phases, of a chunk of each rank's rows. A kernel
adds the ranks' partials of own rows, which cuBLAS rounds as our kernels do; or these rows are left
to our kernel, which adds as it multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.library_product import LibraryProduct, library_product, refused
from tdx.kernels.operand import Operand, elements
from tdx.kernels.product import blocks_for, least_us
from tdx.kernels.reduced_product import ReducedProduct
from tdx.kernels.scattered_rows import each_phase, product_turns, sum_tile, wait_each
from tdx.kernels.select import engines_us
from tdx.kernels.tile_product import known
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Bound

if TYPE_CHECKING:
    from tdx.kernels.copy_push import CopyPush
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


@triton.jit(do_not_specialize=["rows", "whole", "columns", "chunks", "first", "last"])
def sum_kernel(
    c, bias, partials, outgoing, made, signals, credit, epoch, world, rows, whole, columns, chunks,
    first, last,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr, OWN_CHUNK: tl.constexpr,
    PHASED: tl.constexpr,
):  # fmt: skip
    """Add the own tiles in `outgoing` and the peers' in `partials` as they arrive.

    Own tiles `first` to `last`, row by row. c, rows, whole, chunks and constants: as fused_kernel
    has them.
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
    phase = tl.minimum(CHUNK // BM, tl.cdiv(rows, BM)) * tiles_n
    begin = first // phase if PHASED else 0
    end = tl.cdiv(last, phase) if PHASED else chunks
    if OWN_CHUNK > 0:
        own += part * columns
        count = tl.minimum(rows, whole - part).to(tl.int32)
    rm = tl.arange(0, BM)
    rn = tl.arange(0, WIDTH)
    for tile in range(first + tl.program_id(0), last, tl.num_programs(0)):
        row, col = tile // tiles_n, tile % tiles_n
        ok = tdl.wait_all(credit, ranks, world, tl.load(epoch)) & sound
        ok = wait_each(signals + row * BM // CHUNK, ranks, chunks, world, epoch, ok)
        for piece in range(0, BN // WIDTH):
            left = tl.cast(col, tl.int64) * BN + piece * WIDTH
            corner = mine + tl.cast(row, tl.int64) * BM * columns + left
            at = rm[:, None] * columns + rn[None, :]
            inside = (rm[:, None] < count - row * BM) & (rn[None, :] < columns - left)
            sum_tile(
                own, bias, tl.load(corner + at, mask=inside, other=0.0), partials, row,
                col * (BN // WIDTH) + piece, rows, count, columns, world, ok, BM, WIDTH,
                HAS_BIAS, ACTIVATION,
            )  # fmt: skip
        if OWN_CHUNK > 0:
            tdl.notify(made + row * BM // OWN_CHUNK, me, world, 1, op="add")
    tdl.wait_all(credit, ranks, world, tl.load(epoch))
    for chunk in range(begin, end):
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
    share, parts = _share(plan, fused)
    ours, rows, phase = share == "others", fused.rows, fused.parts.phase
    height = phase // parts  # of a product
    a_line, c_line = strides[0] * plan.dtype.itemsize, n * own.out_dtype.itemsize
    lines = (a_line, c_line, 4 * steps[0])
    products: dict[int, LibraryProduct] = {}
    for rest in (height, rows % height):
        fits = aligned and not any(rest * line % 16 for line in lines)
        if rest:
            made = library_product(
                plan.world, own, plan.pinned, (rest, n, k, *strides), steps, plan.dtype, fits,
                share != "none",
            )  # fmt: skip
            if made is None:
                return None
            products[rest] = made
    for made in products.values():
        plan.use(made.memory)
    _, outgoing, finished, *_, handle = fused.shared
    counts, chunk = fused.counts, fused.parts.chunk
    count = plan.bind(
        count_kernel, 1, (), finished, handle, len(counts), counts[0], counts[-1], num_warps=1
    )
    order = [(group.rank + hop) % group.size for hop in range(1, group.size + (not ours))]
    work = [
        [
            _Product(
                products[min(height, rows - at)], rank, rank * rows + at,
                range(at // chunk, -(-min(at + height, rows) // chunk)),
            )
            for rank in order
            for at in range(first, min(first + phase, rows), height)
        ]
        for first in range(0, rows, phase)
    ]  # fmt: skip
    last = [
        fused.kernel(plan, layout, number) if ours else _bind_sum(plan, fused, bias, number)
        for number in range(len(work))
    ]
    return LibrarySums(push, group.rank, work, count, last, ours, outgoing, lines)


def _bind_sum(plan: ReducedProduct, fused: Fused, bias: np.dtype, phase: int) -> Bound:
    """sum_kernel of a phase, which is called with c and the bias."""
    config, (_, n) = plan.config, plan.shape_b
    partials, outgoing, _, *others = fused.shared
    first, count = sum(fused.phases[:phase]), fused.phases[phase]
    # Where a kernel that waits takes all multiprocessors signals behind copies may not come (H100)
    assert fused.push is not None
    return plan.bind(
        sum_kernel, blocks_for(plan.world, count, fused.push.blocks),
        (plan.product.out_dtype, bias), partials, outgoing, *others,
        fused.rows, elements(plan.shape_a[:-1]), n, len(fused.counts), first, first + count,
        BM=config.block_m, BN=config.block_n, WIDTH=min(_WIDTH, config.block_n),
        EVEN=n % 16 == 0, CHUNK=fused.parts.chunk, OWN_CHUNK=fused.parts.own_chunk,
        PHASED=fused.phased, num_warps=config.num_warps, **plan.product.constants,
    )  # fmt: skip


def _share(plan: ReducedProduct, fused: Fused) -> tuple[str, int]:
    """What cuBLAS should multiply, and in how many products of the rows of a rank, in a phase.

    "all", rows of "others", or "none" (all, if it was asked for). Two products, of which one
    travels while the next is made, unless there are phases or they take longer than one, as they do
    of float8. Our kernel adds own rows as it multiplies them: so it has these, of types of 2 bytes,
    if the products hide what is sent and blocks have tiles. If not, it has all sums of one peer,
    and those that are gathered meanwhile. It also has what would leave blocks idle, a product at a
    time.
    """
    backend, size, config = plan.world.backend, plan.group.size, plan.config
    k, n = plan.shape_b
    if plan.product.scaled or backend != "cuda":
        return "all", 1
    blocks, rows, phase = plan.world.driver.resident_blocks(), fused.rows, fused.parts.phase
    heights = each_phase(rows, phase)
    each, own = (product_turns(heights, n, blocks, width) for width in (0, config.block_n))
    halves = product_turns([rows // 2] * 2, n, blocks)
    parts = 1
    if fused.parts.halves and halves <= each:
        parts, each = 2, halves
    whole = product_turns([size * rows], n, blocks, config.block_n)
    sent = (size - 1) * rows * n * plan.partial_dtype.itemsize
    multiplying = least_us(plan.world, plan.dtype.itemsize, size * rows, n, k)
    hidden = plan.dtype.itemsize == 2 and engines_us(backend, sent) < multiplying
    share, turns = "none", 0.0
    if hidden and 2 * config.tiles(phase, n) > blocks and (size > 2 or parts > 1):
        share, turns = "others", (size - 1) * each + own
    elif size > 2 and not fused.parts.own_chunk:
        share, turns = "all", size * each
    return share if turns <= _IDLE * whole else "none", parts


@dataclass(frozen=True)
class _Product:
    """A product by cuBLAS of rows of a `rank`, from `row` of all on, and their chunks."""

    multiply: LibraryProduct
    rank: int
    row: int
    chunks: range


class LibrarySums:
    """Phases of products, of other ranks' rows each followed by its copies, then of `last`.

    `last` is called with all that a call was given if own rows are `ours`, else with c and the
    bias. `lines`: bytes from a row of a, of sums and of scales to the next one.
    """

    def __init__(
        self, push: CopyPush, rank: int, products: Sequence[Sequence[_Product]], count: Bound,
        last: Sequence[Bound], ours: bool, outgoing: Array, lines: tuple[int, int, int],
    ):  # fmt: skip
        self._push, self._rank, self._products = push, rank, products
        self._count, self._last = count, last
        self._first = 0 if ours else 4
        self._outgoing, self._lines = outgoing, lines

    def __call__(self, stream: int, *operands: Operand) -> None:
        """Queue them, for a, b, their scales, c and the bias."""
        a, b, scale_a, scale_b, c, _ = operands
        of_a, of_sums, of_scales = self._lines
        push = self._push
        self._count(push.begin(stream))
        for phase, products in enumerate(self._products):
            for each in products:
                row = each.row
                each.multiply.at(
                    stream, a.address + row * of_a, b.address,
                    self._outgoing._address + row * of_sums,
                    0, scale_a.address + row * of_scales, scale_b.address,
                )  # fmt: skip
                if each.rank != self._rank:
                    push.send(stream, each.rank, each.chunks)
            push.rest(stream, c, phase)
            self._last[phase](stream, *operands[self._first :])

    def prepare(self, *operands: Operand) -> None:
        """Load the last kernels."""
        for each in self._last:
            each.prepare(*operands[self._first :])
