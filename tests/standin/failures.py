"""Scenarios in which something fails: on every rank the right error, and nothing stays."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.standin.fake import Fake
from tests.standin.ranks import ERROR, Rank, scenario


@scenario(1, 2, 3)
def every_verb_of_init(rank: Rank) -> None:
    """Whichever call of init fails on one rank: all raise what failed, nothing stays."""
    rank.check_works()
    rank.fake.heal()
    world = rank.init()
    calls = rank.union(rank.fake.calls())
    world.close()
    del world
    assert len(calls) > 20, calls
    del calls["cuMemRelease"]  # where this fails the handle does stay
    for verb, count in calls.items():
        for call in range(1, count + 1):
            try:
                with rank.leaves_nothing():
                    if rank.last:
                        rank.fake.fail(verb, call)
                    with rank.raises(ERROR):
                        rank.init()
                    rank.fake.heal()
            except (AssertionError, pytest.fail.Exception) as error:
                raise AssertionError(f"{verb}, call {call}: {error}") from error
    rank.check_works()


@scenario(1, 2)
def every_verb_of_close(rank: Rank) -> None:
    """Whichever call of close fails on one rank, it raises, and the next world works."""
    world = rank.init()
    rank.fake.heal()
    world.close()
    calls = rank.union(rank.fake.calls())
    for verb in calls:
        world = rank.init()
        rank.meet()
        if rank.last:
            rank.fake.fail(verb)
            with rank.raises():
                world.close()
        else:
            with contextlib.suppress(Exception):
                world.close()
        rank.fake.heal()
        del world
        gc.collect()
    world = rank.init()
    world.close()


@scenario(2)
def growth_fails(rank: Rank) -> None:
    """A heap that cannot grow on one rank raises on all, and what was there stays right."""
    with rank.leaves_nothing():
        world = rank.init()
        x = world.array(np.arange(1000, dtype=np.int64))
        for verb in (
            "cuMemCreate",
            "cuMemExportToShareableHandle",
            "cuMemImportFromShareableHandle",
            "cuMemMap",
            "cuMemSetAccess",
        ):
            before = rank.fake.live()
            rank.meet()
            if rank.last:
                rank.fake.fail(verb)
            with rank.raises(ERROR, kind="DriverError"):
                world.empty(200 << 20, np.int8)
            rank.fake.heal()
            assert rank.fake.live() == before, verb
            world.barrier()
        y = world.empty(200 << 20, np.int8)
        assert (x.numpy() == np.arange(1000)).all()
        world.close()
        del x, y


@scenario(1, 2)
def memory_runs_out(rank: Rank) -> None:
    """Out of memory is HeapExhausted with the remedy, at init, in growth and in local memory."""
    fake = rank.fake
    whole = fake.memory
    with rank.leaves_nothing():
        fake.memory = 40 << 20  # less than the first heap
        with rank.raises("heap_bytes", "are free", kind="HeapExhausted"):
            rank.init(heap_bytes=1 << 30)
        fake.memory = 1 << 30
        world = rank.init()
        fake.memory = 256 << 20  # somebody else took the rest
        with rank.raises("heap_bytes", "requested", kind="HeapExhausted"):
            world.empty(512 << 20, np.int8)
        rank.meet()
        with rank.raises("out of device memory", "free arrays", kind="HeapExhausted"):
            world.empty(512 << 20, np.int8, symmetric=False)
        # what other streams have given up is found
        x = world.empty(100 << 20, np.int8, symmetric=False)
        x._block.stream = 12345
        del x
        assert rank.fake.live()["allocations"] == 2, rank.fake.live()
        y = world.empty(180 << 20, np.int8, symmetric=False)
        assert rank.fake.live()["allocations"] == 2, rank.fake.live()
        del y
        world.close()
        fake.memory = whole


@scenario(2)
def plan_fails(rank: Rank) -> None:
    """A plan whose workspace fails on one rank raises on all; the next one works."""
    import tdx

    def make(numel: int) -> Any:
        return tdx.AllReduce(world, (numel,), np.float32, algorithm="two_shot")

    with rank.leaves_modules():
        world = rank.init()
        first = make(1 << 19)  # loads the kernel
        rank.fake.heal()
        plan = make(1 << 20)
        calls = rank.union(rank.fake.calls())
        for verb in [v for v in calls if v != "cuMemRelease"]:
            rank.meet()
            if rank.last:
                rank.fake.fail(verb)
            with rank.raises(ERROR):
                make(1 << 22)
            rank.fake.heal()
        plan = make(1 << 20)
        del first, plan
        gc.collect()
        world.close()


@scenario(2)
def loading_fails(rank: Rank) -> None:
    """A kernel that one rank cannot load fails the plan on all; the next attempt works."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        for verb in ("cuModuleLoadData", "cuModuleGetFunction"):
            rank.meet()
            if rank.last:
                rank.fake.fail(verb)
            with rank.raises(ERROR):
                tdx.AllReduce(world, (100,), np.float64)
            rank.fake.heal()
        plan = tdx.AllReduce(world, (100,), np.float64)
        plan(world.zeros(100, np.float64))
        world.close()
        del plan


