"""Products whose tiles are summed by every rank in the same kernel, for few rows.

Blocks push each partial tile to all ranks as soon as it is finished, or to each the rows that it
owns, with a signal; then they add all ranks' partials of every tile as they arrive.

Places for partials are used in turn by calls' parity. A rank in call n + 2 has finished call n + 1,
for which every rank had left call n.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.operand import elements
from tdx.kernels.reduced_product import OneKernel, ReducedProduct
from tdx.kernels.select import constants
from tdx.kernels.tile_product import (
    finish_tile,
    grouped_tile,
    known,
    known_strides,
    store_value,
    tile_inside,
    tile_places,
    tile_product,
)

__all__ = ["SummedTiles"]

_SIZES = [
    "owned_rows", "rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn",
]  # fmt: skip


@triton.jit
def _owner(row, owned_rows, BM: tl.constexpr, RANKS: tl.constexpr):
    """Which ranks own the rows of tiles in this row of tiles: (BM, 1)."""
    return tl.minimum((row * BM + tl.arange(0, BM)) // owned_rows, RANKS - 1)[:, None]


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
        inside = tile_inside(row, col, rows, columns, BM, BN)
        at = tile_places(BN, BM, BN)
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
        inside = tile_inside(row, col, rows, columns, BM, BN)
        at = tile_places(BN, BM, BN)
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
        store_value(c, total.to(c.dtype.element_ty), row, col, columns, inside & ok, BM, BN)


class SummedTiles(OneKernel):
    """Workspaces and the kernel. A Way. `scattered`: every rank owns a part of the rows."""

    kernel = fused_kernel

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
