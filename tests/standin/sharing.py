"""Scenarios of what is shared: memory by streams, streams by libraries, kernels by ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import triton

from tdx.runtime.heap import HeapFull
from tdx.runtime.stream import DEFAULT_STREAM
from tests.standin.ranks import Rank, scenario


@triton.jit
def touch_kernel(x):
    pass


@contextlib.contextmanager
def waits(driver: Any) -> Iterator[list[tuple[int, int]]]:
    """(waiting stream, stream waited for) of all waits in the block."""
    recorded: dict[int, int] = {}
    seen: list[tuple[int, int]] = []
    record, wait = driver.event_record, driver.stream_wait

    def event_record(event: int, stream: int) -> None:
        recorded[event] = stream
        record(event, stream)

    def stream_wait(stream: int, event: int) -> None:
        seen.append((stream, recorded[event]))
        wait(stream, event)

    driver.event_record, driver.stream_wait = event_record, stream_wait
    try:
        yield seen
    finally:
        del driver.event_record, driver.stream_wait


@contextlib.contextmanager
def records(driver: Any) -> Iterator[list[int]]:
    """The streams on which events are recorded in the block."""
    seen: list[int] = []
    record = driver.event_record
    driver.event_record = lambda event, stream: (seen.append(stream), record(event, stream))
    try:
        yield seen
    finally:
        del driver.event_record


def foreign_stream() -> int:
    from cuda.bindings import driver as cu

    return int(cu.cuStreamCreate(1)[1])


def destroy(stream: int) -> None:
    from cuda.bindings import driver as cu

    assert not int(cu.cuStreamDestroy(stream)[0])


def launch(world: Any, x: Any, stream: Any) -> None:
    with world.on(stream):
        touch_kernel[(1,)](x)


@scenario(1)
def freed_after_all_streams(rank: Rank) -> None:
    """Memory that kernels read on two streams is used again when both are done."""
    with rank.leaves_modules():
        world = rank.init()
        first, second = world.new_stream(), world.new_stream()
        x = world.empty(1000, np.float32, symmetric=False)
        touch_kernel[(1,)](x)
        with waits(world.driver) as seen:
            touch_kernel[(1,)](x)
            del x  # used on one stream: nothing waits
            assert not seen
            x = world.empty(1000, np.float32, symmetric=False)
            address = x._address
            for stream in (first, second, first):
                launch(world, x, stream)
            assert not seen  # the order of plain launches is their caller's
            del x
        used = {(first.handle, world.stream.handle), (first.handle, second.handle)}
        assert set(seen) == used, seen
        with world.on(first):
            assert world.empty(1000, np.float32, symmetric=False)._address == address
        world.close()


@scenario(1)
def next_use_waits_for_all_streams(rank: Rank) -> None:
    """A plan, a copy to the host and a reclaimed heap wait for every stream that used an array."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        plan = tdx.AllReduce(world, (64,), np.float32)
        x = world.zeros(64, np.float32)
        side, handle = world.new_stream(), world.stream.handle
        ones = np.ones(64, np.float32)
        for use in (partial(plan, x), x.numpy, partial(x.copy_from, ones)):
            launch(world, x, side)
            touch_kernel[(1,)](x)
            with waits(world.driver) as seen:
                use()
                use()
            assert seen == [(handle, side.handle)], seen
        launch(world, x, side)
        touch_kernel[(1,)](x)
        query = world.driver.stream_query
        world.driver.stream_query = lambda stream: stream != side.handle and query(stream)
        offset = x._block.offset
        del x, use
        region, full = world.user_region, HeapFull(1, 0, 0, 0)
        region._reclaim_idle(full)
        assert offset - region.start in region.heap.dropped()
        del world.driver.stream_query
        region._reclaim_idle(full)
        assert offset - region.start not in region.heap.dropped()
        world.close()
        del plan


@scenario(1)
def default_stream(rank: Rank) -> None:
    """The default stream, 0 or 1, is waited for like any other."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        plan = tdx.AllReduce(world, (64,), np.float32)
        x, y = world.zeros(64, np.float32), world.zeros(64, np.float32)
        for given in (x, y):
            plan(given, stream=0)
        with waits(world.driver) as seen:
            plan(x)
        assert set(seen) == {(world.stream.handle, DEFAULT_STREAM)}, seen
        world.close()
        del plan, x, y


@scenario(1)
def streams_that_are_gone(rank: Rank) -> None:
    """A stream of another library may be destroyed after the call that it was given to."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        plan = tdx.AllReduce(world, (64,), np.float32)
        x = world.array(np.ones(64, np.float32))
        local = world.array(np.ones(64, np.float32), symmetric=False)
        with tdx.graph(world) as graph:
            plan(x)
        for use in (
            partial(plan, x),
            partial(tdx.all_reduce, local),
            partial(launch, world, x),
            partial(launch, world, local),
            graph.replay,
        ):
            stream = foreign_stream()
            use(stream=stream)
            destroy(stream)
            plan(x)
            tdx.all_reduce(local)
            for array in (x, local):
                assert (array.numpy() == 1).all(), use
                assert stream not in array._block.last, use
        stream = foreign_stream()
        with records(world.driver) as recorded:
            plan(x, stream=stream)
        assert recorded[-1] == stream, recorded  # after the launch
        destroy(stream)
        with records(world.driver) as recorded:
            plan(x)
        assert stream not in recorded
        launch(world, local, stream := foreign_stream())
        destroy(stream)
        address = local._address
        del local, array, use
        assert world.empty(64, np.float32, symmetric=False)._address != address
        world.synchronize()  # nothing uses it any more
        assert address not in world.driver._allocated
        streams = [foreign_stream() for _ in range(200)]
        for stream in streams:
            plan(x, stream=stream)
        for stream in streams:
            destroy(stream)
        assert rank.fake.live()["events"] <= 64, rank.fake.live()
        world.close()
        del plan, x, graph


