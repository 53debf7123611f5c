"""The kernels of all_reduce_rms_norm.py that send words of data and flag, and how they are bound.

Several blocks share a row where there are enough of them: each handles a span of its columns, so
small that a thread waits for one word of a peer or two, and all at once. They tell each other their
sums of squares by words of data and flag in the own heap, which each block adds up in the order of
the columns: the norm's bits depend on the spans, not on who comes first.

Such a word belongs to one span of one row, so a call writes it once. It needs no second slot:
kernels of a plan follow one another on their rank, so when a call writes it nobody reads it for the
call before, whose flag it holds. All blocks are resident, and they take their rows in one order: a
block waits for another's sum of a row when it has told its own, which waited for peers alone, whose
words wait for nobody.

Words that peers send have two slots in turn: a rank is in call n + 2 when it has left call n + 1,
for which it needed words of everybody, and who sends those has left call n.

low_latency           A block sends its span to all peers, and adds up what these send of it.
low_latency_two_shot  Each span has a share of every rank, which reduces that one and sends the sums,
                      rounded, to all. A row is divided into equal shares of 16 columns and more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copying import VECTOR, padded
from tdx.kernels.plan import Plan
from tdx.kernels.reduction import (
    ReductionConfig,
    from_words,
    part_words,
    reduce_words,
    to_words,
)
from tdx.kernels.rms_norm_kernels import norm_scale
from tdx.kernels.select import power_of_two
from tdx.kernels.tile_product import known
from tdx.language.signal import program_barrier
from tdx.language.words import pair_words
from tdx.runtime.driver.base import Bound

__all__ = ["bind_words", "low_latency_kernel", "low_latency_two_shot_kernel", "word_bytes"]

_VECTOR = tl.constexpr(VECTOR)
_SIZES = ["rows", "columns", "row_vectors", "share_vectors", "parts"]


@triton.jit
def _send(values, to, count, flag, world, peer, when, PAIRS: tl.constexpr, WIDE: tl.constexpr):
    """Store elements as words with flags in `peer`'s heap, from word `to` on, `count` at most."""
    words = to_words(values, PAIRS)
    if WIDE:
        low, high = part_words(words, 2)
        words = pair_words(low, high)
    STEP: tl.constexpr = 2 if WIDE else 1
    at = STEP * tl.arange(0, words.shape[0])
    tdl.store_ll(to + at, words, flag, peer, world, (at < count) & when)


