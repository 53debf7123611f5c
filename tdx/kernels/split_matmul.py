"""A matrix product whose tiles are each shared by several blocks along K, for few rows.

Few rows have few tiles: narrow ones, of which each reads all of a again, or too few to keep all
multiprocessors reading b. With `Config(split_k=S)` S blocks multiply a part of K each. Every block
stores its float32 sum; the one that finds all others there, whichever that is, adds them in the
order of K. So bits depend on S, but not on who was last. No block waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.product import Config
from tdx.kernels.tile_product import grouped_tile, known, known_strides, store_tile, tile_product
from tdx.language.signal import program_barrier
from tdx.runtime.array import Array
from tdx.runtime.world import World

__all__ = ["split_kernel", "split_memory"]

_SIZES = ["rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn"]


@triton.jit(do_not_specialize=_SIZES)
def split_kernel(
    a, b, c, bias, scale_a, scale_b, sums, arrived, world, rows, columns, depth,
    stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, GATHERED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """As matmul_kernel, by SPLIT blocks a tile. `arrived` counts them, and is 0 thereafter."""
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_am, stride_ak = known_strides(stride_am, stride_ak, A_UNIT, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    ok = True
    if GATHERED:
        ok = tdl.no_fault(world)
        if DESCRIBED:
            tdl.fence_async_proxy()
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(columns, BN)
    share = tl.cdiv(tl.cdiv(depth, BK), SPLIT) * BK
    at = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    for work in range(tl.program_id(0), tiles_m * tiles_n * SPLIT, tl.num_programs(0)):
        tile = work // SPLIT
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        first = work % SPLIT * share
        total = tile_product(
            a, b, scale_a, scale_b, 0, row, col, rows, columns, tl.minimum(first + share, depth),
            stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED, first,
        )  # fmt: skip
        own = sums + tl.cast(work, tl.int64) * (BM * BN)
        tl.store(own + at, total)
        program_barrier()  # all threads' stores come before the count
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            part = sums + tl.cast(tile * SPLIT, tl.int64) * (BM * BN)
            total = tl.load(part + at, cache_modifier=".cg")
            for _ in tl.static_range(1, SPLIT):
                part += BM * BN
                total += tl.load(part + at, cache_modifier=".cg")
            store_tile(
                c, total, bias, row, col, rows, columns, columns, ok, BM, BN, HAS_BIAS, ACTIVATION,
                DESCRIBED and BN > 128,
            )  # fmt: skip
            tl.store(arrived + tile, 0)


def split_memory(world: World, config: Config, rows: int, columns: int) -> tuple[Array, ...]:
    """`sums` and `arrived` for products of this size, one at a time; () where K is not split."""
    if config.split_k == 1:
        return ()
    tiles = config.tiles(rows, columns)
    size = tiles * config.split_k * config.block_m * config.block_n
    return (
        world.empty((max(1, size),), "float32", symmetric=False, name="partial sums"),
        world.zeros((max(1, tiles),), "int32", symmetric=False),
    )
