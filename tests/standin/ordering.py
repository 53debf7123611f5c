"""Scenarios of the order of work on several streams, in programs with frameworks too."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.helpers.vmm import allocated
from tests.standin.foreign import CupyArray, stand_in_for_cupy
from tests.standin.ranks import Rank, scenario


class _Order:
    """What a driver was given, in order: a stream for work on it, (before, after) for a wait."""

    def __init__(self, driver: Any):
        self.seen: list[Any] = []
        recorded: dict[int, int] = {}
        record, wait, replay = driver.event_record, driver.stream_wait, driver.graph_launch

        def event_record(event: int, stream: int) -> None:
            recorded[event] = stream
            record(event, stream)

        def stream_wait(stream: int, event: int) -> None:
            self.seen.append((recorded[event], stream))
            wait(stream, event)

        def graph_launch(graph: int, stream: int) -> None:
            self.seen.append(stream)
            replay(graph, stream)

        driver.event_record, driver.stream_wait = event_record, stream_wait
        driver.graph_launch = graph_launch

    def taken(self) -> list[Any]:
        """What was given since the last time."""
        seen, self.seen = self.seen, []
        return seen


@scenario(1, 2)
def work_in_a_program_with_pytorch(rank: Rank) -> None:
    """Plain launches, calls on tdx arrays and replays all go to PyTorch's stream, in its order."""
    from cuda.bindings import driver as cu

    import tdx

    world = rank.init()
    driver, own = world.driver, world.stream.handle
    theirs = int(cu.cuStreamCreate(0)[1])
    x = world.zeros(64, np.float32, symmetric=False)
    plan = tdx.AllReduce(world, (64,), np.float32)
    order = _Order(driver)

    def launch() -> None:
        """As Triton does: asks for the stream, then for addresses."""
        stream = driver.launch_stream()
        x.data_ptr()
        order.seen.append(stream)

    with tdx.graph(world) as graph:
        launch()
    assert order.taken() == [own]
    with _pytorch(world.device.index, theirs):
        launch()
        assert order.taken() == [(own, theirs), theirs]  # behind what was queued before
        plan(x, out=x)
        tdx.barrier()
        launch()
        x[...] = world.zeros(64, np.float32, symmetric=False)
        assert theirs == world.stream.handle == x._block.stream
        assert set(order.taken()) <= {(own, theirs), theirs}
        graph.replay()
        launch()
        assert order.taken() == [(own, theirs), theirs, (theirs, own), theirs]
        with tdx.graph(world) as recorded:
            plan(x, out=x)
            assert world.stream.handle == own
        recorded.replay()
        launch()
        seen = order.taken()
        assert seen[0] == (own, theirs)
        assert seen[-3:] == [theirs, (theirs, own), theirs]
        side = world.new_stream()
        with world.on(side):  # chosen: the order is the caller's
            launch()
            graph.replay(side)
        assert order.taken() == [side.handle, (own, side.handle), side.handle, (side.handle, own)]
        world.stream.wait(side)
        with world.on(world.stream):
            launch()
        assert order.taken() == [(side.handle, theirs), theirs]
        with world.on(own):
            launch()
        assert order.taken()[-1] == own
        address = world.empty(1000, np.float32, symmetric=False).data_ptr()
        again = world.empty(1000, np.float32, symmetric=False)
        assert again.data_ptr() == address  # it was returned in the order of PyTorch's stream
    with _pytorch(world.device.index, 1):  # another stream of PyTorch's while the world ends
        world.close()
        assert world.stream.handle == own
    cu.cuStreamDestroy(theirs)


@contextlib.contextmanager
def _pytorch(index: int, stream: int) -> Iterator[None]:
    """What stands in for PyTorch, with `stream` as its current stream of GPU `index`."""
    torch: Any = SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: True),
        _C=SimpleNamespace(_cuda_getCurrentRawStream={index: stream}.__getitem__),
    )
    sys.modules["torch"] = torch
    try:
        yield
    finally:
        del sys.modules["torch"]


