"""All-reduces in packed words that hold data and flag: see packed.py and all_reduce.py.

low_latency: all ranks' arrays go to everybody. reduce.py has the same.

low_latency_two_shot, two_shot.py in words: rank r gets shard r of all ranks, reduces it, and sends
the results to all: no signals, two hops, 8/7 of the bytes of two_shot. With a bias or residual
results travel in the accumulator's type, as there; but where all ranks add the same (ALIKE), who
reduces adds them, and results travel rounded.
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
    finish_tile,
    get_tiles,
    load_added_tile,
    load_packable,
    others,
    per_element,
    per_word,
    put_tile,
    slot_words,
    sum_tile,
    tiles_of,
)
from tdx.kernels.plan import Plan
from tdx.kernels.reduction import (
    ReductionConfig,
    add_to,
    from_halves,
    from_words,
    mean,
    to_halves,
    to_words,
    widen,
)
from tdx.kernels.shards import push_packed, sum_of_packed
from tdx.kernels.two_shot import Run, adds
from tdx.language._intrinsic import program_threads
from tdx.language.signal import program_barrier
from tdx.language.words import packed_blocks
from tdx.runtime import dtypes

__all__ = [
    "bind_low_latency", "bind_low_latency_two_shot", "low_latency_kernel",
    "low_latency_two_shot_kernel",
]  # fmt: skip

_VECTOR = tl.constexpr(VECTOR)
_VALUES = tl.constexpr(VALUES)


@triton.jit(do_not_specialize=["numel", "columns"])
def low_latency_kernel(
    x, out, bias, residual, slots, channel, world, numel, columns,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Push the own tiles to everybody as words with flags, and reduce what arrives."""
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    LANES: tl.constexpr = BLOCK // PER_WORD
    TILE: tl.constexpr = BLOCK * _VALUES
    me, size = tdl.rank(world), tdl.num_ranks(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    tiles = tl.cdiv(numel, TILE)
    words = tl.cdiv(numel, PER_WORD)
    stride = tl.cast(tiles, tl.int64) * (4 * LANES)
    base = slots + (flag & 1).to(tl.int64) * RANKS * stride
    to = base + me * stride
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        own = load_packable(x, tl.cast(tile, tl.int64) * TILE, numel, PAIRS, BLOCK)
        for hop in tl.static_range(1, RANKS):
            put_tile(to, tile, own, words, flag, (me + hop) % RANKS, world, sound, LANES)
    if program_threads() > LANES:  # others may send the same words: out may be x
        program_barrier()
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * TILE
        added = load_added_tile(
            bias, residual, 0, numel, columns, numel, tile, HAS_BIAS, HAS_RESIDUAL, BLOCK
        )
        totals, arrived = sum_tile(
            x, first, numel, base, stride, tile, words, flag, world, OP, RANKS, PAIRS, BLOCK
        )
        for j in tl.static_range(packed_blocks()):
            total = totals[j]
            finish_tile(total, out, added[j], 0, numel, numel, tile, j, arrived, size, OP, BLOCK)


@triton.jit(do_not_specialize=["numel", "columns", "shard_vectors"])
def low_latency_two_shot_kernel(
    x, out, bias, residual, words, channel, world, numel, columns, shard_vectors,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    ALIKE: tl.constexpr, PAIRS: tl.constexpr, RESULT_PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push the others' shards as words, reduce the own one, push the results as words.

    For each parity of the epoch `words` holds a place for every rank's tiles of the own shard, then
    one for those of every rank's results: see packed.py. The pairs say whether two elements share
    a word. If two of x do and none of the results, words hold halves of two results, so that tiles
    have as many lanes, one for each thread, and the results are two tiles.
    """
    HALVES: tl.constexpr = 2 if PAIRS and not RESULT_PAIRS else 1
    PER_RESULT: tl.constexpr = 2 if PAIRS or RESULT_PAIRS else 1
    LANES: tl.constexpr = BLOCK // PER_RESULT
    TILE: tl.constexpr = BLOCK * _VALUES
    WIDE: tl.constexpr = (HAS_BIAS or HAS_RESIDUAL) and not ALIKE
    # ranks whose results are waited for at once, with registers for what is added to them
    GROUP: tl.constexpr = (2 if HAS_BIAS and HAS_RESIDUAL else 4) if WIDE else RANKS
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
    parts = words + (flag & 1) * RANKS * (stride + HALVES * result_stride)
    results = parts + RANKS * stride
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        push_packed(x, parts, stride, flag, world, numel, shard, tile, sound, RANKS, PAIRS, BLOCK)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        added = load_added_tile(
            bias, residual, me, numel, columns, shard, tile, HAS_BIAS, HAS_RESIDUAL, BLOCK
        )
        totals, arrived = sum_of_packed(
            x, parts, stride, flag, world, numel, shard, tile, OP, RANKS, PAIRS, BLOCK
        )
        sent = per_word(arrived & sound, PER_RESULT == 2)
        for half in tl.static_range(HALVES):
            values = ()
            for j in tl.static_range(packed_blocks()):
                total = mean(totals[j], tdl.num_ranks(world), OP)
                if ALIKE:
                    total = add_to(total, added[j])
                if HALVES == 2:
                    value = to_halves(total.to(RESULT), half == 1)
                else:
                    value = to_words(total.to(RESULT), RESULT_PAIRS).to(tl.int32, bitcast=True)
                values = values + (value,)  # noqa: RUF005 - Triton has no star
            to = results + (half * RANKS + me) * result_stride
            for hop in tl.static_range(1, RANKS):
                peer = (me + hop) % RANKS
                put_tile(to, tile, values, result_words, flag, peer, world, sent, LANES)
        if program_threads() > LANES:  # others may send the same words: out may be x
            program_barrier()
        for j in tl.static_range(packed_blocks()):
            total = mean(totals[j], tdl.num_ranks(world), OP)
            finish_tile(total, out, added[j], me, numel, shard, tile, j, arrived, 1, "sum", BLOCK)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        for first in tl.static_range(0, RANKS, GROUP):
            added = ()
            for i in tl.static_range(GROUP):
                each = load_added_tile(
                    bias, residual, first + i, numel, columns, shard,
                    tile, HAS_BIAS and WIDE, HAS_RESIDUAL and WIDE, BLOCK,
                )  # fmt: skip
                added = added + (each,)  # noqa: RUF005
            whose = others(world, RANKS) & (((1 << GROUP) - 1) << first)
            found, come = get_tiles(
                results, result_stride, tile, result_words, flag, world, whose, RANKS, LANES
            )
            if HALVES == 2:
                high, too = get_tiles(
                    results + RANKS * result_stride, result_stride, tile, result_words, flag, world,
                    whose, RANKS, LANES,
                )  # fmt: skip
                come = come & too
            arrived = per_element(come, PER_RESULT == 2)
            for peer in tl.static_range(first, min(first + GROUP, RANKS)):
                for j in tl.static_range(packed_blocks()):
                    value = found[peer * packed_blocks() + j]
                    if HALVES == 2:
                        value = from_halves(value, high[peer * packed_blocks() + j], RESULT)
                    else:
                        value = from_words(value.to(KIND, bitcast=True), RESULT, RESULT_PAIRS)
                    finish_tile(
                        widen(value), out, added[peer - first][j], peer, numel, shard, tile, j,
                        arrived & (me != peer), 1, "sum", BLOCK,
                    )  # fmt: skip


def bind_low_latency(
    plan: Plan, config: ReductionConfig, shape: tuple[int, ...], kinds: tuple[np.dtype, np.dtype],
    named: dict[str, Any],
) -> Run:  # fmt: skip
    """Workspace and kernel for a plan, as two_shot.bind_two_shot."""
    dtype, out_dtype = kinds
    ranks, numel, lanes = plan.group.size, elements(shape), config.lanes(dtype)
    nbytes = numel * dtype.itemsize
    blocks = plan.blocks_for(tiles_of(nbytes, lanes), config.blocks)
    return plan.bind(
        low_latency_kernel, blocks, (dtype, out_dtype, dtype, dtype),
        plan.packed_slots(2 * ranks * slot_words(nbytes, lanes)), plan.channel(blocks),
        plan.group.handle, numel, max(1, shape[-1] if shape else 1), **named, RANKS=ranks,
        PAIRS=dtype.itemsize == 2, BLOCK=config.block, num_warps=config.num_warps,
        enable_fp_fusion=False,
    )  # fmt: skip


def bind_low_latency_two_shot(
    plan: Plan, config: ReductionConfig, shape: tuple[int, ...], kinds: tuple[np.dtype, np.dtype],
    named: dict[str, Any], alike: bool = False,
) -> Run:  # fmt: skip
    """Workspace and kernel for a plan, as two_shot.bind_two_shot. `alike`: see ALIKE."""
    dtype, out_dtype = kinds
    wire = dtypes.accumulator(dtype) if adds(named) and not alike else out_dtype
    ranks, numel = plan.group.size, elements(shape)
    shard = padded(-(-numel // ranks))
    lanes = config.lanes(dtype)
    tiles = tiles_of(shard * VECTOR * dtype.itemsize, lanes)
    words = 2 * ranks * tiles * 4 * (lanes + config.lanes(wire))
    blocks = plan.blocks_for(tiles, config.blocks)
    return plan.bind(
        low_latency_two_shot_kernel, blocks, (dtype, out_dtype, dtype, dtype),
        plan.packed_slots(words), plan.channel(blocks), plan.group.handle,
        numel, max(1, shape[-1] if shape else 1), shard, **named, RANKS=ranks, ALIKE=alike,
        PAIRS=dtype.itemsize == 2, RESULT_PAIRS=wire.itemsize == 2, BLOCK=config.block,
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
