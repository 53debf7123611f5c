"""Triton's semi-private hooks: the device library reaches every compilation.

`tdx.language` calls functions written in LLVM IR, which Triton links when a kernel refers to
them. Adding the library where a backend parses its options covers `kernel[grid](...)` as well as
`triton.compile`, and makes the library's content part of the key of Triton's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tdx

LIBRARY_VERSION = 4  # raised with every change of a file in tdx/language/device

_COMPILE_S = 120.0  # how long to wait for another process that compiles a kernel
_LOCK_FILES = 1024

_original: dict[Any, Any] = {}
_lock = threading.Lock()


def constexpr(value: Any) -> Any:
    """`value` as a compile-time constant inside a tuple that is a kernel argument."""
    import triton.language as tl

    return tl.constexpr(value)


def device_library(backend_name: str) -> dict[str, str]:
    """Library name -> path of the text file for a Triton backend, "cuda" or "hip".

    Triton's AMD backend links a library only when its name occurs in that of an undefined
    function ("tdx_..."). Triton 3.6 keys its cache by the path of a library, not its content,
    which explains the version in the file's name.
    """
    vendor = {"cuda": "nvidia", "hip": "amd"}[backend_name]
    folder = Path(tdx.__file__).parent / "language" / "device"
    return {"tdx": str(folder / f"tdx_{vendor}_{LIBRARY_VERSION}.ll")}


def install_device_library() -> None:
    """Add the device library to every later compilation of this process. Idempotent."""
    with _lock:
        for backend in _backends():
            if backend not in _original:
                _original[backend] = backend.parse_options
                backend.parse_options = _with_library(backend.parse_options)


def remove_device_library() -> None:
    """Undo `install_device_library`; a hook that somebody put on top of ours stays."""
    with _lock:
        for backend, original in list(_original.items()):
            if getattr(backend.parse_options, "_tdx_original", None) is original:
                backend.parse_options = original
                del _original[backend]


@contextmanager
def device_library_installed() -> Iterator[None]:
    """The device library for compilations inside the block, whether or not it was installed."""
    was_installed = bool(_original)
    install_device_library()
    try:
        yield
    finally:
        if not was_installed:
            remove_device_library()


@contextmanager
def compiled_once(kernel: Any, named: dict[str, Any]) -> Iterator[None]:
    """Compile `kernel` in the block: the first process of the host does, the others wait for it.

    They then find it in Triton's cache, all at once. A lock ends with the process that holds it;
    who waits longer than two minutes, or where files cannot be locked, compiles as well.
    """
    from triton import knobs

    text = f"{kernel.cache_key} {named}".encode()
    # not more files than that: kernels that share one at most wait for each other
    number = int.from_bytes(hashlib.sha256(text).digest()[:4], "big") % _LOCK_FILES
    try:
        os.makedirs(knobs.cache.dir, exist_ok=True)
        path = os.path.join(knobs.cache.dir, f"tdx-compiles-{number}.lock")
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        if not _locked(file, fcntl.LOCK_EX):
            deadline = time.monotonic() + _COMPILE_S
            while not _locked(file, fcntl.LOCK_SH) and time.monotonic() < deadline:
                time.sleep(0.01)
        yield
    finally:
        os.close(file)


def _locked(file: int, kind: int) -> bool:
    """Whether nobody else holds a lock that stands against this one, which is held now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True


def _with_library(parse_options: Any) -> Any:
    def parse_options_with_library(self: Any, options: dict[str, Any]) -> Any:
        libraries = device_library(self.target.backend)
        asked = {**libraries, **dict(options.get("extern_libs") or {})}
        return parse_options(self, {**options, "extern_libs": asked})

    wrapper: Any = parse_options_with_library
    wrapper._tdx_original = parse_options
    return wrapper


def _backends() -> list[Any]:
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.nvidia.compiler import CUDABackend

    return [CUDABackend, HIPBackend]
