"""Scenarios of what ends early: devices, peers, recordings, and streams that memory went to."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.standin.foreign import CupyArray, stand_in_for_cupy
from tests.standin.ranks import Rank, scenario

_SOON_S = 5.0  # half of the time limit of the worlds


@contextlib.contextmanager
def _soon() -> Iterator[None]:
    """The block must not take until the world's time limit."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < _SOON_S


@scenario(2)
def a_device_breaks(rank: Rank) -> None:
    """After an illegal address every call fails: close() says so and ends, and the peer hears."""
    from tdx.runtime.errors import DriverError, TdxError

    def broken(what: str, *_: object) -> None:
        raise DriverError(f"{what}: CUDA_ERROR_ILLEGAL_ADDRESS")

    world = rank.init()
    rank.meet()
    if rank.rank == 0:
        world.driver._call = broken
        with _soon(), rank.raises("ILLEGAL_ADDRESS", kind="DriverError"):
            world.close()
        assert world.closed
        assert world.channels._closed
        world.close()  # nothing is left to do
    else:
        words = ("lost rank 0", "closed its world", "ILLEGAL_ADDRESS")
        with _soon(), rank.raises(*words, kind="PeerLost"):
            world.barrier()
        with contextlib.suppress(TdxError):
            world.close()


@scenario(1)
def exports_to_streams_that_may_end(rank: Rank) -> None:
    """The memory is used again when the GPU was idle; too much of it is waited for."""
    from cuda.bindings import driver as cu

    from tdx.runtime.driver import cuda_memory

    with rank.leaves_nothing():
        world, theirs = rank.init(), int(cu.cuStreamCreate(1)[1])
        before = rank.fake.live()["allocations"]
        address = _export_and_drop(world, 1000, theirs)
        x = world.zeros(1000, np.int8, symmetric=False)
        assert x.data_ptr() != address
        assert rank.fake.live()["allocations"] == before + 2
        world.synchronize()
        assert rank.fake.live()["allocations"] == before + 1
        kept = [x]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_memory, "_LATE_BYTES", 4000)
            for waiting in (1, 2, 3, 0, 1):  # pieces of 1024 bytes
                _export_and_drop(world, 1000, theirs)
                kept.append(world.empty(5000, np.int8, symmetric=False))
                assert rank.fake.live()["allocations"] == before + waiting + len(kept)
        cu.cuStreamDestroy(theirs)
        world.close()
        del x, kept


def _export_and_drop(world: Any, nbytes: int, stream: int, symmetric: bool = False) -> int:
    """Where the memory is that a consumer had on `stream`."""
    x = world.zeros(nbytes, np.int8, symmetric=symmetric)
    x.__dlpack__(stream=stream)
    return x._address


@scenario(1)
def heap_of_exports(rank: Rank) -> None:
    """Memory of the heap that went to a stream of others is free when the GPU was idle."""
    from cuda.bindings import driver as cu

    with rank.leaves_nothing():
        world, theirs = rank.init(heap_bytes=4 << 20), int(cu.cuStreamCreate(1)[1])
        for stream, waits in ((world.stream.handle, 0), (theirs, 1)):
            address = _export_and_drop(world, 3 << 20, stream, symmetric=True)
            rank.fake.heal()
            x = world.empty(3 << 20, np.int8)
            assert x._address == address
            assert rank.fake.calls().get("cuCtxSynchronize", 0) == waits
            del x
        cu.cuStreamDestroy(theirs)
        world.close()


@scenario(2)
def heap_is_full_in_a_recording(rank: Rank) -> None:
    """It cannot be waited for: all ranks raise, though only one of them holds what fills it."""
    import tdx

    with rank.leaves_nothing():
        world = rank.init(heap_bytes=4 << 20)
        held = world.zeros(3 << 20, np.uint8)
        if rank.rank == 0:
            held = None
        gc.collect()
        world.barrier()
        refused = rank.raises("while a graph is recorded", kind="InvalidArgument")
        with _soon(), refused, tdx.graph(world):
            world.empty(2 << 20, np.uint8)
        del held
        world.empty(2 << 20, np.uint8)
        world.close()


class _NoStorage(CupyArray):
    """An array whose framework cannot say where it lies."""

    @property
    def data(self) -> Any:
        raise RuntimeError("no storage")

    @data.setter
    def data(self, value: Any) -> None:
        pass


@scenario(2)
def a_framework_fails(rank: Rank) -> None:
    """Its own error is raised on the rank, and the peer, which goes straight, hears of it."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        stand_in_for_cupy(SimpleNamespace(ptr=world.new_stream().handle))
        x, out = (CupyArray(world, world.zeros(64, np.int32, symmetric=False)) for _ in range(2))
        if rank.rank == 0:
            _NoStorage.__module__, x.__class__ = "cupy", _NoStorage
            caught = pytest.raises(RuntimeError, match="no storage")
        else:
            caught = rank.raises("refused: RuntimeError: no storage", kind="CollectiveMismatch")
        with _soon(), caught:
            tdx.all_reduce(x, out=out)
        world.close()
        del sys.modules["cupy"], world, x, out, caught
    rank.check_works()
