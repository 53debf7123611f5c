"""Scenarios of several threads that use, free, wait for and close one world."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.vmm import allocated
from tests.standin.ranks import Rank, scenario

_LIMIT_S = 10.0


def _run(*functions: Callable[[], Any], meanwhile: Callable[[], Any] = lambda: None) -> None:
    """Call each in a thread of its own, and `meanwhile` in this one."""
    failures: list[BaseException] = []

    def attempt(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    attempt(meanwhile)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class _Stop:
    """A place where one thread stops, until another one has done something."""

    def __init__(self) -> None:
        self._main = threading.current_thread()
        self._reached, self._go = threading.Event(), threading.Event()

    def here(self) -> None:
        """Stops any thread but the first."""
        if threading.current_thread() is not self._main:
            self._reached.set()
            assert self._go.wait(_LIMIT_S)

    def during(self, *functions: Callable[[], Any]) -> None:
        """Call all while the other thread is there."""
        try:
            assert self._reached.wait(_LIMIT_S)
            for function in functions:
                function()
        finally:
            self._go.set()


@contextlib.contextmanager
def _often() -> Iterator[None]:
    """Threads take turns at almost every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@scenario(1)
def a_call_is_held_until_it_was_queued(rank: Rank) -> None:
    """Memory of producers is not let go by a thread that waits before another one's launch."""
    from tdx.runtime.driver.cuda_kernel import BoundKernel

    with rank.leaves_modules():
        world = rank.init()
        with allocated(world.device.index, pieces=1) as allocator:
            call, launch = _calls(world, allocator), BoundKernel.__call__
            call()
            world.synchronize()

            def late(kernel: Any, *args: Any) -> Any:
                _run(world.synchronize)
                return launch(kernel, *args)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BoundKernel, "__call__", late)
                x = call()
            gc.collect()
            assert x() is not None
            _wait_and_call(world, call, _calls(world, allocator))
            world.synchronize()
            assert x() is None
        del call
        world.close()


def _calls(world: Any, allocator: Any) -> Callable[[], weakref.ref[Any]]:
    """A plan's call on a new producer, which is returned."""
    import tdx

    plan, out = tdx.AllReduce(world, 64, np.int32), world.zeros(64, np.int32)

    def call() -> weakref.ref[Any]:
        x = allocator.array(0, 64)
        plan(x, out=out)
        return weakref.ref(x)

    return call


def _wait_and_call(world: Any, *functions: Callable[[], Any]) -> None:
    def repeated(function: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [function() for _ in range(300)]

    with _often():
        _run(*map(repeated, (*functions, world.synchronize)))


@scenario(1)
def two_wait_for_the_gpu(rank: Rank) -> None:
    """What is dropped after a thread's wait is not returned by that thread."""
    from cuda.bindings import driver as cu

    with rank.leaves_nothing():
        world, theirs = rank.init(), int(cu.cuStreamCreate(1)[1])
        driver, stop, before = world.driver, _Stop(), rank.fake.live()["allocations"]
        with world.on(theirs):
            late = [world.zeros(1000, np.int8, symmetric=False) for _ in range(3)]
            used = [world.zeros(1000, np.int8, symmetric=False)]
        late.clear()
        wait = driver.wait_for_all

        def slow() -> None:
            wait()
            stop.here()

        driver.wait_for_all = slow
        # the second thread finds the GPU idle; the work that reads `used` comes after that
        _run(driver.synchronize, meanwhile=lambda: stop.during(driver.synchronize, used.clear))
        assert rank.fake.live()["allocations"] == before + 1
        world.synchronize()
        assert rank.fake.live()["allocations"] == before
        del driver.wait_for_all
        cu.cuStreamDestroy(theirs)
        world.close()


@scenario(1)
def spare_memory_is_taken_while_it_is_returned(rank: Rank) -> None:
    """Nobody gets what another thread has given back to the driver."""
    with rank.leaves_nothing():
        world = rank.init()
        driver, stop, taken = world.driver, _Stop(), []

        class Slow(list):  # type: ignore[type-arg]
            def pop(self, *at: Any) -> Any:
                stop.here()
                return super().pop(*at)

        world.empty(1000, np.int8, symmetric=False)
        driver._spare.update({key: Slow(spare) for key, spare in driver._spare.items()})
        live = rank.fake.live()["allocations"]
        _run(
            lambda: taken.append(world.zeros(1000, np.int8, symmetric=False)),
            meanwhile=lambda: stop.during(driver._free_spare),
        )
        assert rank.fake.live()["allocations"] == live
        assert taken[0].data_ptr() in driver._allocated
        assert driver._spare_bytes == 0
        taken.clear()
        world.close()


@scenario(1)
def scratch_memory_in_threads(rank: Rank) -> None:
    """Triton's allocator is a thread's own: tdx's in all that launch, as before after close()."""
    import triton
    from triton.runtime import _allocation

    def ask(*_: object) -> int:
        return int(_allocation._allocator.get()(1000, 128, world.stream.own))

    def launch() -> None:
        triton.runtime.driver.active.get_current_stream(world.device.index)
        assert ask() == here

    before = _allocation._allocator.get()
    triton.set_allocator(lambda *_: 7)
    world = rank.init()
    here = ask()
    assert here in world.driver._allocated
    _run(launch)
    _run(world.close)
    assert ask() == 7
    triton.set_allocator(before)
    rank.check_works()


@scenario(1)
def streams_of_many_threads(rank: Rank) -> None:
    """What comes last on streams of others is noted by threads that work at once."""
    from cuda.bindings import driver as cu

    with rank.leaves_nothing():
        world = rank.init()
        events = rank.fake.live().get("events", 0)
        streams = [int(cu.cuStreamCreate(1)[1]) for _ in range(160)]

        def mark(part: list[int]) -> Callable[[], Any]:
            return lambda: [world.driver.mark(stream) for _ in range(20) for stream in part]

        with _often():
            _run(*(mark(streams[i::3]) for i in range(3)))
        known = {*filter(None, map(world.driver.left_at, streams))}
        assert known <= world.driver._events
        assert rank.fake.live()["events"] == events + len(known)
        for stream in streams:
            cu.cuStreamDestroy(stream)
        world.close()
