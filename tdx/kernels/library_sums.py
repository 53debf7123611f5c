"""The products of "fused" by cuBLAS: each other rank's rows, which are sent, then the own ones.

A kernel adds the ranks' partials of own rows, which cuBLAS rounds as our kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copy_push import CopyPush
from tdx.kernels.library_product import LibraryProduct, library_product
from tdx.kernels.operand import Operand
from tdx.kernels.product import blocks_for
from tdx.kernels.reduced_product import ReducedProduct
from tdx.kernels.scattered_rows import sum_tile, wait_each
from tdx.kernels.tile_product import known
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Bound

if TYPE_CHECKING:
    from tdx.kernels.matmul_reduce_scatter import Fused

__all__ = ["LibrarySums", "bind_library_sums"]

_WIDTH = 64  # most columns of a tile that are added at a time


@triton.jit(do_not_specialize=["owner", "chunks", "tiles", "last_tiles"])
def done_kernel(finished, world, owner, chunks, tiles, last_tiles):
    """All tiles of all chunks of `owner` are finished; the last chunk may have fewer."""
    me = tdl.rank(world)
    lanes = tl.arange(0, 32)
    for first in range(0, chunks, 32):
        chunk = first + lanes
        signals = finished + owner * chunks + tl.minimum(chunk, chunks - 1)
        count = tl.where(chunk == chunks - 1, last_tiles, tiles)
        tdl.notify(signals, me, world, count, op="add", when=chunk < chunks)


@triton.jit(do_not_specialize=["rows", "whole", "columns", "chunks"])
def sum_kernel(
    c, bias, partials, outgoing, finished, made, signals, credit, epoch, world, rows, whole,
    columns, chunks, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr,
    OWN_CHUNK: tl.constexpr,
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
            at = (row * BM + rm).to(tl.int64)[:, None] * columns + first + rn[None, :]
            inside = (rm[:, None] < count - row * BM) & (rn[None, :] < columns - first)
            sum_tile(
                own, bias, tl.load(mine + at, mask=inside, other=0.0), partials, row,
                col * (BN // WIDTH) + piece, rows, count, columns, world, ok, BM, WIDTH,
                HAS_BIAS, ACTIVATION,
            )  # fmt: skip
        if OWN_CHUNK > 0:
            tdl.notify(made + row * BM // OWN_CHUNK, me, world, 1, op="add")
    tdl.wait_all(credit, ranks, world, tl.load(epoch))
    for chunk in range(0, chunks):
        wait_each(signals + chunk, ranks, chunks, world, epoch, sound)  # see copy_push.py


def bind_library_sums(
    plan: ReducedProduct, fused: Fused, sizes: Sequence[int], steps: tuple[int, int],
    bias: np.dtype, aligned: bool,
) -> LibrarySums | None:  # fmt: skip
    """What is called as fused_kernel; None if that is to run.

    `sizes`, `steps`: see Product; `bias`: its type; `aligned`: all operands begin so.
    """
    group, own = plan.group, plan.partial_product
    whole, n, k, *strides = sizes
    begin = fused.rows * strides[0] * plan.dtype.itemsize  # bytes to the next rank's rows of a
    part = fused.rows * n * own.out_dtype.itemsize
    scales = 4 * fused.rows * steps[0]
    aligned = aligned and not any(x % 16 for x in (begin, part, scales))
    if whole != group.size * fused.rows:  # of other rows it would load more code: see LibrarySums
        return None
    multiply = library_product(
        plan.world, own, plan.pinned, (fused.rows, n, k, *strides), steps, plan.dtype, aligned,
        own.scaled,  # of other types our kernel, which adds as it multiplies, is faster
    )  # fmt: skip
    if multiply is None:
        return None
    plan.use(multiply.memory)
    shared = fused.shared
    outgoing, finished, handle = shared[1], shared[2], shared[-1]
    tell = [
        plan.bind(
            done_kernel, 1, (), finished, handle, rank, len(fused.counts), fused.counts[0],
            fused.counts[-1], num_warps=1,
        )
        for rank in range(group.size)
    ]  # fmt: skip
    config = plan.config
    tiles = config.tiles(fused.rows, n)
    add = plan.bind(
        sum_kernel, blocks_for(plan.world, tiles, CopyPush.blocks), (plan.product.out_dtype, bias),
        *shared, fused.rows, whole, n, len(fused.counts), BM=config.block_m, BN=config.block_n,
        WIDTH=min(_WIDTH, config.block_n), EVEN=n % 16 == 0, CHUNK=fused.chunk,
        OWN_CHUNK=fused.own_chunk, num_warps=config.num_warps, **plan.product.constants,
    )  # fmt: skip
    return LibrarySums(group.rank, multiply, tell, add, outgoing, (begin, part, scales))


class LibrarySums:
    """The products for all ranks, and the sum.

    cuBLAS loads its code as it queues the first product, and may have to wait for what runs: so
    nothing that waits for a product is queued before `begin`.
    """

    def __init__(
        self, rank: int, multiply: LibraryProduct, tell: Sequence[Bound], add: Bound,
        outgoing: Array, parts: tuple[int, int, int],
    ):  # fmt: skip
        self._multiply, self._tell, self._add = multiply, tell, add
        self._outgoing, self._parts = outgoing, parts
        self._order = [(rank + hop) % len(tell) for hop in range(1, len(tell) + 1)]

    def begin(
        self, stream: int, a: Operand, b: Operand, scale_a: Operand, scale_b: Operand, *_: Operand
    ) -> None:
        """Queue the first rank's product."""
        self._queue(stream, self._order[0], a, b, scale_a, scale_b)

    def __call__(
        self, stream: int, a: Operand, b: Operand, scale_a: Operand, scale_b: Operand, c: Operand,
        bias: Operand,
    ) -> None:  # fmt: skip
        """Queue the others, the own one last, and the sum."""
        self._tell[self._order[0]](stream)
        for rank in self._order[1:]:
            self._queue(stream, rank, a, b, scale_a, scale_b)
            if rank != self._order[-1]:
                self._tell[rank](stream)
        self._add(stream, c, bias)

    def _queue(
        self, stream: int, rank: int, a: Operand, b: Operand, scale_a: Operand, scale_b: Operand
    ) -> None:
        begin, part, scales = self._parts
        self._multiply.at(
            stream, a.address + rank * begin, b.address, self._outgoing._address + rank * part, 0,
            scale_a.address + rank * scales, scale_b.address,
        )  # fmt: skip

    def prepare(self, *operands: Operand) -> None:
        """Load the kernel that adds; cuBLAS loads its own."""
        self._add.prepare(*operands[4:])
