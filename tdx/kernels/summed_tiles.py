"""Products whose tiles are summed over ranks in the same kernel, for few rows.

Blocks push each partial tile to its owners as soon as it is finished, with a signal, and add all
ranks' partials of the own tiles as they arrive. matmul_all_reduce.py and matmul_reduce_scatter.py
say who owns what.

Places for partials are used in turn by calls' parity. A rank in call n + 2 has finished call n + 1,
for which every owner of a tile had left call n. One place is enough for finished tiles: an owner
has then a partial of this call from every rank, all of which have left the call before.
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
    "owned", "owned_rows", "rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk",
    "stride_bn",
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
    a, b, scale_a, scale_b, c, bias, partials, results, arrived, finished, channel, world, owned,
    owned_rows, rows, columns, depth, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, RANKS: tl.constexpr, ONE_SHOT: tl.constexpr,
    SCATTERED: tl.constexpr,
):  # fmt: skip
    """Push partials, reduce the own tiles and push them, take the others'.

    Rank r owns tiles r * owned to (r + 1) * owned - 1 in grouped order; ONE_SHOT: all of them, or
    if SCATTERED its `owned_rows` rows of each, which c has. `arrived` counts calls for each rank
    and own tile, `finished` for each tile.
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
    stride = tl.cast(owned, tl.int64) * TILE  # from one rank's partials to the next one's
    slots = partials + (number & 1) * RANKS * stride
    begin = 0 if ONE_SHOT else ((me + 1) % RANKS) * owned
    begin = tl.where(begin < tiles, begin, 0)  # the last ranks may own nothing
    if SCATTERED:
        c -= me.to(tl.int64) * owned_rows * columns
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = (begin + index) % tiles
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        total = tile_product(
            a, b, scale_a, scale_b, 0, row, col, rows, columns, depth,
            stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
        )  # fmt: skip
        at, inside = _place(row, col, rows, columns, BM, BN)
        value = total.to(partials.dtype.element_ty)
        to = slots + me * stride + (tile % owned).to(tl.int64) * TILE
        signal = arrived + me * owned + tile % owned
        if SCATTERED:
            owner = _owner(row, owned_rows, BM, RANKS)
            tl.store(tdl.symm_at(to + at, owner, world), value, mask=inside & sound)
            for hop in range(1, RANKS + 1):
                tdl.notify(signal, (me + hop) % RANKS, world, number)
        elif ONE_SHOT:
            for hop in range(1, RANKS + 1):
                peer = (me + hop) % RANKS
                tl.store(tdl.symm_at(to, peer, world) + at, value, mask=inside & sound)
                tdl.notify(signal, peer, world, number)
        else:
            owner = tile // owned
            tl.store(tdl.symm_at(to, owner, world) + at, value, mask=inside & sound)
            tdl.notify(signal, owner, world, number)
    first = 0 if ONE_SHOT else me * owned
    for local in range(tl.program_id(0), tl.minimum(owned, tiles - first), tl.num_programs(0)):
        tile = first + local
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        at, inside = _place(row, col, rows, columns, BM, BN)
        if SCATTERED:
            inside &= _owner(row, owned_rows, BM, RANKS) == me
        part = slots + tl.cast(local, tl.int64) * TILE
        ok = tdl.wait(arrived + local, world, number, peer=0)
        total = tl.load(part + at, mask=inside & ok, other=0.0).to(tl.float32)
        for peer in range(1, RANKS):
            ok = tdl.wait(arrived + peer * owned + local, world, number, peer=peer) & ok
            part += stride
            total += tl.load(part + at, mask=inside & ok, other=0.0).to(tl.float32)
        total = finish_tile(total, bias, col, columns, BN, HAS_BIAS, ACTIVATION)
        value = total.to(c.dtype.element_ty)
        if not ONE_SHOT:
            to = results + tl.cast(tile, tl.int64) * TILE
            for hop in range(1, RANKS):
                peer = (me + hop) % RANKS
                tl.store(tdl.symm_at(to, peer, world) + at, value, mask=inside & ok)
                tdl.notify(finished + tile, peer, world, number, when=ok)
        _store(c, value, row, col, columns, inside & ok, BM, BN)
    if not ONE_SHOT:
        for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
            tile = (begin + index) % tiles
            owner = tile // owned
            if owner != me:
                row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
                at, inside = _place(row, col, rows, columns, BM, BN)
                ok = tdl.wait(finished + tile, world, number, peer=owner)
                source = results + tl.cast(tile, tl.int64) * TILE
                value = tl.load(source + at, mask=inside & ok)
                _store(c, value, row, col, columns, inside & ok, BM, BN)


class SummedTiles:
    """Workspaces and the kernel. A Way.

    `whole`: every rank owns all tiles, or its part of the rows of all if they are `scattered`.
    """

    def __init__(self, plan: ReducedProduct, whole: bool, scattered: bool = False):
        size, config = plan.group.size, plan.config
        rows, columns = elements(plan.shape_a[:-1]), plan.shape_b[1]
        tile = config.block_m * config.block_n
        tiles = config.tiles(rows, columns)
        owned = max(1, tiles if whole else -(-tiles // size))
        partials = plan.workspace("partials", (2 * size * owned * tile,), plan.partial_dtype)
        kept = 1 if whole else max(1, tiles)  # finished tiles of other owners
        results = plan.workspace("results", (kept * tile,), plan.product.out_dtype)
        arrived = plan.workspace("partial_tiles", (size * owned,), "int32")
        finished = plan.workspace("finished_tiles", (kept,), "int32")
        most = constants(plan.world.backend).matmul_blocks
        self._blocks = plan.blocks_for(max(1, tiles), most)
        self._shared = (
            partials, results, arrived, finished, plan.channel(self._blocks), plan.group.handle,
            owned, max(1, rows // size),
        )  # fmt: skip
        self._named = {"RANKS": size, "ONE_SHOT": whole, "SCATTERED": scattered}

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