@scenario(1, 2)
def operands_of_two_streams(rank: Rank) -> None:
    """A plan on the first operand's stream comes after what the second one's framework made."""
    from cuda.bindings import driver as cu

    import tdx

    world = rank.init()
    streams = [int(cu.cuStreamCreate(0)[1]) for _ in range(2)]
    current = SimpleNamespace(ptr=0)
    stand_in_for_cupy(current)
    arrays = [CupyArray(world, world.zeros(64, np.int32, symmetric=False)) for _ in streams]
    for array, stream in zip(arrays, streams, strict=True):
        array.device = _On(current, stream, world.device.index)
    plan = tdx.AllReduce(world, 64, np.int32)
    plan(*arrays)
    tdx.all_reduce(arrays[0], out=arrays[1])
    order = _Order(world.driver)
    plan(*arrays)
    assert order.taken() == [(streams[1], streams[0])]
    with tdx.graph(world) as graph:
        tdx.all_reduce(arrays[0], out=arrays[1])
    assert order.taken() == []  # nothing runs by now
    graph.replay()
    assert world.stream.handle in order.taken()
    del sys.modules["cupy"]
    world.close()
    for stream in streams:
        cu.cuStreamDestroy(stream)


@scenario(1, 2)
def branches_of_a_recording(rank: Rank) -> None:
    """Calls with the same plan or array follow one another, also in another library's recording."""
    from cuda.bindings import driver as cu

    import tdx

    world = rank.init()
    own, side = world.stream.handle, world.new_stream()
    x, y, u, v = (world.zeros(64, np.float32, symmetric=False) for _ in range(4))
    plan, other = (tdx.AllReduce(world, 64, np.float32, op=op) for op in ("sum", "max"))
    for _ in range(2):
        tdx.all_reduce(x, out=y)
    plan(x, out=y)
    world.synchronize()
    order = _Order(world.driver)

    def check(before: int, after: int) -> None:
        for call in (
            partial(plan, u, v),  # nothing but the plan
            partial(other, y, v),  # nothing but arrays
            partial(tdx.all_reduce, x, out=v),
            partial(v.copy_from, x),
        ):
            for first, second in ((before, after), (after, before)):
                with world.on(first):
                    plan(x, out=y)
                    tdx.all_reduce(x, out=y)
                order.taken()
                with world.on(second):
                    call()
                    seen = order.taken()
                    assert seen.count((first, second)) == 1, (call, seen, first, second)
                    call()
                    assert order.taken() == []

    with tdx.graph(world):
        side.wait(world.stream)
        check(own, side.handle)
        world.stream.wait(side)
    streams = [int(cu.cuStreamCreate(1)[1]) for _ in range(2)]
    start, end = (cu.cuEventCreate(0)[1] for _ in range(2))
    for _ in range(2):  # of the second recording nothing was in the first
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        cu.cuStreamBeginCapture(streams[0], mode)
        cu.cuEventRecord(start, streams[0])
        cu.cuStreamWaitEvent(streams[1], start, 0)
        order.taken()
        with world.on(streams[1]):
            plan(x, out=y)
        assert order.taken() == []
        check(*streams)
        cu.cuEventRecord(end, streams[1])
        cu.cuStreamWaitEvent(streams[0], end, 0)
        error, graph = cu.cuStreamEndCapture(streams[0])
        assert int(error) == 0
        cu.cuGraphDestroy(graph)
    plan(x, out=y)
    world.close()
    for stream in streams:
        cu.cuStreamDestroy(stream)
    for event in (start, end):
        cu.cuEventDestroy(event)


class _On:
    """The device of an array, on which another stream is current."""

    def __init__(self, current: Any, stream: int, index: int):
        self._current, self._stream, self.id = current, stream, index

    def __enter__(self) -> None:
        self._outer, self._current.ptr = self._current.ptr, self._stream

    def __exit__(self, *_: object) -> None:
        self._current.ptr = self._outer


@scenario(1)
def memory_of_producers_is_held(rank: Rank) -> None:
    """Of those who show no stream, until the plan that reads it is done."""
    with rank.leaves_modules():
        world = rank.init()
        with allocated(world.device.index, pieces=1) as allocator:
            _hold(world, allocator)
        world.close()


def _hold(world: Any, allocator: Any) -> None:
    import tdx

    y = world.zeros(64, np.float32)
    plan = tdx.AllReduce(world, 64, np.float32, residual=True)

    def call() -> list[weakref.ref[Any]]:
        pieces = [allocator.array(offset, 64) for offset in (0, 512)]
        for piece in pieces:
            piece.dtype = np.dtype(np.float32)
        plan(pieces[0], out=y, residual=pieces[1])
        return [weakref.ref(piece) for piece in pieces]

    def alive(pieces: list[weakref.ref[Any]]) -> list[bool]:
        gc.collect()
        return [piece() is not None for piece in pieces]

    first = call()
    assert alive(first) == [True, True]
    second = call()  # the event behind the first call is reached
    assert (alive(first), alive(second)) == ([False, False], [True, True])
    world.synchronize()
    assert alive(second) == [False, False]
    with world.on(world.new_stream()):
        third = call()
    assert alive(third) == [True, True]


