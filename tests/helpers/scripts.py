"""Scripts for `tdx run`, and the processes that they leave."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path

__all__ = ["leftovers", "wait_for_end", "write_script"]

# a marker in the command line, by which leftovers are found
_NAME = "tdx_run_test_script.py"

_HEAD = """
import os, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank = comm.Get_rank()
comm.Barrier()
"""


def write_script(folder: Path, body: str, head: str = _HEAD) -> str:
    """Its path; the script begins with the imports, `comm` and `rank`."""
    path = folder / _NAME
    path.write_text(head + textwrap.dedent(body))
    return str(path)


def leftovers(path: str) -> list[str]:
    """Command lines of processes that still run the script."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if path in line and int(name) != os.getpid():
            found.append(line)
    return found


def wait_for_end(path: str, limit_s: float = 3.0) -> None:
    deadline = time.monotonic() + limit_s
    while leftovers(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(path) == []
