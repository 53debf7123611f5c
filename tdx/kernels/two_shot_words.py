"""low_latency_two_shot of all_reduce: two_shot.py in packed words that hold data and flag.

Rank r gets shard r of all ranks as words, reduces it, and sends the results to all as words: no
signals, two hops, 8/7 of the bytes of two_shot. See packed.py. With a bias or residual results
travel in the accumulator's type, as there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copying import VECTOR, padded
from tdx.kernels.operand import elements
from tdx.kernels.packed import (
    VALUES,
    get_tiles,
    others,
    part_of_tile,
    per_element,
    per_word,
    put_tile,
    tiles_of,
)
from tdx.kernels.plan import Plan
from tdx.kernels.reduction import ReductionConfig, finish, from_words, mean, to_words, widen
from tdx.kernels.shards import push_packed, sum_of_packed
from tdx.kernels.two_shot import Run, adds
from tdx.language._intrinsic import program_threads
from tdx.language.signal import program_barrier
from tdx.language.words import packed_blocks
from tdx.runtime import dtypes

__all__ = ["bind_low_latency_two_shot", "low_latency_two_shot_kernel"]

_VECTOR = tl.constexpr(VECTOR)
_VALUES = tl.constexpr(VALUES)


@triton.jit(do_not_specialize=["numel", "columns", "shard_vectors"])
def low_latency_two_shot_kernel(
    x, out, bias, residual, words, channel, world, numel, columns, shard_vectors,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    PAIRS: tl.constexpr, RESULT_PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push the others' shards as words, reduce the own one, push the results as words.

    For each parity of the epoch `words` holds a place for every rank's tiles of the own shard, then
    one for those of every rank's results: see packed.py. The pairs say whether two elements share
    a word.
    """
    PER_RESULT: tl.constexpr = 2 if RESULT_PAIRS else 1
    LANES: tl.constexpr = BLOCK // PER_RESULT
    TILE: tl.constexpr = BLOCK * _VALUES
    WIDE: tl.constexpr = HAS_BIAS or HAS_RESIDUAL
    RESULT: tl.constexpr = tl.float32 if WIDE else out.dtype.element_ty
    KIND: tl.constexpr = tl.int32 if RESULT_PAIRS else RESULT
    me = tdl.rank(world)
    shard = tl.cast(shard_vectors, tl.int64) * _VECTOR
    tiles = tl.cdiv(shard, TILE)
    stride = tiles * (4 * BLOCK // (2 if PAIRS else 1))
    result_stride = tiles * (4 * LANES)
    result_words = shard // PER_RESULT
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    parts = words + (flag & 1) * RANKS * (stride + result_stride)
    results = parts + RANKS * stride
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        push_packed(x, parts, stride, flag, world, numel, shard, tile, sound, RANKS, PAIRS, BLOCK)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        totals, arrived = sum_of_packed(
            x, parts, stride, flag, world, numel, shard, tile, OP, RANKS, PAIRS, BLOCK
        )
        values = ()
        for j in tl.static_range(packed_blocks()):
            total = mean(totals[j], tdl.num_ranks(world), OP)
            value = to_words(total.to(RESULT), RESULT_PAIRS).to(tl.int32, bitcast=True)
            values = values + (value,)  # noqa: RUF005 - Triton has no star
        sent = per_word(arrived & sound, RESULT_PAIRS)
        for hop in tl.static_range(1, RANKS):
            put_tile(
                results + me * result_stride, tile, values, result_words, flag,
                (me + hop) % RANKS, world, sent, LANES,
            )  # fmt: skip
        if program_threads() > LANES:  # others may send the same words: out may be x
            program_barrier()
        for j in tl.static_range(packed_blocks()):
            total = mean(totals[j], tdl.num_ranks(world), OP)
            _finish_tile(
                total, out, bias, residual, me, numel, columns, shard, tile, j, arrived, world,
                HAS_BIAS, HAS_RESIDUAL, BLOCK,
            )  # fmt: skip
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        found, come = get_tiles(
            results, result_stride, tile, result_words, flag, world, others(world, RANKS), RANKS,
            LANES,
        )  # fmt: skip
        arrived = per_element(come, RESULT_PAIRS)
        for peer in tl.static_range(RANKS):
            for j in tl.static_range(packed_blocks()):
                value = found[peer * packed_blocks() + j].to(KIND, bitcast=True)
                total = widen(from_words(value, RESULT, RESULT_PAIRS))
                _finish_tile(
                    total, out, bias, residual, peer, numel, columns, shard, tile, j,
                    arrived & (me != peer), world, HAS_BIAS, HAS_RESIDUAL, BLOCK,
                )  # fmt: skip


@triton.jit
def _finish_tile(
    total, out, bias, residual, peer, numel, columns, shard, tile, j: tl.constexpr, arrived, world,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store block j of a tile of `peer`'s shard."""
    offsets, mask = part_of_tile(tl.cast(tile, tl.int64) * (BLOCK * _VALUES), shard, j, BLOCK)
    place = tl.cast(peer, tl.int64) * shard + offsets
    mask = arrived & mask & (place < numel)
    finish(
        total, out, bias, residual, place, mask, columns, tdl.num_ranks(world),
        "sum", HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


def bind_low_latency_two_shot(
    plan: Plan, config: ReductionConfig, shape: tuple[int, ...], kinds: tuple[np.dtype, np.dtype],
    named: dict[str, Any],
) -> Run:  # fmt: skip
    """Workspace and kernel for a plan, as two_shot.bind_two_shot."""
    dtype, out_dtype = kinds
    wire = dtypes.accumulator(dtype) if adds(named) else out_dtype
    ranks, numel = plan.group.size, elements(shape)
    shard = padded(-(-numel // ranks))
    lanes = config.lanes(dtype)
    tiles = tiles_of(shard * VECTOR * dtype.itemsize, lanes)
    words = 2 * ranks * tiles * 4 * (lanes + config.lanes(wire))
    blocks = plan.blocks_for(tiles, config.blocks)
    return plan.bind(
        low_latency_two_shot_kernel, blocks, (dtype, out_dtype, dtype, dtype),
        plan.packed_slots(words), plan.channel(blocks), plan.group.handle,
        numel, max(1, shape[-1] if shape else 1), shard, **named, RANKS=ranks,
        PAIRS=dtype.itemsize == 2, RESULT_PAIRS=wire.itemsize == 2, BLOCK=config.block,
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
