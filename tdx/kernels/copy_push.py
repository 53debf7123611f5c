"""Pushes by copy engines beside a kernel that computes: to each peer on a stream of its own.

On a peer's stream a kernel of one warp waits until the peer lets this rank write (its credit), and
where the data is only being made, until all of it is there. Copies follow, and behind those of a
chunk one of the 4 bytes that are its signal, from a word on the device: a call's number, so that
it may be replayed.

Copies cannot look at faults. When a wait was given up no new signal follows them, and before them
the peer's signals from this rank are taken back. Who has read what they write waits for all of its
signals once more, at the end of the kernel or in one behind it: either they are still there, and
what was read was that of its own call, or the wait is in vain and its rank has a fault as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.plan import Plan
from tdx.runtime.array import Array
from tdx.runtime.stream import order
from tdx.runtime.world import World

__all__ = ["Beside", "CopyPush", "confirm_kernel", "enter_kernel", "grant_kernel"]


@triton.jit(do_not_specialize=["chunks"])
def enter_kernel(progress, credit, epoch, world, chunks):
    """Begin a call, the own part being in place: own signals, and credit to every peer."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    number = tl.load(epoch) + 1
    for chunk in range(0, chunks):
        tdl.notify(progress + me * chunks + chunk, me, world, number)
    for hop in range(1, ranks):
        tdl.notify(credit + me, (me + hop) % ranks, world, number)
    tl.store(epoch, number)


@triton.jit(do_not_specialize=["peer", "chunks", "count"])
def grant_kernel(progress, credit, epoch, world, finished, sent, peer, chunks, count):
    """Wait until the data for `peer` may be copied; the copies set its signals to `sent`.

    Every call adds `count` to what is `finished`, if anything has to be.
    """
    me = tdl.rank(world)
    number = tl.load(epoch)
    ok = tdl.wait(credit + peer, world, number, peer=peer)
    if count > 0:
        ok = tdl.wait(finished + peer, world, number * count, peer=me) & ok
    if ok:
        if tdl.no_fault(world):
            tl.store(sent + peer, number)
    else:
        never = number - (1 << 30)
        tl.store(sent + peer, never)
        for chunk in range(0, chunks):
            signal = tdl.symm_at(progress + me * chunks + chunk, peer, world)
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
        for side in self.streams:
            if world.recording is not None and world.driver.capturing(stream) != (
                world.driver.capturing(side.handle)
            ):
                # work of an earlier call, not part of the graph: each replay waits for such
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
        in bytes there, own address, bytes.
    finished, count
        W words of int32: the data for a peer is there when every call has added `count` to its.

    Attributes
    ----------
    blocks : int
        Multiprocessors that the kernels which wait need.
    """

    blocks = 1  # one has room for all of them

    def __init__(
        self, plan: Plan, signals: tuple[Any, ...], chunks: int,
        pieces: Callable[[int, int], Sequence[tuple[Array, int, int, int]]],
        finished: Array | None = None, count: int = 0,
    ):  # fmt: skip
        group, world = plan.group, plan.world
        progress, credit = signals[:2]
        self._driver, self._beside = world.driver, Beside(world, group.size - 1)
        self.join = self._beside.join
        sent = world.zeros((group.size,), np.int32, symmetric=False)
        self._kept = sent
        self._peers: list[tuple[Callable[..., None], list[tuple[int, int, int]]]] = []
        for hop in range(1, group.size):
            peer = (group.rank + hop) % group.size
            grant = plan.bind(
                grant_kernel, 1, (), *signals, credit if finished is None else finished, sent,
                peer, chunks, count, num_warps=1,
            )  # fmt: skip
            copies = []
            for chunk in range(chunks):
                for array, offset, source, nbytes in pieces(peer, chunk):
                    place = array.peer(group.ranks[peer])._address + offset
                    copies.append((place, source, nbytes))
                signal = progress.peer(group.ranks[peer])._address
                signal += 4 * (group.rank * chunks + chunk)
                copies.append((signal, sent._address + 4 * peer, 4))
            self._peers.append((grant, copies))

    def start(self, stream: int) -> None:
        """Queue all of it, behind what is queued on `stream` now."""
        self._beside.fork(stream)
        for side, (grant, copies) in zip(self._beside.streams, self._peers, strict=True):
            grant(side.handle)
            for place, source, nbytes in copies:
                self._driver.copy(place, source, nbytes, side.handle)
