"""The product of rows that are gathered chunk by chunk beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.gathering import Gathering
from tdx.kernels.matmul import multiply_rows
from tdx.kernels.plan import Plan
from tdx.kernels.product import Config, Product, blocks_for
from tdx.kernels.tile_product import known, known_strides
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Described

__all__ = ["bind_chunks", "early_tiles"]

_SIZES = ["rows", "columns", "depth", "chunk_rows", "chunks", "stride_bk", "stride_bn"]


@triton.jit(do_not_specialize=_SIZES)
def consume_kernel(
    own, b, c, bias, scale_b, gathered, scales, progress, epoch, trace, world,
    rows, columns, depth, chunk_rows, chunks, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Each block takes its share of the own rows' tiles, then of every chunk's as it arrives."""
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    me = tdl.rank(world)
    units = tdl.num_ranks(world) * chunks
    # tiles go round the blocks over all chunks, in whatever order they come; own ones to the first
    chunk_tiles = tl.cdiv(chunk_rows, BM) * tl.cdiv(columns, BN)
    first_row = me.to(tl.int64) * rows
    multiply_rows(
        own, b, c, bias, scales + first_row, scale_b, 0, first_row, rows, columns, depth,
        depth, 1, stride_bk, stride_bn, 0, tdl.no_fault(world),
        trace, _arrived(progress, units, epoch, TRACE), BM, BN, BK, GROUP_M, PRECISION,
        HAS_BIAS, ACTIVATION, B_UNIT, A_STEP, B_STEP, DESCRIBED, TRACE,
    )  # fmt: skip
    number = tl.load(epoch)
    lanes = tl.arange(0, tdl.MAX_WAIT_ANY)
    done = ((lanes >= me * chunks) & (lanes < (me + 1) * chunks)).to(tl.int32)
    for _ in range(chunks, units):
        unit, done, ok = tdl.wait_any(progress, units, world, number, done, first=me * chunks)
        if DESCRIBED:
            tdl.fence_async_proxy()
        before = (unit - me * chunks + units) % units * chunk_tiles
        begin = (unit % chunks) * chunk_rows
        first_row = (unit // chunks).to(tl.int64) * rows + begin
        multiply_rows(
            gathered, b, c, bias, scales, scale_b, first_row, first_row,
            tl.minimum(chunk_rows, rows - begin), columns, depth,
            depth, 1, stride_bk, stride_bn, before, ok,
            trace, _arrived(progress, units, epoch, TRACE), BM, BN, BK, GROUP_M, PRECISION,
            HAS_BIAS, ACTIVATION, B_UNIT, A_STEP, B_STEP, DESCRIBED, TRACE,
        )  # fmt: skip


@triton.jit
def _arrived(progress, units, epoch, TRACE: tl.constexpr):
    """How many chunks are there; 0 if nobody asks."""
    count = 0
    if TRACE:
        lanes = tl.arange(0, tdl.MAX_WAIT_ANY)
        seen = tl.load(progress + lanes, mask=lanes < units, other=0, volatile=True)
        count = tl.sum(((lanes < units) & (seen - tl.load(epoch) >= 0)).to(tl.int32))
    return count


def bind_chunks(
    plan: Plan, gathering: Gathering, product: Product, config: Config, trace: Array,
    traced: bool, sizes: Sequence[int], steps: tuple[int, int], described: bool, bias: np.dtype,
) -> Callable[..., None]:  # fmt: skip
    """consume_kernel for the own rows, b, c, bias and scales of b; if `traced` it records
    in `trace`.

    `sizes`, `steps`: see Product, with the rows of all ranks.
    """
    rows, n, k, *strides = sizes
    rows //= plan.group.size
    a, b = product.kinds(config, described, sizes)
    own, _ = product.kinds(config, described, (rows, *sizes[1:]))
    gathered = a.of(gathering.buffer) if isinstance(a, Described) else gathering.buffer
    tiles = config.tiles(gathering.chunk_rows, n) * gathering.chunks * plan.group.size
    return plan.bind(
        consume_kernel, blocks_for(plan.world, tiles, gathering.blocks),
        (own, b, product.out_dtype, bias, product.scale_dtype),
        gathered, gathering.scales, gathering.progress, gathering.epoch,
        trace, plan.group.handle, rows, n, k, gathering.chunk_rows, gathering.chunks,
        *strides[2:], TRACE=traced, **product.constants,
        **product.product_constants(config, sizes, steps, described),
    )  # fmt: skip


def early_tiles(traces: Sequence[Array], ranks: int, chunks: int) -> tuple[int, int]:
    """What AllGatherMatmul.overlap returns, of what was traced for each b."""
    early = remote = 0
    for trace in traces:
        seen = trace.numpy()
        seen = seen[: len(seen) // ranks * ranks].reshape(ranks, -1)[1:]  # own tiles come first
        remote += int((seen > 0).sum())
        early += int(((seen > 0) & (seen < ranks * chunks)).sum())
    return early, remote
