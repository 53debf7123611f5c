"""Broadcast of small arrays as words of data and flag, see low_latency.py: for broadcast.py.

The peers acknowledge each call, so that the root knows of which slots they have read all.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copying import VECTOR
from tdx.kernels.low_latency import load_words, store_words

__all__ = ["low_latency_kernel", "low_latency_scatter_kernel"]

_VECTOR = tl.constexpr(VECTOR)


@triton.jit(do_not_specialize=["root", "count", "vectors"])
def low_latency_kernel(
    x, out, slots, read, channel, world, root, count, vectors,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The root pushes `count` elements of WIDTH bytes to everybody; the others store what arrives.

    Block b acknowledges in the root's words `read`, one for each block and rank.
    """
    PIECES: tl.constexpr = 4 // WIDTH if WIDTH < 4 else 1
    KIND: tl.constexpr = tl.int64 if WIDTH == 8 else tl.int32
    SPAN: tl.constexpr = 2 if WIDTH == 8 else 1
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    slot = slots + (flag & 1).to(tl.int64) * vectors * _VECTOR
    read += tl.program_id(0) * ranks
    values = (count + PIECES - 1) // PIECES
    if me == root:
        sound = sound & tdl.wait_all(read, ranks, world, flag - 2)
    for start in range(tl.program_id(0) * BLOCK, values, tl.num_programs(0) * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = at < values
        if me == root:
            words = load_words(x, at, count, mask, PIECES)
            for hop in range(1, ranks):
                peer = (me + hop) % ranks
                tdl.store_ll(slot + at * SPAN, words, flag, peer, world, mask & sound)
            store_words(out, at, words, count, mask, PIECES)
        else:
            words, there = tdl.load_ll(slot + at * SPAN, flag, world, mask, root, KIND, False)
            store_words(out, at, words, count, mask & there, PIECES)
    tdl.notify(read + me, root, world, flag)


@triton.jit(do_not_specialize=["root", "count", "vectors", "part"])
def low_latency_scatter_kernel(
    x, out, slots, read, channel, world, root, count, vectors, part,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """The root pushes `part` values, of 4 bytes or more, to each peer, which passes them on.

    SPREAD is a power of two of at least RANKS - 1. Block b has the same places of all parts on all
    ranks, and acknowledges as in low_latency_kernel.
    """
    PIECES: tl.constexpr = 4 // WIDTH if WIDTH < 4 else 1
    KIND: tl.constexpr = tl.int64 if WIDTH == 8 else tl.int32
    SPAN: tl.constexpr = 2 if WIDTH == 8 else 1
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    slot = slots + (flag & 1).to(tl.int64) * vectors * _VECTOR
    read += tl.program_id(0) * RANKS
    values = (count + PIECES - 1) // PIECES
    mine = (me - root + RANKS) % RANKS - 1
    first = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    if me == root:
        sound = sound & tdl.wait_all(read, RANKS, world, flag - 2)
        for start in range(first, part, step):
            within = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
            sent = ()  # all loads before the first store, which nothing can be moved across
            for hop in tl.static_range(1, RANKS):
                at = (hop - 1) * part + within
                mask = (within < part) & (at < values)
                sent = sent + (load_words(x, at, count, mask, PIECES),)  # noqa: RUF005
            for hop in tl.static_range(1, RANKS):
                at = (hop - 1) * part + within
                mask = (within < part) & (at < values)
                peer = (me + hop) % RANKS
                tdl.store_ll(slot + at * SPAN, sent[hop - 1], flag, peer, world, mask & sound)
                store_words(out, at, sent[hop - 1], count, mask, PIECES)
    else:
        for start in range(first, part, step):
            within = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
            at = mine * part + within
            mask = (within < part) & (at < values)
            words, there = tdl.load_ll(slot + at * SPAN, flag, world, mask, root, KIND, False)
            for hop in tl.static_range(1, RANKS):
                peer = (me + hop) % RANKS
                passed = mask & there & (peer != root)
                tdl.store_ll(slot + at * SPAN, words, flag, peer, world, passed)
            store_words(out, at, words, count, mask & there, PIECES)
        for start in range(first, part, step):
            for piece in tl.static_range(SPREAD):  # words of all parts in flight at once
                lane = tl.arange(0, BLOCK)
                whose = lane // (BLOCK // SPREAD)
                within = tl.cast(start, tl.int64) + piece * (BLOCK // SPREAD)
                within += lane % (BLOCK // SPREAD)
                at = whose * part + within
                mask = (whose < RANKS - 1) & (whose != mine) & (within < part) & (at < values)
                peer = (root + 1 + whose) % RANKS
                words, there = tdl.load_ll(slot + at * SPAN, flag, world, mask, peer, KIND, False)
                store_words(out, at, words, count, mask & there, PIECES)
    tdl.notify(read + me, root, world, flag)
