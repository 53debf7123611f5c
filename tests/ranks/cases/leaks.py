"""What is given back: nothing grows with the number of arrays, plans and worlds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import warnings
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

import tdx
from tests.helpers.cases import host_only, isolated, limit, worlds
from tests.helpers.movement import MOVES

ALLOCATIONS, WORLDS, PLANS = 10_000, 1000, 10_000
SHARED_WORLDS, SHARED_PLANS = 100, 1500  # of two ranks, which agree over each of them
GPU_SHARE = 50  # a GPU takes far longer to open, and kernels to load: one round in so many
# By how much memory may differ: less than half a KiB a round. MPICH's UCX keeps 0.3 KiB of each
# piece of memory that a thread of Python gives back, and a plan is made with one beside it.
RESIDENT_KIB = 4 << 10
COMMUNICATOR_KIB = 4  # what MPICH keeps of a communicator; a world makes one
MAPPINGS = 10  # the process's allocator may cut its arenas in other pieces


@dataclass
class Usage:
    """What the process holds of the system, and the world of its device."""

    descriptors: int
    threads: int
    mappings: int
    resident_kib: int
    device: dict[str, int]

    @classmethod
    def now(cls, world=None) -> Usage:
        gc.collect()
        # what the C library's allocator keeps for the threads to come is not held by anybody
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/maps") as maps:
            mappings = sum(1 for _ in maps)
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10
        fds = len(os.listdir("/proc/self/fd"))
        return cls(fds, threading.active_count(), mappings, resident, _device_objects(world))

    def check(self, before: Usage, memory: bool, extra_kib: int = 0) -> None:
        """Nothing is held that was not held before."""
        assert self.descriptors <= before.descriptors
        assert self.threads <= before.threads
        assert self.device == before.device
        if memory:
            assert self.mappings <= before.mappings + MAPPINGS
            assert self.resident_kib <= before.resident_kib + RESIDENT_KIB + extra_kib


def _device_objects(world) -> dict[str, int]:
    if world is None:
        return {}
    world.synchronize()
    counts = {
        "streams": len(world.streams._all),
        "sites": len(world._sites._sites),
        "heap": world.user_region.heap.capacity,
        "runtime": world.runtime_regions.of(world).heap.capacity,
    }
    if world.backend == "host":
        device = world.driver.device
        counts |= {"local": len(world.driver._local), "events": len(device.events)}
        counts |= {"graphs": len(device.graphs)}
    return counts


@contextlib.contextmanager
def steady(backend, world=None, extra_kib=0):
    """Nothing grows in the block, before which everything is warm."""
    before = Usage.now(world)
    yield
    # a GPU's driver has memory of its own in the process, which comes and goes
    Usage.now(world).check(before, backend == "host", extra_kib)


def rounds(backend, number):
    return number if backend == "host" else number // GPU_SHARE


@isolated
@worlds(1, 2)
@limit(60)
def case_arrays(comm, backend):
    """Freed, and dropped: by the last reference, as a cycle, as what a consumer held."""
    with tdx.init(comm, backend=backend, heap_bytes=1 << 20) as world:

        def several(number):
            for turn in range(number // 4):
                x = world.zeros(1000 + turn % 7, "float32")
                y = world.empty(100, "int32", symmetric=False)
                x.free()
                y.free()
                x, y = world.empty(300, "int8"), world.zeros(10, "int8", symmetric=False)
                if turn % 16 == 0:
                    cycle = [x, y]
                    cycle.append(cycle)
                if backend == "host":
                    assert np.from_dlpack(y).sum() == 0

        several(rounds(backend, 4000))  # the heap has been full before, and was cleared
        with steady(backend, world):
            several(rounds(backend, ALLOCATIONS))
        world.barrier()


@isolated
@worlds(1, 2)
@limit(60)
def case_worlds(comm, backend):
    """Brought up and closed; with memory, streams, a team and a plan of each."""

    def several(number):
        for _ in range(number):
            with tdx.init(comm, backend=backend, heap_bytes=1 << 20) as world:
                world.zeros(3, "int8")
                world.new_stream()
                team = world.team(range(world.size))
                tdx.AllGather(world, 4, "int8", progress=True, team=team)

    several(20)
    number = rounds(backend, WORLDS if comm.Get_size() == 1 else SHARED_WORLDS)
    with steady(backend, extra_kib=COMMUNICATOR_KIB * number):
        several(number)


PLANS_OF = (
    lambda world: tdx.AllReduce(world, 33, "float32", algorithm="low_latency"),
    lambda world: tdx.AllReduce(world, 33, "float32", algorithm="one_shot"),
    lambda world: tdx.AllGather(world, 33, "float32", algorithm="pull"),
    lambda world: tdx.AllGather(world, (4, 8), "float32", progress=True, chunks_per_rank=2),
    lambda world: tdx.AllGatherMatmul(world, (4, 8), (8, 4), "float32"),
    lambda world: tdx.AllGatherMatmul(world, (4, 8), (8, 4), "float32", algorithm="one_kernel"),
    lambda world: tdx.MatmulReduceScatter(world, (4, 8), (8, 4), "float32"),
    lambda world: tdx.MatmulAllReduce(world, (4, 8), (8, 4), "float32"),
    lambda world: tdx.AllReduceRmsNorm(world, (4, 8), "float32"),
    *(partial(move.plan, shape=(33,), dtype="float32") for move in MOVES),
)


@isolated
@worlds(1, 2)
@limit(90)
def case_plans(comm, backend):
    """Made, at times called or recorded, and dropped: workspaces, channels, streams, sites."""
    with tdx.init(comm, backend=backend, heap_bytes=1 << 20) as world:
        shapes = [33, 33, 33, *[(4, 8)] * 6]
        shapes += [move.given_shape((33,), world.size) for move in MOVES]
        inputs = [world.zeros(shape, "float32") for shape in shapes]
        b, weight = world.zeros((8, 4), "float32"), world.zeros(8, "float32")
        second = {4: b, 5: b, 6: b, 7: b, 8: weight}

        def use(plan, kind, recorded):
            operands = (inputs[kind], second[kind]) if kind in second else (inputs[kind],)
            with tdx.graph(world) if recorded else contextlib.nullcontext() as graph:
                plan(*operands)
                if kind == 3:
                    plan.join()
            if recorded:
                graph.replay()

        def several(number):
            for turn in range(number):
                kind = turn % len(PLANS_OF)
                plan = PLANS_OF[kind](world)
                if turn % 31 < 2:
                    use(plan, kind, recorded=turn % 31 == 1)
                del plan

        world.barrier()
        heap, used = world.runtime_regions.of(world).heap, -1
        while heap.used > used:  # until it has been full, and was cleared
            used = heap.used
            several(500)
        with steady(backend, world):
            several(rounds(backend, PLANS if world.size == 1 else SHARED_PLANS))
        world.barrier()


@worlds(1, 2)
def case_a_dropped_plan_needs_no_collector(world):
    """Its memory is there for the next one when the last reference goes."""
    gc.collect()
    gc.disable()
    try:
        before = _device_objects(world)
        for make in PLANS_OF:
            plan = make(world)
            assert len(world._sites._sites) > before["sites"]
            del plan
            assert len(world._sites._sites) == before["sites"]
    finally:
        gc.enable()
    world.barrier()


@worlds(1, 2)
def case_evicted_plans_lend_their_streams_on(world):
    """One-line functions keep a bounded number of plans, and so of streams."""
    b = world.zeros((8, 4), "float32", symmetric=False)
    for rows in range(1, 100):
        tdx.all_gather_matmul(world.zeros((rows, 8), "float32", symmetric=False), b)
    before = len(world.streams._all)
    for rows in range(100, 140):
        tdx.all_gather_matmul(world.zeros((rows, 8), "float32", symmetric=False), b)
    assert len(world.streams._all) == before
    world.barrier()


@worlds(2)
def case_two_plans_have_two_streams(world):
    """A stream is lent to one plan at a time, and to the next when that is dropped."""
    first, second = (PLANS_OF[3](world).gathering for _ in range(2))
    assert _streams(first)[0] is not _streams(second)[0]
    lent = _streams(second)[0]
    del second
    assert _streams(PLANS_OF[3](world).gathering)[0] is lent


def _streams(gathering):
    return gathering._pushing._beside.streams


@isolated
@worlds(1)
def case_close_says_what_is_still_held(backend):
    """As an error too, when warnings are errors; and the world is closed all the same."""
    host_only(backend)
    world = tdx.init(backend=backend)
    view = np.from_dlpack(world.zeros(4, "int32"))
    with pytest.warns(ResourceWarning, match=r"closed while 1 exported array\(s\) are still held"):
        world.close()
    assert view.sum() == 0
    world = tdx.init(backend=backend)
    view = np.asarray(world.zeros(4, "int32"))
    before = threading.active_count()
    with pytest.raises(ResourceWarning, match="1 exported"), warnings_are_errors():
        world.close()
    assert world.closed
    assert threading.active_count() == before - 2  # the watcher and the device's
    assert view.sum() == 0
    tdx.init(backend=backend).close()


@contextlib.contextmanager
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@isolated
@worlds(2, 4)
@pytest.mark.gpu
def case_reserving_commits_nothing(comm, backend):
    from cuda.bindings import driver as cu

    with tdx.init(comm, backend=backend, heap_bytes=64 << 20) as world:
        free, total = cu.cuMemGetInfo()[1:]
        # contexts and the runtime's own memory, far below the reserved addresses
        assert total - free < (4 << 30)
        assert world.window.stride * world.size > 4 * total
        world.barrier()


@isolated
@worlds(2)
@limit(280)
@pytest.mark.gpu
def case_a_thousand_worlds(comm, backend):
    from cuda.bindings import driver as cu

    seen = []
    for i in range(1000):
        with tdx.init(comm, backend=backend, heap_bytes=4 << 20) as world:
            x = world.array(np.full(1000, world.rank + 1, np.float32))
            if i % 100 == 0:
                total = tdx.all_reduce(x).numpy()
                assert (total == sum(range(1, world.size + 1))).all()
            world.barrier()
            if i in (10, 999):
                gc.collect()
                seen.append((len(os.listdir("/proc/self/fd")), cu.cuMemGetInfo()[1]))
    assert seen[1][0] <= seen[0][0]
    assert seen[0][1] - seen[1][1] <= 64 << 20