@scenario(1, 2)
def no_device(rank: Rank) -> None:
    devices, rank.fake.devices = rank.fake.devices, 0
    with rank.leaves_nothing(), rank.raises("no GPU is visible", kind="DriverError"):
        rank.init()
    rank.fake.devices = devices


@scenario(1, 2)
def no_permission(rank: Rank) -> None:
    rank.fake.init_error = 800 if rank.last else 0
    with rank.leaves_nothing(), rank.raises("no permission", "/dev/nvidia", kind="DriverError"):
        rank.init()
    rank.fake.init_error = 0


@scenario(2, 3)
def more_ranks_than_gpus(rank: Rank) -> None:
    """Refused, unless all ranks want to share; with a remedy."""
    from tdx.runtime.config import config

    devices, rank.fake.devices = rank.fake.devices, 1
    words = ("use the same one", "CUDA_VISIBLE_DEVICES", "TDX_SHARE_GPU=1")
    with rank.leaves_nothing(), rank.raises(*words, kind="DriverError"):
        rank.init()
    config.share_gpu = rank.rank == 0
    with rank.leaves_nothing(), rank.raises(*words, kind="DriverError"):
        rank.init()
    config.share_gpu = True
    rank.check_works()
    config.share_gpu = False
    rank.fake.devices = devices


@scenario(2)
def gpus_by_identity(rank: Rank) -> None:
    """Ordinals do not tell GPUs apart: a launcher may show each rank one of its own as 0."""
    rank.fake.identity = 7
    with rank.leaves_nothing(), rank.raises("use the same one", kind="DriverError"):
        rank.init()
    devices, rank.fake.devices = rank.fake.devices, 1
    rank.fake.identity = rank.rank
    rank.check_works()
    rank.fake.devices, rank.fake.identity = devices, -1


@scenario(2)
def no_peer_access(rank: Rank) -> None:
    rank.fake.peer_access = 0
    with rank.leaves_nothing(), rank.raises("cannot reach", "topo -p2p", kind="DriverError"):
        rank.init()
    rank.fake.peer_access = 1


@scenario(1)
def probed_gpus(rank: Rank) -> None:
    """What `tdx doctor` asks of the driver, without a context."""
    from tdx.runtime.driver.cuda_device import probe

    with rank.leaves_nothing():
        count = rank.fake.devices
        found = probe()
        assert found["driver"].startswith("CUDA 1")
        assert len(found["gpus"]) == count > 1
        assert all(gpu["arch"].startswith("sm_") for gpu in found["gpus"])
        assert found["gpus"][0]["memory_bytes"] == rank.fake.memory
        assert found["gpus"][1]["reaches"] == [n for n in range(count) if n != 1]
        rank.fake.peer_access = 0
        assert probe()["gpus"][1]["reaches"] == []
        rank.fake.peer_access = 1


@scenario(1, 2)
def no_compiler(rank: Rank) -> None:
    """Triton's launcher cannot be built: all ranks raise what to install."""
    # no compiler at all, and one that finds no Python.h
    os.environ["CC"] = "/nonexistent/cc" if rank.size == 1 else "/bin/false"
    with rank.leaves_nothing(), rank.raises(*_COMPILER, kind="DriverError"):
        rank.init()


@scenario(2)
def no_compiler_on_one(rank: Rank) -> None:
    """On the last rank."""
    os.environ["TRITON_CACHE_DIR"] += f"/{rank.rank}"  # where nobody else has built it
    if rank.last:
        os.environ["CC"] = "/bin/false"
    with rank.leaves_nothing(), _raises_everywhere(rank, *_COMPILER):
        rank.init()


@scenario(1, 2)
def old_driver(rank: Rank) -> None:
    """On the last rank."""
    from cuda.bindings import driver as cu

    if rank.last:
        rank.fake.version = cu.CUDA_VERSION // 1000 * 1000 - 1000 + 80
    words = ("older than the installed cuda-bindings", "update the driver", "pip install")
    with _raises_everywhere(rank, *words):
        rank.init()


@scenario(1, 2)
def no_library(rank: Rank) -> None:
    """On the last rank; the others have that of the folder that the environment names."""
    if not rank.last:  # found by its name from now on
        ctypes.CDLL(os.environ["TDX_STANDIN"] + "/libcuda.so.1")
        rank.fake = Fake()
    with _raises_everywhere(rank, "cannot be loaded", "libcuda.so.1", "install the NVIDIA driver"):
        rank.init()


@scenario(1, 2)
def no_binding(rank: Rank) -> None:
    """On the last rank."""
    if rank.last:
        sys.modules["cuda.bindings"] = None  # type: ignore[assignment]
    with _raises_everywhere(rank, "cannot be imported", "cuda-bindings==13.*"):
        rank.init()


_COMPILER = ("C compiler", "Python's headers", "apt-get install gcc python3-dev")


@contextlib.contextmanager
def _raises_everywhere(rank: Rank, *words: str) -> Iterator[None]:
    """What only the last rank lacks; the others are told on which it is, and without a wait."""
    where = () if rank.last else (f"rank {rank.size - 1}: DriverError",)
    with rank.raises(*words, *where, kind="DriverError"):
        begin = time.monotonic()
        try:
            yield
        finally:
            assert time.monotonic() - begin < 5, "waited for the rank that failed"
