"""Two-shot reductions: shards are reduced by one rank each, which then passes the results on.

W ranks, S bytes each, R bytes of results (S, unless results travel in another type):

two_shot              Reduce-scatter and all-gather in one kernel, by pushes only. Each rank pushes
                      shard p to rank p, reduces its own shard and pushes the results to all, or to
                      the root alone. (W - 1) / W * (S + R) bytes out, two hops and two signals per
                      block and step; see shards.py for the order of pushes and for the slots.
low_latency_two_shot  The same in words that hold data and flag: see all_reduce_words.py.

The wire carries results in the output's type, rounded once. With a bias or residual, which each
rank adds for itself, they travel in the accumulator's type and are rounded at their destination.

Peers' results land in the plan's own symmetric buffer (WHOLE), or in slots. Where they are wanted
elsewhere the same kernel copies them there, those of a step while it pushes a later one: stores to
peers and local ones hide each other. (Own results go there as they are computed.)

Two ranks work AHEAD: they push a step before they reduce the one before it, and bring home what was
reduced three steps before. More ranks reduce each step as soon as it is there, and bring it home
with the next: results on their way would share links with the pushes of another step, which then
are no permutation of the ranks.

A peer may write results of step t once it has this rank's signal that it pushed step t. By then the
rank has copied the results of all steps up to t - 3, or t - 1, so that as many slots as for the
pushes are enough; two are where a call is one step, because then those of all calls before are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copying import VECTOR, copy_share, padded
from tdx.kernels.operand import elements
from tdx.kernels.packed import VALUES
from tdx.kernels.plan import Plan
from tdx.kernels.reduction import ReductionConfig, finish, load_added, mean, widen
from tdx.kernels.select import STEP_BYTES
from tdx.kernels.shards import (
    Steps,
    notify_ranks,
    part_length,
    push_step,
    sum_of_ranks,
)
from tdx.language.signal import program_barrier
from tdx.runtime import dtypes
from tdx.runtime.array import Array

__all__ = ["Run", "adds", "bind_two_shot"]

Run = Callable[..., None]  # run(stream, x, out, bias, residual)

_VECTOR = tl.constexpr(VECTOR)
_VALUES = tl.constexpr(VALUES)
_SIZES = ["numel", "columns", "shard_vectors", "step_vectors", "steps", "root"]


@triton.jit
def _reduce_at(
    own, slot, size, mine, theirs, out, bias, residual, begin, at, mask, columns, takes, world,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    KEPT: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Reduce the elements `at` and store the results at the first destinations."""
    ranks = tdl.num_ranks(world)
    total = mean(sum_of_ranks(own, slot, size, at, mask, world, OP, RANKS), ranks, OP)
    value = total.to(mine.dtype.element_ty)
    tl.store(theirs + at, value, mask=mask)
    if KEPT:
        tl.store(mine + at, value, mask=mask)
    if COPY:  # noqa: SIM102  # this alone is known to the compiler
        if takes:
            added = load_added(bias, residual, begin + at, mask, columns, HAS_BIAS, HAS_RESIDUAL)
            finish(total, out, added, begin + at, mask, ranks, "sum")


