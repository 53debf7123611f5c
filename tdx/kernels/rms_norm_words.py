"""The kernels of all_reduce_rms_norm.py that send words of data and flag, and how they are bound.

Several blocks share a row where there are enough of them: each handles a span of its columns, so
small that a thread waits for a word or two of each peer, all at once. They tell each other their
sums of squares by words of data and flag in the own heap, which each block adds up in the order of
the columns: the norm's bits depend on the spans, not on who comes first.

low_latency           A block sends its span to all peers, and adds up what these send of it.
low_latency_two_shot  A span has a share for every rank, which reduces it and sends the sums to all.
                      Shares are multiples of 16 columns, and equal.

Words from peers have two slots in turn: a rank that is in call n + 2 has left call n + 1, for which
it needed words of everybody, and who sends those has left call n. Those of a sum have one place:
each belongs to one span of one row, so a call writes it once, and nobody reads it for the call
before any more, since the kernels of a plan follow one another on their rank. It holds the flag of
the call before until then.

Nobody waits for ever: all blocks are resident and push all they have of x before they wait. Blocks
take rows in one order, and tell their sum of a row before they wait for the others'.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copying import VECTOR, padded
from tdx.kernels.element_words import of_elements, receive_elements, send_elements
from tdx.kernels.plan import Plan
from tdx.kernels.reduction import ReductionConfig, from_words, reduce_words, to_words
from tdx.kernels.rms_norm_kernels import norm_scale
from tdx.kernels.select import power_of_two
from tdx.kernels.tile_product import known
from tdx.language._intrinsic import program_threads
from tdx.language.signal import program_barrier
from tdx.runtime.driver.base import Bound

__all__ = ["bind_words", "low_latency_kernel", "low_latency_two_shot_kernel", "word_bytes"]

_VECTOR = tl.constexpr(VECTOR)
_SIZES = ["rows", "columns", "row_vectors", "share_vectors", "parts"]


@triton.jit
def _columns(first, count, columns, BLOCK: tl.constexpr):
    """Those from number `first` on, `count` at most, and which of them there are."""
    lanes = tl.arange(0, BLOCK)
    return first + lanes, (lanes < count) & (first + lanes < columns)


@triton.jit
def _reduce_share(
    x, bias, residual, at, mask, slot, stride, count, flag, world,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    PAIRS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """h of the elements `at` of a row, 0 outside of `mask`, and which words of it have come.

    What is far away is loaded while the words are on their way; x was just read.
    """
    KIND: tl.constexpr = x.dtype.element_ty
    vector, whole = 0.0, 0.0
    if HAS_BIAS:
        vector = tl.load(bias + at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        whole = tl.load(residual + at, mask=mask, other=0.0)
    words, come = receive_elements(
        slot, stride, count, flag, world, KIND, RANKS, PAIRS, WIDE, mask.shape[0]
    )
    own = to_words(tl.load(x + at, mask=mask, other=0), PAIRS)
    total = reduce_words(own, words, world, KIND, "sum", RANKS, PAIRS)
    if HAS_BIAS:
        total = total + vector.to(tl.float32)
    if HAS_RESIDUAL:
        total = total + whole.to(tl.float32)
    return tl.where(mask, total, 0.0).to(KIND), come


@triton.jit
def _gather_shares(
    own, slot, stride, count, flag, world, RANKS: tl.constexpr, PAIRS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h of a span, one block for the share of each rank, their squares, and what has come."""
    KIND: tl.constexpr = own.dtype
    me = tdl.rank(world)
    mine = to_words(own, PAIRS)
    words, come = receive_elements(
        slot, stride, count, flag, world, KIND, RANKS, PAIRS, WIDE, BLOCK
    )
    row = ()
    squared = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(RANKS):
        h = from_words(tl.where(me == peer, mine, words[peer]), KIND, PAIRS)
        squared += _square(h)
        row = row + (h,)  # noqa: RUF005 - Triton has no star
    return row, squared, of_elements(come, PAIRS, WIDE)


@triton.jit
def _square(h):
    value = h.to(tl.float32)
    return value * value


