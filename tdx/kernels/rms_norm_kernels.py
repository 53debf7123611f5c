"""The kernels of all_reduce_rms_norm.py, which describes their algorithms; see also
rms_norm_words.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.all_reduce_words import bind_low_latency, bind_low_latency_two_shot
from tdx.kernels.copying import VECTOR, copy_share
from tdx.kernels.operand import Operand
from tdx.kernels.plan import Plan
from tdx.kernels.reduction import ReductionConfig
from tdx.kernels.select import row_block
from tdx.kernels.shards import notify_ranks, part_length, sum_of_ranks
from tdx.kernels.tile_product import known
from tdx.language.signal import program_barrier

__all__ = ["bind_two_kernels", "norm_scale", "one_shot_kernel", "rows_kernel", "two_shot_kernel"]

_VECTOR = tl.constexpr(VECTOR)
_SIZES = ["rows", "columns", "slot_vectors", "shard", "step", "steps"]


@triton.jit
def _copy_rows(to, source, rows, columns, BLOCK: tl.constexpr):
    """Copy this block's rows of `rows`."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        begin = tl.cast(row, tl.int64) * columns
        copy_share(to + begin, source + begin, columns, 0, 1, BLOCK)


@triton.jit
def _rounded(
    total, bias, residual, at, mask, DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """h of a piece of a row, of which `residual` is the row's: 0 where there is none."""
    if HAS_BIAS:
        total = total + tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total = total + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, total, 0.0).to(DTYPE)


