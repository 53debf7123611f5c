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
from tdx.tools.job_ranks import (
    MAX_LINE,
    Failure,
    Rank,
    exit_code,
    listed,
    ranks_named,
    say,
    write_all,
)
from tdx.tools.processes import adopt_orphans, descendants, end_descendants

__all__ = ["TIMED_OUT", "Job"]

TIMED_OUT = 124  # exit code, as that of timeout(1)
_FAILED_GRACE_S = 0.3  # for the exit handlers of a rank that failed
_CAUSE_GRACE_S = 1.0  # between a consequence and the last news of what it is one of
_INTERRUPT_GRACE_S = 2.0  # for the traceback of a rank that was sent SIGINT
_LAUNCHER_GRACE_S = 0.5  # between the launcher's end and the last news of its ranks
_LAUNCHER_END_S = 10.0  # between the end of all ranks and the launcher's, which says why
_EXIT_GRACE_S = protocol.TERM_GRACE_S + 0.5
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CONSEQUENCES = ("PeerLost", "PeerTimeout", "CollectiveMismatch")  # errors told of other ranks


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
        self._interrupt_code = 0
        self._is_stopping = False  # ranks were told to say where they are
        self._are_aborted = False
        self._consequence: Failure | None = None  # said once it is clear that nothing caused it
        self._ranks: dict[int, Rank] = {}
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

    def interrupt(self, code: int) -> None:
        """For a signal handler: end the job with this exit code, after the ranks' tracebacks."""
        self._interrupt_code = code

    # ---- what runs while the job does

    def _loop(self) -> None:
        started = time.monotonic()
        while not self._is_over():
            for key, _ in self._selector.select(0.05):
                key.data()
            now = time.monotonic()
            if self._interrupt_code and not self._is_stopping:
                self._stop(self._interrupt_code)
            elif self._end_at is None:
                if self._timeout_s is not None and now - started > self._timeout_s:
                    text = f"not finished after {self._timeout_s:g} s; ending the job"
                    say(f"{text}, stacks of the ranks:")
                    self._stop(TIMED_OUT)
                elif self._launcher.poll() is not None:
                    self._end_at = now + _LAUNCHER_GRACE_S
                elif self._have_all_ended():
                    self._end_at = now + _LAUNCHER_END_S
            elif now > self._end_at and not self._abort_silent():
                break
        if self._consequence is not None:
            self._blame(self._consequence)

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
        rank = self._ranks[number] = Rank(number, pid, channel, pipes, mark)
        self._watch(channel, lambda: self._read_status(rank))
        for pipe in pipes:
            os.set_blocking(pipe, False)
            self._watch(pipe, partial(self._pump, rank, pipe))

    def _read_report(self, rank: Rank, data: bytes) -> None:
        rank.report += data
        *lines, rank.report = rank.report.split(b"\n")
        for line in lines:
            fields = json.loads(line)
            if fields.get("finished"):
                rank.is_finished = True
                self._note_files()
            else:
                self._fail(rank, fields["code"], fields.get("error"), fields.get("traceback"))

    def _read_status(self, rank: Rank) -> None:
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

    def _fail(self, rank: Rank, code: int, error: str | None = None, trace: str = "") -> None:
        """The rank's first bad news: say it, and end the job unless it is to go on.

        An error that tells of other ranks is held back, in case one of them failed before it.
        """
        if rank.code is not None:
            return
        rank.code = code
        self._note_files()
        self._exit_code = self._exit_code or exit_code(code)
        self._drain(rank)
        failure = Failure(rank, error, trace or "")
        if self._is_stopping:
            failure.show()
        elif self._end_at is not None and self._consequence is None:
            pass  # it fell with the others
        elif self._keep_going:
            failure.show()
            say(f"{failure}; the other ranks go on")
            with contextlib.suppress(ProcessLookupError):  # its exit could wait for them
                os.kill(rank.pid, signal.SIGKILL)
        elif error not in _CONSEQUENCES:
            self._consequence = None
            self._blame(failure)
            self._end_at = time.monotonic() + _FAILED_GRACE_S
        elif self._consequence is None:
            self._consequence = failure
            self._end_at = time.monotonic() + _CAUSE_GRACE_S

    def _blame(self, failure: Failure) -> None:
        failure.show()
        text = str(failure)
        done = [n for n, rank in self._ranks.items() if rank.has_ended_well]
        if done and failure is self._consequence:
            text = f"{ranks_named(done)} ended with code 0; {text}"
        if not self._is_stopping:
            self._exit_code = exit_code(failure.code)
        say(f"{text}; ending the job")

    def _stop(self, code: int) -> None:
        """End the job soon: first Python raises KeyboardInterrupt where each rank is."""
        self._is_stopping = True
        self._exit_code = code
        self._end_at = time.monotonic() + _INTERRUPT_GRACE_S
        self._signal_running(signal.SIGINT)

    def _abort_silent(self) -> bool:
        """Ranks that are not in Python: faulthandler prints their stacks on SIGABRT."""
        if not self._is_stopping or self._are_aborted:
            return False
        self._are_aborted = True
        self._end_at = time.monotonic() + _FAILED_GRACE_S
        return self._signal_running(signal.SIGABRT)

    def _signal_running(self, number: int) -> bool:
        running = [r for r in self._ranks.values() if r.code is None and not r.has_ended_well]
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)
        return bool(running)

    def _check_complete(self, launcher_code: int | None) -> None:
        """Ranks without a result where none has failed: the launcher knows why."""
        missing = [n for n in range(self._size) if n not in self._ranks]
        lost = [rank.number for rank in self._ranks.values() if rank.code is None]
        if not missing and not lost:
            return
        self._exit_code = abs(launcher_code or 1)
        write_all(2, self._launcher_output)
        what = f"never started: {listed(missing)}" if missing else f"ended early: {listed(lost)}"
        say(f"ranks that {what}; {self._command[0]} ended with code {launcher_code}")

    # ---- output

    def _watch(self, source: Any, handler: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, handler)

    def _pump(self, rank: Rank, pipe: int) -> bool:
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

    def _drain(self, rank: Rank) -> None:
        """All that the rank has written so far, before anything else is said about it."""
        for pipe in (*rank.lines, rank.report_pipe):
            while self._pump(rank, pipe):
                pass

    def _read_launcher(self, pipe: int) -> None:
        data = os.read(pipe, 1 << 16)
        self._launcher_output = (self._launcher_output + data)[-MAX_LINE:]
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


def _receive(channel: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    """A message and the descriptors that came with it, which the caller owns."""
    packed = array.array("i")
    space = socket.CMSG_SPACE(descriptors * packed.itemsize)
    message, ancillary, _, _ = channel.recvmsg(4096, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            packed.frombytes(data[: len(data) - len(data) % packed.itemsize])
    return message, list(packed)
