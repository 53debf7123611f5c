"""A shared page in which every rank of a host shows that it is alive."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator

from tdx import abi

__all__ = ["HeartbeatPage", "beating", "create_page"]

_SLOT_WORDS = 8  # 64-bit words, a cache line: beats, state
_PAGE_BYTES = abi.MAX_RANKS * _SLOT_WORDS * 8
_CLOSED = 1
_BEAT_S = 0.2  # between two heartbeats of a busy rank


def create_page() -> int:
    """A sealed memfd for `HeartbeatPage`, made by one rank for all; the caller owns it."""
    fd = os.memfd_create("tdx-heartbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _PAGE_BYTES)
        # nobody can shrink it under the others' feet, which would kill them with SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


class HeartbeatPage:
    """The mapped page: each rank writes its own slot and reads the others'."""

    def __init__(self, fd: int, rank: int):
        self._rank = rank
        self._map = mmap.mmap(fd, _PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._lock = threading.Lock()  # against closing under a beating thread

    def beat(self) -> None:
        """Show a sign of life."""
        with self._lock:
            if self._words:
                self._words[self._rank * _SLOT_WORDS] += 1

    def beats(self, rank: int) -> int:
        """How many signs of life a rank has shown."""
        with self._lock:
            return self._words[rank * _SLOT_WORDS] if self._words else 0

    def closed(self, rank: int) -> bool:
        """The rank ended its part in an orderly way."""
        with self._lock:
            return bool(self._words) and self._words[rank * _SLOT_WORDS + 1] == _CLOSED

    def close(self) -> None:
        """Mark this rank as closed and unmap; a second call does nothing."""
        with self._lock:
            if self._words:
                self._words[self._rank * _SLOT_WORDS + 1] = _CLOSED
                self._words.release()
                self._words = memoryview(b"")
                self._map.close()


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