@scenario(1)
def streams_of_others(rank: Rank) -> None:
    """What is queued on one is waited for in `world.on` already, and after it was destroyed."""
    from cuda.bindings import driver as cu

    import tdx

    world = rank.init()
    driver, own = world.driver, world.stream.handle
    theirs = int(cu.cuStreamCreate(0)[1])
    x = world.zeros(64, np.float32, symmetric=False)
    order = _Order(driver)
    with world.on(theirs):
        driver.launch_stream()
        x.data_ptr()
        tdx.all_reduce(x, stream=own)
        assert (theirs, own) in order.taken()
        x.data_ptr()
    cu.cuStreamDestroy(theirs)
    tdx.all_reduce(x)
    assert (theirs, own) in order.taken()
    side = world.new_stream()
    with tdx.graph(world) as graph:
        driver.launch_stream()
        x.data_ptr()
    x.numpy()
    tdx.all_reduce(x, out=x, stream=side)
    graph.replay()
    assert x._block.last == [own, side.handle]  # the replay is in no order with the call
    event = side.record()
    world.close()
    for call in (event.query, event.wait, partial(event.elapsed, event)):
        with rank.raises(kind="Closed"):
            call()
    del x, graph, event, order
    gc.collect()


@scenario(1)
def exports_are_remembered(rank: Rank) -> None:
    """Memory that a consumer had on the default stream is used again behind that stream's work."""
    world = rank.init()
    x = world.zeros(1000, np.float32, symmetric=False)
    capsule = x.__dlpack__(stream=1)
    order = _Order(world.driver)
    address = x.data_ptr()
    del capsule, x
    y = world.zeros(1000, np.float32, symmetric=False)
    assert y.data_ptr() == address
    assert order.taken() == [(1, world.stream.handle)]
    world.close()
    del y, order
    gc.collect()


@scenario(1)
def what_a_producer_came_before(rank: Rank) -> None:
    """`out=` moves a call to another stream: that waits for the one its producer was given."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        own, side = world.stream.own, world.new_stream().handle
        stand_in_for_cupy(SimpleNamespace(ptr=side))
        out = CupyArray(world, world.zeros(64, np.int32, symmetric=False))
        with allocated(world.device.index, pieces=1) as allocator:
            for _ in range(2):  # the first makes the plan
                x, order = allocator.array(0, 64), _Order(world.driver)
                tdx.all_reduce(x, out=out)
            assert (x.streams, order.taken()) == ([own], [(own, side)])
            world.synchronize()
            del x
        del sys.modules["cupy"]
        world.close()
        del out, order


@scenario(1)
def producers_on_streams_of_others(rank: Rank) -> None:
    """A call asks no stream that its owner may have destroyed since an earlier one."""
    from cuda.bindings import driver as cu

    import tdx

    with rank.leaves_modules():
        world = rank.init()
        out, plan = world.zeros(64, np.int32), tdx.AllReduce(world, 64, np.int32)
        theirs = int(cu.cuStreamCreate(0)[1])
        with allocated(world.device.index, pieces=1) as allocator:
            plan(allocator.array(0, 64), out=out, stream=theirs)
            cu.cuStreamDestroy(theirs)
            plan(allocator.array(0, 64), out=out)
            world.close()
        del out, plan


@scenario(1)
def zeros_of_a_graph(rank: Rank) -> None:
    """A replay that fills an array comes behind what uses it on other streams by then."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        side, third = world.new_stream(), world.new_stream()
        plan = tdx.AllReduce(world, 64, np.float32)
        out = world.zeros(64, np.float32)
        with tdx.graph(world) as graph:
            x = world.zeros(64, np.float32, symmetric=False)
        plan(x, out=out, stream=side)
        order = _Order(world.driver)
        graph.replay(third)
        seen = order.taken()
        assert (side.handle, third.handle) in seen[: seen.index(third.handle)]
        assert x._block.last == [third.handle]
        world.close()
        del x, out, plan, graph, order
