"""The files in /dev/shm through which the ranks of an MPI job share memory.

MPI removes them in MPI_Finalize. A process that ends without it leaves them behind, until the
machine is started again, so that somebody else has to remove them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

__all__ = ["files_of", "remove"]

# MPICH and what is derived from it; Open MPI
_NAMES = ("/dev/shm/mpich_", "/dev/shm/sm_segment.", "/dev/shm/vader_segment.")


def files_of(process: int | str) -> set[str]:
    """Those that a process has mapped; empty for one that is gone or of another user."""
    found = set()
    with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as file:
        for line in file:
            path = line.rstrip("\n").split(maxsplit=5)[-1]
            if path.startswith(_NAMES) and not path.endswith(" (deleted)"):
                found.add(path)
    return found


def remove(files: Iterable[str]) -> None:
    """Remove the files' names; processes that have them mapped are not disturbed."""
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)
