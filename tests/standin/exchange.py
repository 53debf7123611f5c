"""Scenarios of arrays that come from, or go to, somebody else: MPI, frameworks, allocators."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from tdx.runtime import dlpack
from tests.helpers.vmm import FABRIC, PIECE, POSIX_FD, Producer, allocated
from tests.standin.ranks import ERROR, Rank, scenario

_NOT_READY = 600


def stored(array: Producer) -> np.ndarray:
    """What the stand-in has in the array's memory, which is the process's own."""
    return dlpack.numpy_view(array, array.address, array.shape, (4,), array.dtype)


@scenario(1, 2, 3)
def registered_memory(rank: Rank) -> None:
    """Every rank sees all ranks' memory in its own window, and owners see what is written."""
    with rank.leaves_nothing():
        world = rank.init()
        offset, count = PIECE - 4096, 2 * PIECE // 4
        pieces = 1 if rank.last else 3  # one rank has it in one piece
        with allocated(world.device.index, pieces, 3 * PIECE // pieces) as allocator:
            producer = allocator.array(offset, count)
            theirs = stored(producer)
            theirs[:] = np.arange(count) + rank.rank
            before = rank.fake.live()["mappings"]
            x = world.register(producer)
            assert producer.streams == [world.stream.handle]
            assert x.data_ptr() != producer.address
            mapped = 3 * (rank.size - 1) + 1
            assert rank.fake.live()["mappings"] - before == mapped
            world.barrier()
            for peer in range(rank.size):
                assert (x.peer(peer).numpy() == np.arange(count) + peer).all()
            world.barrier()
            right = (rank.rank + 1) % rank.size
            x.peer(right).copy_from(np.full(count, 7 * rank.rank, np.int32))
            world.synchronize()
            world.barrier()
            assert (theirs == 7 * ((rank.rank - 1) % rank.size)).all()
            x.free()
            assert rank.fake.live()["mappings"] == before
            del x
            x = world.register(producer)
            del x
            y = world.register(producer)  # unmaps what all have dropped
            assert rank.fake.live()["mappings"] - before == mapped
            assert "handles" not in rank.fake.live()
            del theirs, producer
        world.close()
        del y


@scenario(1, 2, 3)
def registering_fails(rank: Rank) -> None:
    """Whichever call fails on one rank: all raise, and nothing stays."""
    with rank.leaves_nothing():
        world = rank.init()
        with allocated(world.device.index, pieces=3) as allocator:
            producer = allocator.array(256, 3 * PIECE // 4 - 64)
            theirs = stored(producer)
            world.register(producer).free()
            rank.fake.heal()
            world.register(producer).free()
            calls = rank.union(rank.fake.calls())
            before = rank.fake.live()
            for verb in (
                "cuMemGetAddressRange",
                "cuMemRetainAllocationHandle",
                "cuMemGetAllocationPropertiesFromHandle",
                "cuMemExportToShareableHandle",
                "cuMemImportFromShareableHandle",
                "cuMemMap",
                "cuMemSetAccess",
            ):
                assert calls[verb] >= 3, calls
                for call in range(1, calls[verb] + 1):
                    rank.meet()
                    if rank.last:
                        rank.fake.fail(verb, call)
                    with rank.raises(ERROR, kind="DriverError"):
                        world.register(producer)
                    rank.fake.heal()
                    assert rank.fake.live() == before, (verb, call, rank.fake.live(), before)
            x = world.register(producer)
            theirs[5] = 55
            assert x.numpy()[5] == 55
            del producer, theirs
        world.close()
        del x


@scenario(1, 2)
def what_cannot_be_registered(rank: Rank) -> None:
    """All ranks raise, with the allocators that would do, whatever the reason and on which."""
    with rank.leaves_nothing():
        world = rank.init()
        remedy = ("expandable_segments:True", "cupy.cuda.set_allocator", "world.array(x)")
        pool = world.zeros(100, np.int32, symmetric=False)  # cuMemAllocFromPoolAsync
        unknown = Producer(4096, (100,), np.int32, world.device.index)
        with contextlib.ExitStack() as stack:
            gpu = world.device.index
            good, fabric, foreign = (
                stack.enter_context(allocated(device, 1, kinds=kinds)).array(0, 100)
                for device, kinds in ((gpu, POSIX_FD), (gpu, FABRIC), (5, POSIX_FD))
            )
            foreign.device = good.device  # as if the producer did not know
            hole = Producer(good.address, (PIECE,), np.int32, world.device.index)
            bad = Producer(pool.data_ptr(), (100,), np.int32, world.device.index)
            for array, words in (
                (bad, remedy),
                (unknown, remedy),
                (fabric, ("without descriptors", *remedy)),
                (foreign, ("on GPU 5",)),
            ):
                given = array if rank.last else good
                with rank.raises(*words, kind="Unsupported"):
                    world.register(given)
                with rank.raises(*words, kind="Unsupported"):
                    world.register(array)
            with rank.raises(*remedy, kind="Unsupported"):
                world.register(hole)  # whose end is not mapped
            other = Producer(good.address, (100,), np.int32, 6)
            with rank.raises("on GPU 6", kind="Unsupported"):
                world.register(other)
            with rank.raises("DLPack device (1, 0)", kind="Unsupported"):
                world.register(np.zeros(100, np.int32))
            world.barrier()
            world.register(good).free()
        world.close()
        del pool


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
        for debug in (False, True):
            for pending in (False, True):
                for stream in (-1, None, 1, world.stream.handle):
                    x = world.zeros(10, np.int32)
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


@scenario(1)
def producers_without_a_stream(rank: Rank) -> None:
    """Who shows no stream is asked to order its work before ours, once for each stream."""
    with rank.leaves_modules():
        world = rank.init()
        with allocated(world.device.index, pieces=1) as allocator:
            _ask_in_all_ways(world, allocator.array(0, 64))
        world.close()


def _ask_in_all_ways(world: Any, x: Producer) -> None:
    import tdx

    ours, side, theirs = world.stream.handle, world.new_stream(), stored(x)
    theirs[:] = np.arange(64)
    y = world.zeros(64, np.int32)
    plan = tdx.AllReduce(world, 64, np.int32)
    graph = tdx.graph(world)

    def asked(call: Any) -> list[int | None]:
        x.streams.clear()
        call()
        return list(x.streams)

    def elsewhere() -> None:
        with world.on(side):
            tdx.put(y, x, 0)

    def record() -> None:
        with graph:
            plan(x, y)

    for streams, call in (
        ([ours], lambda: y.copy_from(x)),
        ([ours], lambda: tdx.put(y, x, 0)),
        ([side.handle], lambda: tdx.put(y, x, 0, stream=side)),
        ([side.handle], elsewhere),
        ([1], lambda: tdx.put(y, x, 0, stream=0)),
        ([ours], lambda: plan(x, y)),
        ([ours, side.handle], lambda: plan(x, y, stream=side)),
        ([side.handle], lambda: y.copy_from(x)),
        ([ours], lambda: world.array(x)),
        ([ours], lambda: tdx.all_reduce(x, out=y)),
        # what is recorded cannot wait for what runs now: the replay does
        ([1], record),
        ([ours], graph.replay),
        ([side.handle], lambda: graph.replay(side)),
    ):
        assert asked(call) == streams, (x.streams, streams)
    assert (y.copy_from(x).numpy() == theirs).all()


@scenario(2)
def a_gather_is_dropped_before_it_was_joined(rank: Rank) -> None:
    """Its memory goes back behind what its own stream still does."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        plan = tdx.AllGather(world, (8, 4), "float32", progress=True)
        x = world.zeros((8, 4), "float32", symmetric=False)
        plan(x)
        rank.fake.heal()
        del plan
        gc.collect()
        assert rank.fake.calls()["cuStreamWaitEvent"] >= 1
        world.close()
        del x
