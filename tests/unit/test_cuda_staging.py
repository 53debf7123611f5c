"""Staging of large copies: when its pinned pieces are used again."""

from __future__ import annotations

import ctypes
from typing import Any

from tdx.runtime.driver.cuda_staging import LARGE, Staging


class Log:
    """A driver that notes what is done with pinned pieces and their events."""

    def __init__(self) -> None:
        self.memory: dict[int, Any] = {}
        self.done: list[tuple[str, int]] = []
        self.events = 0

    def host_alloc(self, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes)
        self.memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def event_create(self, timing: bool) -> int:
        self.events += 1
        return self.events

    def event_record(self, event: int, stream: int) -> None:
        self.done.append(("record", event))

    def event_synchronize(self, event: int) -> None:
        self.done.append(("wait", event))

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.done.append(("copy", 0))


def test_a_piece_that_another_thread_sends_is_waited_for():
    """copy_in returns when its pieces are queued: who fills one next waits for its event."""
    log = Log()
    staging = Staging(log)
    data = ctypes.create_string_buffer(LARGE)
    address = ctypes.addressof(data)
    staging.copy_in(1, address, LARGE, 7, log.copy)
    log.done.clear()
    staging.copy_out(address, 1, LARGE, 8, log.copy)
    assert log.done == [("wait", 1), ("copy", 0), ("record", 1), ("wait", 1)]
