"""One job of `tdx run`: starts the ranks, passes their output on, ends them all."""

from __future__ import annotations

import array
import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tdx.runtime.mpi_files import files_of, remove
from tdx.tools import rank as protocol
from tdx.tools.processes import adopt_orphans, descendants, end_descendants

__all__ = ["TIMED_OUT", "Job"]

TIMED_OUT = 124  # exit code, as that of timeout(1)
_FAILED_GRACE_S = 0.3  # for the exit handlers of a rank that failed
_LAUNCHER_GRACE_S = 0.5  # between the launcher's end and the last news of its ranks
_LAUNCHER_END_S = 10.0  # between the end of all ranks and the launcher's, which says why
_EXIT_GRACE_S = protocol.TERM_GRACE_S + 0.5
_MAX_LINE = 1 << 20  # longer lines are passed on in pieces
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Job:
    """`ranks` processes, started by `launcher` (words before the program; none for one rank).

    target: ["-f", script, ...] or ["-m", module, ...]. prefix: mark lines with "[rank] ".
    timeout_s: None for no limit.
    """

    def __init__(
        self,
        ranks: int,
        launcher: list[str],
        target: list[str],
        *,
        environment: dict[str, str],
        keep_going: bool = False,
        prefix: bool = True,
        timeout_s: float | None = None,
    ):
        self._size = ranks
        self._keep_going = keep_going
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._exit_code = 0
        self._ranks: dict[int, _Rank] = {}
        self._end_at: float | None = None  # when the job is ended, whatever still runs
        self._selector = selectors.DefaultSelector()
        self._mpi_files: set[str] = set()  # what killed ranks leave in /dev/shm
        self._token = secrets.token_bytes(16)
        self._name = "tdx-run-" + secrets.token_hex(16)
        self._command = [*launcher, sys.executable, "-P", protocol.__file__, *target]
        channel = f"{self._name}:{self._token.hex()}"
        self._environment = environment | {protocol.CHANNEL_VARIABLE: channel}

    def run(self) -> int:
        """Run to the end; returns the exit code. No process is left, also after an exception."""
        adopt_orphans()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(b"\0" + self._name.encode())
            listener.listen(self._size)
            listener.setblocking(False)
            self._watch(listener, lambda: self._accept(listener))
            self._launcher = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes to `tdx run` alone
            )
            assert self._launcher.stdout is not None
            said = self._launcher.stdout.fileno()
            self._launcher_output = b""
            self._watch(said, lambda: self._read_launcher(said))
            try:
                self._loop()
                launcher_code = self._launcher.poll()
            finally:
                self._end()
            if self._exit_code == 0:
                self._check_complete(launcher_code)
        return self._exit_code

    # ---- what runs while the job does

    def _loop(self) -> None:
        started = time.monotonic()
        while not self._is_over():
            for key, _ in self._selector.select(0.05):
                key.data()
            now = time.monotonic()
            if self._end_at is None:
                if self._timeout_s is not None and now - started > self._timeout_s:
                    self._time_out()
                elif self._launcher.poll() is not None:
                    self._end_at = now + _LAUNCHER_GRACE_S
                elif self._have_all_ended():
                    self._end_at = now + _LAUNCHER_END_S
            elif now > self._end_at:
                break

    def _is_over(self) -> bool:
        ranks = self._ranks.values()
        if self._exit_code != 0 and len(ranks) == self._size:
            # Where a rank is lost, MPI_Finalize of the others may never return.
            return all(rank.has_ended or rank.is_finished for rank in ranks)
        # Why ranks ended that said nothing (MPI_Abort) is known when the launcher has ended.
        are_known = all(rank.code is not None for rank in ranks)
        return self._have_all_ended() and (are_known or self._launcher.poll() is not None)

    def _have_all_ended(self) -> bool:
        ranks = self._ranks.values()
        return len(ranks) == self._size and all(rank.has_ended for rank in ranks)

    def _accept(self, listener: socket.socket) -> None:
        channel, _ = listener.accept()
        packed = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(packed)[1] != os.geteuid():
            channel.close()
        else:
            self._watch(channel, lambda: self._greet(channel))

    def _greet(self, channel: socket.socket) -> None:
        self._selector.unregister(channel)
        message, pipes = _receive(channel, len(protocol.PIPES))
        valid = len(message) == protocol.HELLO.size and len(pipes) == len(protocol.PIPES)
        token, number, pid = protocol.HELLO.unpack(message) if valid else (b"", 0, 0)
        if not secrets.compare_digest(token, self._token) or number in self._ranks:
            for pipe in pipes:
                os.close(pipe)
            channel.close()
            return
        mark = f"[{number}] ".encode() if self._prefix else b""
        rank = self._ranks[number] = _Rank(number, pid, channel, pipes, mark)
        self._watch(channel, lambda: self._read_status(rank))
        for pipe in pipes:
            os.set_blocking(pipe, False)
            self._watch(pipe, partial(self._pump, rank, pipe))

    def _read_report(self, rank: _Rank, data: bytes) -> None:
        rank.report += data
        *lines, rank.report = rank.report.split(b"\n")
        for line in lines:
            fields = json.loads(line)
            if fields.get("finished"):
                rank.is_finished = True
                self._note_files()
            else:
                self._fail(rank, fields["code"], fields.get("error"), fields.get("traceback"))

    def _read_status(self, rank: _Rank) -> None:
        message = rank.channel.recv(protocol.STATUS.size)
        self._selector.unregister(rank.channel)
        rank.has_ended = True
        self._drain(rank)
        if not message:  # its waiting process was killed, as the launcher does on MPI_Abort
            return
        (code,) = protocol.STATUS.unpack(message)
        if code:
            self._fail(rank, code)
        elif rank.code is None:
            rank.code = 0

    def _fail(self, rank: _Rank, code: int, error: str | None = None, trace: str = "") -> None:
        """The rank's first bad news: say it, and end the job unless it is to go on."""
        if rank.code is not None:
            return
        rank.code = code
        self._note_files()
        self._exit_code = self._exit_code or (code if code >= 0 else 128 - code)
        self._drain(rank)
        if self._end_at is not None:  # it fell with the others
            return
        rank.err.flush()
        rank.err.write((trace or "").encode(errors="backslashreplace"))
        if error:
            text = f"raised {error}"
        elif code > 0:
            text = f"exited with code {code}"
        else:
            text = f"was killed by {_signal_name(-code)}"
        if self._keep_going:
            _say(f"rank {rank.number} {text}; the other ranks go on")
            with contextlib.suppress(ProcessLookupError):  # its exit could wait for them
                os.kill(rank.pid, signal.SIGKILL)
        else:
            _say(f"rank {rank.number} {text}; ending the job")
            self._end_at = time.monotonic() + _FAILED_GRACE_S

    def _time_out(self) -> None:
        """faulthandler of each rank prints its stacks on SIGABRT."""
        _say(f"not finished after {self._timeout_s:g} s; ending the job, stacks of the ranks:")
        self._exit_code = TIMED_OUT
        self._end_at = time.monotonic() + _FAILED_GRACE_S
        for rank in self._ranks.values():
            if rank.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGABRT)

    def _check_complete(self, launcher_code: int | None) -> None:
        """Ranks without a result where none has failed: the launcher knows why."""
        missing = [n for n in range(self._size) if n not in self._ranks]
        lost = [rank.number for rank in self._ranks.values() if rank.code is None]
        if not missing and not lost:
            return
        self._exit_code = abs(launcher_code or 1)
        _write(2, self._launcher_output)
        what = f"never started: {_list(missing)}" if missing else f"ended early: {_list(lost)}"
        _say(f"ranks that {what}; {self._command[0]} ended with code {launcher_code}")

    # ---- output

    def _watch(self, source: Any, handler: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, handler)

    def _pump(self, rank: _Rank, pipe: int) -> bool:
        """Pass on what the pipe holds; False when there is nothing (more)."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
        elif pipe == rank.report_pipe:
            self._read_report(rank, data)
        else:
            rank.lines[pipe].write(data)
        return bool(data)

    def _drain(self, rank: _Rank) -> None:
        """All that the rank has written so far, before anything else is said about it."""
        for pipe in (*rank.lines, rank.report_pipe):
            while self._pump(rank, pipe):
                pass

    def _read_launcher(self, pipe: int) -> None:
        data = os.read(pipe, 1 << 16)
        self._launcher_output = (self._launcher_output + data)[-_MAX_LINE:]
        if not data:
            self._selector.unregister(pipe)

    # ---- the end

    def _note_files(self) -> None:
        for process in descendants():
            self._mpi_files |= files_of(process)

    def _end(self) -> None:
        self._note_files()
        for rank in self._ranks.values():
            rank.channel.close()  # tells its waiting process to end it
        deadline = time.monotonic() + _EXIT_GRACE_S
        while time.monotonic() < deadline and descendants():
            self._launcher.poll()
            time.sleep(0.005)
        end_descendants(grace_s=0.2)
        self._launcher.wait()
        remove(self._mpi_files)
        for rank in self._ranks.values():
            self._drain(rank)
            for lines in rank.lines.values():
                lines.flush()
            for pipe in (*rank.lines, rank.report_pipe):
                os.close(pipe)
        self._selector.close()


class _Rank:
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


class _Lines:
    """Writes whole lines to a descriptor, each with `mark` before it, in one write."""

    def __init__(self, descriptor: int, mark: bytes):
        self._descriptor = descriptor
        self._mark = mark
        self._rest = b""

    def write(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            _write(self._descriptor, self._mark + line + b"\n")
        if len(self._rest) > _MAX_LINE:
            self.flush()

    def flush(self) -> None:
        if self._rest:
            self.write(b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _say(text: str) -> None:
    _write(2, f"tdx run: {text}\n".encode())


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _receive(channel: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    """A message and the descriptors that came with it, which the caller owns."""
    packed = array.array("i")
    space = socket.CMSG_SPACE(descriptors * packed.itemsize)
    message, ancillary, _, _ = channel.recvmsg(4096, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            packed.frombytes(data[: len(data) - len(data) % packed.itemsize])
    return message, list(packed)
