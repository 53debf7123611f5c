"""What a job of `tdx run` knows of its ranks: their output, and how they ended."""

from __future__ import annotations

import os
import signal
import socket

__all__ = ["MAX_LINE", "Failure", "Rank", "exit_code", "listed", "ranks_named", "say", "write_all"]

MAX_LINE = 1 << 20  # longer lines are passed on in pieces


class Rank:
    """What is known of one rank."""

    def __init__(
        self, number: int, pid: int, channel: socket.socket, pipes: list[int], mark: bytes
    ):
        self.number = number
        self.pid = pid
        self.channel = channel
        out, err, self.report_pipe = pipes
        self.err = _Lines(2, mark)
        self.lines = {out: _Lines(1, mark), err: self.err}
        self.report = b""
        self.code: int | None = None  # minus the number of the signal that ended it
        self.is_finished = False  # the script is done, its exit handlers too
        self.has_ended = False

    @property
    def has_ended_well(self) -> bool:
        return self.code == 0 or (self.is_finished and self.code is None)


class Failure:
    """How a rank failed. error: name of the exception's type."""

    def __init__(self, rank: Rank, error: str | None, trace: str):
        assert rank.code
        self._rank = rank
        self.code = rank.code
        self._error = error
        self._trace = trace

    def __str__(self) -> str:
        if self._error:
            return f"rank {self._rank.number} raised {self._error}"
        if self.code > 0:
            return f"rank {self._rank.number} exited with code {self.code}"
        return f"rank {self._rank.number} was killed by {_signal_name(-self.code)}"

    def show(self) -> None:
        self._rank.err.flush()
        self._rank.err.write(self._trace.encode(errors="backslashreplace"))


class _Lines:
    """Writes whole lines to a descriptor, each with `mark` before it, in one write."""

    def __init__(self, descriptor: int, mark: bytes):
        self._descriptor = descriptor
        self._mark = mark
        self._rest = b""

    def write(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            write_all(self._descriptor, self._mark + line + b"\n")
        if len(self._rest) > MAX_LINE:
            self.flush()

    def flush(self) -> None:
        if self._rest:
            self.write(b"\n")


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def say(text: str) -> None:
    write_all(2, f"tdx run: {text}\n".encode())


def listed(numbers: list[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def ranks_named(numbers: list[int]) -> str:
    return f"{'ranks' if len(numbers) > 1 else 'rank'} {listed(numbers)}"


def exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