@triton.jit
def _load_row(source, columns, when, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    """A row as a tuple of pieces, filled up with 0."""
    row = ()
    for piece in tl.static_range(PIECES):
        at = piece * BLOCK + tl.arange(0, BLOCK)
        row = row + (tl.load(source + at, mask=(at < columns) & when, other=0.0),)  # noqa: RUF005
    return row


@triton.jit
def norm_scale(squares, columns, EPS: tl.constexpr):
    """What to multiply a row by, of which `squares` is the sum."""
    mean = tl.div_rn(squares, columns.to(tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + EPS))


@triton.jit
def _normalise(
    row, factors, out, kept, weight, columns, when,
    EPS: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the norm of a row, given as a tuple of pieces of h, and with KEEP also h.

    EARLY: `factors` are the pieces of the weight, loaded before, for which there are registers.
    """
    squares = tl.zeros((BLOCK,), tl.float32)
    for piece in tl.static_range(PIECES):
        value = row[piece].to(tl.float32)
        squares += value * value
    scale = norm_scale(tl.sum(squares), columns, EPS)
    for piece in tl.static_range(PIECES):
        at = piece * BLOCK + tl.arange(0, BLOCK)
        mask = (at < columns) & when
        if EARLY:
            factor = factors[piece].to(tl.float32)
        else:
            factor = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
        value = row[piece].to(tl.float32) * scale * factor
        tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
        if KEEP:
            tl.store(kept + at, row[piece], mask=mask)


@triton.jit
def _normalise_stored(
    h, out, kept, weight, columns, when,
    EPS: tl.constexpr, KEEP: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same of a row in memory, read twice: registers do not hold the longest; out may be h."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for piece in range(PIECES):
        at = piece * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(h + at, mask=(at < columns) & when, other=0.0).to(tl.float32)
        squares += value * value
    scale = norm_scale(tl.sum(squares), columns, EPS)
    for piece in range(PIECES):
        at = piece * BLOCK + tl.arange(0, BLOCK)
        mask = (at < columns) & when
        row = tl.load(h + at, mask=mask, other=0.0)
        factor = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
        value = row.to(tl.float32) * scale * factor
        tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)
        if KEEP:
            tl.store(kept + at, row, mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def rows_kernel(
    h, out, weight, world, rows, columns,
    EPS: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise the rows of h, which no peer has a part in; out may be h."""
    columns = known(columns, EVEN)
    sound = tdl.no_fault(world)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        begin = tl.cast(index, tl.int64) * columns
        if PIECES == 1:
            factors = _load_row(weight, columns, True, PIECES, BLOCK)
            row = _load_row(h + begin, columns, True, PIECES, BLOCK)
            _normalise(
                row, factors, out + begin, out + begin, weight, columns, sound,
                EPS, False, True, PIECES, BLOCK,
            )  # fmt: skip
        else:
            _normalise_stored(
                h + begin, out + begin, out + begin, weight, columns, sound,
                EPS, False, PIECES, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def one_shot_kernel(
    x, out, kept, weight, bias, residual, slots, channel, world, rows, columns, slot_vectors,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stage the own rows, meet, and reduce and normalise everybody's."""
    columns = known(columns, EVEN)
    slot = slots + (tdl.epoch(channel) & 1).to(tl.int64) * slot_vectors * _VECTOR
    _copy_rows(slot, x, tl.where(tdl.no_fault(world), rows, 0), columns, BLOCK)
    ok = tdl.barrier(channel, world)
    if ok:
        for index in range(tl.program_id(0), rows, tl.num_programs(0)):
            begin = tl.cast(index, tl.int64) * columns
            row = ()
            for piece in tl.static_range(PIECES):
                at = piece * BLOCK + tl.arange(0, BLOCK)
                mask = at < columns
                total = tl.zeros((BLOCK,), tl.float32)
                for peer in tl.static_range(RANKS):
                    source = tdl.symm_at(slot, peer, world) + begin
                    value = tl.load(source + at, mask=mask).to(tl.float32)
                    total = value if peer == 0 else total + value
                h = _rounded(
                    total, bias, residual + begin, at, mask, out.dtype.element_ty,
                    HAS_BIAS, HAS_RESIDUAL,
                )  # fmt: skip
                row = row + (h,)  # noqa: RUF005 - Triton has no star
            factors = ()
            if PIECES == 1:
                factors = _load_row(weight, columns, True, PIECES, BLOCK)
            _normalise(
                row, factors, out + begin, kept + begin, weight, columns, True,
                EPS, HAS_RESIDUAL, PIECES == 1, PIECES, BLOCK,
            )  # fmt: skip


@triton.jit
def _reduce_piece(
    own, slot, size, mine, theirs, bias, residual, piece, columns, world,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr, KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """h of a piece of a row, also stored at the next rank, and with KEPT here."""
    at = piece * BLOCK + tl.arange(0, BLOCK)
    mask = at < columns
    total = sum_of_ranks(own, slot, size, at, mask, world, "sum", RANKS)
    h = _rounded(
        total, bias, residual, at, mask, mine.dtype.element_ty, HAS_BIAS, HAS_RESIDUAL
    )  # fmt: skip
    if RANKS > 1:
        tl.store(theirs + at, h, mask=mask)
    if KEPT:
        tl.store(mine + at, h, mask=mask)
    return h


@triton.jit
def _reduce_rows(
    own, slot, size, mine, out, kept, weight, bias, residual, rows, columns, world,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """h of this block's rows, to all ranks: to the first hop while reducing.

    The own norms follow at once, so that their stores hide behind those to peers.
    """
    KEPT: tl.constexpr = RANKS > 2 or PIECES > 1
    me = tdl.rank(world)
    theirs = tdl.symm_at(mine, (me + 1) % RANKS, world)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        begin = tl.cast(index, tl.int64) * columns
        for piece in range(PIECES):
            h = _reduce_piece(
                own + begin, slot + begin, size, mine + begin, theirs + begin, bias,
                residual + begin, piece, columns, world, HAS_BIAS, HAS_RESIDUAL, RANKS, KEPT,
                BLOCK,
            )  # fmt: skip
            if PIECES == 1:
                _normalise(
                    (h,), (), out + begin, kept + begin, weight, columns, True,
                    EPS, HAS_RESIDUAL, False, PIECES, BLOCK,
                )  # fmt: skip
        if PIECES > 1:  # the registers hold no whole row beside all ranks' pieces
            program_barrier()  # what is read now was stored by other threads
            if HELD:
                row = _load_row(mine + begin, columns, True, PIECES, BLOCK)
                _normalise(
                    row, (), out + begin, kept + begin, weight, columns, True,
                    EPS, HAS_RESIDUAL, False, PIECES, BLOCK,
                )  # fmt: skip
            else:
                _normalise_stored(
                    mine + begin, out + begin, kept + begin, weight, columns, True,
                    EPS, HAS_RESIDUAL, PIECES, BLOCK,
                )  # fmt: skip
    program_barrier()  # what is pushed on was stored by other threads
    for hop in range(2, RANKS):
        _copy_rows(tdl.symm_at(mine, (me + hop) % RANKS, world), mine, rows, columns, BLOCK)


@triton.jit
def _push_rows(
    x, slot, world, rows, columns, shard, step, first, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Push this block's rows from row `first` of every other rank's shard to its `slot`."""
    me = tdl.rank(world).to(tl.int64)
    for hop in range(1, RANKS):
        peer = (me + hop) % RANKS
        source = x + (peer * shard + first) * columns
        count = part_length(peer, shard, rows, first, step)
        _copy_rows(tdl.symm_at(slot, peer, world), source, count, columns, BLOCK)


@triton.jit
def _task(number, mine, me, rows, shard, step, first, RANKS: tl.constexpr):
    """Of this block's rows, `mine` of each peer: whose number `number` is, which of a step, and
    whether the step from row `first` of each shard has it. Behind the last come own rows.
    """
    peer = (me + 1 + number // mine) % RANKS
    index = tl.program_id(0).to(tl.int64) + number % mine * tl.num_programs(0)
    return peer, index, index < part_length(peer, shard, rows, first, step)


@triton.jit
def _normalise_peers(
    results, out, kept, weight, world, size, rows, columns, shard, step, done,
    EPS: tl.constexpr, KEEP: tl.constexpr, RANKS: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The norms of peers' rows of the step from row `done` of each shard, with KEEP also the rows,
    from their slot to the results.
    """
    me = tdl.rank(world).to(tl.int64)
    mine = tl.cdiv(step - tl.program_id(0), tl.num_programs(0))  # a step has a row for each block
    for task in range(0, mine * (RANKS - 1)):
        peer, index, there = _task(task, mine, me, rows, shard, step, done, RANKS)
        begin = (peer * shard + done + index) * columns
        _normalise_stored(
            results + peer * size + index * columns, out + begin, kept + begin, weight, columns,
            there, EPS, KEEP, PIECES, BLOCK,
        )  # fmt: skip


@triton.jit
def _push_and_normalise(
    x, slot, results, out, kept, weight, world, size, rows, columns, shard, step, first, done,
    EPS: tl.constexpr, KEEP: tl.constexpr, RANKS: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`_push_rows` of the step from row `first` on, if there is one, and `_normalise_peers`, row by
    row: stores to peers and local ones hide each other, and the next row's load both.
    """
    me = tdl.rank(world).to(tl.int64)
    mine = tl.cdiv(step - tl.program_id(0), tl.num_programs(0))
    tasks = mine * (RANKS - 1)
    peer, index, there = _task(0, mine, me, rows, shard, step, done, RANKS)
    there = there & (tasks > 0)
    row = _load_row(results + peer * size + index * columns, columns, there, PIECES, BLOCK)
    for task in range(0, tasks):
        sent = index < part_length(peer, shard, rows, first, step)
        source = x + (peer * shard + first + index) * columns
        pushed = _load_row(source, columns, sent, PIECES, BLOCK)
        owner, place, more = _task(task + 1, mine, me, rows, shard, step, done, RANKS)
        more = more & (task + 1 < tasks)
        following = _load_row(
            results + owner * size + place * columns, columns, more, PIECES, BLOCK
        )
        to = tdl.symm_at(slot, peer, world) + index * columns
        for piece in tl.static_range(PIECES):
            at = piece * BLOCK + tl.arange(0, BLOCK)
            tl.store(to + at, pushed[piece], mask=(at < columns) & sent)
        begin = (peer * shard + done + index) * columns
        _normalise(
            row, (), out + begin, kept + begin, weight, columns, there,
            EPS, KEEP, False, PIECES, BLOCK,
        )  # fmt: skip
        peer, index, there, row = owner, place, more, following


@triton.jit(do_not_specialize=_SIZES)
def two_shot_kernel(
    x, out, kept, weight, bias, residual, staging, results, signals, channel, world,
    rows, columns, shard, step, steps,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Push step s and normalise the peers' rows of step s - 1; reduce and normalise own ones of s.

    A step is of `step` of a shard's rows, and a slot has a place of as many for each rank. One slot
    of shards and one of results: who pushes a step knows that all have reduced the one before, and
    who stores its results that all have normalised that. `signals` is as in two_shot.py. HELD:
    registers hold three rows.
    """
    columns = known(columns, EVEN)
    size = tl.cast(step, tl.int64) * columns
    me = tdl.rank(world)
    pushed = signals + tl.program_id(0) * (2 * RANKS)
    reduced = pushed + RANKS
    before = (tdl.epoch(channel) - 1) * steps  # steps of all earlier calls
    slot = staging + me * size
    ok = (steps > 0) & tdl.no_fault(world)
    for s in range(0, steps + 1):
        now = before + s
        first = s * step
        if s > 0:
            ok = tdl.wait_all(reduced, RANKS, world, now) & ok
            if ok:
                if HELD:
                    _push_and_normalise(
                        x, slot, results, out, kept, weight, world, size, rows, columns, shard,
                        step, first, first - step, EPS, HAS_RESIDUAL, RANKS, PIECES, BLOCK,
                    )  # fmt: skip
                else:
                    _normalise_peers(
                        results, out, kept, weight, world, size, rows, columns, shard, step,
                        first - step, EPS, HAS_RESIDUAL, RANKS, PIECES, BLOCK,
                    )  # fmt: skip
        if ok & ((s == 0) | (not HELD)):
            _push_rows(x, slot, world, rows, columns, shard, step, first, RANKS, BLOCK)
        if s < steps:
            notify_ranks(pushed, world, now + 1, ok)
            ok = tdl.wait_all(pushed, RANKS, world, now + 1) & ok
            if ok:
                begin = (me * shard + first).to(tl.int64) * columns
                _reduce_rows(
                    x + begin, staging, size, results + me * size, out + begin, kept + begin,
                    weight, bias, residual + begin, part_length(me, shard, rows, first, step),
                    columns, world, EPS, HAS_BIAS, HAS_RESIDUAL, RANKS, PIECES, BLOCK, HELD,
                )  # fmt: skip
            notify_ranks(reduced, world, now + 1, ok)


def bind_two_kernels(
    plan: Plan, config: ReductionConfig, rows: int, columns: int, dtype: np.dtype,
    named: dict[str, Any],
) -> Any:  # fmt: skip
    """What runs unfused: as rms_norm_words.bind_words."""
    added = {"OP": "sum", **{name: named[name] for name in ("HAS_BIAS", "HAS_RESIDUAL")}}
    what = (plan, config, (rows, columns), (dtype, dtype), added)
    two_shot = config.algorithm.endswith("two_shot")
    reduce = bind_low_latency_two_shot(*what, alike=True) if two_shot else bind_low_latency(*what)
    block, warps = row_block(plan.world.backend, columns, dtype.itemsize, 1)
    blocks = min(rows, 4 * plan.blocks_for(rows))  # which wait for nobody
    normalise = plan.bind(
        rows_kernel, blocks, (dtype,) * 3, plan.group.handle, rows, columns,
        EPS=named["EPS"], EVEN=named["EVEN"], PIECES=-(-columns // block), BLOCK=block,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip

    def run(
        handle: int, x: Operand, out: Operand, kept: Operand, weight: Operand, bias: Operand,
        residual: Operand,
    ) -> None:  # fmt: skip
        reduce(handle, x, kept, bias, residual)  # h goes where it is wanted, else where the norm is
        normalise(handle, kept, out, weight)

    return run
