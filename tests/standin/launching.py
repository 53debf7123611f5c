"""Scenarios of launches, by several threads too, and on several GPUs."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import numpy as np
import pytest

from tests.standin.ranks import Rank, scenario


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

    signature = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    launch = signature(("cuLaunchKernelEx", ctypes.CDLL("libcuda.so.1")))
    threads: list[threading.Thread] = []
    second, seen = threading.Event(), []

    @signature
    def slow(config: int, function: int, table: int, extra: int) -> int:
        if threads and threading.current_thread() is threads[0]:
            second.wait()
            threads[1].join(5)  # it can be launched while this launch waits
        first = ctypes.c_void_p.from_address(table).value
        seen.append((threading.current_thread(), ctypes.c_int64.from_address(first).value))
        return launch(config, function, table, extra)

    def run(a: Any) -> None:
        if threading.current_thread() is threads[1]:
            second.set()
        tdx.matmul(a, b)

    with pytest.MonkeyPatch.context() as patch:
        address = ctypes.cast(slow, ctypes.c_void_p).value
        patch.setattr(cuda_kernel, "LAUNCH_ADDRESS", address)
        world = rank.init()
        b = world.array(np.ones((16, 16), np.float32))
        given = [world.array(np.ones((16, 16), np.float32)) for _ in range(2)]
        tdx.matmul(given[0], b)
        seen.clear()
        threads += [threading.Thread(target=run, args=(a,)) for a in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = [(threads[i], given[i].data_ptr()) for i in (1, 0)]
        assert seen == expected
        world.close()


@scenario(1)
def kernel_that_cannot_be_laid_out(rank: Rank) -> None:
    """The driver is asked for a kernel's parameters, and to finish loading it; one is too large."""
    import tdx
    from tdx.kernels.matmul import Config

    world = rank.init()
    rank.fake.more_parameters = 1
    with pytest.raises(tdx.errors.DriverError, match=r"has (\d+) parameters where \d+ were laid"):
        tdx.Barrier(world)
    rank.fake.more_parameters = 0
    rank.fake.fail("cuFuncLoad")
    with pytest.raises(tdx.errors.DriverError, match="loading a kernel"):
        tdx.AllReduce(world, (64,), np.float32)
    rank.fake.heal()
    tdx.AllReduce(world, (64,), np.float32)(world.array(np.ones(64, np.float32)))
    a = world.zeros((1024, 1024), "bfloat16", symmetric=False)
    deep = Config(128, 128, 64, num_stages=9)
    with pytest.raises(tdx.errors.Unsupported, match=r"\d+ bytes of shared memory, of which this"):
        tdx.matmul(a, a, config=deep)
    world.close()


@scenario(2)
def launches_on_another_gpu(rank: Rank) -> None:
    """A later world may have another GPU: kernels are loaded into that as well."""
    import tdx

    indices = []
    for place in (rank.rank, 1 - rank.rank):
        with rank.announced(place), rank.init() as world:
            indices.append(world.device.index)
            tdx.AllReduce(world, (64,), np.float32)(world.array(np.ones(64, np.float32)))
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
