"""Products whose tiles are summed by one rank each in the same kernel, and sent on to all.

Each tile has one owner. Blocks push the partial tiles of other owners, the next rank's first, and
compute the own ones last: to each they add the peers' partials while it is in registers, and push
the sum to all. At the end they take what the other owners have pushed.

A tile's signal follows when the block has computed its next one: its stores have arrived by then,
so that nothing waits for them. Before it waits itself a block has sent all its signals.

Places for partials are used in turn by calls' parity. A rank in call n + 2 has finished call n + 1,
for which every owner of a tile had left call n. One place is enough for finished tiles: an owner
has then a partial of this call from every rank, all of which have left the call before.
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
    quarters,
    store_value,
    tile_inside,
    tile_places,
    tile_product,
)

__all__ = ["OwnedTiles"]

_SIZES = [
    "owned", "rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn",
]  # fmt: skip


@triton.jit
def _tell(tile, owned, arrived, finished, world, number, ok, RANKS: tl.constexpr):
    """Signal a tile that was pushed, to its owner or by it to all."""
    me = tdl.rank(world)
    owner = tile // owned
    if owner == me:
        for hop in range(1, RANKS):
            tdl.notify(finished + tile, (me + hop) % RANKS, world, number, when=ok)
    else:
        tdl.notify(arrived + tile % owned * RANKS + me, owner, world, number, when=ok)


@triton.jit
def _wait_for_partials(local, arrived, world, number, RANKS: tl.constexpr):
    """Wait until all peers have pushed their partials of own tile `local`."""
    me = tdl.rank(world)
    signals = arrived + local * RANKS
    ok = tdl.wait_all(signals, me, world, number)
    behind = me + 1
    return tdl.wait_all(signals + behind, RANKS - behind, world, number, first_peer=behind) & ok


@triton.jit
def _put(
    c, bias, own, slots, stride, result, row, col, rows, columns, owner, world, ok,
    BM: tl.constexpr, BN: tl.constexpr, PITCH: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Push a piece of a partial to its owner; of an own tile store the sum and push it to all.

    Partials are added in rank order. `slots`, `result`: where rank 0's and the sum begin, PITCH
    elements a row.
    """
    me = tdl.rank(world)
    at = tile_places(PITCH, BM, BN)
    inside = tile_inside(row, col, rows, columns, BM, BN) & ok
    value = own.to(slots.dtype.element_ty)
    if owner != me:
        tl.store(tdl.symm_at(slots + me * stride, owner, world) + at, value, mask=inside)
    else:
        mine = value.to(tl.float32)
        total = tl.full((BM, BN), -0.0, tl.float32)  # with which a sum is the other summand
        for first in range(0, RANKS, 2):
            for rank in tl.static_range(2):  # as many loads at a time
                peer = first + rank
                there = (peer < RANKS) & (peer != me)
                part = tl.load(slots + peer * stride + at, mask=inside & there, other=-0.0)
                total += tl.where(peer == me, mine, part.to(tl.float32))
        total = finish_tile(total, bias, col, columns, BN, HAS_BIAS, ACTIVATION)
        finished = total.to(c.dtype.element_ty)
        for hop in range(1, RANKS):
            to = tdl.symm_at(result, (me + hop) % RANKS, world)
            tl.store(to + at, finished, mask=inside)
        store_value(c, finished, row, col, columns, inside, BM, BN)


@triton.jit(do_not_specialize=_SIZES)
def owned_kernel(
    a, b, scale_a, scale_b, c, bias, partials, results, arrived, finished, channel, world, owned,
    rows, columns, depth, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, RANKS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Push partials, sum the own tiles and push them, take the others'.

    Rank r owns tiles r * owned to (r + 1) * owned - 1 in grouped order, and sums them in 1 or 4
    PIECES. `arrived` counts calls for each own tile and rank, `finished` for each tile.
    """
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_am, stride_ak = known_strides(stride_am, stride_ak, A_UNIT, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    TILE: tl.constexpr = BM * BN
    WIDTH: tl.constexpr = BN // PIECES
    me = tdl.rank(world)
    sound = tdl.no_fault(world)
    number = tdl.epoch(channel)
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(columns, BN)
    tiles = tiles_m * tiles_n
    stride = tl.cast(owned, tl.int64) * TILE  # from one rank's partials to the next one's
    slots = partials + (number & 1) * RANKS * stride
    begin = (me + 1) * owned
    begin = tl.where(begin < tiles, begin, 0)  # the last ranks may own nothing
    before = 0 * begin - 1  # the tile that was pushed last
    ok = sound
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = (begin + index) % tiles
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        total = tile_product(
            a, b, scale_a, scale_b, 0, row, col, rows, columns, depth,
            stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
        )  # fmt: skip
        if before >= 0:
            _tell(before, owned, arrived, finished, world, number, ok, RANKS)
        owner = tile // owned
        local = tile % owned
        part = slots + local.to(tl.int64) * TILE
        ok = sound
        if owner == me:
            ok = _wait_for_partials(local, arrived, world, number, RANKS) & ok
        result = results + tile.to(tl.int64) * TILE
        pieces = quarters(total, BM, BN) if PIECES == 4 else (total,)
        for i in tl.static_range(PIECES):  # with as much fewer registers
            _put(
                c, bias, pieces[i], part + i * WIDTH, stride, result + i * WIDTH, row,
                col * PIECES + i, rows, columns, owner, world, ok, BM, WIDTH, BN, HAS_BIAS,
                ACTIVATION, RANKS,
            )  # fmt: skip
        before = tile
    if before >= 0:
        _tell(before, owned, arrived, finished, world, number, ok, RANKS)
    if RANKS > 2:  # to name who is late, not an owner who waits for them too
        mine = tl.minimum(owned, tiles - me * owned)
        if (before // owned != me) & (mine > 0):
            _wait_for_partials(tl.program_id(0) % mine, arrived, world, number, RANKS)
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = (begin + index) % tiles
        owner = tile // owned
        if owner != me:
            row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            ok = tdl.wait(finished + tile, world, number, peer=owner)
            inside = tile_inside(row, col, rows, columns, BM, BN) & ok
            source = results + tile.to(tl.int64) * TILE
            value = tl.load(source + tile_places(BN, BM, BN), mask=inside)
            store_value(c, value, row, col, columns, inside, BM, BN)


class OwnedTiles(OneKernel):
    """Workspaces and the kernel. A Way."""

    kernel = owned_kernel

    def __init__(self, plan: ReducedProduct):
        size, config = plan.group.size, plan.config
        tile = config.block_m * config.block_n
        tiles = max(1, config.tiles(elements(plan.shape_a[:-1]), plan.shape_b[1]))
        owned = -(-tiles // size)
        partials = plan.workspace("partials", (2 * size * owned * tile,), plan.partial_dtype)
        results = plan.workspace("results", (tiles * tile,), plan.product.out_dtype)
        arrived = plan.workspace("partial_tiles", (size * owned,), "int32")
        finished = plan.workspace("finished_tiles", (tiles,), "int32")
        self._blocks = plan.blocks_for(tiles, constants(plan.world.backend).matmul_blocks)
        self._shared = (
            partials, results, arrived, finished, plan.channel(self._blocks), plan.group.handle,
            owned,
        )  # fmt: skip
        quartered = plan.world.backend != "host" and config.block_n >= 64
        self._named = {"RANKS": size, "PIECES": 4 if quartered else 1}
