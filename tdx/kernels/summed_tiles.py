"""Products whose tiles are summed by every rank in the same kernel, for few rows.

Blocks push each partial tile to all ranks as soon as it is finished, or to each the rows that it
owns, with a signal; then they add all ranks' partials of every tile as they arrive.

Places for partials are used in turn by calls' parity. A rank in call n + 2 has finished call n + 1,
for which every rank had left call n.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.operand import Operand, elements
from tdx.kernels.reduced_product import ReducedProduct
from tdx.kernels.select import constants
from tdx.kernels.tile_product import finish_tile, grouped_tile, known, known_strides, tile_product
from tdx.runtime.driver.base import Bound

__all__ = ["SummedTiles"]

_SIZES = [
    "owned_rows", "rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn",
]  # fmt: skip


@triton.jit
def _place(row, col, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Where the elements of a tile are in a buffer of tiles, and which are in the matrix."""
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    inside = (rm[:, None] < rows - row * BM) & (rn[None, :] < columns - col * BN)
    return rm[:, None] * BN + rn[None, :], inside


@triton.jit
def _owner(row, owned_rows, BM: tl.constexpr, RANKS: tl.constexpr):
    """Which ranks own the rows of tiles in this row of tiles: (BM, 1)."""
    return tl.minimum((row * BM + tl.arange(0, BM)) // owned_rows, RANKS - 1)[:, None]


@triton.jit
def _store(c, value, row, col, columns, mask, BM: tl.constexpr, BN: tl.constexpr):
    """Store a tile of the result."""
    c_tile = c + tl.cast(row, tl.int64) * BM * columns + tl.cast(col, tl.int64) * BN
    at = tl.arange(0, BM)[:, None] * columns + tl.arange(0, BN)[None, :]
    tl.store(c_tile + at, value, mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def fused_kernel(
    a, b, scale_a, scale_b, c, bias, partials, arrived, channel, world, owned_rows, rows, columns,
    depth, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, RANKS: tl.constexpr, SCATTERED: tl.constexpr,
):  # fmt: skip
    """Push partials, sum all tiles, or if SCATTERED the own `owned_rows` rows, which c has.

    `arrived` counts calls for each rank and tile.
    """
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_am, stride_ak = known_strides(stride_am, stride_ak, A_UNIT, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    TILE: tl.constexpr = BM * BN
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)
    number = tdl.epoch(channel)
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(columns, BN)
    tiles = tiles_m * tiles_n
    stride = tl.cast(tiles, tl.int64) * TILE  # from one rank's partials to the next one's
    slots = partials + (number & 1) * RANKS * stride
    if SCATTERED:
        c -= me.to(tl.int64) * owned_rows * columns
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        total = tile_product(
            a, b, scale_a, scale_b, 0, row, col, rows, columns, depth,
            stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
        )  # fmt: skip
        at, inside = _place(row, col, rows, columns, BM, BN)
        value = total.to(partials.dtype.element_ty)
        to = slots + me * stride + tl.cast(tile, tl.int64) * TILE
        signal = arrived + me * tiles + tile
        if SCATTERED:
            owner = _owner(row, owned_rows, BM, RANKS)
            tl.store(tdl.symm_at(to + at, owner, world), value, mask=inside & sound)
        for hop in range(1, RANKS + 1):
            peer = (me + hop) % RANKS
            if not SCATTERED:
                tl.store(tdl.symm_at(to, peer, world) + at, value, mask=inside & sound)
            tdl.notify(signal, peer, world, number)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        at, inside = _place(row, col, rows, columns, BM, BN)
        if SCATTERED:
            inside &= _owner(row, owned_rows, BM, RANKS) == me
        part = slots + tl.cast(tile, tl.int64) * TILE
        ok = tdl.wait(arrived + tile, world, number, peer=0)
        total = tl.load(part + at, mask=inside & ok, other=0.0).to(tl.float32)
        for peer in range(1, RANKS):
            ok = tdl.wait(arrived + peer * tiles + tile, world, number, peer=peer) & ok
            part += stride
            total += tl.load(part + at, mask=inside & ok, other=0.0).to(tl.float32)
        total = finish_tile(total, bias, col, columns, BN, HAS_BIAS, ACTIVATION)
        _store(c, total.to(c.dtype.element_ty), row, col, columns, inside & ok, BM, BN)


class SummedTiles:
    """Workspaces and the kernel. A Way. `scattered`: every rank owns a part of the rows."""

    def __init__(self, plan: ReducedProduct, scattered: bool = False):
        size, config, rows = plan.group.size, plan.config, elements(plan.shape_a[:-1])
        tiles = max(1, config.tiles(rows, plan.shape_b[1]))
        slots = (2 * size * tiles * config.block_m * config.block_n,)
        partials = plan.workspace("partials", slots, plan.partial_dtype)
        arrived = plan.workspace("partial_tiles", (size * tiles,), "int32")
        self._blocks = plan.blocks_for(tiles, constants(plan.world.backend).matmul_blocks)
        self._shared = (
            partials, arrived, plan.channel(self._blocks), plan.group.handle, max(1, rows // size),
        )  # fmt: skip
        self._named = {"RANKS": size, "SCATTERED": scattered}

    def run(self, plan: Any, multiply: Bound, handle: int, ops: tuple[Operand, ...]) -> None:
        """Queue a call."""
        multiply(handle, *ops)

    def bind(self, plan: Any, *layout: Any) -> Bound:
        """The kernel for operands so laid out."""
        strides, steps, bias, aligned, _ = layout
        product, config, sizes = plan.product, plan.config, plan._sizes(strides)
        described = product.described(plan.world, config, sizes, aligned)
        scale, kinds = product.scale_dtype, product.kinds(config, described, sizes)
        return plan.bind(
            fused_kernel, self._blocks, (*kinds, scale, scale, product.out_dtype, bias),
            *self._shared, *sizes, **product.constants, **self._named,
            **product.product_constants(config, sizes, steps, described),
        )  # fmt: skip
