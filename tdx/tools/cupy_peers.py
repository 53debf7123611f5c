"""NCCL through CuPy, for those who compare without PyTorch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.tools.peers import Makers, TimedPeers, without_multicast
from tdx.tools.timing import recorded

if TYPE_CHECKING:
    from tdx.runtime.array import Array
    from tdx.runtime.world import World

__all__ = ["CupyPeers", "unique_id"]

_BFLOAT16 = 9  # NCCL's number of the type, for which not every CuPy has a name


def unique_id() -> bytes:
    """What the ranks of a communicator share, from one of them. Raises whatever CuPy raises."""
    return pickle.dumps(_nccl().get_unique_id())


def _nccl() -> Any:
    without_multicast()
    from cupy.cuda import nccl

    return nccl


class CupyPeers(TimedPeers):
    """NCCL's collectives, called through CuPy on arrays of tdx."""

    def __init__(self, world: World, number: bytes, missing: str):
        """Collective; `number` is rank 0's unique_id. `missing`: why there is no more than that."""
        super().__init__(world, missing)
        import cupy

        self._nccl = _nccl()
        cupy.cuda.Device(world.device.index).use()
        self._comm = self._nccl.NcclCommunicator(world.size, pickle.loads(number), world.rank)
        version = self._nccl.get_version()
        release = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        self.names = f"CuPy {cupy.__version__}, NCCL {release}{without_multicast()}"

    def all_reduce(self, values: np.ndarray) -> dict[str, Any]:
        def make() -> Callable[[], None]:
            x = self._array(values)
            return partial(self.reduced, x, x)

        return self._nccl_times(make, values.nbytes)

    def reduce_scatter(self, values: np.ndarray) -> dict[str, Any]:
        def make() -> Callable[[], None]:
            x = self._array(values)
            out = self._world.empty(x.size // self._world.size, x.dtype, symmetric=False)
            return partial(self.scattered, x, out)

        return self._nccl_times(make, values.nbytes)

    def all_gather(self, values: np.ndarray) -> dict[str, Any]:
        def make() -> Callable[[], None]:
            x = self._array(values)
            out = self._world.empty(self._world.size * x.size, x.dtype, symmetric=False)
            return partial(self.gathered, x, out)

        return self._nccl_times(make, self._world.size * values.nbytes)

    def all_to_all(self, values: np.ndarray) -> dict[str, Any]:
        def make() -> Callable[[], None]:
            x, kind, ranks = self._array(values), self._nccl.NCCL_UINT8, self._world.size
            out, count = self._array(values), values.size // ranks

            def call() -> None:
                self._nccl.groupStart()
                for peer in range(ranks):
                    block = peer * count
                    self._comm.send(x.data_ptr() + block, count, kind, peer, self._stream)
                    self._comm.recv(out.data_ptr() + block, count, kind, peer, self._stream)
                self._nccl.groupEnd()

            return call

        return self._nccl_times(make, values.nbytes)

    def broadcast(self, values: np.ndarray) -> dict[str, Any]:
        def make() -> Callable[[], None]:
            x, kind = self._array(values), self._nccl.NCCL_UINT8
            return lambda: self._comm.broadcast(
                x.data_ptr(), x.data_ptr(), x.size, kind, 0, self._stream
            )

        return self._nccl_times(make, values.nbytes)

    def reduced(self, x: Array, out: Array) -> None:
        """Queue the sum of all ranks' x to out, which may be x."""
        kind, total = self._kind(x.dtype), self._nccl.NCCL_SUM
        self._comm.allReduce(x.data_ptr(), out.data_ptr(), x.size, kind, total, self._stream)

    def scattered(self, x: Array, out: Array) -> None:
        """Queue this rank's part of that sum to out."""
        kind, total = self._kind(x.dtype), self._nccl.NCCL_SUM
        self._comm.reduceScatter(x.data_ptr(), out.data_ptr(), out.size, kind, total, self._stream)

    def gathered(self, x: Array, out: Array) -> None:
        """Queue all ranks' x to out, as bytes."""
        kind = self._nccl.NCCL_UINT8
        self._comm.allGather(x.data_ptr(), out.data_ptr(), x.nbytes, kind, self._stream)

    def recorded(self, call: Callable[[], Any], calls: int) -> Callable[[], None]:
        for _ in range(3):
            call()
        self._world.synchronize()
        again = recorded(self._world, call, calls)

        def replay() -> None:
            again()
            _ = call  # the graph does not hold what it uses

        return replay

    def close(self) -> None:
        super().close()
        self._comm.destroy()

    @property
    def _stream(self) -> int:
        return self._world.stream.handle

    def _array(self, values: np.ndarray) -> Any:
        return self._world.array(values, symmetric=False)

    def _kind(self, dtype: np.dtype) -> int:
        """NCCL's number of an element type. Raises AttributeError for one that it has not."""
        if dtype.name == "bfloat16":
            return _BFLOAT16
        return int(getattr(self._nccl, f"NCCL_{dtype.name.upper()}"))

    def _nccl_times(self, make: Callable[[], Callable[[], Any]], nbytes: int) -> dict[str, Any]:
        makers: Makers = {"nccl": make}
        return self._times(makers, nbytes)
