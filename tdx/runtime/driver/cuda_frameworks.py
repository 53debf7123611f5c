"""The stream that a program works on without saying so: that of its array library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tdx.runtime.stream import DEFAULT_STREAM

__all__ = ["FrameworkStreams"]


class FrameworkStreams:
    """Current streams of PyTorch and CuPy on one GPU. Nothing is imported here."""

    def __init__(self, index: int):
        self._index = index
        self._torch: Callable[[int], int] | None = None  # tells its stream, once it uses GPUs
        self._kept: dict[int, Any] = {}  # CuPy's streams, which would end with their objects

    def current(self) -> int:
        """That of PyTorch once it has begun to use GPUs, else of CuPy once imported, else 0."""
        if self._torch is not None:
            return int(self._torch(self._index)) or DEFAULT_STREAM
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            self._torch = torch._C._cuda_getCurrentRawStream
            return self.current()
        cupy = getattr(sys.modules.get("cupy"), "cuda", None)
        if cupy is None:
            return 0
        try:
            stream = cupy.get_current_stream(self._index)
        except TypeError:  # an older CuPy tells of the GPU that is current
            stream = cupy.get_current_stream()
        handle = int(stream.ptr) or DEFAULT_STREAM
        self._kept.setdefault(handle, stream)
        return handle
