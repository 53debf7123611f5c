"""Pushes by copy engines beside a kernel that computes.

A kernel of one warp waits until the peer lets this rank write (its credit) and the data is there:
one on each stream, and where the data is only being made for each chunk, of all peers together if
they get the same. Copies follow, and behind those of a chunk one of the 4 bytes that are its
signal, from a word on the device: a call's number, so that it may be replayed.

All goes to the next rank first, then to the one after it, and so on, as every rank does (but what
is common to all a chunk at a time): so each link carries one rank's rows, which is when links are
fastest, and rows of one rank are there before those of the next begin to come. Chunks take turns on
two streams: a signal behind a chunk takes a while, in which the other stream copies.

cuBLAS tells nothing, and a kernel that waits would take a multiprocessor from it: the waits for all
peers' credits come first then, and copies follow a product in order of streams.

Copies cannot look at faults. Where one stands as the data is there no new signal follows them; if a
wait was given up that peer's signals from this rank are taken back before them. Who has read what
they write waits for all of its signals once more, at the end of the kernel or in one behind it:
either they are still there, and what was read was that of its own call, or the wait is in vain and
its rank has a fault as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.operand import Operand
from tdx.kernels.plan import Plan
from tdx.runtime.array import Array
from tdx.runtime.stream import order
from tdx.runtime.world import World

__all__ = ["Beside", "CopyPush", "confirm_kernel", "enter_kernel", "grant_kernel"]

_STREAMS = 2  # which have chunks in turn
_Copy = tuple[int, int, int, bool]  # to, from, bytes; whether `from` counts from an operand's begin
_Work = tuple[int, Callable[..., None] | _Copy]  # with the stream


@triton.jit(do_not_specialize=["chunks"])
def enter_kernel(progress, credit, epoch, world, chunks):
    """Begin a call: own signals, and credit to every rank, the own one too."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    number = tl.load(epoch) + 1
    lanes = tl.arange(0, 32)
    for first in range(0, ranks, 32):  # first, and at once: peers may be waiting
        hop = first + lanes
        tdl.notify(credit + me, (me + hop) % ranks, world, number, when=hop < ranks)
    for first in range(0, chunks, 32):
        own = progress + me * chunks + tl.minimum(first + lanes, chunks - 1)
        tdl.notify(own, me, world, number, when=first + lanes < chunks)
    tl.store(epoch, number)


@triton.jit(do_not_specialize=["peer", "peers", "word", "chunks", "count"])
def grant_kernel(
    progress, credit, epoch, world, finished, sent, peer, peers, word, chunks, count,
    ALL: tl.constexpr,
):  # fmt: skip
    """Wait until a chunk may be copied to `peer`, or ALL `peers` from it on.

    Every call adds `count` to `word` of `finished`, if anything has to be. The copies set a peer's
    signals to its 16 bytes of `sent`.
    """
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    number = tl.load(epoch)
    never = number - (1 << 30)
    for hop in range(0, peers if ALL else 1):
        to = (peer + hop) % ranks
        ok = tdl.wait(credit + to, world, number, peer=to)
        if count > 0:
            ok = tdl.wait(finished + word, world, number * count, peer=me) & ok
        tl.store(sent + 4 * to, tl.where(ok & tdl.no_fault(world), number, never))
        if ok == 0:
            for each in range(0, chunks):
                signal = tdl.symm_at(progress + me * chunks + each, to, world)
                tl.atomic_xchg(signal, never, sem="release", scope="sys")


@triton.jit(do_not_specialize=["units"])
def confirm_kernel(progress, epoch, world, units):
    """Wait for all signals of this call once more, after something has read the data."""
    tdl.wait_all(progress, units, world, tl.load(epoch), first_peer=-units)


class Beside:
    """Streams for work beside that of a call's stream. Part of a plan."""

    def __init__(self, world: World, count: int):
        self._world = world
        self.streams = [world.streams.lend(self, priority=-1) for _ in range(count)]

    def fork(self, stream: int) -> None:
        """Work queued here next waits for what is queued on `stream` now."""
        for side in self.streams:
            order(self._world.driver, stream, side.handle)

    def join(self, stream: int) -> None:
        """Later work of `stream` waits for what is queued here."""
        world = self._world
        recorded = world.recording is not None or world.driver.recorded_elsewhere(stream)
        for side in self.streams:
            if recorded and world.driver.capturing(stream) != world.driver.capturing(side.handle):
                # work of an earlier call, not part of the graph: each replay of ours waits for it
                if world.recording is not None:
                    world.recording.before_replay(self.join)
            else:
                order(world.driver, side.handle, stream)


