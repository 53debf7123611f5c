"""The stream that a program works on without saying so: that of its array library."""

from __future__ import annotations

import sys
from typing import Any

from tdx.runtime.stream import DEFAULT_STREAM

__all__ = ["FrameworkStreams"]


class FrameworkStreams:
    """Current streams of PyTorch and CuPy on one GPU. Nothing is imported here."""

    def __init__(self, index: int):
        self._index = index
        self._kept: dict[int, Any] = {}  # CuPy's streams, which would end with their objects

    def current(self) -> int:
        """That of PyTorch once it has begun to use GPUs, else of CuPy once imported, else 0."""
        torch = getattr(sys.modules.get("torch"), "cuda", None)
        if torch is not None and torch.is_initialized():
            binding = sys.modules["torch"]._C
            return int(binding._cuda_getCurrentRawStream(self._index)) or DEFAULT_STREAM
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
