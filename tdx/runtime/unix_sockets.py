"""Unix sockets: messages with descriptors, listening under a private name, deadlines."""

from __future__ import annotations

import array
import contextlib
import math
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence

from tdx.runtime.errors import InvalidArgument, PeerTimeout
from tdx.runtime.outcomes import describe_ranks
from tdx.runtime.undo import Undo

__all__ = ["Clock", "Door", "close_fds", "listen", "receive_some", "send_some"]

_MAX_PATH = 107  # sun_path, without the terminator
_FILE = "socket"


def send_some(sock: socket.socket, data: memoryview | bytes, fds: Sequence[int] = ()) -> int:
    """Send as much as the socket takes, descriptors with the first byte. Returns the bytes sent.

    The descriptors stay the caller's. A signal is never raised for a closed connection.
    """
    extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return sock.sendmsg([data], extra, socket.MSG_NOSIGNAL)


def receive_some(sock: socket.socket, size: int, max_fds: int) -> tuple[bytes, list[int], bool]:
    """One read of up to `size` bytes: (data, descriptors, whether descriptors were cut off).

    The caller owns the descriptors, which are close-on-exec.
    """
    space = socket.CMSG_SPACE(max_fds * array.array("i").itemsize)
    data, extra, flags, _ = sock.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds.tolist(), bool(flags & socket.MSG_CTRUNC)


def close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class Clock:
    """A deadline on the monotonic clock; 0 seconds: none."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds if seconds > 0 else None

    def remaining(self) -> float | None:
        """Seconds left, for `settimeout` and `select`; never 0, which would mean not to block."""
        return None if self._end is None else max(self._end - time.monotonic(), 1e-3)

    def expired(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def timeout(self, rank: int, missing: Sequence[int], operation: str) -> PeerTimeout:
        return PeerTimeout(
            f"rank {rank} waited {self.seconds:g} s in {operation} for "
            f"{describe_ranks(missing)}: raise timeout_s if the machine is that busy",
            rank=rank, peer=missing[0], operation=operation, signal="host channel",
        )  # fmt: skip


class Door:
    """A listening socket, its address, and the directory to remove with it."""

    def __init__(self, sock: socket.socket, address: bytes, directory: str | None = None):
        self.sock = sock
        self.address = address
        self._directory = directory

    def close(self) -> None:
        self.sock.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def listen(abstract: bool, backlog: int) -> Door:
    """Listen under a random name: an abstract one, or a path in a private directory.

    Raises OSError if neither can be had.
    """
    with Undo() as undo:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.add(sock.close)
        door = None
        if abstract:
            address = f"\0tdx-{secrets.token_hex(16)}".encode()
            with contextlib.suppress(OSError):  # not offered here: a path does as well
                sock.bind(address)
                door = Door(sock, address)
        if door is None:
            directory = _private_directory()
            undo.add(shutil.rmtree, directory, True)
            path = os.path.join(directory, _FILE)
            sock.bind(path)
            door = Door(sock, os.fsencode(path), directory)
        sock.listen(backlog)
        undo.commit()
    return door


def _private_directory() -> str:
    """A new directory that only this user can enter (mode 0700), with a path short enough."""
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if len(os.fsencode(base)) + len(f"/tdx-12345678/{_FILE}") <= _MAX_PATH:
            with contextlib.suppress(OSError):
                return tempfile.mkdtemp(prefix="tdx-", dir=base)
    raise OSError("no directory for temporary files can be written, or their paths are too long")


def check_timeout(timeout_s: float) -> float:
    """`timeout_s` as a float; InvalidArgument unless it is a number of seconds >= 0."""
    if not 0 <= timeout_s < math.inf:
        raise InvalidArgument(f"timeout_s={timeout_s}: give seconds, at least 0 (0: no deadline)")
    return float(timeout_s)
