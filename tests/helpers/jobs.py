"""Runs rank cases: one `tdx run` job per world size, asked for one case at a time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from tests.helpers.commands import ROOT, tdx_environment

__all__ = ["CaseFailure", "Jobs", "Request", "Skipped"]

_START_LIMIT_S = 60.0
_STRAGGLER_LIMIT_S = 3.0  # for the other ranks once one has failed
_MAX_OUTPUT = 20000  # characters of a job's output in a failure


class CaseFailure(Exception):
    """A case failed; the text names the ranks, with their tracebacks."""


class Skipped(Exception):
    """Every rank skipped the case."""


@dataclass(frozen=True)
class Request:
    """One case on one world size."""

    id: str
    module: str
    name: str
    parameters: str
    size: int
    limit_s: float
    isolated: bool
    dies: frozenset[int]


class Jobs:
    """The running job, replaced when the world size changes and after every failure."""

    def __init__(self, backend: str):
        self._backend = backend
        self._job: Job | None = None

    def run(self, request: Request) -> None:
        """Run the case. Raises CaseFailure or Skipped."""
        if self._job is not None and (request.isolated or self._job.size != request.size):
            self.close()
        if self._job is None:
            self._job = Job(request.size, self._backend)
        try:
            self._job.run(request)
        except CaseFailure:
            self.kill()  # its ranks may be out of step
            raise
        if request.dies:
            self.kill()
        elif request.isolated:
            self.close()

    def close(self) -> None:
        """Let the job end by itself. Raises CaseFailure if it does not end well."""
        job, self._job = self._job, None
        if job is not None:
            job.close()

    def kill(self) -> None:
        """End the job at once."""
        job, self._job = self._job, None
        if job is not None:
            job.kill()


class Job:
    """Ranks that wait for cases."""

    def __init__(self, size: int, backend: str):
        self.size = size
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._seen = 0  # bytes of the output that belong to earlier cases
        self._channels: dict[int, _Channel] = {}
        name = "tdx-test-" + secrets.token_hex(16)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(b"\0" + name.encode())
            listener.listen(size)
            listener.settimeout(0.1)
            words = [sys.executable, "-m", "tdx", "run", "-n", str(size), "--keep-going"]
            self._process = subprocess.Popen(
                [*words, "-m", "tests.helpers.rank_main", name, backend],
                cwd=ROOT,
                env=tdx_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )
            try:
                self._accept(listener)
            except BaseException:
                self.kill()
                raise

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while len(self._channels) < self.size:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise CaseFailure(f"the job of {self.size} ranks did not start\n{self._recent()}")
            with contextlib.suppress(TimeoutError):
                channel = _Channel(listener.accept()[0])
                hello = channel.receive(deadline)
                self._channels[hello["rank"]] = channel
                channel.pid = hello["pid"]

    def run(self, request: Request) -> None:
        """Run one case on all ranks. Raises CaseFailure or Skipped."""
        self._seen = os.fstat(self._output.fileno()).st_size
        for channel in self._channels.values():
            channel.send({k: v for k, v in vars(request).items() if k != "dies"})
        results, lost = self._collect(request)
        silent = [rank for rank in self._channels if rank not in results and rank not in lost]
        problems = self._problems(request, results, lost, silent)
        if problems:
            self._end()  # `tdx run` has passed on all that the ranks had printed
            raise CaseFailure("\n".join([*problems, self._recent()]))
        outcomes = {result["outcome"] for result in results.values()}
        if outcomes == {"skipped"}:
            raise Skipped(next(iter(results.values()))["text"])

    def _collect(self, request: Request) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Results by rank, and the ranks that are gone; returns at the time limit at last."""
        results: dict[int, dict[str, Any]] = {}
        lost: set[int] = set()
        deadline = time.monotonic() + request.limit_s
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel.socket, selectors.EVENT_READ, rank)
            while len(results) + len(lost) < self.size and time.monotonic() < deadline:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    rank = key.data
                    try:
                        results[rank] = self._channels[rank].receive(time.monotonic() + 5)
                        is_bad = results[rank]["outcome"] == "failed"
                    except (EOFError, OSError):
                        lost.add(rank)
                        is_bad = rank not in request.dies
                    selector.unregister(key.fileobj)
                    if is_bad:
                        deadline = min(deadline, time.monotonic() + _STRAGGLER_LIMIT_S)
        return results, lost

    def _problems(
        self,
        request: Request,
        results: dict[int, dict[str, Any]],
        lost: set[int],
        silent: list[int],
    ) -> list[str]:
        texts = [
            f"rank {rank} of {self.size} failed:\n{result['text']}"
            for rank, result in sorted(results.items())
            if result["outcome"] == "failed"
        ]
        unexpected = sorted(lost - request.dies)
        if unexpected:
            self._await_obituaries(unexpected, 1.0)
            texts.append(f"rank {_list(unexpected)} of {self.size} ended within the case")
        immortal = sorted(request.dies & set(results))
        if immortal:
            texts.append(f"rank {_list(immortal)} was to end within the case and did not")
        outcomes = {result["outcome"] for result in results.values()}
        if not texts and len(outcomes) > 1:
            skipped = [r for r, result in results.items() if result["outcome"] == "skipped"]
            texts.append(f"rank {_list(sorted(skipped))} skipped, the others did not")
        if silent:
            when = "another rank had failed" if texts else f"{request.limit_s:g} s"
            texts.append(f"rank {_list(silent)} of {self.size} still ran after {when}; its stacks:")
            self._dump_stacks(silent)
        return texts

    def _dump_stacks(self, ranks: list[int]) -> None:
        """faulthandler prints them to the job's output on SIGABRT, which ends the rank."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._channels[rank].pid, signal.SIGABRT)
        self._await_obituaries(ranks, 3.0)

    def _await_obituaries(self, ranks: list[int], limit_s: float) -> None:
        """Wait for what `tdx run` says of ranks that are gone."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self._process.poll() is None:
            text = self._recent()
            if all(f"tdx run: rank {rank} " in text for rank in ranks):
                break
            time.sleep(0.02)

    def _recent(self) -> str:
        """The job's output since the case began."""
        size = os.fstat(self._output.fileno()).st_size
        data = os.pread(self._output.fileno(), size - self._seen, self._seen)
        text = data.decode(errors="replace")
        if len(text) > _MAX_OUTPUT:
            text = "...\n" + text[-_MAX_OUTPUT:]
        return f"output of the job:\n{text}" if text else "(the job printed nothing)"

    def close(self) -> None:
        """End the ranks by the end of their requests; every one must exit with 0."""
        self._seen = os.fstat(self._output.fileno()).st_size
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.socket.shutdown(socket.SHUT_WR)
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            code = None
        text = self._recent()
        self.kill()
        if code != 0:
            state = "did not end" if code is None else f"ended with code {code}"
            raise CaseFailure(f"after its last case the job of {self.size} ranks {state}\n{text}")

    def kill(self) -> None:
        """End the job at once."""
        self._end()
        for channel in self._channels.values():
            channel.socket.close()
        self._output.close()

    def _end(self) -> None:
        """End `tdx run`, which takes its ranks along."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Channel:
    """JSON lines over a socket."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.pid = 0
        self._rest = b""

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the rank is gone: seen when its result is read
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises EOFError at the end, TimeoutError at the deadline."""
        while b"\n" not in self._rest:
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
