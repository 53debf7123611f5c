"""Broadcast of small arrays as words of data and flag, see low_latency.py: for broadcast.py.

The peers acknowledge each call, so that the root knows of which slots they have read all.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.broadcast_rounds import partner
from tdx.kernels.packed import VALUES, get_tile, get_tiles, load_tile, put_tile, store_tile

__all__ = ["low_latency_kernel", "low_latency_scatter_kernel"]

_VALUES = tl.constexpr(VALUES)


@triton.jit(do_not_specialize=["root", "count"])
def low_latency_kernel(
    x, out, slots, read, channel, world, root, count, WIDTH: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """The root pushes `count` elements of WIDTH bytes to everybody; the others store what arrives.

    Block b acknowledges in the root's words `read`, one for each block and rank.
    """
    PIECES: tl.constexpr = 4 // WIDTH
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    words = tl.cdiv(count, PIECES)
    tiles = tl.cdiv(words, LANES * _VALUES)
    slot = slots + (flag & 1).to(tl.int64) * tiles * (4 * LANES)
    read += tl.program_id(0) * ranks
    if me == root:
        sound = sound & tdl.wait_all(read, ranks, world, flag - 2)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        if me == root:
            values = load_tile(x, tile, count, PIECES, LANES)
            for hop in range(1, ranks):
                put_tile(slot, tile, values, words, flag, (me + hop) % ranks, world, sound, LANES)
            store_tile(out, tile, values, 0, count, True, PIECES, LANES)
        else:
            values, there = get_tile(slot, tile, words, flag, world, root, LANES)
            store_tile(out, tile, values, 0, count, there, PIECES, LANES)
    tdl.notify(read + me, root, world, flag)


@triton.jit(do_not_specialize=["root", "count", "part", "rounds"])
def low_latency_scatter_kernel(
    x, out, slots, read, channel, world, root, count, part, rounds,
    WIDTH: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """In each round the root pushes a part of `part` elements to each peer, which passes it on to
    the others.

    Block b has the same tiles of all parts on all ranks, and acknowledges each round as
    low_latency_kernel does a call.
    """
    PIECES: tl.constexpr = 4 // WIDTH
    AT_ONCE: tl.constexpr = RANKS - 1 if PIECES == 1 and RANKS >= 2 and RANKS <= 8 else 1
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    before = (tdl.epoch(channel) - 1) * rounds  # rounds of all calls before this one
    tiles = tl.cdiv(part // PIECES, LANES * _VALUES)
    stride = tl.cast(tiles, tl.int64) * (4 * LANES)  # from one part to the next, a rank each
    read += tl.program_id(0) * RANKS
    first = tl.program_id(0)
    step = tl.num_programs(0)
    for turn in range(0, rounds):
        flag = before + turn + 1
        turn_slots = slots + (flag & 1).to(tl.int64) * RANKS * stride
        if me == root:
            sound = sound & tdl.wait_all(read, RANKS, world, flag - 2)
            for tile in range(first, tiles, step):
                for hop in range(1, RANKS, AT_ONCE):
                    sent = ()  # all loads before the first store, which nothing moves across
                    for i in tl.static_range(AT_ONCE):
                        peer = (me + hop + i) % RANKS
                        begin, size = _part(peer, root, RANKS, part, count, turn)
                        sent = sent + (load_tile(x + begin, tile, size, PIECES, LANES),)  # noqa: RUF005
                    for i in tl.static_range(AT_ONCE):
                        peer = (me + hop + i) % RANKS
                        begin, size = _part(peer, root, RANKS, part, count, turn)
                        to = turn_slots + peer * stride
                        words = tl.cdiv(size, PIECES)
                        put_tile(to, tile, sent[i], words, flag, peer, world, sound, LANES)
                        store_tile(out + begin, tile, sent[i], 0, size, True, PIECES, LANES)
        else:
            begin, size = _part(me, root, RANKS, part, count, turn)
            words = tl.cdiv(size, PIECES)
            mine = turn_slots + me * stride
            for tile in range(first, tiles, step):
                values, there = get_tile(mine, tile, words, flag, world, root, LANES)
                for phase in range(0, RANKS - 1):
                    peer = partner(me, root, RANKS, phase)
                    passed = there & (peer != me)
                    put_tile(mine, tile, values, words, flag, peer, world, passed, LANES)
                store_tile(out + begin, tile, values, 0, size, there, PIECES, LANES)
            for tile in range(first, tiles, step):
                lanes = tl.cast(tile, tl.int64) * (LANES * _VALUES) + tl.arange(0, LANES)
                whose = tl.zeros((LANES,), tl.int32)
                for peer in tl.static_range(RANKS):
                    begin, size = _part(peer, root, RANKS, part, count, turn)
                    sends = (me != peer) & (root != peer) & (lanes < tl.cdiv(size, PIECES))
                    whose |= tl.where(sends, 1 << peer, 0)
                found, there = get_tiles(
                    turn_slots, stride, tile, part // PIECES, flag, world, whose, RANKS, LANES
                )
                for peer in tl.static_range(RANKS):
                    begin, size = _part(peer, root, RANKS, part, count, turn)
                    come = there & (me != peer) & (root != peer)
                    store_tile(out + begin, tile, found, peer, size, come, PIECES, LANES)
        tdl.notify(read + me, root, world, flag)


@triton.jit
def _part(rank, root, ranks, part, count, turn):
    """(begin, elements) of the part that a peer passes on in a round."""
    place = tl.cast(turn, tl.int64) * (ranks - 1) + (rank + ranks - root) % ranks - 1
    begin = tl.minimum(place * part, count)
    return begin, tl.minimum(part, count - begin)
