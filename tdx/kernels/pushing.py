"""Movement of large blocks into peers' memory: all_gather, all_to_all, and places for broadcast.

Every rank has a block of S bytes for every rank (all_gather: the same for all) and pushes it where
the receiver wants it: (W - 1) * S bytes out. All programs of a kernel push to one peer, rank + 1,
then all to rank + 2, and so on, so that at any time the ranks form a permutation and no link is
shared (measured: 359 of 370 GB/s on four H200, against 345 with the peers mixed). Program b of
every rank owns the same bytes, so meetings are program by program.

places   A rank that enters a call tells its peers, program by program, where its result is: a
         distance within its heap when the result is symmetric memory, else that they must use its
         staging slots, from which it copies the data out. This is also the credit to write there.
rounds   If all results are symmetric, one round, then a meeting. Else blocks go in rounds of
         bounded size with a meeting after each, and two staging slots used in turn. Round r is
         copied out while round r + 1 is pushed: stores to peers and local ones hide each other. A
         rank pushes round r + 2 after the meeting of round r + 1, before which all have done so.

Ordering: after the last meeting no peer writes into the result or the staging slots any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx import abi
from tdx.kernels.copying import copy_share, copy_shares
from tdx.kernels.operand import Operand, byte_units
from tdx.kernels.plan import Plan
from tdx.kernels.select import STAGING_BYTES, push_block, push_tile
from tdx.language.address import masked_peers
from tdx.runtime.errors import InvalidArgument

__all__ = [
    "ALIGNMENT", "Push", "aligned", "announce", "check_overlap", "is_direct", "place_of", "staged",
]  # fmt: skip

ALIGNMENT = 128  # rounds are multiples of this: of any unit of `byte_units`
_LANES = tl.constexpr(abi.MAX_RANKS)


@triton.jit
def announce(places, stage, out, direct, number, world):
    """Tell all peers where the own result is: its distance from `stage` in bytes, or 0 for staging.

    `places` has two words of 8 bytes for each block and rank. Returns (block of MAX_RANKS places,
    ok): what all ranks announced in call `number`.
    """
    ranks = tdl.num_ranks(world)
    own = places + 2 * tl.program_id(0) * ranks
    peers = tl.arange(0, _LANES)
    mask = peers < ranks
    sound = tdl.no_fault(world, uniform=False)
    distance = tl.where(direct != 0, out.to(tl.int64) - stage.to(tl.int64), 0)
    distances = tl.zeros((_LANES,), tl.int64) + distance
    to = masked_peers(peers, world)
    tdl.store_ll(own + 2 * tdl.rank(world), distances, number, to, world, mask & sound)
    return tdl.load_ll(own + 2 * peers, number, world, mask, peers, tl.int64)


@triton.jit
def place_of(announced, peer):
    """One rank's place, a scalar."""
    return tl.sum(tl.where(tl.arange(0, _LANES) == peer, announced, 0))


@triton.jit
def staged(announced, world):
    """Whether any rank's result goes through staging slots."""
    peers = tl.arange(0, _LANES)
    missing = (announced == 0) & (peers < tdl.num_ranks(world))
    return tl.max(missing.to(tl.int32)) != 0


@triton.jit
def _arrived(stage, turn, peer, size, world):
    """The staging slot, of `size` words, with what `peer` has pushed in a round."""
    return stage + ((turn & 1) * tdl.num_ranks(world) + peer) * size


