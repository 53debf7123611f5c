"""The control block that kernels see, the fault record they write, and the exception it becomes.

Layouts: tdx/abi.py. A fault is sticky: the first one is kept, and every later call raises it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tdx import abi
from tdx.runtime.errors import PeerLost, PeerTimeout, TdxError
from tdx.runtime.heartbeat import ABORT_QUESTION, PRESENT
from tdx.runtime.mpi_end import skip_mpi_finalize
from tdx.runtime.mpi_files import files_of, remove
from tdx.runtime.outcomes import describe_ranks
from tdx.runtime.undo import Undo

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = ["Faults", "Pointer"]

_STATE = abi.RECORD_STATE
_NOBODY = 1 << 20  # a world rank whose memory is nowhere: for peers beyond a team
_LEFT_S = 1.0  # what a peer that left has sent is used for so long
_WATCH_S = 0.2  # how often the watcher looks: a fault is reported well within a second


class Pointer:
    """An address with a dtype: a kernel argument for memory that is no array.

    `owner` is kept alive with the pointer, and so until a queued kernel that takes it has run.
    `check` raises where the memory must not be used any more.
    """

    __slots__ = ("_address", "check", "dtype", "owner")

    def __init__(
        self,
        address: int,
        dtype: np.dtype,
        owner: object = None,
        check: Callable[[], None] | None = None,
    ):
        self._address = address
        self.dtype = dtype
        self.owner = owner
        self.check = check

    def data_ptr(self) -> int:
        if self.check is not None:
            self.check()
        return self._address

    def cast(self, dtype: str) -> Pointer:
        """The same address with another element type."""
        return Pointer(self._address, np.dtype(dtype), self.owner, self.check)


class Faults:
    """Owns the control block and the fault record of a world."""

    def __init__(self, world: World, timeout_s: float):
        self._world = world
        driver = world.driver
        with Undo() as undo:
            self._record_address = driver.host_alloc(8 * abi.RECORD_WORDS)
            undo.add(driver.host_free, self._record_address)
            self.record = (ctypes.c_int64 * abi.RECORD_WORDS).from_address(self._record_address)
            self._words = np.zeros(abi.CONTROL_WORDS, np.int64)
            self._words[abi.CONTROL_RECORD] = self._record_address
            self._words[abi.CONTROL_TIMEOUT_NS] = int(timeout_s * 1e9)
            self.address = driver.alloc(self._words.nbytes, world.stream.handle)
            undo.add(driver.free, self.address, world.stream.handle)
            self.control = Pointer(self.address, np.dtype(np.int64), check=world.check_open)
            self.set_table(0, range(world.size))
            undo.commit()
        self._executor = getattr(driver, "executor", None)  # of the host tier: knows who waits
        if self._executor is not None:
            here = weakref.proxy(world)  # which owns the driver
            self._executor.introduce(
                world.rank,
                lambda address: here.signal_site(address)[2],
                weakref.proxy(world.window),
            )
        self.first: TdxError | None = None
        self.raised: TdxError | None = None  # the fault, once a caller has been told
        self.abort = False  # end the process when a peer is lost
        self._lock = threading.Lock()
        self._said = False
        self._left_since = math.inf  # when peers were first seen to have left
        self._stop = threading.Event()
        world.channels.gave_up = self._gave_up
        self._watcher = threading.Thread(target=self._watch, name="tdx-watcher", daemon=True)
        self._watcher.start()

    def set_table(self, team: int, ranks: range | tuple[int, ...]) -> None:
        """Fill a team's table of world ranks, in team order."""
        start = abi.CONTROL_TABLE + team * abi.MAX_RANKS
        self._words[start : start + abi.MAX_RANKS] = _NOBODY
        self._words[start : start + len(ranks)] = ranks
        driver = self._world.driver
        part = self._words if team == 0 else self._words[start : start + abi.MAX_RANKS]
        offset = 0 if team == 0 else 8 * start
        driver.copy_in(
            self.address + offset, part.ctypes.data, part.nbytes, self._world.stream.handle
        )

    def stands(self) -> bool:
        """Whether there is a fault; one read of host memory."""
        return bool(self.record[_STATE])

    def check(self) -> None:
        """Raise the fault that stands, if any; one read of host memory."""
        if self.stands():
            self.raised = self._exception()
            raise self.raised.with_traceback(None)

    def halt(self) -> None:
        """Make every wait of a running kernel give up at once."""
        with contextlib.suppress(TdxError):  # on a device that has failed nothing runs any more
            self._world.driver.poke(self.address + 8 * abi.CONTROL_FAULT, abi.FAULT_HOST)

    def _exception(self) -> TdxError:
        with self._lock:
            if self.first is None:
                channels = self._world.channels
                self.first = channels.explain(self._describe())
                if channels.page is not None and isinstance(self.first, PeerTimeout):
                    own = self._world.rank, str(self.first)
                    channels.page.tell_fault(*self.first.origin or own)
            return self.first

    def notice(self) -> bool:
        """Make a fault of what the host knows of the peers; whether any fault stands now."""
        channels = self._world.channels
        lost, given_up = channels.lost(), channels.given_up()
        if lost:
            skip_mpi_finalize()
        if channels.mismatch is not None and self.first is None:
            self._stand(channels.mismatch)
        elif (lost or given_up) and self.first is None:
            fault = self._lost(lost) if lost else self._given_up(given_up, "because of a fault and")
            self._stand(channels.explain(fault))
        elif self.first is None and (left := self._left()):
            self._stand(channels.explain(left))
        return self.stands()

    def _gave_up(self, error: TdxError) -> bool:
        """An operation of the host ended in `error`, which its caller gets, and every later one."""
        if self._world.closing:
            return False
        self._said = True
        self._stand(error)
        self.raised = error
        return True

    def _stand(self, fault: TdxError) -> None:
        """Let a fault stand, unless another one does."""
        with self._lock:
            if self.first is None and not self.record[abi.RECORD_STATE]:
                self.first = fault
                self.record[abi.RECORD_STATE] = 1
        self.halt()

    def _left(self) -> PeerLost | PeerTimeout | None:
        """For peers that left their world while work is queued here, which may wait for them.

        What they sent has arrived by then; a while is for what comes of it.
        """
        world, now = self._world, time.monotonic()
        left = frozenset() if world.closing else world.channels.departed()
        recovering = [] if world.closing else world.channels.recovering()
        if not (left or recovering) or not world.driver.is_busy():
            self._left_since = math.inf
            return None
        self._left_since = min(self._left_since, now)
        if now - self._left_since < _LEFT_S:
            return None
        if not left:
            return self._given_up(recovering, "while it is in use here, and")
        ranks, page = sorted(left), world.channels.page
        why, origin = page.absence(ranks, 0, True) if page is not None else PRESENT
        return PeerLost(
            f"rank {world.rank} lost {describe_ranks(left)}: the world was closed there, after an "
            f"error or too early, while it is in use here{why}",
            ranks,
            rank=world.rank,
            origin=origin,
        )

    def _lost(self, ranks: frozenset[int]) -> PeerLost:
        return PeerLost(
            f"rank {self._world.rank} lost {describe_ranks(ranks)}: the process has ended",
            sorted(ranks),
            rank=self._world.rank,
        )

    def _given_up(self, ranks: list[int], why: str) -> PeerTimeout:
        return PeerTimeout(
            f"{describe_ranks(ranks)} gave this world up {why} went on to "
            f"world.recover(): call it on rank {self._world.rank} as well",
            rank=self._world.rank,
            peer=ranks[0],
            operation="world.recover",
        )

    def _describe(self) -> TdxError:
        record = self.record
        world = self._world
        seen, expected = int(record[abi.RECORD_SEEN]), int(record[abi.RECORD_EXPECTED])
        peer = int(record[abi.RECORD_PEER])
        ranks = world.team_ranks(int(record[abi.RECORD_TEAM]))
        site, word, signal = world.signal_site(int(record[abi.RECORD_SIGNAL]))
        if peer < 0 and site.words_per_rank:
            peer = word // site.words_per_rank
        peer = ranks[peer] if 0 <= peer < len(ranks) else -1
        number = site.usage.call_of(expected, site.steps, site.bits)
        who = f"rank {peer}" if peer >= 0 else "a peer"
        if peer in world.channels.departed():
            who += " (which has closed its world)"
        if arrived := site.arrived(word, seen):
            who, arrived = "its own programs", f"; {arrived}"
        operation, location = site.operation, site.usage.location
        running = operation
        if operation == "kernel" and self._executor is not None and self._executor.kernel:
            operation, location = self._executor.kernel, self._executor.launched
            running, signal = f"kernel {operation}", self._executor.signal
        call = f", call {number}" if number else ""
        where = f", called at {location}" if location else ""
        if peer in world.channels.lost():
            return PeerLost(
                f"rank {world.rank} lost rank {peer} while it waited in {running}{call} for "
                f"signal {signal}{where}",
                [peer],
                rank=world.rank,
            )
        programs = self._executor.waiting if self._executor is not None else []
        waiting = "".join(f"\n  {line}" for line in programs)
        return PeerTimeout(
            f"rank {world.rank} waited {world.timeout_s:g} s for {who}: {running}{call}, "
            f"signal {signal} expected {expected}, seen {seen}{arrived}{where}"
            + (f"\nwaiting programs of rank {world.rank}:{waiting}" if waiting else ""),
            rank=world.rank,
            peer=peer,
            operation=operation,
            signal=signal,
            expected=expected,
            seen=seen,
            call_number=number,
            location=location,
        )

    def _watch(self) -> None:
        """Say a fault once on stderr, also while the host sits in the user's code."""
        while not self._stop.wait(_WATCH_S):
            stands = self.notice()
            if self.abort and (lost := self._world.channels.lost()):
                self._end_process(lost)
            if stands and not self._said:
                self._said = True
                _say(str(self._exception()))

    def _end_process(self, lost: frozenset[int]) -> None:
        """End the job as `on_peer_failure="abort"` asks for; one rank says why."""
        page = self._world.channels.page
        speaker = chosen = self._world.rank + 1
        if page is not None:
            with contextlib.suppress(TdxError):  # who has the lock may be stopped
                chosen = page.settle(ABORT_QUESTION, speaker, _WATCH_S)
        if chosen == speaker:
            _say(f"{self._lost(lost)}: ending the job (on_peer_failure)")
        else:
            time.sleep(_WATCH_S)  # a launcher ends all ranks with the first: let that one speak
        remove(files_of("self"))
        os._exit(1)

    def close(self) -> None:
        """Stop the watcher and return the memory; no kernel may run any more."""
        self._world.channels.gave_up = lambda why: False  # they may outlive this world
        self._stop.set()
        self._watcher.join()
        driver = self._world.driver
        try:
            driver.free(self.address, self._world.stream.handle)
        finally:
            driver.host_free(self._record_address)


def _say(text: str) -> None:
    """Write a line to stderr, if there is one that takes it."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"tdx: {text}\n")
        sys.stderr.flush()
