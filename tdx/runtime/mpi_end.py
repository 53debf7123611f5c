"""Leaving out MPI_Finalize in a process whose MPI job has lost ranks.

MPI_Finalize waits for all ranks of the job, without a deadline. mpi4py calls it from a function
that it gave to Py_AtExit when it was imported, and nothing in MPI or mpi4py takes that back. So
the entry is replaced, in the interpreter's own table of such functions: the rest of the
process's end, its exit code included, stays what it is.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import numpy as np

from tdx.runtime.mappings import mappings
from tdx.runtime.mpi_files import files_of, remove

__all__ = ["leave_out_if_damaged", "skip_mpi_finalize", "watch_at_exit"]

_MAX_FUNCTIONS = 32  # that Py_AtExit takes
_damaged = False
_left: set[int] = set()


def skip_mpi_finalize() -> None:
    """From now on MPI in this process cannot be finalized: a rank is lost or was left out."""
    global _damaged
    _damaged = True


def watch_at_exit(processes: Iterable[int]) -> None:
    """Ranks that left a world without a goodbye: MPI is damaged if they have ended by our exit."""
    _left.update(process for process in processes if process)


def leave_out_if_damaged() -> None:
    """Called when the process ends: keep mpi4py from MPI_Finalize, which would not return."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not (_damaged or any(map(_has_ended, _left))):
        return
    if not module.Is_initialized() or module.Is_finalized():
        return
    remove(files_of("self"))
    if not _replace(str(module.__file__)):
        sys.stderr.write(
            "tdx: ranks are lost, and MPI_Finalize may wait for them for ever: this Python does "
            "not let tdx leave it out. End the process with os._exit(code)\n"
        )


def _has_ended(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def _replace(library: str) -> bool:
    """Let the functions of `library` in the table of Py_AtExit do nothing; whether any was there.

    The table is found by adding a function of no effect, which is its last entry then.
    """
    harmless = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    add = ctypes.pythonapi.Py_AtExit
    add.argtypes = [ctypes.c_void_p]
    try:
        start = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    except ValueError:  # the interpreter does not show it
        return False
    if add(harmless):
        return False
    maps = mappings()
    end = next(m.end for m in maps if m.start <= start < m.end)
    code = [(m.start, m.end) for m in maps if "x" in m.rights and m.file == library]
    words = np.ctypeslib.as_array((ctypes.c_uint64 * ((end - start) // 8)).from_address(start))
    found = False
    for last in np.flatnonzero(words == harmless).tolist():
        for at in range(last - 1, max(-1, last - _MAX_FUNCTIONS), -1):
            if not words[at]:
                break
            if any(low <= int(words[at]) < high for low, high in code):
                words[at] = harmless
                found = True
    return found