@triton.jit(do_not_specialize=["direct", "units", "round_units"])
def push_kernel(
    x, out, stage, places, channel, world, direct, units, round_units,
    EACH: tl.constexpr, OWN_FIRST: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Push blocks of `units` * UNIT words of WIDTH bytes to everybody; EACH: x has one for each.

    OWN_FIRST: the own block is copied while the peers' places are on their way, instead of
    together with the first push. A staging slot has `round_units` for each rank.
    """
    index = tl.program_id(0)
    parts = tl.num_programs(0)
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    units = tl.cast(units, tl.int64)
    number = tdl.epoch(channel)
    if OWN_FIRST:
        own = me * units * UNIT
        copy_share(out + own, x + (own if EACH else 0), units * UNIT, index, parts, BLOCK, GROUP)
    announced, ok = announce(places, stage, out, direct, number, world)
    step = tl.where(staged(announced, world), round_units, units)
    rounds = tl.cdiv(units, step)
    for turn in range(0, rounds + tl.where(direct == 0, 1, 0)):
        begin = turn * step
        count = tl.maximum(tl.minimum(step, units - begin), 0) * UNIT
        before = tl.where((direct == 0) & (turn > 0), begin - step, units)
        brought = tl.minimum(step, units - before) * UNIT  # home, of the round before
        if ok:
            for hop in range(1, ranks):
                peer = (me + hop) % ranks
                place = place_of(announced, peer)
                there = tl.where(
                    place != 0,
                    place // (WIDTH * UNIT) + me * units + begin,
                    ((turn & 1) * ranks + me) * round_units,
                )
                to = tdl.symm_at(stage, peer, world) + there * UNIT
                source = x + ((peer * units if EACH else 0) + begin) * UNIT
                own = (me * units + begin) * UNIT
                own_source = x + (own if EACH else begin * UNIT)
                if (brought == count) & (WIDTH >= 4):
                    home = out + (peer * units + before) * UNIT
                    arrived = _arrived(stage, turn - 1, peer, round_units * UNIT, world)
                    if OWN_FIRST or hop > 1:
                        copy_shares(to, source, home, arrived, count, index, parts, BLOCK, GROUP)
                    else:
                        copy_shares(
                            to, source, home, arrived, count, index, parts, BLOCK, GROUP,
                            out + own, own_source,
                        )  # fmt: skip
                else:
                    if OWN_FIRST or hop > 1:
                        copy_share(to, source, count, index, parts, BLOCK, GROUP)
                    else:
                        copy_shares(
                            to, source, out + own, own_source, count, index, parts, BLOCK, GROUP
                        )
                    copy_share(
                        out + (peer * units + before) * UNIT,
                        _arrived(stage, turn - 1, peer, round_units * UNIT, world),
                        brought, index, parts, BLOCK, GROUP,
                    )  # fmt: skip
        if turn < rounds:
            ok = tdl.barrier(channel, world) & ok


class Push:
    """Blocks from every rank to every rank, pushed into results or staging. Part of a plan.

    Parameters
    ----------
    plan : Plan
        In its preparation.
    nbytes : int
        Of a block. The workspace takes up to 2 * W * nbytes, and at most 64 MiB.
    each : bool
        Whether x has a block for every rank, or one for all of them.
    """

    def __init__(self, plan: Plan, nbytes: int, each: bool):
        ranks = plan.group.size
        self._nbytes, self._each = nbytes, each
        self._block, self._warps = push_block(plan.world.backend, nbytes)
        self._blocks = plan.blocks_for(-(-nbytes // self._block))
        most = STAGING_BYTES // (2 * ranks) // ALIGNMENT * ALIGNMENT
        self._round = min(aligned(nbytes), most)
        slots = 1 if nbytes <= self._round else 2
        self._stage = plan.workspace("staging", (slots * ranks * self._round,), np.uint8)
        self._places = plan.workspace("places", (2 * self._blocks * ranks,), np.int64)
        self._channel = plan.channel(self._blocks)
        self._alignment = math.gcd(ALIGNMENT, nbytes)
        self._kernels: dict[tuple[bool, int], Callable[..., None]] = {}
        if nbytes:
            for direct in (False, True):
                self._kernel(plan, direct, self._alignment)

    def _kernel(self, plan: Plan, direct: bool, alignment: int) -> Callable[..., None]:
        """The kernel for sizes and addresses that are multiples of `alignment` bytes."""
        kernel = self._kernels.get((direct, alignment))
        if kernel is None:
            word, unit = byte_units(alignment)
            width = word.itemsize
            own_first = self._nbytes <= self._blocks * self._block or plan.group.size == 1
            own_first |= unit == 1  # words loaded one by one leave no registers for a third copy
            kernel = self._kernels[direct, alignment] = plan.bind(
                push_kernel, self._blocks, (word, word), self._stage.view(word), self._places,
                self._channel, plan.group.handle, int(direct),
                self._nbytes // (width * unit), self._round // (width * unit), EACH=self._each,
                OWN_FIRST=own_first, WIDTH=width, UNIT=unit,
                **push_tile(plan.world.backend, self._block, self._warps, width),
            )  # fmt: skip
        return kernel

    def run(self, plan: Plan, stream: int, x: Operand, to: Operand) -> None:
        """Queue it. With `each`, `to` may be `x`."""
        in_place = self._each and x.address == to.address
        direct = is_direct(plan, to, self._alignment) and not in_place
        alignment = math.gcd(self._alignment, x.address, to.address)
        self._kernel(plan, direct, alignment)(stream, x, to)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to ALIGNMENT, at least that."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


def is_direct(plan: Plan, to: Operand, alignment: int) -> bool:
    """Whether peers can write into `to`, in words as wide as the size's `alignment` allows."""
    block = to.block
    if block is None or not block.symmetric or to.address % alignment:
        return False
    return block.ranks is None or set(plan.group.ranks) <= set(block.ranks)


def check_overlap(
    operation: str, x: Operand, to: Operand, own: int | None, sizes: tuple[int, int]
) -> None:
    """Refuse an `out` that shares memory with `x` other than by having it at byte `own`.

    None: that shares any. `sizes` are the bytes of x and out.
    """
    apart = x.address + sizes[0] <= to.address or to.address + sizes[1] <= x.address
    if not apart and (own is None or x.address != to.address + own):
        remedy = "they must be apart"
        if own is not None:
            inner, outer = ("x", "out") if own >= 0 else ("out", "x")
            remedy = f"in place {inner} must be at byte {abs(own)} of {outer}"
        raise InvalidArgument(
            f"{operation}: out (address {to.address:#x}, {sizes[1]} bytes) overlaps x (address "
            f"{x.address:#x}, {sizes[0]} bytes); {remedy}"
        )
