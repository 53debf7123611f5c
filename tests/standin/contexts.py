"""Scenarios of the context that is current in a thread."""

from __future__ import annotations

import gc

import numpy as np

import tdx
from tests.standin.ranks import Rank, scenario


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


@scenario(1, 2)
def another_gpu_is_current(rank: Rank) -> None:
    """A framework has left it so: calls find their own, and those of memory leave that current."""
    from cuda.bindings import driver as cu

    rank.check_works()
    other = cu.cuDevicePrimaryCtxRetain(3)[1]
    world = rank.init()
    plan = tdx.AllReduce(world, 10, np.int64)
    cu.cuCtxSetCurrent(other)
    x = world.zeros(10, np.int64, symmetric=False)
    x[...] = np.arange(10)
    assert list(x.numpy()) == list(range(10))
    plan(x)
    event = world.driver.event_create(timing=False)
    world.driver.event_record(event, world.driver.current_stream())
    assert world.driver.event_query(event)
    driver, own, at, host = world.driver, world.device.index, x.data_ptr(), np.ones(10, np.int64)
    for use in (
        world.synchronize, lambda: driver.copy(at, at, 8, 1), lambda: driver.fill(at, 0, 8, 1),
        lambda: driver.copy_in(at, host.ctypes.data, 80, 2), lambda: driver.stream_wait(1, event),
        lambda: driver.copy_out(host.ctypes.data, at, 80, 2), lambda: driver.stream_query(0),
        lambda: driver.copy_2d(at, 8, at, 8, 8, 2, 1), lambda: driver.stream_synchronize(1),
        lambda: driver.read(host.ctypes.data, at, 80),
    ):  # fmt: skip
        rank.fake.device_used = -1
        use()
        assert rank.fake.device_used == own
        assert int(cu.cuCtxGetCurrent()[1]) == int(other)
    world.driver.event_destroy(event)
    side = world.new_stream()
    assert int(cu.cuCtxGetCurrent()[1]) == int(other)
    with world.on(side):
        cu.cuCtxSetCurrent(other)
        y = world.array(np.arange(10), symmetric=False)
        assert list(y.numpy()) == list(range(10))
    side.close()
    cu.cuCtxSetCurrent(other)
    del x, y, plan
    world.close()
    cu.cuCtxSetCurrent(0)
    cu.cuDevicePrimaryCtxRelease(3)


@scenario(1, 2)
def memory_of_a_closed_world_is_dropped_in_the_next(rank: Rank) -> None:
    """It takes nothing from the world that is open, and what was current comes back at the end."""
    from cuda.bindings import driver as cu

    rank.check_works()
    other = cu.cuDevicePrimaryCtxRetain(3)[1]
    for before in (0, int(other)):
        cu.cuCtxSetCurrent(before)
        world = rank.init()
        x = world.zeros(10, np.float32, symmetric=False)
        world.close()
        world = rank.init()
        own = int(cu.cuCtxGetCurrent()[1])
        assert own not in (0, int(other))
        del x
        gc.collect()
        assert int(cu.cuCtxGetCurrent()[1]) == own
        y = world.zeros(10, np.float32, symmetric=False)
        world.close()
        del world, y
        gc.collect()
        assert int(cu.cuCtxGetCurrent()[1]) == before
        # memory that outlives two worlds, and a program that turns to another GPU between them
        world = rank.init()
        x = world.zeros(10, np.float32, symmetric=False)
        world.close()
        cu.cuCtxSetCurrent(other)
        world = rank.init()
        world.close()
        assert int(cu.cuCtxGetCurrent()[1]) == int(other)
        cu.cuCtxSetCurrent(before)
        del world, x
        gc.collect()
        assert int(cu.cuCtxGetCurrent()[1]) == before
    cu.cuCtxSetCurrent(0)
    cu.cuDevicePrimaryCtxRelease(3)


@scenario(1)
def stream_that_was_closed(rank: Rank) -> None:
    """CUDA goes on with its work: whoever uses the memory next waits for that."""
    with rank.leaves_nothing():
        world = rank.init()
        side = world.new_stream()
        with world.on(side):
            x = world.zeros(10, np.int64, symmetric=False)
        side.close()
        rank.fake.heal()
        x[...] = np.arange(10)
        assert rank.fake.calls()["cuStreamWaitEvent"] == 1
        del x
        world.close()
