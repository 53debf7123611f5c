"""What is left of a world whose ranks were lost: who is there, and a new world of them.

MPI is of no use once a rank has died, so everything goes over the old world's host channel. It
is done in rounds. In each round:

1. Every rank shows in the shared page that it takes part. When all ranks have that are not gone,
   or the others were silent for the deadline, a rank proposes those present as members. The
   first proposal holds (`HeartbeatPage.settle`): all ranks read the same members, also one that
   comes late and finds that it is none of them.
2. The members bring up a world as `tdx.init` does, with `Survivors` in the place of MPI.
3. They settle, again by the first answer, whether that world holds. A rank that heard from all
   members that theirs is up proposes so; one that misses a member proposes another round.

So there is never more than one world of the survivors, whenever a rank dies or is stopped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from tdx.runtime.closing import give_up
from tdx.runtime.descriptors import exchange_fds
from tdx.runtime.errors import Closed, PeerLost, PeerTimeout
from tdx.runtime.exchange import Mesh
from tdx.runtime.host_channel import GRACE_S
from tdx.runtime.mpi_end import skip_mpi_finalize, watch_at_exit
from tdx.runtime.outcomes import describe_ranks, is_consequence, pack_error

if TYPE_CHECKING:
    from tdx.runtime.host_channel import HostChannel
    from tdx.runtime.world import World

__all__ = ["Survivors", "recover"]

_POLL_S = 0.01
_HOLDS, _AGAIN, _FAILED = 1, 2, 3  # answers to: does the new world hold?


class Survivors:
    """The communicator of a round: the members, over the old world's host channel."""

    def __init__(self, channel: HostChannel, members: tuple[int, ...], attempt: int):
        self._channel = channel
        self._members = members  # old ranks; the new ones are their places
        self._question = 2 * attempt + 1
        self._step = 0

    def Get_rank(self) -> int:
        return self._members.index(self._channel.rank)

    def Get_size(self) -> int:
        return len(self._members)

    def allgather(self, payload: bytes, /) -> list[bytes]:
        """Every member's payload. Raises PeerLost, PeerTimeout."""
        self._step += 1
        what = f"world.recover, step {self._step}"
        return self._channel.allgather(payload, what, self._members)

    def connect(self) -> Mesh:
        """Fresh connections between the members, handed over by the old ones."""
        own, members = self._channel.rank, self._members
        with contextlib.ExitStack() as opened:
            here, there = {}, {}
            for rank in members:
                here[rank], there[rank] = (opened.enter_context(s) for s in socket.socketpair())
            ends = {rank: sock.fileno() for rank, sock in there.items()}
            fds = exchange_fds(self._channel, ends, "world.recover: connections", members)
            given = {}
            for rank, fd in zip(members, fds, strict=True):
                assert fd is not None
                given[rank] = opened.enter_context(socket.socket(fileno=fd))
            # of the two connections of a pair, the one that the lower rank made
            kept = {rank: here[rank] if own < rank else given[rank] for rank in members}
            sockets = {
                new: socket.socket(fileno=kept[old].detach())
                for new, old in enumerate(members)
                if old != own
            }
        return Mesh(members.index(own), len(members), sockets)

    def conclude(self, outcome: bytes) -> list[bytes]:
        """Every member's outcome (`pack_error`), empty for all if the new world holds.

        Raises PeerLost or PeerTimeout if it does not because of a member.
        """
        try:
            outcomes = self.allgather(outcome)
        except (PeerLost, PeerTimeout):
            if self.settle(_AGAIN) == _HOLDS:  # somebody has heard of all, this rank included
                return [b""] * len(self._members)
            raise
        failures = [failure for failure in outcomes if failure]
        answer = _AGAIN if all(map(is_consequence, failures)) else _FAILED
        if self.settle(answer if failures else _HOLDS) != _HOLDS and not failures:
            raise PeerLost("world.recover: a rank was lost before the new world was complete")
        return outcomes

    def settle(self, answer: int) -> int:
        """What holds for all members: `answer`, or the one that was first."""
        page = self._channel.page
        if page is None:
            return answer
        return page.settle(self._question, answer, self._channel.timeout_s)


def recover(world: World, bring_up: Callable[[Survivors], World]) -> World:
    """End `world` and bring up a new one of the ranks that are there; see `World.recover`."""
    channel = world.channels
    if os.getpid() != world.process:
        raise Closed("world.recover: this is a forked process, which has no part in the world")
    members = tuple(range(channel.size))
    channel.enter(1, world.faults.notice())
    try:
        _retire(world)
        for attempt in range(channel.size):
            if attempt:
                channel.enter(attempt + 1, is_damaged=True)
            members = _gather(channel, attempt, members)
            survivors = Survivors(channel, members, attempt)
            try:
                return bring_up(survivors)
            except Exception as error:
                answer = _AGAIN if is_consequence(pack_error(error)) else _FAILED
                if survivors.settle(answer) == _FAILED or attempt == channel.size - 1:
                    raise
        raise AssertionError("a world has one rank or more")
    finally:
        channel.close()


def _retire(world: World) -> None:
    """Close the world but for its host channel and the memory of arrays."""
    channel = world.channels
    with channel.busy("world.recover"):
        if world.recording is not None:
            world.recording.discard()
        try:
            world.synchronize()
        except Exception as error:
            if not world.faults.notice():
                warnings.warn(
                    f"work that was queued before world.recover() failed: {error}",
                    RuntimeWarning,
                    stacklevel=4,
                )
        channel.enter(1, world.faults.notice(), is_done=True)
        give_up(world)


def _gather(channel: HostChannel, attempt: int, candidates: tuple[int, ...]) -> tuple[int, ...]:
    """The members of a round, in old numbers: the same on every rank. Raises PeerLost if left out.

    Ranks that are neither gone nor there are waited for until they were silent for the deadline,
    and for as long as one whose kernel waits at that moment needs to hear of this.
    """
    page = channel.page
    if page is None:
        return candidates
    limit, question = channel.timeout_s, 2 * attempt
    seen = {rank: (-1, 0.0) for rank in candidates}  # beats, and when they changed
    while not (mask := page.answer(question)):
        gone = channel.lost() | channel.departed()
        present = [r for r in candidates if r not in gone and page.stage(r) > attempt]
        missing = set(candidates) - gone - set(present)
        now = time.monotonic()
        for rank in missing:
            if (beats := page.beats(rank)) != seen[rank][0]:
                seen[rank] = beats, now
        if all(limit and now - seen[rank][1] > limit + GRACE_S for rank in missing):
            mask = page.settle(question, sum(1 << rank for rank in present), limit)
            break
        time.sleep(_POLL_S)
    members = tuple(rank for rank in candidates if mask >> rank & 1)
    departed = channel.departed()
    watch_at_exit(page.process(rank) for rank in departed)
    if set(candidates) - set(members) - departed:
        skip_mpi_finalize()
    if channel.rank not in members:
        raise PeerLost(
            f"rank {channel.rank} came too late to world.recover(): {describe_ranks(members)} went "
            f"on without it, after they had heard nothing of it for {limit:g} s (timeout_s)",
            members,
            rank=channel.rank,
        )
    return members
