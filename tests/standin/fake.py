"""The stand-ins for libcuda and cuBLASLt from Python: building them, and steering libcuda in a
process that loaded it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CUBLAS", "Fake", "build", "compile_library"]

_SOURCES = Path(__file__).parent / "fakecuda"
CUBLAS = Path(__file__).parent / "fakecublas.c"


def build(folder: Path) -> Path:
    """Compile libcuda.so.1 and libcublasLt into `folder`, which then goes first in LD_LIBRARY_PATH.

    cuda.h is the one in Triton's own wheel. Raises FileNotFoundError without a C compiler.
    """
    import triton

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    sources = {"libcuda.so.1": sorted(_SOURCES.glob("*.c"))}
    sources |= {f"libcublasLt.so.{release}": [CUBLAS] for release in (12, 13)}
    for name, files in sources.items():
        compile_library(folder / name, files, f"-I{include}", f"-Wl,-soname,{name}")
    return folder


def compile_library(to: Path, sources: Sequence[Path], *options: str) -> None:
    """Make a shared library of C sources. Raises FileNotFoundError without a C compiler."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    subprocess.run(
        [
            compiler, "-O1", "-shared", "-fPIC", "-pthread", *options, "-o", str(to),
            *map(str, sources), "-ldl",
        ],
        check=True,
    )  # fmt: skip


class Fake:
    """The loaded stand-in. Its settings (`devices`, `memory`, ...) are attributes; see core.c."""

    _LONG = ("memory", "launches", "first_argument", "calls_after_fork")

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:  # as the scenario wants it; nothing can be steered then
            return
        library.fakecuda_fail.argtypes = (ctypes.c_char_p, ctypes.c_long, ctypes.c_int)
        object.__setattr__(self, "_library", library)

    def _variable(self, name: str) -> ctypes.c_int | ctypes.c_long:
        kind = ctypes.c_long if name in self._LONG else ctypes.c_int
        return kind.in_dll(self._library, f"fakecuda_{name}")

    def __getattr__(self, name: str) -> int:
        return self._variable(name).value

    def __setattr__(self, name: str, value: int) -> None:
        self._variable(name).value = value

    def fail(self, verb: str, call: int = 1, code: int = 304) -> None:
        """The `call`th call of `verb` from now on returns `code` (CUDA_ERROR_OPERATING_SYSTEM)."""
        self._library.fakecuda_fail(verb.encode(), call, code)

    def heal(self) -> None:
        """Nothing fails any more; counts start at zero."""
        self.fail("", 0)

    def calls(self) -> dict[str, int]:
        """How often each verb was called since the last `fail` or `heal`."""
        return self._table(self._library.fakecuda_calls)

    def live(self) -> dict[str, int]:
        """How many objects of each kind exist."""
        return self._table(self._library.fakecuda_live)

    def _table(self, function: ctypes._CFuncPtr) -> dict[str, int]:
        text = ctypes.create_string_buffer(1 << 14)
        function(text, ctypes.c_size_t(len(text)))
        rows = (line.split() for line in text.value.decode().splitlines())
        return {name: int(number) for name, number in rows}


def open_files() -> list[str]:
    """What the descriptors of this process refer to, sorted."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:  # the one that read the directory
            continue
    return sorted(found)
