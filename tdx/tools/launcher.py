"""Finding the MPI launcher that belongs to the MPI library mpi4py loads, and its options."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tdx.runtime.errors import TdxError
from tdx.tools.child import python_words

__all__ = ["Launcher", "Library", "clean_environment", "find_launcher", "find_library"]

_REMEDY = "install one that ships its launcher: pip install mpich"

# Asks without MPI_Init, which takes a second with some libraries.
_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
paths = [line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line]
print(json.dumps([MPI.Get_library_version(), paths[0] if paths else ""]))
"""

# (text in the library's or launcher's version, family); the first match counts
_FAMILIES = (
    ("open mpi", "openmpi"),
    ("openrte", "openmpi"),
    ("prrte", "openmpi"),
    ("intel(r) mpi", "intel"),
    ("mvapich", "mpich"),
    ("mpich", "mpich"),
    ("hydra", "mpich"),
)
_NAMES = {
    "mpich": ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.mpich", "mpiexec.mpich"),
    "openmpi": ("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi"),
    "intel": ("mpirun", "mpiexec", "mpiexec.hydra"),
}
# What a launcher tells its children: a job started from within a rank must not inherit it.
_ANNOUNCED = re.compile(r"(PMI|PMIX|OMPI|PRTE|HYDI|MPI_LOCAL|MV2_COMM).*")
_SETTINGS = re.compile(r"(PMIX|OMPI|PRTE)_(MCA|ALLOW_RUN)_.*")  # these are the user's own


@dataclass(frozen=True)
class Library:
    """The MPI library: first line of its version text, family, file ("" if not known)."""

    version: str
    family: str
    path: str


@dataclass(frozen=True)
class Launcher:
    """An MPI launcher: its file, family and version numbers."""

    path: str
    family: str
    version: tuple[int, ...]

    def command(self, ranks: int, keep_going: bool = False) -> list[str]:
        """Command line that starts `ranks` processes, before the program's own words.

        It works as root and with more ranks than cores. keep_going: the death of a rank does
        not end the others.
        """
        words = [self.path, "-n", str(ranks)]
        if self.family != "openmpi":
            return [*words, "-disable-auto-cleanup"] if keep_going else words
        modern = self.version >= (5,)
        words += ["--map-by", ":OVERSUBSCRIBE"] if modern else ["--oversubscribe"]
        words += ["--bind-to", "none"]
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        if keep_going:
            words += ["--with-ft", "ulfm"] if modern else []
            words.append("--enable-recovery")
        return words


def find_library(python: str = sys.executable) -> Library:
    """The MPI library that mpi4py loads in `python`. Raises TdxError if there is none."""
    done = subprocess.run(
        python_words(_PROBE, python),
        env=clean_environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TdxError(f"mpi4py finds no MPI library ({reason}); {_REMEDY}")
    version, path = json.loads(done.stdout.splitlines()[-1])
    first = " ".join(version.split("\n")[0].rstrip("\0").split())
    family = _family(version)
    if family is None:
        raise TdxError(f"tdx run knows no launcher of {first!r}; start its mpirun by hand")
    return Library(first, family, path)


def find_launcher(library: Library | None = None) -> Launcher:
    """The launcher of the library's family; looked for beside Python, the library, in PATH.

    Raises TdxError naming the places tried.
    """
    library = library or find_library()
    refused = []
    for path in _candidates(library):
        launcher = _inspect(path)
        if launcher is not None and launcher.family == library.family:
            return launcher
        refused.append(f"{path} ({launcher.family if launcher else 'does not run'})")
    tried = "; found, but not of its family: " + ", ".join(refused) if refused else ""
    raise TdxError(
        f"no mpirun for {library.version}, the MPI library mpi4py loads{tried}; "
        f"{_REMEDY}, or put the mpirun of that library into PATH"
    )


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what an MPI launcher around this process has announced."""
    return {
        name: value
        for name, value in environment.items()
        if not _ANNOUNCED.fullmatch(name) or _SETTINGS.fullmatch(name)
    }


def _family(text: str) -> str | None:
    lowered = text.lower()
    return next((family for needle, family in _FAMILIES if needle in lowered), None)


def _candidates(library: Library) -> Iterator[str]:
    folders = [Path(sys.executable).parent, Path(sys.prefix, "bin")]
    if library.path:
        home = Path(library.path).parent
        folders += [home, home.parent / "bin", home.parent.parent / "bin"]
    folders += map(Path, os.get_exec_path())
    for folder in dict.fromkeys(folders):
        for name in _NAMES[library.family]:
            found = shutil.which(name, path=str(folder))
            if found:
                yield found


def _inspect(path: str) -> Launcher | None:
    try:
        done = subprocess.run(
            [path, "--version"],
            env=clean_environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout + done.stderr
    family = _family(text)
    if family is None:
        return None
    number = re.search(r"(\d+(?:\.\d+)+)", text)
    return Launcher(path, family, tuple(map(int, number[1].split("."))) if number else ())
