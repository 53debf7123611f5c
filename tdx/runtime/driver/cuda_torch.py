"""The stream that a program works on without saying so: that of PyTorch, where it uses GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tdx.runtime.stream import DEFAULT_STREAM

__all__ = ["TorchStream"]


class TorchStream:
    """PyTorch's current stream on one GPU. Nothing is imported here."""

    def __init__(self, index: int):
        self._index = index
        self._ask: Callable[[int], int] | None = None  # there once PyTorch uses GPUs

    def current(self) -> int:
        """The stream; 0 as long as PyTorch has not begun to use GPUs."""
        if self._ask is None:
            torch = sys.modules.get("torch")
            if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
                return 0
            self._ask = torch._C._cuda_getCurrentRawStream
        return self._ask(self._index) or DEFAULT_STREAM
