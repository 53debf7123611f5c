"""Scenarios of what tdx puts into Triton, with PyTorch in the process and without."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton

from tests.ranks.cases import device_descriptors, no_framework
from tests.standin.ranks import ERROR, Rank, scenario


def _hooks() -> tuple[Any, ...]:
    """What tdx changes in Triton while a world is open."""
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import _allocation

    backends = (CUDABackend.parse_options, HIPBackend.parse_options)
    return (triton.runtime.driver._active, _allocation._allocator.get(), *backends)


@scenario(1, 2)
def triton_is_as_before(rank: Rank) -> None:
    """After close(), from any thread, after recover(), and after an init that failed late."""
    active = triton.runtime.driver
    previous = active._active
    try:
        for driver in (None, SimpleNamespace(name="somebody's")):
            active._active = driver
            with rank.leaves_modules():
                _restored(rank)
    finally:
        active._active = previous


def _restored(rank: Rank) -> None:
    active, before = triton.runtime.driver, _hooks()
    world = rank.init()
    during = _hooks()
    assert all(a is not b for a, b in zip(before, during, strict=True))
    assert active.active.get_current_device() == world.device.index
    with rank.raises("open already", kind="InvalidArgument"):
        rank.init()
    assert _hooks() == during
    world = world.recover()
    assert _hooks()[0] not in (before[0], during[0])
    no_framework.launch(world)
    world.close()
    world.close()
    assert _hooks() == before
    world = rank.init()
    thread = threading.Thread(target=world.close)
    thread.start()
    thread.join()
    assert world.closed
    now = _hooks()
    # an allocator is its thread's own: that of this one asks the one of before
    assert (now[0], *now[2:]) == (before[0], *before[2:])
    triton.set_allocator(before[1])
    _init_fails(rank)
    assert _hooks() == before


def _init_fails(rank: Rank) -> None:
    """Within the last step of init, on one rank, when all have installed their hooks."""
    from tdx.runtime.driver.cuda import CudaDriver

    install, calls = CudaDriver.install, []

    def noting(driver: CudaDriver) -> None:
        install(driver)
        calls.append(_hooks())
        if rank.last:
            rank.fake.fail("cuMemCreate")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaDriver, "install", noting)
        with rank.raises(ERROR):
            rank.init()
    rank.fake.heal()
    assert len(calls) == 1
    assert calls[0] != _hooks()


@scenario(1, 2)
def no_framework_is_loaded(rank: Rank) -> None:
    """By init, launches, plans, functions and close, though frameworks can be imported."""
    assert not no_framework.loaded()
    with no_framework.importable():
        with rank.init() as world:
            assert not no_framework.loaded()
            before = rank.fake.launches
            no_framework.launch(world)
            no_framework.every_plan(world)
            no_framework.call_functions(world)
            assert rank.fake.launches > before + 20
            assert not no_framework.loaded()
        assert not no_framework.loaded()
        importlib.import_module("torch")  # is what would have been seen
        assert no_framework.loaded() == {"torch"}


def _everything(rank: Rank, torch: Any = None, then: Any = None) -> None:
    """A world that launches, calls plans and ends; `then` is called in the middle."""
    import tdx

    active = triton.runtime.driver._active
    with rank.init() as world:
        x = np.ones(64, np.float32)
        for turn in range(2):
            before = rank.fake.launches
            no_framework.launch(world)
            no_framework.every_plan(world)
            assert rank.fake.launches > before
            driver = triton.runtime.driver.active
            assert driver.get_current_stream(world.device.index) == world.stream.own
            if turn == 0 and then:
                torch = then()
        if torch is not None:
            given = torch.from_numpy(x)
            result = tdx.all_reduce(given)
            assert (type(result), result.shape) == (torch.Tensor, given.shape)
            copied = world.array(given, symmetric=False)
            assert (torch.from_numpy(copied.numpy()) == given).all()
    assert triton.runtime.driver._active is active
    if torch is not None:
        assert (torch.ones(3) + torch.arange(3)).tolist() == [1.0, 2.0, 3.0]


def _import_torch() -> Any:
    assert "torch" not in sys.modules
    return importlib.import_module("torch")


@scenario(1, 2)
def torch_is_imported_first(rank: Rank) -> None:
    """Before tdx makes a world: two worlds, each with kernels of users and of plans."""
    torch = _import_torch()
    for _ in range(2):
        _everything(rank, torch)


@scenario(1, 2)
def torch_is_imported_later(rank: Rank) -> None:
    """Within a world that has launched already; that one and a later one go on."""
    _everything(rank, then=_import_torch)
    _everything(rank, sys.modules["torch"])


@scenario(1)
def triton_asks_for_scratch_memory(rank: Rank) -> None:
    """At launches of a kernel that makes descriptors: one piece a stream, more when outgrown."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        pieces = world.driver._shim._scratch
        x, y = (world.zeros(device_descriptors.SHAPE, "float32") for _ in range(2))
        no_framework.launch(world)
        assert not pieces  # other kernels need none
        own, side = world.stream, world.new_stream()
        for stream in (own, side, own):
            with world.on(stream):
                device_descriptors.launch(x, y, 1)
        assert {stream: len(each) for stream, each in pieces.items()} == {
            own.handle: 1, side.handle: 1
        }  # fmt: skip
        assert pieces[own.handle] != pieces[side.handle]
        new = world.new_stream()
        with world.on(new), tdx.graph(world) as graph:
            device_descriptors.launch(x, y, 1)
        graph.replay()
        (address, size), = pieces[new.handle]  # fmt: skip
        assert world.driver._allocated[address] >= size
        large = world.zeros((16 * 80, 16 * 80), "float32", symmetric=False)
        with world.on(new):
            device_descriptors.launch(large, large, 1)
        first, second = pieces[new.handle]
        assert first == (address, size)
        # two descriptors of 128 bytes in each program
        assert second[1] >= 80 * 80 * 2 * 128 > size
        held = {each[0] for stream in pieces.values() for each in stream}
        assert held <= set(world.driver._allocated)
        graph.replay()
        world.close()
        assert not pieces
        del x, y, large, graph


@scenario(1)
def kernels_are_timed(rank: Rank) -> None:
    """do_bench, which the autotuner uses, by events on the stream that is current."""
    from triton.testing import do_bench

    with rank.leaves_modules(), rank.init() as world:
        x = world.zeros(64, "float32", symmetric=False)
        run = functools.partial(no_framework.add_kernel[(1,)], x, 64, 1, 0.5, BLOCK=64)
        for stream in (world.stream, world.new_stream()):
            launches = rank.fake.launches
            with world.on(stream):
                times = do_bench(run, warmup=1, rep=5, return_mode="all")
            assert len(times) >= 1
            assert min(times) >= 0
            assert rank.fake.launches > launches + len(times)
        assert not no_framework.loaded()
        del x, run
