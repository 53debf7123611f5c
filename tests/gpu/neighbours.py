"""PyTorch, CuPy and JAX on the GPU of a world of one rank: the same few verbs for each.

An array here has N float32, unless it was taken from a producer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pytest

from tests.helpers.frameworks import jax_device, missing

__all__ = ["NAMES", "N", "Neighbour", "neighbour"]

N = 1000
NAMES = ("torch", "cupy", "jax")
_CYCLES = 200_000_000  # of a slow kernel: a tenth of a second
_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;);
}
"""


class Neighbour(Protocol):
    """A framework. What it queues goes to its current stream."""

    has_streams: bool

    def on(self, where: str) -> contextlib.AbstractContextManager[Any]:
        """The current stream in the block: the "default" one, or a "side" one."""
        ...

    def full(self, value: float) -> Any:
        """An array."""
        ...

    def late(self, value: float) -> tuple[Any, Callable[[], bool]]:
        """An array that holds `value` after a slow kernel only; and whether that still runs."""
        ...

    def take(self, producer: Any) -> Any:
        """An array over the memory of a DLPack producer."""
        ...

    def address(self, x: Any) -> int: ...

    def fill(self, x: Any, value: float) -> None:
        """Write to all of `x`. TypeError where arrays are immutable."""
        ...

    def doubled(self, x: Any) -> Any: ...

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        """A copy on the host, which waits for the current stream only."""
        ...


class Torch:
    has_streams = True

    def __init__(self, world: Any):
        import torch

        self.torch = torch
        torch.cuda.set_device(world.device.index)

    def on(self, where: str) -> Any:
        side = where == "side"
        return self.torch.cuda.stream(
            self.torch.cuda.Stream() if side else self.torch.cuda.default_stream()
        )

    def full(self, value: float) -> Any:
        return self.torch.full((N,), value, dtype=self.torch.float32, device="cuda")

    def late(self, value: float) -> tuple[Any, Callable[[], bool]]:
        x, done = self.full(0), self.torch.cuda.Event()
        self.torch.cuda._sleep(_CYCLES)
        x += value
        done.record()
        return x, lambda: not done.query()

    def take(self, producer: Any) -> Any:
        return self.torch.from_dlpack(producer)

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def fill(self, x: Any, value: float) -> None:
        x.fill_(value)

    def doubled(self, x: Any) -> Any:
        return x * 2

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return x.cpu().numpy()


class CuPy:
    has_streams = True

    def __init__(self, world: Any):
        import cupy

        self.cupy = cupy
        cupy.cuda.Device(world.device.index).use()
        self._spin = cupy.RawKernel(_SPIN, "spin")

    def on(self, where: str) -> Any:
        stream = self.cupy.cuda.Stream
        return stream(non_blocking=True) if where == "side" else stream.null

    def full(self, value: float) -> Any:
        return self.cupy.full(N, value, self.cupy.float32)

    def late(self, value: float) -> tuple[Any, Callable[[], bool]]:
        x, done = self.full(0), self.cupy.cuda.Event(disable_timing=True)
        self._spin((1,), (1,), (np.int64(_CYCLES),))
        x += value
        done.record()
        return x, lambda: not done.done

    def take(self, producer: Any) -> Any:
        return self.cupy.from_dlpack(producer)

    def address(self, x: Any) -> int:
        return int(x.data.ptr)

    def fill(self, x: Any, value: float) -> None:
        x.fill(value)

    def doubled(self, x: Any) -> Any:
        return x * 2

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return x.get()


class Jax:
    """Its arrays are immutable, and there is no current stream."""

    has_streams = False

    def __init__(self, world: Any):
        self._device = jax_device(world)
        import jax

        self.jax = jax
        self._large = self._put(np.ones(1 << 26, np.float32))
        self._one = self._put(np.ones((), np.float32))

        @jax.jit
        def late(x: Any, one: Any, value: Any) -> Any:
            """`one` is no constant, so that nothing can be left out."""
            x = jax.lax.fori_loop(0, 500, lambda _, x: x * one, x)
            return jax.numpy.full(N, x.max() * value)

        self._late = late

    def _put(self, x: np.ndarray[Any, Any]) -> Any:
        return self.jax.device_put(x, self._device)

    def on(self, where: str) -> Any:
        return contextlib.nullcontext()

    def full(self, value: float) -> Any:
        return self._put(np.full(N, value, np.float32))

    def late(self, value: float) -> tuple[Any, Callable[[], bool]]:
        x = self._late(self._large, self._one, self._put(np.full((), value, np.float32)))
        return x, lambda: not x.is_ready()

    def take(self, producer: Any) -> Any:
        return self.jax.dlpack.from_dlpack(producer)

    def address(self, x: Any) -> int:
        return int(x.unsafe_buffer_pointer())

    def fill(self, x: Any, value: float) -> None:
        raise TypeError("arrays of JAX are immutable")

    def doubled(self, x: Any) -> Any:
        return x * 2

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x)


_KINDS: dict[str, Callable[[Any], Neighbour]] = {"torch": Torch, "cupy": CuPy, "jax": Jax}


def neighbour(name: str, world: Any) -> Neighbour:
    """The framework on the world's GPU; skips the test where it cannot be used."""
    if why := missing(name, "cuda"):
        pytest.skip(why)
    return _KINDS[name](world)