@triton.jit
def _reduce_step(
    own, slot, size, mine, out, bias, residual, begin, count, columns, takes, root, world,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    WHOLE: tl.constexpr, COPY: tl.constexpr, ROOTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce a step of the own shard, for `out` from element `begin` on, and push the results, the
    first hop while reducing.
    """
    KEPT: tl.constexpr = not ROOTED and (WHOLE or RANKS > 2)
    index = tl.program_id(0)
    parts = tl.num_programs(0)
    me = tdl.rank(world)
    if ROOTED:
        theirs = tdl.symm_at(mine, root, world)
    else:
        theirs = tdl.symm_at(mine, (me + 1) % RANKS, world)
    whole = count // BLOCK
    for block in range(index, whole, parts):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        _reduce_at(
            own, slot, size, mine, theirs, out, bias, residual, begin, at, None, columns, takes,
            world, OP, HAS_BIAS, HAS_RESIDUAL, RANKS, KEPT, COPY,
        )  # fmt: skip
    if (whole * BLOCK < count) & (whole % parts == index):
        at = tl.cast(whole, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        _reduce_at(
            own, slot, size, mine, theirs, out, bias, residual, begin, at, at < count, columns,
            takes, world, OP, HAS_BIAS, HAS_RESIDUAL, RANKS, KEPT, COPY,
        )  # fmt: skip
    if not ROOTED:
        program_barrier()  # what is pushed on was stored by other threads
        for hop in range(2, RANKS):
            copy_share(
                tdl.symm_at(mine, (me + hop) % RANKS, world), mine, count, index, parts, BLOCK
            )


@triton.jit
def _finish_at(
    results, out, bias, residual, begin, at, mask, columns, world,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Bring the results `at` to their destination, `begin` elements behind the start of `out`."""
    added = load_added(bias, residual, begin + at, mask, columns, HAS_BIAS, HAS_RESIDUAL)
    total = widen(tl.load(results + at, mask=mask))
    finish(total, out, added, begin + at, mask, tdl.num_ranks(world), "sum")


@triton.jit
def _push_and_finish(
    x, slot, results, out, bias, residual, world, numel, columns, shard, size, begin, home, turn,
    takes, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`push_step` from element `begin` of each shard on, and if the rank `takes` any, the peers'
    results from element `home` on: their slot begins at `turn`, unless they are WHOLE.
    """
    index = tl.program_id(0)
    parts = tl.num_programs(0)
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    for hop in range(1, ranks):
        peer = (me + hop) % ranks
        to = tdl.symm_at(slot + me * size, peer, world)
        source = x + peer * shard + begin
        found = results + (peer * shard + home if WHOLE else turn + peer * size)
        first = peer * shard + home
        count = part_length(peer, shard, numel, begin, size)
        finished = tl.where(takes, part_length(peer, shard, numel, home, size), 0)
        both = tl.where(count == finished, count, 0)
        whole = both // BLOCK
        for block in range(index, whole, parts):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(source + at)
            result = widen(tl.load(found + at))
            added = load_added(bias, residual, first + at, None, columns, HAS_BIAS, HAS_RESIDUAL)
            tl.store(to + at, value)
            finish(result, out, added, first + at, None, ranks, "sum")
        if both == 0:
            copy_share(to, source, count, index, parts, BLOCK)
            whole = finished // BLOCK
            for block in range(index, whole, parts):
                at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                _finish_at(
                    found, out, bias, residual, first, at, None, columns, world,
                    HAS_BIAS, HAS_RESIDUAL,
                )  # fmt: skip
        if (whole * BLOCK < finished) & (whole % parts == index):
            at = tl.cast(whole, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            if both > 0:
                tl.store(to + at, tl.load(source + at, mask=at < count), mask=at < count)
            _finish_at(
                found, out, bias, residual, first, at, at < finished, columns, world,
                HAS_BIAS, HAS_RESIDUAL,
            )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def two_shot_kernel(
    x, out, bias, residual, staging, results, signals, channel, world, numel, columns,
    shard_vectors, step_vectors, steps, root,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    SLOTS: tl.constexpr, AHEAD: tl.constexpr, WHOLE: tl.constexpr, COPY: tl.constexpr,
    ROOTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push step s, and bring home the peers' results of step s - LAG; reduce step s - AHEAD.

    `signals` holds 2 * RANKS words for each block: who has pushed its part of which step, and who
    has reduced it. WHOLE: `results` is the whole array, else slots. COPY: `out` is another place
    than `results`. ROOTED: only `root` gets results.
    """
    tl.static_assert(COPY or not ROOTED)
    LAG: tl.constexpr = 1 + 2 * AHEAD
    shard = tl.cast(shard_vectors, tl.int64) * _VECTOR
    size = tl.cast(step_vectors, tl.int64) * _VECTOR
    me = tdl.rank(world).to(tl.int64)
    member = (me == root) if ROOTED else me >= 0  # does this rank get results?
    pushed = signals + tl.program_id(0) * (2 * RANKS)
    reduced = pushed + RANKS
    first = (tdl.epoch(channel) - 1) * steps  # steps of all calls before this one
    ok = (steps > 0) & tdl.no_fault(world)
    for s in range(0, steps + (LAG if COPY else AHEAD)):
        now = first + s
        slot = staging + (now & (SLOTS - 1)) * (RANKS * size)
        if COPY:
            takes = member & (s >= LAG)
            if takes:
                ok = tdl.wait_all(reduced, RANKS, world, now - LAG + 1) & ok
            if ok & (takes | (s < steps)):
                turn = ((now - LAG) & (SLOTS - 1)) * (RANKS * size)
                _push_and_finish(
                    x, slot, results, out, bias, residual, world, numel, columns, shard, size,
                    s * size, (s - LAG) * size, turn, takes, HAS_BIAS, HAS_RESIDUAL, WHOLE, BLOCK,
                )  # fmt: skip
        elif ok & (s < steps):
            push_step(x, slot, world, numel, shard, s * size, size, BLOCK)
        if s < steps:
            notify_ranks(pushed, world, now + 1, ok)
        if (s >= AHEAD) & (s < steps + AHEAD):
            done = now - AHEAD + 1
            turn = ((done - 1) & (SLOTS - 1)) * (RANKS * size)
            begin = (s - AHEAD) * size
            ok = tdl.wait_all(pushed, RANKS, world, done) & ok
            if ok:
                own = x + me * shard + begin
                mine = results + (me * shard + begin if WHOLE else turn + me * size)
                count = part_length(me, shard, numel, begin, size)
                _reduce_step(
                    own, staging + turn, size, mine, out, bias, residual, me * shard + begin,
                    count, columns, member, root, world, OP, HAS_BIAS, HAS_RESIDUAL, RANKS,
                    WHOLE, COPY, ROOTED, BLOCK,
                )  # fmt: skip
            if ROOTED:
                tdl.notify(reduced + me, root, world, done, when=ok)
            else:
                notify_ranks(reduced, world, done, ok)
    if not COPY:
        tdl.wait_all(reduced, RANKS, world, first + steps)


def bind_two_shot(
    plan: Plan, config: ReductionConfig, shape: tuple[int, ...], kinds: tuple[np.dtype, np.dtype],
    named: dict[str, Any], buffer: Array | None = None, root: int | None = None,
) -> tuple[Run, Run | None]:  # fmt: skip
    """Workspaces and kernels for a plan, of inputs of one shape and type, in and out.

    `named` holds OP, HAS_BIAS and HAS_RESIDUAL. Returns what writes results anywhere, and with a
    symmetric `buffer` also what leaves them there.
    """
    dtype, out_dtype = kinds
    wire = out_dtype if not adds(named) else dtypes.accumulator(dtype)
    ranks, numel = plan.group.size, elements(shape)
    shard = padded(-(-numel // ranks))
    per_element = dtype.itemsize + (0 if buffer is not None else wire.itemsize)
    ahead = ranks <= 2  # of more, pushes of two steps at once would share links
    slot_bytes = ranks * shard * VECTOR * per_element
    nbytes, least = numel * dtype.itemsize, config.steps
    if not ahead and least is None and nbytes > 2 * STEP_BYTES:
        least = -(-nbytes // STEP_BYTES)
    steps = Steps.make(shard * VECTOR, slot_bytes, least, ahead)
    slots = (steps.slots * ranks * steps.elements,)
    blocks = plan.blocks_for(-(-steps.elements // config.block), config.blocks)
    staging = plan.workspace("shards", slots, dtype)
    results = plan.workspace("results", slots, wire) if buffer is None else buffer
    signals = plan.workspace("signals", (blocks * 2 * ranks,), np.int32, steps=steps.count)
    shared = (
        staging, results, signals, plan.channel(blocks), plan.group.handle, numel,
        max(1, shape[-1] if shape else 1), shard, steps.vectors, steps.count, root or 0,
    )  # fmt: skip

    def bind(copies: bool) -> Run:
        return plan.bind(
            two_shot_kernel, blocks, (dtype, out_dtype, dtype, dtype), *shared, **named,
            RANKS=ranks, SLOTS=steps.slots, AHEAD=int(ahead), WHOLE=buffer is not None,
            COPY=copies, ROOTED=root is not None, BLOCK=config.block,
            num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip

    return bind(True), bind(False) if buffer is not None else None


def adds(named: dict[str, Any]) -> bool:
    """Whether bias or residual follow, before which results are not rounded."""
    return named["HAS_BIAS"] or named["HAS_RESIDUAL"]
