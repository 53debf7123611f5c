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
from tdx.kernels.library_product import LibraryProduct, library_product, refused
from tdx.kernels.operand import Operand
from tdx.kernels.product import blocks_for
from tdx.kernels.reduced_product import ReducedProduct
from tdx.kernels.scattered_rows import sum_tile, wait_each
from tdx.kernels.tile_product import known
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Bound

if TYPE_CHECKING:
    from tdx.kernels.matmul_reduce_scatter import Fused

__all__ = ["bind_library_sums"]

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
    c, bias, partials, outgoing, made, signals, credit, epoch, world, rows, whole,
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
    plan: ReducedProduct, fused: Fused, sizes: Sequence[int], steps: tuple[int, int],
    bias: np.dtype, aligned: bool,
) -> _LibrarySums | None:  # fmt: skip
    """What is called as fused_kernel; None if that is to run.

    `sizes`, `steps`: see Product; `bias`: its type; `aligned`: what cuBLAS reads begins at
    multiples of 16 bytes.
    """
    group, own = plan.group, plan.partial_product
    whole, n, k, *strides = sizes
    reason, config = "", plan.config
    if n * config.block_m >= 1 << 31:
        return None  # our kernel says so
    if fused.push is None:
        reason = "there is nothing to send"
    elif whole != group.size * fused.rows:
        reason = f"{whole} rows are no multiple of the {group.size} ranks"
    if reason:
        if plan.product.library:
            raise refused(f'{reason}; "unfused" takes it')
        return None
    begin = fused.rows * strides[0] * plan.dtype.itemsize  # bytes to the next rank's rows of a
    part = fused.rows * n * own.out_dtype.itemsize
    scales = 4 * fused.rows * steps[0]
    aligned = aligned and not any(x % 16 for x in (begin, part, scales))
    multiply = library_product(
        plan.world, own, plan.pinned, (fused.rows, n, k, *strides), steps, plan.dtype, aligned,
        own.scaled,  # of other types our kernel, which adds as it multiplies, is faster
    )  # fmt: skip
    if multiply is None:
        return None
    plan.use(multiply.memory)
    partials, outgoing, finished, *others, handle = fused.shared
    order = [(group.rank + hop) % group.size for hop in range(1, group.size + 1)]  # own rows last
    tell = [
        plan.bind(
            done_kernel, 1, (), finished, handle, rank, len(fused.counts), fused.counts[0],
            fused.counts[-1], num_warps=1,
        )
        for rank in order[:-1]
    ]  # fmt: skip
    tiles = config.tiles(fused.rows, n)
    blocks = blocks_for(plan.world, tiles, fused.push.blocks)
    add = plan.bind(
        sum_kernel, blocks, (plan.product.out_dtype, bias),
        partials, outgoing, *others, handle, fused.rows, whole, n, len(fused.counts),
        BM=config.block_m, BN=config.block_n, WIDTH=min(_WIDTH, config.block_n),
        EVEN=n % 16 == 0, CHUNK=fused.chunk,
        OWN_CHUNK=fused.own_chunk, num_warps=config.num_warps, **plan.product.constants,
    )  # fmt: skip
    return _LibrarySums(multiply, order, tell, add, outgoing, (begin, part, scales))


class _LibrarySums:
    """The products for all ranks in `order`, and the sum."""

    def __init__(
        self, multiply: LibraryProduct, order: Sequence[int], tell: Sequence[Bound], add: Bound,
        outgoing: Array, parts: tuple[int, int, int],
    ):  # fmt: skip
        self._multiply, self._order, self._tell, self._add = multiply, order, tell, add
        self._outgoing, self._parts = outgoing, parts

    def __call__(
        self, stream: int, a: Operand, b: Operand, scale_a: Operand, scale_b: Operand, c: Operand,
        bias: Operand,
    ) -> None:  # fmt: skip
        """Queue them."""
        begin, part, scales = self._parts
        for i, rank in enumerate(self._order):
            self._multiply.at(
                stream, a.address + rank * begin, b.address, self._outgoing._address + rank * part,
                0, scale_a.address + rank * scales, scale_b.address,
            )  # fmt: skip
            if i < len(self._tell):
                self._tell[i](stream)
        self._add(stream, c, bias)

    def prepare(self, *operands: Operand) -> None:
        """Load the kernel that adds."""
        self._add.prepare(*operands[4:])
