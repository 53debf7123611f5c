"""A shared page: every rank of a host shows in it that it is alive, and ranks settle questions.

A question is settled by the first rank that writes an answer, under a file lock that the system
takes from a process which dies. It works without any message, so also among ranks that have
lost others, and a rank that comes late finds the answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tdx import abi
from tdx.runtime.board import CallBoard, board_bytes
from tdx.runtime.descriptors import exchange_fds
from tdx.runtime.errors import Closed, PeerTimeout
from tdx.runtime.undo import Undo

if TYPE_CHECKING:
    from tdx.runtime.host_channel import HostChannel

__all__ = [
    "ABORT_QUESTION",
    "PRESENT",
    "Absence",
    "HeartbeatPage",
    "beating",
    "create_page",
    "share_page",
]

# Questions that the ranks of a page can settle: two for each round of recovery, and one more.
_ROUNDS = abi.MAX_RANKS
ABORT_QUESTION = 2 * _ROUNDS  # which rank says why the job ends
_BEATS, _STATE, _STAGE, _OVER, _PROCESS, _FAULT_LENGTH, _FAULT_ORIGIN, _GIVEN_UP = range(8)
_SLOT_WORDS = 8  # 64-bit words, a cache line
_ANSWERS = abi.MAX_RANKS * _SLOT_WORDS
_FAULTS_AT = (_ANSWERS + ABORT_QUESTION + 1) * 8
_FAULT_BYTES = 1024  # of the text of a fault
_PAGE_BYTES = _FAULTS_AT + abi.MAX_RANKS * _FAULT_BYTES
_BOARD_AT = -(-_PAGE_BYTES // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
_CLOSED = 1
_FAULT, _DONE = 1, 2  # why nothing of a rank that recovers is to be waited for any more
_BEAT_S = 0.2  # between two heartbeats of a busy rank
_LOCK_POLL_S = 1e-3
_settling = threading.Lock()  # file locks do not exclude threads of one process


class Absence(NamedTuple):
    """Why a rank will not come: as a message goes on, empty if it may; and see tell_fault."""

    why: str
    origin: tuple[int, str] | None


PRESENT = Absence("", None)


def create_page(ranks: int) -> int:
    """A sealed memfd for `HeartbeatPage`, made by one rank for all; the caller owns it."""
    fd = os.memfd_create("tdx-heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _BOARD_AT + board_bytes(ranks))
        # nobody can shrink it under the others' feet, which would kill them with SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


class HeartbeatPage:
    """The mapped page: each rank writes its own slot and reads the others'.

    Attributes
    ----------
    board : CallBoard
        Which calls the ranks have made, in the same file.
    """

    def __init__(self, fd: int, rank: int, ranks: int):
        self._rank = rank
        with Undo() as undo:
            self._fd = os.dup(fd)
            undo.add(os.close, self._fd)
            self.board = CallBoard(fd, _BOARD_AT, rank, ranks)
            undo.add(self.board.close)
            self._map = mmap.mmap(fd, _PAGE_BYTES)
            undo.commit()
        self._words = memoryview(self._map).cast("Q")
        self.farewell: tuple[int, str] | None = None  # of tell_fault, when this rank closes
        self._lock = threading.RLock()  # against closing under a beating thread
        self._write(_PROCESS, os.getpid())

    def beat(self) -> None:
        """Show a sign of life."""
        with self._lock:
            self._write(_BEATS, self.beats(self._rank) + 1)

    def beats(self, rank: int) -> int:
        """How many signs of life a rank has shown."""
        return self._read(rank, _BEATS)

    def closed(self, rank: int) -> bool:
        """The rank ended its part in an orderly way."""
        return self._read(rank, _STATE) == _CLOSED

    def enter(self, stage: int, is_damaged: bool, is_done: bool = False) -> None:
        """Show that this rank gave up all earlier stages.

        `is_damaged`: because of a fault; `is_done`: what it had queued there has ended.
        """
        with self._lock:
            self._write(_OVER, _FAULT if is_damaged else _DONE if is_done else 0)
            self._write(_STAGE, stage)

    def stage(self, rank: int) -> int:
        """How far a rank has come: 0 in the world's normal work, else its round of recovery."""
        return self._read(rank, _STAGE)

    def damaged(self, rank: int) -> bool:
        """The rank gave the world up because of a fault."""
        return self._read(rank, _OVER) == _FAULT

    def done(self, rank: int) -> bool:
        """The rank gave the world up without a fault, and nothing more comes of it."""
        return self._read(rank, _OVER) == _DONE

    def give_up(self, stamp: int) -> None:
        """Show which operation of the host channel, not 0, this rank has waited for in vain."""
        self._write(_GIVEN_UP, stamp)

    def given_up(self, rank: int) -> int:
        """What `give_up` was given there; 0: nothing."""
        return self._read(rank, _GIVEN_UP)

    def tell_fault(self, origin: int, text: str) -> None:
        """Say why this rank gives up, as far as there is room; what was said first stays.

        `origin`: the rank that failed first, in its own words; this one, unless it was another.
        """
        data = text.encode(errors="replace")[:_FAULT_BYTES]
        start = _FAULTS_AT + self._rank * _FAULT_BYTES
        with self._lock:
            if self._words and not self._read(self._rank, _FAULT_LENGTH):
                self._map[start : start + len(data)] = data
                self._write(_FAULT_ORIGIN, origin)
                self._write(_FAULT_LENGTH, len(data))  # last: who sees it sees the rest

    def absence(self, ranks: Sequence[int], stage: int, left: bool = False) -> Absence:
        """Why one of the ranks will not come to an operation of `stage` any more.

        Of ranks that have closed only if they have `left`: their connections end at once.
        """
        for rank in ranks:
            if self.stage(rank) > stage:
                why = "gave it up and went on to world.recover(): call it here as well"
                return Absence(f"; rank {rank} {why}", None)
            told = None if stage or (self.closed(rank) and not left) else self._told(rank)
            if told is not None:
                first = "" if [*ranks] == [told[0]] else "first: "
                return Absence(f"; {first}rank {told[0]} has given up: {told[1]}", told)
        return PRESENT

    def _told(self, rank: int) -> tuple[int, str] | None:
        """What `tell_fault` was given there."""
        start = _FAULTS_AT + rank * _FAULT_BYTES
        with self._lock:
            length = self._read(rank, _FAULT_LENGTH)
            if not length:
                return None
            text = self._map[start : start + length].decode(errors="replace")
            return self._read(rank, _FAULT_ORIGIN), text

    def process(self, rank: int) -> int:
        """Process id of a rank; 0: not known."""
        return self._read(rank, _PROCESS)

    def answer(self, question: int) -> int:
        """What was settled; 0: nothing yet."""
        with self._lock:
            return self._words[_ANSWERS + question] if self._words else 0

    def settle(self, question: int, answer: int, timeout_s: float) -> int:
        """The first answer (not 0) that any rank gave to the question: the same on every rank.

        Raises PeerTimeout if a rank was stopped in the middle of this for `timeout_s` seconds.
        """
        start = time.monotonic()
        while not (settled := self.answer(question)):
            with self._lock, _settling:
                if not self._words:
                    raise Closed("the host channel is closed")
                with contextlib.suppress(BlockingIOError, PermissionError):  # another rank has it
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    try:
                        self._words[_ANSWERS + question] = self.answer(question) or answer
                    finally:
                        fcntl.lockf(self._fd, fcntl.LOCK_UN)
                    continue
            if timeout_s and time.monotonic() - start > timeout_s:
                raise PeerTimeout(
                    f"rank {self._rank} waited {timeout_s:g} s for a rank that was stopped while "
                    "it held the lock of the shared page",
                    rank=self._rank, operation="settling", signal="host channel",
                )  # fmt: skip
            time.sleep(_LOCK_POLL_S)
        return settled

    def _read(self, rank: int, word: int) -> int:
        with self._lock:
            return self._words[rank * _SLOT_WORDS + word] if self._words else 0

    def _write(self, word: int, value: int) -> None:
        with self._lock:
            if self._words:
                self._words[self._rank * _SLOT_WORDS + word] = value

    def close(self) -> None:
        """Mark this rank as closed and unmap; a second call does nothing."""
        with self._lock:
            if self._words:
                self._write(_STATE, _CLOSED)
                if self.farewell is not None:
                    self.tell_fault(*self.farewell)
                self._words.release()
                self._words = memoryview(b"")
                self._map.close()
                self.board.close()
                os.close(self._fd)


def share_page(channel: HostChannel) -> HeartbeatPage | None:
    """The page of a channel that has just been made (collective); None for a single rank."""
    if channel.size == 1:
        return None
    is_first = channel.rank == 0
    own = channel.together(
        lambda: create_page(channel.size) if is_first else None, "init: heartbeats"
    )
    fds: list[int | None] = []
    made: list[HeartbeatPage] = []
    try:
        fds = exchange_fds(channel, own, "init: heartbeat page")
        page = fds[0]
        assert page is not None
        step = functools.partial(HeartbeatPage, page, channel.rank, channel.size)
        channel.together(lambda: made.append(step()), "init: heartbeat map")
        return made[0]
    except BaseException:
        for own_page in made:
            own_page.close()
        raise
    finally:
        for fd in (own, *fds):
            if fd is not None:
                os.close(fd)


@contextlib.contextmanager
def beating(beat: Callable[[], None], what: str) -> Iterator[None]:
    """Call `beat` now, then every 0.2 s from a thread of its own while the block runs."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(_BEAT_S):
            beat()

    beat()
    thread = threading.Thread(target=run, name=f"tdx heartbeat: {what}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        beat()
