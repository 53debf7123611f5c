"""Scenarios of a world in use: graphs, copies, memory that outlives its world."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.standin.ranks import ERROR, Rank, scenario


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
def overlapping_copies(rank: Rank) -> None:
    """Go through memory that a graph holds, and that goes when nobody does."""
    import tdx

    with rank.leaves_nothing():
        world = rank.init()
        data = np.arange(36).reshape(6, 6)
        x = world.array(data)
        x[...] = x.T
        assert (x.numpy() == data.T).all()
        with tdx.graph(world) as graph:
            x[...] = x.T
        graph.replay()
        assert (x.numpy() == data).all()
        del graph
        world.synchronize()
        world.driver._free_spare()
        assert rank.fake.live()["allocations"] == 1  # the control block
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
def calls_after_the_end(rank: Rank) -> None:
    """Say that the world is closed, and touch none of its streams: CUDA would crash."""
    with rank.leaves_modules():
        for end in ("close", "recover"):
            world = rank.init()
            new = _call_after(rank, world, getattr(world, end))
            if new is not None:
                new.close()
            del world, new


def _call_after(rank: Rank, world: Any, end: Callable[[], Any]) -> Any:
    import tdx

    x, signal = world.zeros((16, 16), np.float32), world.zeros(1, np.int32)
    tdx.all_reduce(x, op="max")  # else the next world's stream may be where this one's was
    new = end()
    for call in (
        lambda: tdx.all_reduce(x), lambda: tdx.all_reduce(x, out=x), lambda: tdx.all_gather(x),
        lambda: tdx.broadcast(x, 0), lambda: tdx.matmul(x, x), lambda: tdx.matmul(x, x, out=x),
        lambda: tdx.all_gather_matmul(x, x), lambda: tdx.matmul_reduce_scatter(x, x),
        lambda: tdx.matmul_all_reduce(x, x), lambda: tdx.put(x, x, 0, signal),
        lambda: tdx.matmul_all_reduce(x, x, out=x, stream=world.stream),
        lambda: tdx.get(x, x, 0), lambda: x.copy_from(x),
    ):  # fmt: skip
        with rank.raises(kind="Closed"):
            call()
    return new


@scenario(1)
def results_in_numpy(rank: Rank) -> None:
    """They are copied to the host, also those of tdx arrays."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        values, out = np.arange(12, dtype=np.int32), np.zeros(12, np.int32)
        x = world.array(values)
        assert tdx.broadcast(x, 0, out=out) is out
        assert (out == values).all()
        out.flags.writeable = False
        with rank.raises("read-only", kind="InvalidArgument"):
            tdx.broadcast(x, 0, out=out)
        world.close()
        del world, x


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
