"""A communicator of allgather alone: ranks are threads or forked processes of one test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

_LENGTH = struct.Struct("<Q")


class FakeComm:
    """One rank's end: rank 0's process runs a server that collects and distributes."""

    def __init__(self, rank: int, size: int, sock: socket.socket):
        self._rank = rank
        self._size = size
        self._sock = sock

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def allgather(self, payload: bytes) -> list[bytes]:
        if type(payload) is not bytes:
            raise TypeError(f"tdx passed {type(payload).__name__}: only bytes may pass")
        _send(self._sock, payload)
        return [_receive(self._sock) for _ in range(self._size)]


def fake_comms(size: int) -> list[FakeComm]:
    """Connected communicators, one a rank; a thread of this process serves them."""
    pairs = [socket.socketpair() for _ in range(size)]
    threading.Thread(target=_serve, args=([a for a, _ in pairs],), daemon=True).start()
    return [FakeComm(rank, size, b) for rank, (_, b) in enumerate(pairs)]


def run_threads(size: int, body: Callable[[Any], Any], timeout_s: float = 30.0) -> list[Any]:
    """`body(comm)` as `size` ranks in threads. Results, or the exceptions raised, by rank."""
    results: list[Any] = [TimeoutError("this rank hangs")] * size
    comms = fake_comms(size)

    def run(rank: int) -> None:
        try:
            results[rank] = body(comms[rank])
        except BaseException as error:
            results[rank] = error
        finally:
            comms[rank]._sock.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return results


def run_processes(size: int, body: Callable[[Any], Any], timeout_s: float = 30.0) -> list[Any]:
    """`body(comm)` as `size` ranks in forked processes.

    A rank's result is its return value (picklable), the exception it raised, or, if it died or
    was killed because it hung, its exit status as an int wrapped in `Died`.
    """
    context = multiprocessing.get_context("fork")
    comms = fake_comms(size)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]

    def run(rank: int) -> None:
        for other in comms:
            if other is not comms[rank]:
                other._sock.close()
        try:
            result = body(comms[rank])
        except BaseException as error:
            error.add_note(traceback.format_exc())
            result = error
        pipes[rank][1].send(result)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for comm, (_, writer) in zip(comms, pipes, strict=True):
        comm._sock.close()
        writer.close()
    end = time.monotonic() + timeout_s
    results = [_result(p, reader, end) for p, (reader, _) in zip(processes, pipes, strict=True)]
    for process in processes:
        process.join()
    return results


class Died:
    """A rank that ended without a result; `status` as of multiprocessing."""

    def __init__(self, status: int | None):
        self.status = status

    def __repr__(self) -> str:
        return f"Died({self.status})"


def results_of(results: Sequence[Any]) -> list[Any]:
    """The results, after raising the first exception among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert not isinstance(result, Died), results
    return list(results)


def open_fds() -> dict[int, str]:
    """The descriptors of this process and what they are."""
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fds[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return fds


def _result(process: Any, reader: Any, end: float) -> Any:
    result: Any = None
    got = False
    with contextlib.suppress(EOFError):
        if reader.poll(max(0.0, end - time.monotonic())):
            result, got = reader.recv(), True
    reader.close()
    process.join(max(0.0, end - time.monotonic()) if not got else 5.0)
    if process.is_alive():
        process.kill()
        process.join()
    return result if got else Died(process.exitcode)


def _serve(socks: list[socket.socket]) -> None:
    try:
        while True:
            payloads = [_receive(sock) for sock in socks]
            for sock in socks:
                for payload in payloads:
                    _send(sock, payload)
    except (EOFError, OSError):
        pass
    finally:
        for sock in socks:
            sock.close()


def _send(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(sock: socket.socket) -> bytes:
    return _read(sock, _LENGTH.unpack(_read(sock, _LENGTH.size))[0])


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
