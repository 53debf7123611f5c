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
from tdx.kernels import all_reduce
from tdx.kernels.copying import VECTOR
from tdx.kernels.reduction import combine, finish, from_words, to_words, widen
from tdx.language import nvidia
from tdx.language._intrinsic import intrinsic, unwrap
from tdx.runtime import dtypes
from tdx.tools.timing import slowest

_VECTOR = tl.constexpr(VECTOR)
_CALLS, _TURNS = 50, 200
_BOUNDED = (
    f"add.u32 polls, polls, 1; setp.lt.u32 more, polls, {nvidia._SPINS};\n"
    "and.pred more, more, miss; @more bra POLL;"
)


@intrinsic
def spin_for_ever(base, stride, flag, active, ranks, words, _semantic=None):
    """As nvidia.spin_ll for 4 bytes of data, without a limit; gives 0 instead of 1 for missing."""
    ranks = unwrap(ranks)
    text = nvidia._spin_text(ranks, 1, [f"${ranks + 1 + i}" for i in range(4)])
    assert _BOUNDED in text
    return core.inline_asm_elementwise(
        text.replace(_BOUNDED, "@miss bra POLL;"),
        ",".join(["=&l"] * ranks + ["=&r", "l", "l", "r", "r"]),
        [_semantic.to_tensor(unwrap(x)) for x in (base, stride, flag, active)],
        dtype=(core.int64,) * ranks + (core.int32,),
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


@triton.jit(do_not_specialize=["numel", "columns", "vectors"])
def unbounded_kernel(
    x, out, bias, residual, slots, channel, world, numel, columns, vectors,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """low_latency_kernel of tdx/kernels/all_reduce.py, but for the waiting."""
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    WORDS: tl.constexpr = BLOCK // PER_WORD
    me = tdl.rank(world)
    flag = tdl.epoch(channel)
    stride = vectors * _VECTOR
    base = slots + (flag & 1).to(tl.int64) * RANKS * stride
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, numel, step):
        offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        words = to_words(tl.load(x + offsets, mask=offsets < numel, other=0), PAIRS)
        at = tl.cast(start, tl.int64) // PER_WORD + tl.arange(0, WORDS)
        own = base + me * stride + at
        for hop in tl.static_range(1, RANKS):
            tdl.store_ll(own, words, flag, (me + hop) % RANKS, world, at < stride)
    for start in range(tl.program_id(0) * BLOCK, numel, step):
        offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = offsets < numel
        at = tl.cast(start, tl.int64) // PER_WORD + tl.arange(0, WORDS)
        own = to_words(tl.load(x + offsets, mask=mask, other=0), PAIRS)
        wanted = tl.where(at < stride, ((1 << RANKS) - 1) & ~(1 << me), 0)
        address = (base + at).to(tl.int64)
        words = spin_for_ever(address, stride.to(tl.int64) * 8, flag, wanted, RANKS, 1)
        total = widen(
            from_words(tl.where(me == 0, own, words[0].to(tl.int32)), x.dtype.element_ty, PAIRS)
        )
        for peer in tl.static_range(1, RANKS):
            value = tl.where(me == peer, own, words[peer].to(tl.int32))
            total = combine(total, widen(from_words(value, x.dtype.element_ty, PAIRS)), OP)
        finish(
            total, out, bias, residual, offsets, mask, columns, tdl.num_ranks(world),
            OP, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


def main() -> None:
    with tdx.init(backend="cuda") as world:
        numel = 2048
        ones = np.ones(numel, np.float32).astype(dtypes.resolve("bfloat16"))
        x = world.array(ones)
        graphs = []
        for kernel in (all_reduce.low_latency_kernel, unbounded_kernel):
            all_reduce.low_latency_kernel = kernel
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
