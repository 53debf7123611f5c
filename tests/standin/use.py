"""Scenarios of a world in use: threads, graphs, copies, memory that outlives its world."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from typing import Any

import numpy as np
import pytest

from tests.standin.ranks import ERROR, Rank, scenario


@scenario(1)
def other_threads(rank: Rank) -> None:
    """Finalizers, fault reports and launches come from threads that never used the GPU."""
    with rank.leaves_nothing():
        world = rank.init()
        held = [world.array(np.arange(10), symmetric=False), world.stream.record()]
        failures: list[BaseException] = []

        def run(held: list[Any]) -> None:
            try:
                held.clear()
                gc.collect()
                world.faults.halt()
                assert world.driver.launch_stream() == world.stream.handle
                x = world.array(np.arange(5), symmetric=False)
                assert (x.numpy() == np.arange(5)).all()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, args=(held,))
        thread.start()
        thread.join()
        assert not failures, failures
        assert rank.fake.live()["allocations"] == 1  # the control block
        assert "events" not in rank.fake.live()
        world.close()


@scenario(1)
def forked(rank: Rank) -> None:
    """A forked copy drops what it inherited without touching the GPU."""
    world = rank.init()
    x = world.array(np.arange(10), symmetric=False)
    event = world.stream.record()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            del x, event
            gc.collect()
            code = 0 if rank.fake.calls_after_fork == 0 else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    world.close()


@scenario(1)
def recording(rank: Rank) -> None:
    """What cannot be part of a graph is refused before it spoils the recording."""
    import tdx

    with rank.leaves_nothing():
        world = rank.init()
        x = world.zeros(1 << 18, np.int64)
        y = world.array(np.arange(1 << 18))
        dropped = world.zeros(10, np.int32, symmetric=False)
        with tdx.graph(world) as graph:
            del dropped
            made = world.empty(10, np.int32, symmetric=False)
            with rank.raises("while a graph is recorded", kind="InvalidArgument"):
                x.copy_from(np.zeros(1 << 18, np.int64))
            with rank.raises("while a graph is recorded", kind="InvalidArgument"):
                y.numpy()
            with rank.raises("while a graph is recorded", kind="InvalidArgument"):
                world.stream.synchronize()
            with rank.raises("while a graph is recorded", kind="InvalidArgument"):
                world.synchronize()
            with rank.raises("recorded already", kind="InvalidArgument"), tdx.graph(world):
                pass
            x.copy_from(y)
        with rank.raises("default stream"), world.on(0), tdx.graph(world):
            pass
        assert not x.numpy().any()
        graph.replay()
        assert (x.numpy() == np.arange(1 << 18)).all()
        assert rank.fake.live()["allocations"] == 2
        rank.fake.fail("cuGraphInstantiate")
        with rank.raises(ERROR), tdx.graph(world):
            x.copy_from(y)
        rank.fake.heal()
        assert "graphs" not in rank.fake.live()
        with pytest.raises(ZeroDivisionError), tdx.graph(world):
            1 // 0  # noqa: B018
        with pytest.raises(ZeroDivisionError), tdx.graph(world):
            # a stream that joins the recording and never leaves it
            1 // int(world.new_stream().wait(world.stream) is not None)
        with tdx.graph(world) as graph:
            x.copy_from(y)
        side = world.new_stream()
        kept = side.record()
        world.close()  # with a live graph, stream and event
        del x, y, made, graph, kept


@scenario(1)
def large_copies(rank: Rank) -> None:
    """Through pinned pieces: every byte, at sizes around those of the pieces."""
    with rank.leaves_nothing():
        world = rank.init()
        rng = np.random.default_rng(0)
        for size in (0, 1, (1 << 20) - 1, 1 << 20, 8 << 20, (16 << 20) + 1, (24 << 20) + 12345):
            values = rng.integers(0, 256, size, np.uint8)
            x = world.array(values, symmetric=False)
            assert (x.numpy() == values).all(), size
        calls = rank.fake.calls()
        for verb in ("cuMemHostAlloc", "cuEventCreate", "cuMemcpyHtoDAsync", "cuEventRecord"):
            assert calls.get(verb), verb
        world.close()
        del x
    with rank.leaves_nothing():
        world = rank.init()
        for verb in ("cuMemHostAlloc", "cuEventCreate", "cuEventRecord", "cuMemcpyDtoHAsync"):
            x = world.zeros(3 << 20, np.uint8, symmetric=False)
            rank.fake.fail(verb)
            with contextlib.suppress(Exception):
                x.numpy()
            rank.fake.heal()
            assert not x.numpy().any()
        world.close()
        del x


@scenario(1)
def held_after_close(rank: Rank) -> None:
    """Memory that somebody holds stays, with its context, until the last one drops it."""
    with rank.leaves_nothing():
        world = rank.init()
        x, y = world.zeros(10, np.int32), world.zeros(10, np.int32, symmetric=False)
        capsules = [x.__dlpack__(stream=-1), y.__dlpack__(stream=-1)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            world.close()
        assert any(w.category is ResourceWarning for w in caught)
        with rank.raises(kind="Closed"):
            x.numpy()
        del x, y, world
        gc.collect()
        live = rank.fake.live()
        assert live["contexts"] == live["allocations"] == 1, live
        assert live["mappings"], live
        capsules.clear()


@scenario(1, 2)
def cycles(rank: Rank) -> None:
    """Worlds come and go without a trace."""
    rank.check_works()
    with rank.leaves_nothing():
        for _ in range(20):
            world = rank.init()
            x = world.zeros(10, np.float32)
            world.new_stream().record()
            world.close()
            del world, x


@scenario(1)
def context_is_restored(rank: Rank) -> None:
    """The thread has the context of before when the world is closed."""
    from cuda.bindings import driver as cu

    rank.check_works()
    assert int(cu.cuCtxGetCurrent()[1]) == 0
    context = cu.cuDevicePrimaryCtxRetain(1)[1]
    cu.cuCtxSetCurrent(context)
    world = rank.init()
    assert int(cu.cuCtxGetCurrent()[1]) != int(context)
    world.close()
    assert int(cu.cuCtxGetCurrent()[1]) == int(context)
    cu.cuCtxSetCurrent(0)
    cu.cuDevicePrimaryCtxRelease(1)


@scenario(2)
def launches(rank: Rank) -> None:
    """Kernels reach the driver: by plans, one-line functions, in graphs and after a reload."""
    import tdx

    for _ in range(2):
        with rank.leaves_modules():
            world = rank.init()
            x = world.array(np.ones(64, np.float32))
            plan = tdx.AllReduce(world, (64,), np.float32)
            before = rank.fake.launches
            plan(x)
            tdx.all_reduce(x)
            tdx.barrier()
            assert rank.fake.launches == before + 3
            with tdx.graph(world) as graph:
                plan(x)
                made = tdx.all_reduce(x)
            graph.replay()
            world.barrier()
            world.close()
            del x, plan, graph, made


@scenario(2)
def launch_fails(rank: Rank) -> None:
    """A driver error in a launch is raised, and the world can still be closed."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        x = world.array(np.ones(64, np.float32))
        plan = tdx.AllReduce(world, (64,), np.float32)
        plan(x)
        for verb in ("cuLaunchKernelEx", "cuEventRecord"):
            rank.fake.fail(verb)
            try:
                plan(x, stream=world.new_stream())
            except (RuntimeError, tdx.errors.TdxError):
                continue
            raise AssertionError(f"{verb}: nothing was raised")
        rank.fake.heal()
        world.close()
        del x, plan
