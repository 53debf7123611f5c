"""Broadcast of large arrays in rounds: kernels of broadcast.py, which tells how they work."""

from __future__ import annotations

import triton
import triton.language as tl

import tdx.language as tdl
from tdx import abi
from tdx.kernels.copying import copy_share
from tdx.kernels.pushing import announce, place_of, staged
from tdx.language.address import masked_peers

__all__ = ["SLOTS", "chain_kernel", "partner", "scatter_kernel"]

SLOTS = 4  # of each lane
_SLOTS = tl.constexpr(SLOTS)
_MOST = tl.constexpr(abi.MAX_RANKS)


@triton.jit
def _round(turn, lane, lane_units, units, round_units, LANES: tl.constexpr):
    """(begin, units, staging slot) of a lane's round; the second lane's first is half as long."""
    turn = tl.cast(turn, tl.int64)
    begin = tl.cast(lane, tl.int64) * lane_units
    first = begin + turn * round_units - lane * (round_units // 2)
    end = tl.minimum(first + round_units, tl.minimum(begin + lane_units, units))
    first = tl.maximum(first, begin)
    slot = (turn % _SLOTS * LANES + lane) * round_units
    return first, tl.maximum(end - first, 0), slot


@triton.jit(do_not_specialize=["direct", "root", "units", "lane_units", "round_units", "rounds"])
def chain_kernel(
    x, out, stage, places, sent, channel, world, direct, root, units, lane_units, round_units,
    rounds,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Pass rounds of `round_units` * UNIT words on from rank to rank, in each lane.

    Block b passes on, and copies out, what block b of the rank before has sent it. Rounds sent,
    and rounds whose slots are free, are counted in `sent`, a word for each block and rank. Where a
    rank stops midway, its neighbours name it, and others who wait name the neighbours.
    """
    lane = tl.program_id(0) % LANES
    index = tl.program_id(0) // LANES
    parts = tl.num_programs(0) // LANES
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    source_rank = (me + ranks - 1) % ranks
    target_rank = (me + 1) % ranks
    passes = target_rank != root
    units = tl.cast(units, tl.int64)
    number = tdl.epoch(channel)
    places += (number & 1) * (2 * tl.num_programs(0) * ranks)  # some ranks may be a call ahead
    announced, ok = announce(places, stage, out, direct, number, world)
    place = tl.where(ok, place_of(announced, target_rank), 0)  # the same in all threads
    frees = (me != root) & (direct == 0)
    everyone = tl.arange(0, _MOST)
    peers = masked_peers(everyone, world)
    told = (passes & (everyone == target_rank)) | (frees & (everyone == source_rank))
    sent += tl.program_id(0) * ranks
    before = (number - 1) * rounds
    last = tl.where(ok, place_of(announced, tl.where(me == root, target_rank, me)), 0)
    at_once = (ranks == 2) & (last != 0)  # nobody waits for a part of it
    rounds = tl.where(at_once, 1, rounds)
    round_units = tl.where(at_once, 2 * tl.cast(lane_units, tl.int64), round_units)
    for turn in range(0, rounds):
        begin, count, slot = _round(turn, lane, lane_units, units, round_units, LANES)
        if passes & (place == 0) & (turn >= _SLOTS):
            free = before + turn + 1 - _SLOTS
            ok = tdl.wait(sent + target_rank, world, free, peer=target_rank) & ok
        if me != root:
            ok = tdl.wait(sent + source_rank, world, before + turn + 1, peer=source_rank) & ok
        if ok:
            home = out + begin * UNIT
            source = tl.where(direct == 0, stage + slot * UNIT, home)
            source = tl.where(me == root, x + begin * UNIT, source)
            there = tl.where(place != 0, place // (WIDTH * UNIT) + begin, slot)
            to = tdl.symm_at(stage, target_rank, world) + there * UNIT
            if passes & ((me == root) | (direct == 0)):
                copy_share(to, source, count * UNIT, index, parts, BLOCK, GROUP, home)
            elif passes:
                copy_share(to, source, count * UNIT, index, parts, BLOCK, GROUP)
            elif direct == 0:
                copy_share(home, source, count * UNIT, index, parts, BLOCK, GROUP)
        tdl.notify(sent + me, peers, world, before + turn + 1, when=ok & told)


@triton.jit
def partner(me, root, ranks, phase):
    """To whom a rank sends in a phase, in which the peers whose numbers add up to it exchange.

    The root sends to the peer that would be its own partner: of an odd number of peers the only
    one, so that no link is asked for twice.
    """
    peers = ranks - 1
    mine = (me - root + ranks) % ranks - 1
    idle = phase * tl.where(peers % 2 == 1, (peers + 1) // 2, 1)
    number = tl.where(me == root, idle, phase - mine + peers) % peers
    return (root + 1 + number) % ranks


@triton.jit
def _part(rank, root, ranks, part_units, count):
    """(begin, units) of the part of a round's `count` units that a peer passes on."""
    begin = tl.minimum(((rank - root + ranks) % ranks - 1) * part_units, count)
    return begin, tl.minimum(part_units, count - begin)


@triton.jit
def _target(stage, announced, peer, world, begin, slot, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """Where `peer` wants unit `begin` of the result, which is unit `slot` of its staging."""
    place = place_of(announced, peer)
    there = tl.where(place != 0, place // (WIDTH * UNIT) + begin, slot)
    return tdl.symm_at(stage, peer, world) + there * UNIT


@triton.jit(do_not_specialize=[
    "direct", "root", "units", "lane_units", "round_units", "part_units", "rounds",
])  # fmt: skip
def scatter_kernel(
    x, out, stage, places, sent, channel, world, direct, root, units, lane_units, round_units,
    part_units, rounds,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Scatter rounds of `round_units` * UNIT words, which the peers pass on, in each lane.

    A peer's part of a round is `part_units`, the same bytes on all ranks, whatever their words.
    Block b of a peer passes on, and copies out, what block b of others has sent it; their rounds
    are counted in `sent`, a word for each block and rank.
    """
    lane = tl.program_id(0) % LANES
    index = tl.program_id(0) // LANES
    parts = tl.num_programs(0) // LANES
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    units = tl.cast(units, tl.int64)
    number = tdl.epoch(channel)
    places += (number & 1) * (2 * tl.num_programs(0) * ranks)  # some ranks may be a call ahead
    announced, ok = announce(places, stage, out, direct, number, world)
    slots_are_used = staged(announced, world) | (ok == 0)  # the same in all threads
    everyone = tl.arange(0, _MOST)
    peers = masked_peers(everyone, world)
    sent += tl.program_id(0) * ranks
    before = (number - 1) * rounds
    for turn in range(0, rounds + 1):  # a round is passed on before the last one is copied out
        if turn < rounds:
            begin, count, slot = _round(turn, lane, lane_units, units, round_units, LANES)
            if (turn >= _SLOTS) & slots_are_used:  # before the root, which waits for them too
                ok = tdl.wait_all(sent, ranks, world, before + turn + 3 - _SLOTS) & ok
            if me != root:
                ok = tdl.wait(sent + root, world, before + turn + 1, peer=root) & ok
            for phase in range(0, ranks - 1):
                peer = partner(me, root, ranks, phase)
                if peer != me:
                    whose = tl.where(me == root, peer, me)
                    first, size = _part(whose, root, ranks, part_units, count)
                    to = _target(
                        stage, announced, peer, world, begin + first, slot + first, WIDTH, UNIT
                    )
                    at = (begin + first) * UNIT
                    if ok & (me == root):
                        copy_share(to, x + at, size * UNIT, index, parts, BLOCK, GROUP, out + at)
                    elif ok:
                        source = out + at
                        if direct == 0:
                            source = stage + (slot + first) * UNIT
                        copy_share(to, source, size * UNIT, index, parts, BLOCK, GROUP)
            tdl.notify(sent + me, peers, world, before + turn + 1, when=ok & (everyone < ranks))
        done = turn - 1
        if (me != root) & (done >= 0) & ((direct == 0) | (done == rounds - 1)):
            ok = tdl.wait_all(sent, ranks, world, before + done + 1) & ok
            if ok & (direct == 0):
                begin, count, slot = _round(done, lane, lane_units, units, round_units, LANES)
                for hop in range(1, ranks):
                    first, size = _part((root + hop) % ranks, root, ranks, part_units, count)
                    copy_share(
                        out + (begin + first) * UNIT, stage + (slot + first) * UNIT, size * UNIT,
                        index, parts, BLOCK, GROUP,
                    )  # fmt: skip