@scenario(1)
def graphs_of_others(rank: Rank) -> None:
    """What another library's graph uses stays as long as that graph may be replayed."""
    from cuda.bindings import driver as cu

    import tdx

    with rank.leaves_modules():
        world = rank.init()
        x = world.array(np.ones((16, 16), np.float32), symmetric=False)
        read = world.array(np.ones(256, np.float32), symmetric=False)
        tdx.matmul(x, x)
        stream = foreign_stream()
        tdx.all_reduce(x, stream=stream)
        launch(world, x, stream)  # the stream is known
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        assert not int(cu.cuStreamBeginCapture(stream, mode)[0])
        with rank.raises("call it once before", kind="InvalidArgument"):
            tdx.all_gather(x, stream=stream)
        with rank.raises("call it once before", kind="InvalidArgument"):
            tdx.matmul(x, x[:, :8], stream=stream)
        made = tdx.all_reduce(x, stream=stream)
        product = tdx.matmul(x, made, stream=stream)
        with world.on(stream):
            touch_kernel[(1,)](read)
            late = world.empty(100, np.float32, symmetric=False)
            touch_kernel[(1,)](late)
        error, graph = cu.cuStreamEndCapture(stream)
        assert not int(error), error
        error, executable = cu.cuGraphInstantiate(graph, 0)
        assert not int(error), error
        used = {a._address for a in (x, made, product, read, late)}
        world.plans.clear()  # as if other plans had taken their places
        del x, made, product, read, late
        gc.collect()
        world.synchronize()
        taken = [world.empty(n, np.int8, symmetric=False) for n in (400, 1024) for _ in range(8)]
        assert not used & {a._address for a in taken}
        assert any(isinstance(kept, tdx.AllReduce) for kept in world.captured.values())
        assert not int(cu.cuGraphLaunch(executable, stream)[0])
        tdx.all_reduce(taken[-1].view(np.float32))
        world.close()
        destroy(stream)
        cu.cuGraphDestroy(graph)
        cu.cuGraphExecDestroy(executable)
        del taken


@scenario(3)
def one_compiles(rank: Rank) -> None:
    """With an empty cache each kernel is compiled by one rank, and loaded by the others."""
    from triton import knobs

    import tdx

    compiled: list[str] = []

    def listen(*, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(metadata["hash"])

    knobs.compilation.listener = listen
    with rank.init() as world:
        for algorithm in ("one_shot", "low_latency"):
            tdx.AllReduce(world, (1000,), np.float32, algorithm=algorithm)
    everybody = [key for theirs in rank.comm.allgather(compiled) for key in theirs]
    assert len(everybody) == len(set(everybody)) == 2, everybody


@scenario(2, 3)
def worlds_of_one_host(rank: Rank) -> None:
    """Each takes GPUs of its own, by what MPI's launcher says; a place that is none is ignored."""
    for said in ("", "first", "-1"):
        for color, order in ((rank.rank, 0), (rank.rank % 2, -rank.rank)):
            part = rank.comm.Split(color, order)
            with rank.announced(said), rank.init(comm=part) as world:
                assert world.device.index == rank.rank, (said, world.device)
                assert world.local_rank == world.rank == part.Get_rank()
            part.Free()
    devices, rank.fake.devices = rank.fake.devices, 1
    rank.fake.identity = rank.rank  # each sees one of its own
    with rank.init() as world:
        assert world.device.index == 0
    rank.fake.devices, rank.fake.identity = devices, -1


@scenario(2, 3)
def places_of_another_launcher(rank: Rank) -> None:
    """What ranks have inherited does not number them; what they cannot share is refused."""
    with rank.announced(3), rank.init() as world:
        assert world.device.index == rank.rank
    count = rank.fake.devices
    words = [f"ranks 0-{rank.size - 1} (processes 0, {count}", "takes GPU i", "GPU of its own"]
    words += ["CUDA_VISIBLE_DEVICES", "TDX_SHARE_GPU=1"]
    with (
        rank.announced(count * rank.rank),
        rank.leaves_nothing(),
        rank.raises(*words, kind="DriverError"),
    ):
        rank.init()


@scenario(3)
def links_of_one_world(rank: Rank) -> None:
    """Only the GPUs of a world need to reach each other."""
    rank.fake.peer_access = 2  # 0 and 2 do, 1 does not
    part = rank.comm.Split(rank.rank % 2, 0)
    with rank.leaves_nothing(), rank.init(comm=part) as world:
        assert world.device.index == rank.rank
    part.Free()
    with rank.leaves_nothing(), rank.raises("cannot reach", "topo -p2p", kind="DriverError"):
        rank.init()
    rank.fake.peer_access = 1
