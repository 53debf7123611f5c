"""What deadline, fault word and predicate cost an all-reduce of 4 KiB: nothing that can be seen.

    tdx run -n 4 --backend cuda -m tests.gpu.deadline_cost

Two kernels take turns in one run: that of the package, and the same one with waits that never give
up and results that do not depend on them. Prints the medians of both, and the noise: how much the
medians of one kernel's odd and even samples differ.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core

import tdx
import tdx.language as tdl
from tdx.kernels import all_reduce_words
from tdx.kernels.packed import VALUES, load_packable, others, put_tile
from tdx.kernels.reduction import finish, reduce_words
from tdx.language import nvidia
from tdx.language._intrinsic import intrinsic, unwrap
from tdx.language.words import _unpacked
from tdx.runtime import dtypes
from tdx.tools.timing import slowest

_VALUES = tl.constexpr(VALUES)
_CALLS, _TURNS = 50, 200
_BOUNDED = (
    f"add.u32 polls, polls, 1; setp.lt.u32 more, polls, {nvidia._SPINS};\n"
    "and.pred more, more, miss; @more bra POLL;"
)


@intrinsic
def spin_for_ever(base, stride, gap, flag, active, ranks, _semantic=None):
    """As nvidia.spin_ll for packed words, without a limit; gives 0 instead of 1 for missing."""
    count = 4 * unwrap(ranks)
    text = nvidia._spin_text(unwrap(ranks), 4, 56, False, [f"${count + 1 + i}" for i in range(5)])
    assert _BOUNDED in text
    return core.inline_asm_elementwise(
        text.replace(_BOUNDED, "@miss bra POLL;"),
        ",".join(["=&l"] * count + ["=&r", "l", "l", "l", "r", "r"]),
        [_semantic.to_tensor(unwrap(x)) for x in (base, stride, gap, flag, active)],
        dtype=(core.int64,) * count + (core.int32,),
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


@triton.jit(do_not_specialize=["numel", "columns"])
def unbounded_kernel(
    x, out, bias, residual, slots, channel, world, numel, columns,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """low_latency_kernel of tdx/kernels/all_reduce_words.py, but for the waiting."""
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    LANES: tl.constexpr = BLOCK // PER_WORD
    TILE: tl.constexpr = BLOCK * _VALUES
    me = tdl.rank(world)
    flag = tdl.epoch(channel)
    tiles = tl.cdiv(numel, TILE)
    words = tl.cdiv(numel, PER_WORD)
    stride = tl.cast(tiles, tl.int64) * (4 * LANES)
    base = slots + (flag & 1).to(tl.int64) * RANKS * stride
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        own = load_packable(x, tl.cast(tile, tl.int64) * TILE, numel, PAIRS, BLOCK)
        for hop in tl.static_range(1, RANKS):
            peer = (me + hop) % RANKS
            put_tile(base + me * stride, tile, own, words, flag, peer, world, True, LANES)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        first = tl.cast(tile, tl.int64) * TILE
        own = load_packable(x, first, numel, PAIRS, BLOCK)
        lanes = tl.cast(tile, tl.int64) * (LANES * _VALUES) + tl.arange(0, LANES)
        wanted = tl.where(lanes < words, others(world, RANKS), 0)
        at = base + tl.cast(tile, tl.int64) * (4 * LANES) + 2 * tl.arange(0, LANES)
        gap = tl.full((), 16 * LANES, tl.int64)
        tag = (flag & 0xFF) << 24
        packed = spin_for_ever(at.to(tl.int64), stride * 8, gap, tag, wanted, RANKS)
        found = ()
        for peer in tl.static_range(RANKS):
            found = found + _unpacked(packed, 4 * peer)
        for j in tl.static_range(_VALUES):
            pieces = ()
            for peer in tl.static_range(RANKS):
                pieces = pieces + (found[peer * _VALUES + j],)  # noqa: RUF005
            total = reduce_words(own[j], pieces, world, x.dtype.element_ty, OP, RANKS, PAIRS)
            place = first + j * BLOCK + tl.arange(0, BLOCK)
            finish(total, out, (), place, place < numel, tdl.num_ranks(world), OP)


def main() -> None:
    with tdx.init(backend="cuda") as world:
        numel = 2048
        ones = np.ones(numel, np.float32).astype(dtypes.resolve("bfloat16"))
        x = world.array(ones)
        graphs = []
        for kernel in (all_reduce_words.low_latency_kernel, unbounded_kernel):
            all_reduce_words.low_latency_kernel = kernel
            plan = tdx.AllReduce(world, numel, x.dtype, algorithm="low_latency")
            assert (plan(x).numpy().astype(int) == world.size).all()
            with tdx.graph(world) as graph:
                for _ in range(_CALLS):
                    plan(x)
            graphs.append(graph)
        samples: tuple[list[float], ...] = ([], [])
        for turn in range(_TURNS + 20):
            for graph, mine in zip(graphs, samples, strict=True):
                taken = _replay(world, graph)
                if turn >= 20:  # clocks have risen
                    mine.append(taken)
        ours, bare = (slowest(world, statistics.median(mine)) for mine in samples)
        halves = [
            abs(statistics.median(mine[::2]) - statistics.median(mine[1::2])) for mine in samples
        ]
        noise = slowest(world, max(halves))
        if world.rank == 0:
            sys.stdout.write(
                f"with deadline {ours:.3f} us, without {bare:.3f} us, noise {noise:.3f} us\n"
            )


def _replay(world: tdx.World, graph: Any) -> float:
    """Microseconds of one call."""
    world.barrier()
    start = world.stream.record()
    graph.replay()
    end = world.stream.record()
    end.wait()
    return start.elapsed(end) * 1e3 / _CALLS


if __name__ == "__main__":
    main()
