"""Triton's semi-private hooks: the device library reaches every compilation.

`tdx.language` calls functions written in LLVM IR, which Triton links when a kernel refers to
them. Adding the library where a backend parses its options covers `kernel[grid](...)` as well as
`triton.compile`, and makes the library's content part of the key of Triton's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tdx

LIBRARY_VERSION = 1  # raised with every change of a file in tdx/language/device

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
