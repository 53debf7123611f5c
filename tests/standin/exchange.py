"""Scenarios of arrays that come from, or go to, somebody else: MPI, frameworks, allocators."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tests.standin.ranks import Rank, scenario

_NOT_READY = 600


@scenario(1, 2)
def arrays_to_mpi(rank: Rank) -> None:
    """Only the streams of the arrays are waited for, and only an MPI that takes GPU memory."""
    from tdx.runtime.errors import Unsupported

    if rank.comm is None:
        from mpi4py import MPI

        rank.comm = MPI.COMM_WORLD
    with rank.leaves_nothing():
        world = rank.init()
        x = world.array(np.full(1000, rank.rank, np.int32))
        y = world.zeros((rank.size, 1000), np.int32)
        words = r"does not take GPU memory.*gpu_aware=True"
        with pytest.raises(Unsupported, match=words), world.mpi(x):
            pass
        side = world.new_stream()
        with world.on(side):
            x.data_ptr()
        rank.fake.heal()
        with world.mpi(x, y, gpu_aware=True):
            calls = rank.fake.calls()
            assert calls["cuStreamSynchronize"] == 2, calls  # the world's and the side stream
            assert "cuCtxSynchronize" not in calls
            # the stand-in's memory is the process's own: any MPI can read it
            rank.comm.Allgather(x, y)
        assert (y.numpy() == np.arange(rank.size)[:, None]).all()
        world.close()
        del x, y


@scenario(1)
def mpi_that_says_nothing(rank: Rank) -> None:
    """Without mpi4py nobody knows; an MPI that takes GPU memory is believed."""
    import sys

    from tdx.runtime import mpi_access

    with rank.leaves_nothing():
        world = rank.init()
        x = world.zeros(10, np.int32)
        module = sys.modules.pop("mpi4py.MPI", None)
        words = ("mpi4py is not loaded", "does not say")
        with rank.raises(*words, kind="Unsupported"), world.mpi(x):
            pass
        if module is not None:
            sys.modules["mpi4py.MPI"] = module
        ask, mpi_access.mpi_takes_gpu_memory = mpi_access.mpi_takes_gpu_memory, bool
        with world.mpi(x) as given:
            assert given is x
        mpi_access.mpi_takes_gpu_memory = ask
        world.close()
        del x


@scenario(1)
def bare_exports(rank: Rank) -> None:
    """stream=-1 orders nothing; debug mode says so where work is pending, else not."""
    from tdx.runtime.config import config

    with rank.leaves_nothing():
        world = rank.init()
        x = world.zeros(10, np.int32)
        for debug in (False, True):
            for pending in (False, True):
                for stream in (-1, None, 1, world.stream.handle):
                    rank.fake.heal()
                    if pending:
                        rank.fake.fail("cuStreamQuery", 1, _NOT_READY)
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        config.debug = debug
                        x.__dlpack__(stream=stream)
                        config.debug = False
                    calls = rank.fake.calls()
                    said = [str(w.message) for w in caught if w.category is RuntimeWarning]
                    assert bool(said) == (debug and pending and stream == -1), (said, stream)
                    assert all("world.mpi" in text for text in said)
                    ordered = stream not in (-1, world.stream.handle)
                    assert calls.get("cuStreamWaitEvent", 0) == ordered, (stream, calls)
                    assert "cuStreamSynchronize" not in calls
        rank.fake.heal()
        world.close()
        del x