@triton.jit
def _store_norm(h, factor, scale, out, at, mask):
    value = h.to(tl.float32) * scale * factor.to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _normalise_span(
    row, factors, there, squared, out, kept, weight, words, part, parts, first, step, columns,
    flag, world, when, EPS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, LANES: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the norm of the span of a row that is this block's, number `part` of `parts`.

    The span has COUNT times `step` columns from `first` on: `row` has their h and `factors` their
    weights, or nothing where those are too many for registers; h lies where results go then.
    `there`: which of the BLOCK lanes hold data; `squared`: what each adds to the sum of squares;
    `words`: those of the row.
    """
    HELD: tl.constexpr = len(row) > 0
    total = tl.sum(squared)
    if LANES > 1:  # a store of each thread would keep others from the line that they poll
        THREADS: tl.constexpr = program_threads()
        thread = tl.arange(0, THREADS)
        to = words + part + 0 * thread
        tdl.store_ll(to, total, flag, tdl.rank(world), world, (thread == 0) & when)
    if HELD and HAS_RESIDUAL:  # while the other sums are on their way
        for i in tl.static_range(COUNT):
            at, mask = _columns(first + i * step, step, columns, BLOCK)
            tl.store(kept + at, row[i], mask=mask & there)
    if LANES > 1:
        spans = tl.arange(0, LANES)
        each, ok = tdl.load_ll(
            words + spans, flag, world, spans < parts, dtype=tl.float32, uniform=False
        )
        total = tl.sum(each)
        there = there & (tl.min(ok.to(tl.int32)) != 0)
    scale = norm_scale(total, columns, EPS)
    if HELD:
        for i in tl.static_range(COUNT):
            at, mask = _columns(first + i * step, step, columns, BLOCK)
            _store_norm(row[i], factors[i], scale, out, at, mask & there)
    else:
        program_barrier()  # what is read now was stored by other threads
        for i in range(COUNT):
            at, mask = _columns(first + i * step, step, columns, BLOCK)
            h = tl.load((kept if HAS_RESIDUAL else out) + at, mask=mask, other=0.0)
            factor = tl.load(weight + at, mask=mask, other=0.0)
            _store_norm(h, factor, scale, out, at, mask & there)


@triton.jit(do_not_specialize=_SIZES)
def low_latency_kernel(
    x, out, kept, weight, bias, residual, slots, squares, channel, world,
    rows, columns, row_vectors, parts,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push the own rows to everybody as words with flags; reduce and normalise what arrives.

    A row takes VECTOR * row_vectors words; `parts` blocks share it, each with PIECES times BLOCK
    columns. LANES is a power of two, not less than `parts`. PAIRS: two elements share a word; WIDE:
    a thread has two words.
    """
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    # several threads have, and send, the same words
    SHARED: tl.constexpr = program_threads() > BLOCK // PER_WORD
    columns = known(columns, EVEN)
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    row_words = tl.cast(row_vectors, tl.int64) * _VECTOR
    stride = rows * row_words
    slot = slots + (flag & 1) * RANKS * stride
    part = tl.program_id(0) % parts
    group, groups = tl.program_id(0) // parts, tl.num_programs(0) // parts
    span = part * (PIECES * BLOCK)
    for index in range(group, rows, groups):
        for piece in range(PIECES):
            first = span + piece * BLOCK
            at, mask = _columns(first, BLOCK, columns, BLOCK)
            value = tl.load(x + tl.cast(index, tl.int64) * columns + at, mask=mask, other=0)
            to = slot + me * stride + index * row_words + first // PER_WORD
            count = tl.cdiv(columns - first, PER_WORD)
            for hop in tl.static_range(1, RANKS):
                send_elements(value, to, count, flag, world, (me + hop) % RANKS, sound, PAIRS, WIDE)
    if SHARED:  # h or results may go where the others read what they send
        program_barrier()
    for index in range(group, rows, groups):
        begin = tl.cast(index, tl.int64) * columns
        there = tl.full((BLOCK,), 1, tl.int1)
        squared = tl.zeros((BLOCK,), tl.float32)
        row, factors = (), ()
        if PIECES == 1:
            at, mask = _columns(span, BLOCK, columns, BLOCK)
            factors = (tl.load(weight + at, mask=mask, other=0.0),)
            h, come = _reduce_share(
                x + begin, bias, residual + begin, at, mask,
                slot + index * row_words + span // PER_WORD, stride,
                tl.cdiv(columns - span, PER_WORD), flag, world,
                HAS_BIAS, HAS_RESIDUAL, RANKS, PAIRS, WIDE,
            )  # fmt: skip
            row, there, squared = (h,), of_elements(come, PAIRS, WIDE), _square(h)
        else:
            for piece in range(PIECES):
                first = span + piece * BLOCK
                at, mask = _columns(first, BLOCK, columns, BLOCK)
                h, come = _reduce_share(
                    x + begin, bias, residual + begin, at, mask,
                    slot + index * row_words + first // PER_WORD, stride,
                    tl.cdiv(columns - first, PER_WORD), flag, world,
                    HAS_BIAS, HAS_RESIDUAL, RANKS, PAIRS, WIDE,
                )  # fmt: skip
                there = there & (of_elements(come, PAIRS, WIDE) | (at >= columns))
                squared += _square(h)
                tl.store((kept if HAS_RESIDUAL else out) + begin + at, h, mask=mask & there)
        _normalise_span(
            row, factors, there, squared, out + begin, kept + begin, weight,
            squares + tl.cast(index, tl.int64) * parts, part, parts, span, BLOCK, columns,
            flag, world, sound, EPS, HAS_RESIDUAL, LANES, PIECES, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def low_latency_two_shot_kernel(
    x, out, kept, weight, bias, residual, slots, squares, channel, world,
    rows, columns, share_vectors, parts,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    PIECES: tl.constexpr, LANES: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push the others' shares as words, reduce the own ones, push those, normalise what arrives.

    `parts` blocks share a row, each with PIECES times a share of VECTOR * share_vectors columns, at
    most BLOCK, for each rank; LANES, PAIRS, WIDE as above. A slot has a place for every rank's part
    of the own shares, then one for every rank's sums, and holds whole shares, whatever lies behind
    the last column.
    """
    columns = known(columns, EVEN)
    share = share_vectors * _VECTOR
    count = share_vectors * (_VECTOR // 2 if PAIRS else _VECTOR)  # words of a share
    # several threads have, and send, the same words
    SHARED: tl.constexpr = BLOCK // (2 if PAIRS else 1) < program_threads()
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    row_words = tl.cast(parts * PIECES, tl.int64) * count
    stride = rows * row_words
    slot = slots + (flag & 1) * (2 * RANKS) * stride
    reduced = slot + RANKS * stride
    part = tl.program_id(0) % parts
    group, groups = tl.program_id(0) // parts, tl.num_programs(0) // parts
    sums = kept if HAS_RESIDUAL else out  # where the own shares of h are until all are there
    span = part * PIECES * RANKS * share
    for index in range(group, rows, groups):
        for piece in range(PIECES):
            values = ()  # all loads before the first store, which nothing can be moved across
            for hop in tl.static_range(1, RANKS):
                first = span + (piece * RANKS + (me + hop) % RANKS) * share
                at, mask = _columns(first, share, columns, BLOCK)
                value = tl.load(x + tl.cast(index, tl.int64) * columns + at, mask=mask, other=0)
                values = values + (value,)  # noqa: RUF005
            to = slot + me * stride + index * row_words + (part * PIECES + piece) * count
            for hop in tl.static_range(1, RANKS):
                peer = (me + hop) % RANKS
                send_elements(values[hop - 1], to, count, flag, world, peer, sound, PAIRS, WIDE)
    for index in range(group, rows, groups):
        begin = tl.cast(index, tl.int64) * columns
        for piece in range(PIECES):
            place = index * row_words + (part * PIECES + piece) * count
            first = span + (piece * RANKS + me) * share
            at, mask = _columns(first, share, columns, BLOCK)
            h, come = _reduce_share(
                x + begin, bias, residual + begin, at, mask, slot + place, stride, count, flag,
                world, HAS_BIAS, HAS_RESIDUAL, RANKS, PAIRS, WIDE,
            )  # fmt: skip
            to = reduced + me * stride + place
            for hop in tl.static_range(1, RANKS):
                peer = (me + hop) % RANKS
                send_elements(h, to, count, flag, world, peer, come & sound, PAIRS, WIDE)
            if SHARED:  # h may go where the others read what they send
                program_barrier()
            tl.store(sums + begin + at, h, mask=mask & of_elements(come, PAIRS, WIDE))
    program_barrier()  # what is read now was stored by other threads
    for index in range(group, rows, groups):
        begin = tl.cast(index, tl.int64) * columns
        there = tl.full((BLOCK,), 1, tl.int1)
        squared = tl.zeros((BLOCK,), tl.float32)
        row, factors = (), ()
        if PIECES == 1:
            for peer in tl.static_range(RANKS):
                at, mask = _columns(span + peer * share, share, columns, BLOCK)
                factors = factors + (tl.load(weight + at, mask=mask, other=0.0),)  # noqa: RUF005
            at, mask = _columns(span + me * share, share, columns, BLOCK)
            own = tl.load(sums + begin + at, mask=mask, other=0.0)
            row, squared, there = _gather_shares(
                own, reduced + index * row_words + part * count, stride, count, flag, world,
                RANKS, PAIRS, WIDE, BLOCK,
            )  # fmt: skip
        else:
            for piece in range(PIECES):
                first = span + piece * RANKS * share
                at, mask = _columns(first + me * share, share, columns, BLOCK)
                own = tl.load(sums + begin + at, mask=mask, other=0.0)
                place = index * row_words + (part * PIECES + piece) * count
                found, more, come = _gather_shares(
                    own, reduced + place, stride, count, flag, world, RANKS, PAIRS, WIDE, BLOCK
                )
                there, squared = there & come, squared + more
                for peer in tl.static_range(RANKS):
                    at, mask = _columns(first + peer * share, share, columns, BLOCK)
                    tl.store(sums + begin + at, found[peer], mask=mask & there)
        _normalise_span(
            row, factors, there, squared, out + begin, kept + begin, weight,
            squares + tl.cast(index, tl.int64) * parts, part, parts, span, share, columns,
            flag, world, sound, EPS, HAS_RESIDUAL, LANES, PIECES * RANKS, BLOCK,
        )  # fmt: skip


def word_bytes(rows: int, columns: int, dtype: np.dtype, shares: int = 1) -> int:
    """Bytes of data that the words of all rows hold, each of so many shares."""
    return 4 * VECTOR * rows * shares * _row_vectors(-(-columns // shares), dtype)


def _row_vectors(columns: int, dtype: np.dtype) -> int:
    """Words of a row, in units of VECTOR."""
    return padded(-(-columns * dtype.itemsize // 4))


def bind_words(
    plan: Plan, config: ReductionConfig, rows: int, columns: int, dtype: np.dtype,
    named: dict[str, Any],
) -> Bound:  # fmt: skip
    """Workspaces and the kernel of `config` for a plan of `rows`, with the constants `named`."""
    ranks, scattered = plan.group.size, config.algorithm == "low_latency_two_shot"
    kernel: Any = low_latency_two_shot_kernel if scattered else low_latency_kernel
    block = max(config.block, VECTOR) if scattered else config.block
    pieces = -(-columns // (block * ranks if scattered else block))
    most = plan.blocks_for(rows * pieces, config.blocks)
    each = -(-pieces // most)  # pieces of a row that a block has
    parts = -(-pieces // each)
    blocks = parts * min(rows, most // parts)
    if scattered:
        vectors = padded(-(-columns // (ranks * parts * each)))  # columns of a share
        words = 4 * ranks * rows * parts * each * vectors * VECTOR * dtype.itemsize // 4
    else:
        vectors = _row_vectors(columns, dtype)
        words = 2 * ranks * rows * vectors * VECTOR
    threads = config.num_warps * (64 if plan.world.backend == "hip" else 32)
    return plan.bind(
        kernel, blocks, (dtype,) * 6, plan.workspace("slots", (words,), np.int64),
        plan.workspace("squares", (rows * parts,), np.int64), plan.channel(blocks),
        plan.group.handle, rows, columns, vectors, parts, **named, PIECES=each,
        LANES=power_of_two(parts), PAIRS=dtype.itemsize == 2,
        WIDE=block * dtype.itemsize // 4 > threads, BLOCK=block, num_warps=config.num_warps,
        enable_fp_fusion=False,  # a contracted product and sum would round once less
    )  # fmt: skip
