"""Scenarios of a world in use: threads, graphs, copies, memory that outlives its world."""

from __future__ import annotations

import contextlib
import ctypes
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
        world.driver._free_spare()
        assert rank.fake.live()["allocations"] == 1  # the control block
        assert "events" not in rank.fake.live()
        world.close()


@scenario(1)
def spare_memory(rank: Rank) -> None:
    """Freed memory is used again on its stream, and given back when the GPU is full."""
    with rank.leaves_nothing():
        world = rank.init()
        x = world.empty(1000, np.float32, symmetric=False)
        address = x.data_ptr()
        del x
        rank.fake.heal()
        side = world.new_stream()
        with world.on(side):
            elsewhere = world.empty(1000, np.float32, symmetric=False)
        again = world.empty(1001, np.float32, symmetric=False)
        assert again.data_ptr() == address != elsewhere.data_ptr()
        assert rank.fake.calls()["cuMemAllocFromPoolAsync"] == 1
        del again, elsewhere
        rank.fake.fail("cuMemAllocFromPoolAsync", 1, 2)  # out of memory, once
        held = world.empty(1 << 20, np.float32, symmetric=False)
        assert rank.fake.live()["allocations"] == 2  # the control block and this one
        rank.fake.heal()
        del held
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
        world.driver._free_spare()
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


@scenario(1)
def graphs_hold_memory(rank: Rank) -> None:
    """What a recorded product reads, and a recorded kernel's scratch memory, goes to nobody."""
    import tdx

    world = rank.init()
    a, b = (world.array(np.ones((16, 16), np.float32), symmetric=False) for _ in range(2))
    tdx.matmul(a, b)
    world.synchronize()
    with tdx.graph(world) as graph:
        made = tdx.matmul(a, b)
        scratch = world.driver._shim._allocate(1000, 128, world.stream.handle)
    used = {a._address, scratch}
    del a
    gc.collect()
    assert world.driver._shim._allocate(2 << 20, 128, world.stream.handle) != scratch
    others = [world.empty(n, np.int8, symmetric=False) for n in (1024, 1 << 20)]
    assert not used & {x._address for x in others}
    graph.replay()
    del b, made, graph, others
    world.close()


@scenario(1)
def queries_of_a_new_thread(rank: Rank) -> None:
    """Asking for what is not ready is no error in a thread that never used the GPU."""
    world = rank.init()
    event = world.stream.record()
    for verb, ask in (
        ("cuEventQuery", event.query),
        ("cuStreamQuery", lambda: world.driver.stream_query(world.stream.handle)),
    ):
        rank.fake.fail(verb, 2, 600)  # the first call finds no context
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(ask()))  # noqa: B023
        thread.start()
        thread.join()
        rank.fake.heal()
        assert answers == [False], (verb, answers)
    del event
    world.close()


@scenario(1)
def launches_of_two_threads(rank: Rank) -> None:
    """Two threads that multiply matrices of one shape share a kernel, not its operands."""
    import tdx
    from tdx.runtime.driver import cuda_kernel

    world = rank.init()
    b = world.array(np.ones((16, 16), np.float32))
    given = [world.array(np.ones((16, 16), np.float32)) for _ in range(2)]
    tdx.matmul(given[0], b)
    launch, second, seen = cuda_kernel.cuLaunchKernelEx, threading.Event(), []

    def slow(config: Any, function: Any, table: int, extra: int) -> Any:
        if threading.current_thread() is not threads[1]:
            second.wait()
            threads[1].join(0.2)
        first = ctypes.c_void_p.from_address(table).value
        seen.append((threading.current_thread(), ctypes.c_int64.from_address(first).value))
        return launch(config, function, table, extra)

    def run(a: Any) -> None:
        if threading.current_thread() is threads[1]:
            second.set()
        tdx.matmul(a, b)

    threads = [threading.Thread(target=run, args=(a,)) for a in given]
    cuda_kernel.cuLaunchKernelEx = slow
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        cuda_kernel.cuLaunchKernelEx = launch
    expected = [(t, a.data_ptr()) for t, a in zip(threads, given, strict=True)]
    assert sorted(seen, key=lambda s: threads.index(s[0])) == expected
    world.close()


@scenario(2)
def launches_on_another_gpu(rank: Rank) -> None:
    """A later world may number the ranks otherwise: kernels are loaded into its GPU as well."""
    import tdx

    indices = []
    for key in (rank.rank, -rank.rank):
        comm = rank.comm.Split(0, key)
        with rank.init(comm=comm) as world:
            indices.append(world.device.index)
            tdx.AllReduce(world, (64,), np.float32)(world.array(np.ones(64, np.float32)))
        comm.Free()
    assert sorted(indices) == [0, 1]


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


@scenario(1, 2)
def recover(rank: Rank) -> None:
    """Old memory is read after its driver was closed, and goes with the old arrays."""
    values = np.arange(100, dtype=np.int32)
    import tdx

    with rank.leaves_nothing():
        world = rank.init()
        old, local = world.array(values), world.array(values, symmetric=False)
        with tdx.graph(world):
            world.zeros(3, "int8", symmetric=False)
        new = world.recover()
        assert new.device.index == world.device.index
        kept = new.array(values + 1)
        for x in (old, local):
            assert (x.numpy() == values).all()
        mappings = rank.fake.live().get("mappings", 0)
        del world, old, local, x
        gc.collect()
        assert rank.fake.live().get("mappings", 0) < mappings
        more = new.array(values + 2)  # the context is still in use
        new.barrier()
        assert (kept.numpy() == values + 1).all()
        assert (more.numpy() == values + 2).all()
        new.close()
        del new, kept, more
