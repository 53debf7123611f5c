"""What `tdx run` starts as every rank: `python -P rank.py (-f SCRIPT | -m MODULE) [ARGS...]`.

The process forks. The child becomes the rank: its stdout and stderr are pipes whose other ends
are handed to `tdx run`, so nothing is lost when it dies. The parent, which the MPI launcher
knows, waits for the child, tells `tdx run` how it ended, and ends it when `tdx run` is gone.

Only the standard library is used: a script that does not need tdx does not pay for its import.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import traceback
from typing import Any, NoReturn

CHANNEL_VARIABLE = "TDX_RUN_CHANNEL"  # "NAME:TOKEN", both hexadecimal
HELLO = struct.Struct("16sII")  # token, rank, process id; with the pipes of _PIPES
STATUS = struct.Struct("i")  # exit code, or minus the number of the signal
PIPES = ("stdout", "stderr", "report")  # report: JSON lines
TERM_GRACE_S = 0.5  # between SIGTERM and SIGKILL for a rank

_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    rank = next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)
    name, token = os.environ.pop(CHANNEL_VARIABLE).split(":")
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(b"\0" + name.encode())
    pipes = [os.pipe() for _ in PIPES]
    waiter = os.getpid()
    pid = os.fork()
    if pid == 0:
        channel.close()
        for read, _ in pipes:
            os.close(read)
        _become_rank([write for _, write in pipes], waiter)
    for _, write in pipes:
        os.close(write)
    descriptors = array.array("i", [read for read, _ in pipes])
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
    channel.sendmsg([HELLO.pack(bytes.fromhex(token), rank, pid)], rights)
    for read, _ in pipes:
        os.close(read)
    _wait(pid, channel)


def _wait(pid: int, channel: socket.socket) -> NoReturn:
    """Report the child's end; then stay until told to go, so that the launcher sees no death."""
    signal.signal(signal.SIGTERM, lambda number, frame: _kill(pid, number))
    child = os.pidfd_open(pid)
    ready, _, _ = select.select([child, channel.fileno()], [], [])
    if child not in ready:  # `tdx run` ends the job, or is gone itself
        _kill(pid, signal.SIGTERM)
        if not select.select([child], [], [], TERM_GRACE_S)[0]:
            _kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        channel.send(STATUS.pack(code))
        channel.recv(1)
    os._exit(code if code >= 0 else 128 - code)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _become_rank(writes: list[int], waiter: int) -> NoReturn:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != waiter:
        os._exit(1)
    os.dup2(writes[0], 1)
    os.dup2(writes[1], 2)
    os.close(writes[0])
    os.close(writes[1])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" makes it ignored
    report = writes[2]
    # Registered first, so it runs after all of the script's own; MPI_Finalize comes later still.
    atexit.register(_report_finished, report, os.getpid())
    flag, target, *sys.argv = sys.argv[1:]
    sys.exit(_execute(flag, target, report))


def _execute(flag: str, target: str, report: int) -> int:
    """Run the target as `python` would; an exit code other than 0 is reported at once."""
    rank = os.getpid()
    try:
        if flag == "-m":
            own = target.partition(".")[0] == "tdx"  # uses no file of the current folder
            folder = os.path.realpath(f"{__file__}/../../..") if own else os.getcwd()
            if not own or folder not in sys.path:
                sys.path.insert(0, folder)
            sys.argv.insert(0, target)
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
            sys.argv.insert(0, target)
            runpy.run_path(os.path.abspath(target), run_name="__main__")
    except SystemExit as stop:
        if os.getpid() != rank:
            raise
        code = stop.code
        if code is None:
            return 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        code &= 0xFF
        if code:  # before exit handlers, of which MPI_Finalize would wait for the other ranks
            _flush()
            _report(report, code=code)
        return code
    except BaseException as error:
        if os.getpid() != rank:  # a fork made by the script
            raise
        _flush()
        _report(report, code=1, error=type(error).__name__, traceback=_format(error))
        sys.last_value = error  # as where Python shows it itself, for what is closed at exit
        return 1
    return 0


def _format(error: BaseException) -> str:
    """The traceback from the first frame of the user's code on."""
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__
        or trace.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _report_finished(descriptor: int, rank: int) -> None:
    if os.getpid() == rank:
        _report(descriptor, finished=True)


def _report(descriptor: int, **fields: Any) -> None:
    data = json.dumps(fields).encode() + b"\n"
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
