"""Ending a tree of processes, also those whose parents are gone already."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict

__all__ = ["adopt_orphans", "descendants", "end_descendants"]

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int | None = None) -> list[int]:
    """Process ids of all living descendants of `root` (default: this process)."""
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if state != b"Z":
            children[int(parent)].append(int(name))
    found, queue = [], [os.getpid() if root is None else root]
    while queue:
        for child in children[queue.pop()]:
            found.append(child)
            queue.append(child)
    return found


def end_descendants(grace_s: float) -> None:
    """End all descendants: SIGTERM, and SIGKILL for those left after `grace_s` seconds."""
    _signal_all(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while descendants() and time.monotonic() < deadline:
        _reap()
        time.sleep(0.01)
    deadline = time.monotonic() + 5.0  # a process in an uninterruptible wait is given up then
    while descendants() and time.monotonic() < deadline:
        _signal_all(signal.SIGKILL)
        _reap()
        time.sleep(0.01)
    _reap()


def _signal_all(number: int) -> None:
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
