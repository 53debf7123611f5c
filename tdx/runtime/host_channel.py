"""The host channel: everything that ranks tell each other after `tdx.init`.

Nothing here waits for a silent peer longer than the deadline, and a peer that is gone is noticed
at once. The operations of one set of ranks are numbered; a message carries the number and the
operation's text, so that ranks which make different calls find out, all of them, and stay in step.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tdx.runtime.board import PLAN_KEY, Entry, explained
from tdx.runtime.errors import Closed, CollectiveMismatch, PeerLost, PeerTimeout, TdxError
from tdx.runtime.exchange import Mesh
from tdx.runtime.frames import Inbox, Link, Message, encode, group_of, members_of
from tdx.runtime.heartbeat import PRESENT, Absence, HeartbeatPage, beating, share_page
from tdx.runtime.outcomes import describe_ranks, pack_error, raise_for_peers, require_same_calls
from tdx.runtime.unix_sockets import check_timeout, close_fds

__all__ = ["GRACE_S", "HostChannel"]

T = TypeVar("T")

_TICK_S = 0.25  # between two looks at the heartbeats while waiting
GRACE_S = 0.5  # kernels' waits end before the host's: their faults say which signal was missing
_GOODBYE_S = 0.5  # how long `close` tries to deliver what is queued


class HostChannel:
    """Agreement, barriers and liveness among the ranks of a mesh.

    Operations are collective over `members` (world ranks in team order, default: all). All of
    them raise PeerLost if a needed rank is gone, PeerTimeout if one is silent for `timeout_s`
    seconds (None: the default given here; 0: no deadline), CollectiveMismatch if ranks make
    different calls, InvalidArgument for bad members, Closed after `close`. One thread at a time
    takes part; `lost` and `heartbeat` may be called from any thread at any time.

    An operation that a rank waited for in vain is given up for good, unless `gave_up`, which is
    called with the error, returns False: members that come to it afterwards raise as well.
    """

    def __init__(self, mesh: Mesh, timeout_s: float = 30.0):
        """Collective; raises on every rank or on none. The channel owns the mesh from here on."""
        self.rank = mesh.rank
        self.size = mesh.size
        self.timeout_s = check_timeout(timeout_s)
        self._mesh = mesh
        self._pid = os.getpid()
        self._links = {peer: Link(sock) for peer, sock in mesh.sockets.items()}
        self._by_fd = {link.sock.fileno(): peer for peer, link in self._links.items()}
        self._poll = select.poll()
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        self._full: set[int] = set()  # peers polled for room to send
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}  # group -> operations begun
        self._shown: dict[int, Entry] = {}  # group -> what peers see of them
        self.mismatch: CollectiveMismatch | None = None  # what `explain` found
        self.gave_up: Callable[[TdxError], bool] = lambda why: True
        self._inbox = Inbox()
        self._awaited: tuple[int, int] | None = None
        self._lost: frozenset[int] = frozenset()
        self._departed: frozenset[int] = frozenset()
        self._closed = False
        self._stage = 0  # 0: the world's normal work, else the round of its recovery
        self.page: HeartbeatPage | None = None
        try:
            self.page = share_page(self)
        except BaseException:
            self.close()
            raise

    def allgather(
        self,
        payload: bytes,
        what: str,
        members: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[bytes]:
        """Every member's `payload`, in the order of `members`. `what` must be equal on all."""
        messages = self.exchange(what, payload, members, timeout_s)
        return [message.payload for message in messages.values()]

    def barrier(
        self,
        what: str = "barrier",
        members: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Return when every member has called it."""
        self.allgather(b"", what, members, timeout_s)

    def agree(
        self,
        record: str,
        refused: BaseException | None = None,
        members: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Return if every member makes the call that `record` describes.

        `refused` says that this rank cannot make it: the others raise CollectiveMismatch that
        names this rank and the reason, while here `refused` itself is raised, without waiting.
        """
        if refused is not None:
            self.post(f"refused: {type(refused).__name__}: {refused}", b"", members)
            raise refused
        self.exchange(record, b"", members, timeout_s)

    def together(
        self,
        step: Callable[[], T],
        what: str,
        members: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """Run `step` on every member; its result, if it succeeded on all of them.

        Where it failed its own error is raised. The other members raise the same class if it is
        one of tdx, else TdxError, with the failing ranks in the message. Use `busy` within a step
        that takes long.
        """
        try:
            result = step()
        except BaseException as error:
            self.post(what, pack_error(error), members)
            raise
        messages = self.exchange(what, b"", members, timeout_s)
        raise_for_peers({rank: message.payload for rank, message in messages.items()}, what)
        return result

    def heartbeat(self) -> None:
        """Tell the peers that this rank is at work: their deadlines start again."""
        if self.page is not None:
            self.page.beat()

    def busy(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Send heartbeats while the block runs: for compilation, growth, loading."""
        return beating(self.heartbeat, what)

    def lost(self) -> frozenset[int]:
        """Ranks whose connection ended without an orderly close. Never blocks; any thread."""
        self._look()
        return self._lost

    def departed(self) -> frozenset[int]:
        """Ranks that closed their channel in an orderly way. Never blocks; any thread."""
        self._look()
        return self._departed

    def explain(self, error: TdxError) -> TdxError:
        """CollectiveMismatch if ranks made different calls and so came to `error`, else `error`."""
        if self.page is None or self._stage:
            return error
        if self.mismatch is None:
            found = explained(self.page.board, range(self.size), error)
            if isinstance(found, CollectiveMismatch):
                self.mismatch, self.page.board.kept = found, True
        return self.mismatch or error

    def enter(self, stage: int, is_damaged: bool, is_done: bool = False) -> None:
        """Give up all earlier stages: peers that still wait there for this rank raise.

        Messages of different stages do not meet. `is_damaged`: a fault is the reason; `is_done`:
        what this rank had queued has ended.
        """
        self._stage = stage
        if self.page is not None:
            self.page.enter(stage, is_damaged, is_done)

    def given_up(self) -> list[int]:
        """Peers that gave the world up because of a fault. Never blocks; any thread."""
        return [peer for peer in self._links if self.page is not None and self.page.damaged(peer)]

    def recovering(self) -> list[int]:
        """Peers that gave the world up without a fault, their work done, unless this rank has too.

        Never blocks; any thread.
        """
        page = None if self._stage else self.page
        return [peer for peer in self._links if page is not None and page.done(peer)]

    def close(self) -> None:
        """Deliver what is queued (at most 0.5 s), then close everything. May be called again.

        Not collective: put a `barrier` before it where peers may still need this rank.
        """
        if os.getpid() != self._pid:  # a forked copy, which must not speak for this rank
            return
        with self._lock:
            if self._closed:
                return
            end = time.monotonic() + _GOODBYE_S
            while any(link.unsent for link in self._links.values()) and time.monotonic() < end:
                self._pump(0.05)
            self._closed = True
            if self.page is not None:
                self.page.close()  # before the connections end, so that peers see it in order
            for link in self._links.values():
                link.close()
            self._mesh.close()
            self._inbox.clear()

    def exchange(
        self,
        what: str,
        payload: bytes,
        members: Sequence[int] | None,
        timeout_s: float | None,
        fds: list[int] | None = None,
    ) -> dict[int, Message]:
        """All members' messages of one operation, by world rank in the order of members.

        `fds` holds a copy of this rank's descriptor for every member, which are used up.
        """
        copies = fds or []
        try:
            ranks = members_of(members, self.rank, self.size)
            limit = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
            with self._operation(what, ranks) as (group, number):
                own = Message(group, number, what, payload)
                self._send(encode(own, bool(copies)), ranks, copies)
                peers = [rank for rank in ranks if rank != self.rank]
                try:
                    self._collect(what, group, number, peers, limit)
                except (PeerLost, PeerTimeout) as error:
                    why = self.explain(error)
                    if isinstance(error, PeerTimeout) and not self._stage:
                        self._give_up(why, group, number)
                    raise why from None
                inbox = {p: self._inbox.take(p, group, number) for p in peers}
            own.fd = copies.pop() if copies else None
        finally:
            close_fds(copies)
        messages = {rank: inbox.get(rank, own) for rank in ranks}
        try:
            require_same_calls({rank: message.what for rank, message in messages.items()})
        except CollectiveMismatch:
            for message in messages.values():
                message.discard()
            raise
        return messages

    def _give_up(self, why: TdxError, group: int, number: int) -> None:
        """Let peers that come to the operation later, and this rank's later calls, know."""
        if self.gave_up(why) and self.page is not None:
            self.page.tell_fault(*(getattr(why, "origin", None) or (self.rank, str(why))))
            self.page.give_up(_stamp(group, number))

    def post(self, what: str, payload: bytes, members: Sequence[int] | None) -> None:
        """This rank's part in an operation whose outcome it does not wait for."""
        with contextlib.suppress(TdxError):
            ranks = members_of(members, self.rank, self.size)
            with self._operation(what, ranks) as (group, number):
                self._send(encode(Message(group, number, what, payload), False), ranks, [])

    @contextlib.contextmanager
    def _operation(self, what: str, ranks: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """The channel is this thread's alone; yields the group and the operation's number."""
        group = group_of(ranks, self._stage)
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                raise Closed(f"{what}: the world is closed, or this is a forked process")
            number = self._numbers.get(group, 0)
            self._numbers[group] = number + 1
            self._awaited = (group, number)
            if self.page is not None and self.mismatch is None:  # peers look at what led to it
                shown = self._shown.get(group) or Entry(self.page.board, group & ~PLAN_KEY or 1)
                self._shown[group] = shown
                shown.write(what)
                shown.add()
            try:
                yield group, number
            finally:
                self._awaited = None
                for peer in ranks:
                    if (peer, group, number) in self._inbox:
                        self._inbox.take(peer, group, number).discard()

    def _send(self, records: bytes, ranks: tuple[int, ...], copies: list[int]) -> None:
        for peer in ranks:
            if peer != self.rank:
                self._links[peer].post(records, copies.pop() if copies else None)
                self._watch(peer)

    def _collect(self, what: str, group: int, number: int, peers: list[int], limit: float) -> None:
        """Wait until every peer's message is in the inbox and all of ours is on its way."""
        now = time.monotonic()
        heard = dict.fromkeys(peers, now)
        signs = {peer: self._signs(peer) for peer in peers}
        while True:
            missing = [p for p in peers if (p, group, number) not in self._inbox]
            if gone := [p for p in missing if self._links[p].ended]:
                raise self._peer_lost(what, gone)
            self._refuse_the_vain(what, group, number, missing)
            if not (waiting := missing or [p for p in peers if self._links[p].unsent]):
                self._refuse_the_given_up(what, group, number, peers)
                return
            now = time.monotonic()
            for peer in waiting:
                if (seen := self._signs(peer)) != signs[peer]:
                    signs[peer], heard[peer] = seen, now
            oldest = min(heard[peer] for peer in waiting)
            left = oldest + limit + GRACE_S - now if limit else math.inf
            if left <= 0:
                silent = [peer for peer in waiting if heard[peer] == oldest]
                why = f": nothing heard of {describe_ranks(silent)} for {limit:g} s (timeout_s). "
                why += "Look at what these ranks do, or give tdx.init a larger timeout_s"
                raise self._late(what, waiting, silent[0], Absence(why, None))
            self._pump(min(left, _TICK_S))

    def _refuse_the_vain(self, what: str, group: int, number: int, missing: list[int]) -> None:
        """Raise if one of `missing` will not come, for a reason that it has shown on the page."""
        for peer in missing:
            absence = self.page.absence([peer], self._stage) if self.page else PRESENT
            if absence.why:
                self._pump(0)  # what it said before, or that it has ended
                if (peer, group, number) not in self._inbox and not self._links[peer].ended:
                    raise self._late(what, [peer], peer, absence)

    def _refuse_the_given_up(self, what: str, group: int, number: int, peers: list[int]) -> None:
        """Raise if a peer that has sent its message did not wait for the others'."""
        if self.page is not None and not self._stage:
            stamp = _stamp(group, number)
            for peer in peers:
                if self.page.given_up(peer) == stamp:
                    raise self._late(what, [peer], peer, self.page.absence([peer], 0, True))

    def _signs(self, peer: int) -> tuple[int, int]:
        beats = self.page.beats(peer) if self.page is not None else 0
        return beats, self._links[peer].received

    def _peer_lost(self, what: str, gone: list[int]) -> PeerLost:
        how = "closed its world" if self._departed.issuperset(gone) else self._links[gone[0]].ended
        why, origin = self.page.absence(gone, self._stage, True) if self.page else PRESENT
        text = f"{what}: lost {describe_ranks(gone)} ({how}{why})"
        return PeerLost(text, gone, rank=self.rank, origin=origin)

    def _late(self, what: str, missing: list[int], peer: int, absence: Absence) -> TdxError:
        return PeerTimeout(
            f"rank {self.rank} waited in {what} for {describe_ranks(missing)}{absence.why}",
            rank=self.rank, peer=peer, operation=what, signal="host channel", origin=absence.origin,
        )  # fmt: skip

    def _watch(self, peer: int) -> None:
        link = self._links[peer]
        if not link.ended and link.unsent != (peer in self._full):
            self._full ^= {peer}
            event = select.POLLIN | (select.POLLOUT if link.unsent else 0)
            self._poll.modify(link.sock, event)

    def _pump(self, wait_s: float) -> None:
        """Send and receive what is possible; wait up to `wait_s` for the first event."""
        if not self._by_fd:
            return
        for fd, event in self._poll.poll(math.ceil(wait_s * 1000)):
            peer = self._by_fd[fd]
            link = self._links[peer]
            if event & select.POLLOUT:
                link.flush()
                self._watch(peer)
            if event & ~select.POLLOUT:
                for message in link.receive():
                    self._store(peer, message)
            if link.ended:
                self._poll.unregister(fd)
                del self._by_fd[fd]
                if self.page is not None and self.page.closed(peer):
                    self._departed |= {peer}
                else:
                    self._lost |= {peer}

    def _store(self, peer: int, message: Message) -> None:
        group, number = message.group, message.number
        if number < self._numbers.get(group, 0) and (group, number) != self._awaited:
            message.discard()  # of an operation that this rank gave up
        elif not self._inbox.put(peer, message):
            self._links[peer].refuse("it sent more than anybody asked for")

    def _look(self) -> None:
        if self._lock.acquire(blocking=False):  # else an operation is at it, and keeps watch
            try:
                if not self._closed and os.getpid() == self._pid:
                    self._pump(0)
            finally:
                self._lock.release()


def _stamp(group: int, number: int) -> int:
    """An operation as a word that is not 0."""
    return hash((group, number)) & 0xFFFFFFFF | 1 << 32
