"""Ranks without `tdx.init`: threads or forked processes with a communicator of allgather alone,
and plain Python under mpirun.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tdx.runtime.exchange import Mesh
from tdx.runtime.host_channel import HostChannel

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_PREFIXES = ("PMI", "OMPI_", "MV2_", "SLURM_", "MPI_", "HYD", "PRTE", "I_MPI")
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
            result = error
            if not isinstance(error, (Exception, KeyboardInterrupt)):  # pytest.fail
                result = AssertionError(f"{error}\n{traceback.format_exc()}")
            result.add_note(traceback.format_exc())
        pipes[rank][1].send(result)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    with warnings.catch_warnings():
        # fork in a process with threads: those of this module hold no lock across it
        warnings.simplefilter("ignore", DeprecationWarning)
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


def on_channel(body: Callable[[HostChannel], Any], timeout_s: float = 20.0) -> Callable[[Any], Any]:
    """A rank's body that opens a host channel, runs `body(channel)` and closes it."""

    def run(comm: Any) -> Any:
        channel = HostChannel(Mesh.connect(comm, 20), timeout_s)
        try:
            return body(channel)
        finally:
            channel.close()

    return run


def threads(size: int, body: Callable[[HostChannel], Any], timeout_s: float = 20.0) -> list[Any]:
    """`run_threads` of a body that takes a host channel."""
    return run_threads(size, on_channel(body, timeout_s))


def processes(size: int, body: Callable[[HostChannel], Any], timeout_s: float = 20.0) -> list[Any]:
    """`run_processes` of a body that takes a host channel."""
    return run_processes(size, on_channel(body, timeout_s))


def run_python(code: str, *, launch: int = 0, **env: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh process, or in `launch` of them under mpirun; `env` is added."""
    command = [sys.executable, "-c", code]
    if launch:
        beside = Path(sys.executable).parent / "mpirun"
        mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
        assert mpirun, "no mpirun: install the extra `test`"
        command = [mpirun, "-n", str(launch), *command]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    environment = clean | {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def open_fds() -> dict[int, str]:
    """The descriptors of this process and what they are."""
    fds = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fds[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return fds


def new_fds(before: dict[int, str]) -> dict[int, str]:
    """Descriptors that are open now and were not `before`; waits until the servers have gone.

    Those of earlier tests may have been there then, and go meanwhile.
    """
    end = time.monotonic() + 5
    while (more := dict(open_fds().items() - before.items())) and time.monotonic() < end:
        time.sleep(0.01)
    return more


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
