"""`tdx run -n N script.py ...`: run a script on N ranks of this machine.

What it adds to `mpirun`: the launcher that matches mpi4py, the options that root and more ranks
than cores need, whole output lines marked with their rank, the end of all ranks within two
seconds when one fails, with that rank's traceback first, and no process left behind. Ranks have
no standard input. After Ctrl-C (SIGINT) and after --timeout ranks are interrupted and show where
they were before they are ended; at a second Ctrl-C they are ended at once.

Exit code: the first one that is not 0 of any rank, but that of a failed rank goes before those of
ranks that raised PeerLost, PeerTimeout or CollectiveMismatch; 128 + the signal's number for a
killed rank; 124 after --timeout; 2 if the job cannot be started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from functools import partial
from types import FrameType

from tdx.abi import MAX_RANKS
from tdx.runtime.backends import choose
from tdx.runtime.errors import InvalidArgument
from tdx.tools.job import Job
from tdx.tools.launcher import clean_environment, find_launcher

__all__ = ["add_arguments", "check_ranks", "main"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "tdx run -n N [options] (SCRIPT | -m MODULE) [ARGUMENTS...]"
    parser.add_argument("-n", "--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--backend",
        choices=("host", "cuda", "hip"),
        help="what tdx.init() uses when it is given no backend",
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="end the job after S seconds, exit code 124"
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="a rank that fails is a lost peer for the others, not their end",
    )
    parser.add_argument(
        "--no-prefix", action="store_true", help="do not mark output lines with their rank"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="script and its arguments")


def main(args: argparse.Namespace) -> int:
    """Run the job of the parsed arguments; returns its exit code."""
    check_ranks(args.ranks)
    if args.timeout is not None and args.timeout <= 0:
        raise InvalidArgument(f"--timeout {args.timeout:g}: must be above 0 seconds")
    command = [] if args.ranks == 1 else find_launcher().command(args.ranks, args.keep_going)
    job = Job(
        args.ranks,
        command,
        _target(args),
        environment=_environment(args.backend),
        keep_going=args.keep_going,
        prefix=not args.no_prefix,
        timeout_s=args.timeout,
    )
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    signal.signal(signal.SIGINT, partial(_interrupt_once, job))
    try:
        return job.run()
    except _Interrupted as stop:
        return 128 + stop.number


def check_ranks(ranks: int) -> None:
    """Raise InvalidArgument for a number of ranks that no job can have."""
    if not 1 <= ranks <= MAX_RANKS:
        raise InvalidArgument(f"-n {ranks}: the number of ranks must be in 1..{MAX_RANKS}")


class _Interrupted(BaseException):
    def __init__(self, number: int):
        self.number = number


def _interrupt_once(job: Job, number: int, frame: FrameType | None) -> None:
    signal.signal(number, _interrupt)
    _say_signal(number, ", stacks of the ranks:")
    job.interrupt(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # the job is being ended
    _say_signal(number)
    raise _Interrupted(number)


def _say_signal(number: int, more: str = "") -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(2, f"tdx run: {signal.Signals(number).name}; ending the job{more}\n".encode())


def _target(args: argparse.Namespace) -> list[str]:
    """Command line of the target for `tdx.tools.rank`."""
    if args.module:
        return ["-m", *args.module]
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script:
        raise InvalidArgument("no script: tdx run -n N script.py, or tdx run -n N -m module")
    if not os.path.isfile(script[0]):
        raise InvalidArgument(f"there is no script {script[0]!r} in {os.getcwd()}")
    return ["-f", *script]


def _environment(backend: str | None) -> dict[str, str]:
    environment = clean_environment(os.environ)
    if backend is not None:
        environment["TDX_BACKEND"] = backend
    if choose(backend) == "host":
        for name in _THREAD_VARIABLES:  # ranks share the cores already
            environment.setdefault(name, "1")
    return environment