@triton.jit
def _receive(
    slot, stride, count, flag, world, DTYPE: tl.constexpr, RANKS: tl.constexpr,
    PAIRS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `_send` of all peers stored, as `to_words` has it: for each rank, 0 for the own one and
    behind `count`. And whether it has come, for each word or two that a thread polls.
    """
    STEP: tl.constexpr = 2 if WIDE else 1
    WORDS: tl.constexpr = BLOCK // 2 if PAIRS else BLOCK
    KIND: tl.constexpr = tl.int64 if WIDE else tl.int32
    at = STEP * tl.arange(0, WORDS // STEP)
    found, come = tdl.load_ll_all(slot + at, stride, flag, world, RANKS, at < count, KIND)
    words = ()
    for peer in tl.static_range(RANKS):
        each = found[peer]
        if WIDE:
            each = tl.interleave(each.to(tl.int32), (each >> 32).to(tl.int32))
        if not PAIRS:
            each = each.to(DTYPE, bitcast=True)
        words = words + (each,)  # noqa: RUF005 - Triton has no star
    return words, come


@triton.jit
def _of_elements(come, PAIRS: tl.constexpr, WIDE: tl.constexpr):
    """What is known of words, or of two of them, for each element."""
    if WIDE:
        come = tl.interleave(come, come)
    if PAIRS:
        come = tl.interleave(come, come)
    return come


@triton.jit
def _reduce_span(
    x, bias, residual, at, mask, slot, stride, count, flag, world,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, RANKS: tl.constexpr,
    PAIRS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """h of the elements `at` of a row, 0 outside of `mask`, and which words of it have come.

    All that is near is loaded before the wait for the words, in whose shadow it comes.
    """
    KIND: tl.constexpr = x.dtype.element_ty
    own = to_words(tl.load(x + at, mask=mask, other=0), PAIRS)
    vector = 0.0
    whole = 0.0
    if HAS_BIAS:
        vector = tl.load(bias + at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        whole = tl.load(residual + at, mask=mask, other=0.0)
    words, come = _receive(
        slot, stride, count, flag, world, KIND, RANKS, PAIRS, WIDE, mask.shape[0]
    )
    total = reduce_words(own, words, world, KIND, "sum", RANKS, PAIRS)
    if HAS_BIAS:
        total = total + vector.to(tl.float32)
    if HAS_RESIDUAL:
        total = total + whole.to(tl.float32)
    return tl.where(mask, total, 0.0).to(KIND), come


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
    weights, or nothing where those are too many for registers; h lies where the results go then.
    `there`: which of the BLOCK lanes hold data; `squared`: what each adds to the sum of squares;
    `words`: those of the row.
    """
    HELD: tl.constexpr = len(row) > 0
    total = tl.sum(squared)
    if LANES > 1:
        tdl.store_ll(words + part, total, flag, tdl.rank(world), world, when)
    lanes = tl.arange(0, BLOCK)
    if HELD and HAS_RESIDUAL:  # while the other sums are on their way
        for i in tl.static_range(COUNT):
            at = first + i * step + lanes
            tl.store(kept + at, row[i], mask=there & (lanes < step) & (at < columns))
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
            at = first + i * step + lanes
            mask = there & (lanes < step) & (at < columns)
            _store_norm(row[i], factors[i], scale, out, at, mask)
    else:
        program_barrier()  # what is read now was stored by other threads
        for i in range(COUNT):
            at = first + i * step + lanes
            mask = (lanes < step) & (at < columns)
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
    columns = known(columns, EVEN)
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    row_words = tl.cast(row_vectors, tl.int64) * _VECTOR
    stride = rows * row_words
    slot = slots + (flag & 1) * RANKS * stride
    part = tl.program_id(0) % parts
    group = tl.program_id(0) // parts
    groups = tl.num_programs(0) // parts
    span = part * (PIECES * BLOCK)
    for index in range(group, rows, groups):
        source = x + tl.cast(index, tl.int64) * columns
        for piece in range(PIECES):
            first = span + piece * BLOCK
            at = first + tl.arange(0, BLOCK)
            value = tl.load(source + at, mask=at < columns, other=0)
            to = slot + me * stride + index * row_words + first // PER_WORD
            count = tl.cdiv(columns - first, PER_WORD)
            for hop in tl.static_range(1, RANKS):
                _send(value, to, count, flag, world, (me + hop) % RANKS, sound, PAIRS, WIDE)
    for index in range(group, rows, groups):
        begin = tl.cast(index, tl.int64) * columns
        there = tl.full((BLOCK,), 1, tl.int1)
        squared = tl.zeros((BLOCK,), tl.float32)
        row, factors = (), ()
        if PIECES == 1:
            at = span + tl.arange(0, BLOCK)
            factor = tl.load(weight + at, mask=at < columns, other=0.0)
            h, come = _reduce_span(
                x + begin, bias, residual + begin, at, at < columns,
                slot + index * row_words + span // PER_WORD, stride,
                tl.cdiv(columns - span, PER_WORD), flag, world,
                HAS_BIAS, HAS_RESIDUAL, RANKS, PAIRS, WIDE,
            )  # fmt: skip
            there = _of_elements(come, PAIRS, WIDE)
            squared = h.to(tl.float32) * h.to(tl.float32)
            row, factors = (h,), (factor,)
        else:
            for piece in range(PIECES):
                first = span + piece * BLOCK
                at = first + tl.arange(0, BLOCK)
                h, come = _reduce_span(
                    x + begin, bias, residual + begin, at, at < columns,
                    slot + index * row_words + first // PER_WORD, stride,
                    tl.cdiv(columns - first, PER_WORD), flag, world,
                    HAS_BIAS, HAS_RESIDUAL, RANKS, PAIRS, WIDE,
                )  # fmt: skip
                there = there & (_of_elements(come, PAIRS, WIDE) | (at >= columns))
                squared += h.to(tl.float32) * h.to(tl.float32)
                sums = (kept if HAS_RESIDUAL else out) + begin
                tl.store(sums + at, h, mask=there & (at < columns))
        _normalise_span(
            row, factors, there, squared, out + begin, kept + begin, weight,
            squares + tl.cast(index, tl.int64) * parts, part, parts, span, BLOCK, columns,
            flag, world, sound, EPS, HAS_RESIDUAL, LANES, PIECES, BLOCK,
        )  # fmt: skip


@triton.jit
def _gather_span(
    own, slot, stride, count, flag, world, RANKS: tl.constexpr, PAIRS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """h of a span, one block for the share of each rank, and which lanes have come."""
    KIND: tl.constexpr = own.dtype
    me = tdl.rank(world)
    mine = to_words(own, PAIRS)
    words, come = _receive(slot, stride, count, flag, world, KIND, RANKS, PAIRS, WIDE, BLOCK)
    row = ()
    for peer in tl.static_range(RANKS):
        each = tl.where(me == peer, mine, words[peer])
        row = row + (from_words(each, KIND, PAIRS),)  # noqa: RUF005
    return row, _of_elements(come, PAIRS, WIDE)


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
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    columns = known(columns, EVEN)
    share = share_vectors * _VECTOR
    count = share_vectors * (_VECTOR // PER_WORD)  # words of a share
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    row_words = tl.cast(parts * PIECES, tl.int64) * count
    stride = rows * row_words
    slot = slots + (flag & 1) * (2 * RANKS) * stride
    reduced = slot + RANKS * stride
    part = tl.program_id(0) % parts
    group = tl.program_id(0) // parts
    groups = tl.num_programs(0) // parts
    sums = kept if HAS_RESIDUAL else out  # where the own shares of h are until all are there
    lanes = tl.arange(0, BLOCK)
    span = part * PIECES * RANKS * share
    for index in range(group, rows, groups):
        source = x + tl.cast(index, tl.int64) * columns
        for piece in range(PIECES):
            first = span + piece * RANKS * share
            place = index * row_words + (part * PIECES + piece) * count
            values = ()  # all loads before the first store, which nothing can be moved across
            for hop in tl.static_range(1, RANKS):
                at = first + (me + hop) % RANKS * share + lanes
                value = tl.load(source + at, mask=(lanes < share) & (at < columns), other=0)
                values = values + (value,)  # noqa: RUF005
            for hop in tl.static_range(1, RANKS):
                to, peer = slot + me * stride + place, (me + hop) % RANKS
                _send(values[hop - 1], to, count, flag, world, peer, sound, PAIRS, WIDE)
    for index in range(group, rows, groups):
        begin = tl.cast(index, tl.int64) * columns
        for piece in range(PIECES):
            at = span + (piece * RANKS + me) * share + lanes
            mask = (lanes < share) & (at < columns)
            place = index * row_words + (part * PIECES + piece) * count
            h, come = _reduce_span(
                x + begin, bias, residual + begin, at, mask, slot + place, stride, count, flag,
                world, HAS_BIAS, HAS_RESIDUAL, RANKS, PAIRS, WIDE,
            )  # fmt: skip
            for hop in tl.static_range(1, RANKS):
                to, peer = reduced + me * stride + place, (me + hop) % RANKS
                _send(h, to, count, flag, world, peer, come & sound, PAIRS, WIDE)
            tl.store(sums + begin + at, h, mask=mask & _of_elements(come, PAIRS, WIDE))
    program_barrier()  # what is read now was stored by other threads
    for index in range(group, rows, groups):
        begin = tl.cast(index, tl.int64) * columns
        there = tl.full((BLOCK,), 1, tl.int1)
        squared = tl.zeros((BLOCK,), tl.float32)
        row, factors = (), ()
        if PIECES == 1:
            for peer in tl.static_range(RANKS):
                at = span + peer * share + lanes
                factor = tl.load(weight + at, mask=(lanes < share) & (at < columns), other=0.0)
                factors = factors + (factor,)  # noqa: RUF005
            at = span + me * share + lanes
            own = tl.load(sums + begin + at, mask=(lanes < share) & (at < columns), other=0.0)
            place = index * row_words + part * count
            row, there = _gather_span(
                own, reduced + place, stride, count, flag, world, RANKS, PAIRS, WIDE, BLOCK
            )
            for peer in tl.static_range(RANKS):
                squared += row[peer].to(tl.float32) * row[peer].to(tl.float32)
        else:
            for piece in range(PIECES):
                first = span + piece * RANKS * share
                at = first + me * share + lanes
                own = tl.load(sums + begin + at, mask=(lanes < share) & (at < columns), other=0.0)
                place = index * row_words + (part * PIECES + piece) * count
                found, come = _gather_span(
                    own, reduced + place, stride, count, flag, world, RANKS, PAIRS, WIDE, BLOCK
                )
                there = there & come
                for peer in tl.static_range(RANKS):
                    squared += found[peer].to(tl.float32) * found[peer].to(tl.float32)
                    at = first + peer * share + lanes
                    mask = there & (lanes < share) & (at < columns)
                    tl.store(sums + begin + at, found[peer], mask=mask)
        _normalise_span(
            row, factors, there, squared, out + begin, kept + begin, weight,
            squares + tl.cast(index, tl.int64) * parts, part, parts, span, share, columns,
            flag, world, sound, EPS, HAS_RESIDUAL, LANES, PIECES * RANKS, BLOCK,
        )  # fmt: skip


def word_bytes(rows: int, columns: int, dtype: np.dtype, shares: int = 1) -> int:
    """Bytes of data that the words of all rows hold, of which each has so many shares."""
    return 4 * rows * shares * _row_vectors(-(-columns // shares), dtype) * VECTOR


def _row_vectors(columns: int, dtype: np.dtype) -> int:
    """Words of a row, in units of VECTOR."""
    return padded(-(-columns * dtype.itemsize // 4))


def bind_words(
    plan: Plan, config: ReductionConfig, rows: int, columns: int, dtype: np.dtype,
    named: dict[str, Any],
) -> Bound:  # fmt: skip
    """Workspaces and the kernel of `config` for a plan of `rows`, with the constants `named`."""
    ranks = plan.group.size
    kernel, slots, shares, block = low_latency_kernel, 2 * ranks, 1, config.block
    if config.algorithm == "low_latency_two_shot":
        kernel, slots, shares = low_latency_two_shot_kernel, 4 * ranks, ranks
        block = max(block, VECTOR)
    pieces = -(-columns // (shares * block))
    most = plan.blocks_for(rows * pieces, config.blocks)
    each = -(-pieces // most)  # pieces of a row that a block has
    parts = -(-pieces // each)
    blocks = parts * max(1, min(rows, most // parts))
    row_vectors = size = _row_vectors(columns, dtype)
    if shares > 1 or kernel is low_latency_two_shot_kernel:
        size = padded(-(-columns // (shares * parts * each)))
        row_vectors = -(-parts * each * size * dtype.itemsize // 4)
    words = block * dtype.itemsize // 4
    wave = 64 if plan.world.backend == "hip" else 32
    return plan.bind(
        kernel, blocks, (dtype,) * 6,
        plan.workspace("slots", (slots * rows * row_vectors * VECTOR,), np.int64),
        plan.workspace("squares", (rows * parts,), np.int64), plan.channel(blocks),
        plan.group.handle, rows, columns, size, parts, **named, PIECES=each,
        LANES=power_of_two(parts), PAIRS=dtype.itemsize == 2,
        WIDE=words > wave * config.num_warps, BLOCK=block, num_warps=config.num_warps,
        enable_fp_fusion=False,  # a contracted product and sum would round once less
    )  # fmt: skip