class CopyPush:
    """Copies to all peers, each followed by its signal. Part of a plan.

    Parameters
    ----------
    plan : Plan
        In its preparation.
    signals : tuple
        `progress` of (W * chunks) words, of which the copies set those of this rank; `credit` of W
        words, `epoch` of one, and the group's handle; all int32. enter_kernel begins a call.
    chunks : int
    pieces : callable
        (peer, chunk) to the copies of a chunk: array whose memory at the peer is written, offset
        in bytes there, array that is read (None: the operand of the call), offset, bytes.
    finished, counts
        (W * chunks) words of int32: chunk c for a peer is there when every call has added
        `counts[c]` to its. It should be made for the next rank first, and so on. Default: all is
        there, and the first chunk on each stream waits for the peer's credit.
    phased : bool
        Chunks should be made one after the other, each for all ranks.
    common : bool
        All peers get the same: `finished` has (chunks) words, of which the first should be there
        first.
    behind : CopyPush, optional
        One which copies this, too, on its streams and after its own, `phased` each chunk after its
        own; then it alone is started.

    Attributes
    ----------
    blocks : int
        Multiprocessors that the kernels which wait need.
    """

    def __init__(
        self, plan: Plan, signals: tuple[Any, ...], chunks: int,
        pieces: Callable[[int, int], Sequence[tuple[Array, int, Array | None, int, int]]],
        finished: Array | None = None, counts: Sequence[int] = (0,) * _STREAMS,
        phased: bool = False, common: bool = False, behind: CopyPush | None = None,
    ):  # fmt: skip
        group, world = plan.group, plan.world
        progress, credit = signals[:2]
        peers = group.size - 1
        self._driver = world.driver
        self._work: list[list[_Work]] = [[] for _ in range(chunks if phased else 1)]
        self._behind: list[list[_Work]] = [[] for _ in self._work]  # of one behind this one
        self._copies: dict[tuple[int, int], list[_Work]] = {}  # by peer and chunk
        if behind is None:
            self._beside = Beside(world, min(_STREAMS, chunks) if peers else 0)
        else:
            self._beside, self._work = behind._beside, behind._behind
        self.join = self._beside.join
        streams = self._beside.streams
        self.blocks = len(streams)
        # of each stream: where waits on one were given up, those on the other may not have been
        sent = world.zeros((_STREAMS, group.size, 4), np.int32, symmetric=False)  # 16 bytes each

        following = [(group.rank + hop) % group.size for hop in range(1, group.size)]

        def grant(which: int, peer: int, count: int, word: int, every: bool = False) -> _Work:
            wait = plan.bind(
                grant_kernel, 1, (), *signals, credit if finished is None else finished,
                sent[which], peer, peers, word, chunks, count, ALL=every, num_warps=1,
            )  # fmt: skip
            return streams[which].handle, wait

        self._credits = [
            grant(which, peer, 0, 0)
            for which in range(len(streams))
            for peer in following
            if any(counts) and behind is None
        ]
        turns = [(hop, chunk) for hop in range(peers) for chunk in range(chunks)]
        if phased or common:
            turns.sort(key=lambda turn: turn[1])
        for hop, chunk in turns:
            work = self._work[chunk if phased else 0]
            peer, which = following[hop], chunk % len(streams)
            side, word = streams[which].handle, sent[which, peer]
            if common and hop == 0:  # nothing runs between the copies
                work.append(grant(which, peer, counts[chunk], chunk, every=True))
            elif not common and chunk < len(counts):
                work.append(grant(which, peer, counts[chunk], peer * chunks + chunk))
            copies = self._copies[peer, chunk] = []
            for array, offset, source, begin, nbytes in pieces(peer, chunk):
                place = array.peer(group.ranks[peer])._address + offset
                first = begin if source is None else source._address + begin
                copies.append((side, (place, first, nbytes, source is None)))
            signal = progress.peer(group.ranks[peer])._address
            signal += 4 * (group.rank * chunks + chunk)
            copies.append((side, (signal, word._address, 4, False)))
            work += copies

    def start(self, stream: int, x: Operand | None = None) -> int:
        """Queue all of it, behind what is queued on `stream` now; returns a stream of it.

        `x`: what is read where `pieces` have no array.
        """
        self._beside.fork(stream)
        for work, behind in zip(self._work, self._behind, strict=True):
            self._queue(work, x)
            self._queue(behind, x)
        return self._beside.streams[-1].handle

    def begin(self, stream: int) -> int:
        """Queue waits for credits; returns a stream of them.

        `send` is to queue the copies, then `rest` what is behind those of a phase.
        """
        self._beside.fork(stream)
        self._queue(self._credits)
        return self._beside.streams[-1].handle

    def send(self, stream: int, peer: int, chunks: Iterable[int]) -> None:
        """Queue the copies of `chunks` for `peer`, which what is queued on `stream` now makes."""
        self._beside.fork(stream)
        for chunk in chunks:
            self._queue(self._copies[peer, chunk])

    def rest(self, stream: int, x: Operand, phase: int) -> None:
        """Queue what is behind a phase, also behind `stream`; `x` as `start` has it."""
        if self._behind[phase]:
            self._beside.fork(stream)
            self._queue(self._behind[phase], x)

    def _queue(self, items: Iterable[_Work], x: Operand | None = None) -> None:
        base, keep = (0, None) if x is None else (x.address, x.owner)
        for side, work in items:
            if not isinstance(work, tuple):
                work(side)
                continue
            place, source, nbytes, given = work
            if given:
                self._driver.copy(place, base + source, nbytes, side, keep)
            else:
                self._driver.copy(place, source, nbytes, side)
