"""Large copies between pageable host memory and the GPU, through a little pinned memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["LARGE", "Staging"]

LARGE = 1 << 20  # bytes from which staging beats the driver's own handling of pageable memory
_PIECE = 8 << 20


class Staging:
    """Two pinned pieces of 8 MiB: the host fills or empties one while the other travels.

    `driver` gives pinned memory and events, with the verbs of driver/base.py.
    """

    def __init__(self, driver: Any):
        self._driver = driver
        self._lock = threading.Lock()
        self._pieces: list[tuple[int, int]] = []  # (address, event after its last copy)

    def copy_in(self, dst: int, src: int, nbytes: int, stream: int, copy: Any) -> None:
        """`copy(dst, pinned, bytes, stream)` queues one piece; returns when `src` was read."""
        with self._lock:
            pieces = self._open()
            for number, (at, width) in enumerate(_split(nbytes)):
                pinned, event = pieces[number % 2]
                self._driver.event_synchronize(event)
                ctypes.memmove(pinned, src + at, width)
                copy(dst + at, pinned, width, stream)
                self._driver.event_record(event, stream)

    def copy_out(self, dst: int, src: int, nbytes: int, stream: int, copy: Any) -> None:
        """`copy(pinned, src, bytes, stream)` queues one piece; returns when `dst` is filled."""
        with self._lock:
            pieces = self._open()
            travelling: list[tuple[int, int, int, int]] = []
            for number, (at, width) in enumerate(_split(nbytes)):
                pinned, event = pieces[number % 2]
                if len(travelling) == 2:
                    self._empty(*travelling.pop(0))
                self._driver.event_synchronize(event)  # a copy_in of another thread may read it
                copy(pinned, src + at, width, stream)
                self._driver.event_record(event, stream)
                travelling.append((dst + at, pinned, width, event))
            for piece in travelling:
                self._empty(*piece)

    def _empty(self, dst: int, pinned: int, width: int, event: int) -> None:
        self._driver.event_synchronize(event)
        ctypes.memmove(dst, pinned, width)

    def _open(self) -> list[tuple[int, int]]:
        while len(self._pieces) < 2:
            pinned = self._driver.host_alloc(_PIECE)
            try:
                event = self._driver.event_create(timing=False)
            except BaseException:
                self._driver.host_free(pinned)
                raise
            self._pieces.append((pinned, event))
        return self._pieces

    def close(self) -> None:
        """Give the pinned memory back; no copy may be under way."""
        with self._lock:
            while self._pieces:
                pinned, event = self._pieces.pop()
                self._driver.event_destroy(event)
                self._driver.host_free(pinned)


def _split(nbytes: int) -> Iterator[tuple[int, int]]:
    for at in range(0, nbytes, _PIECE):
        yield at, min(_PIECE, nbytes - at)
