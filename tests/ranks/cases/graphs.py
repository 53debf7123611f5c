"""Graphs of several ranks: kernels that meet are replayed any number of times."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import Closed, InvalidArgument
from tests.helpers.cases import worlds


@worlds(1, 2, 3)
def case_replays_of_a_plan(world):
    x = world.zeros(100, "float32")
    out = world.zeros(100, "float32")
    plan = tdx.AllReduce(world, (100,), "float32")
    with tdx.graph(world) as graph:
        plan(x, out=out)
    del plan
    gc.collect()
    for number in range(5):
        x[...] = np.full(100, number + world.rank, np.float32)
        graph.replay(world.new_stream() if number % 2 else None)
        assert (out.numpy() == world.size * number + sum(range(world.size))).all()
    world.barrier()


@worlds(1, 2)
def case_a_plan_cannot_be_made_while_recording(world):
    x = world.zeros(7, "float32")
    world.synchronize()
    with pytest.raises(InvalidArgument, match="while a graph is being recorded"), tdx.graph(world):
        tdx.all_reduce(x)
    assert (tdx.all_reduce(x).numpy() == 0).all()
    world.barrier()


@worlds(1, 2)
def case_nothing_waits_while_recording(world):
    """What would is named, with what to do, and leaves nothing in the graph."""
    x, y, host = world.zeros(8, "float32"), world.zeros(8, "float32"), np.ones(8, np.float32)
    world.barrier()
    what = " is not possible while a graph is recorded: do it before or after .* are recorded"
    for call, text in (
        (x.numpy, r"copying to the host, as x\.numpy\(\) does,"),
        (lambda: x.copy_from(host), r"copying from the host, as x\.copy_from\(a\) .* does,"),
        (lambda: x.__setitem__(0, 3), r"copying from the host, as x\.copy_from\(a\) .* does,"),
        (world.synchronize, r"waiting for the device, as world\.synchronize\(\)"),
        (world.barrier, r"waiting for the device, as .* and world\.barrier\(\) do,"),
        (world.stream.synchronize, "waiting for a stream"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{text}.*{what}"), tdx.graph(world):
            call()
        with tdx.graph(world) as graph:
            with pytest.raises(InvalidArgument, match=what):
                call()
            y.copy_from(x)
        graph.replay()
        assert not y.numpy().any()
    world.barrier()


@worlds(1, 2)
def case_copies_are_recorded_wherever_the_array_was_used(world):
    x, y = world.zeros(8, "float32"), world.zeros(8, "float32")
    side = world.new_stream()
    plan = tdx.AllReduce(world, (8,), "float32")
    plan(x, out=y, stream=side)
    with tdx.graph(world) as graph:
        y.copy_from(x)
    for number in (1, 2):
        x[...] = np.full(8, number, np.float32)
        graph.replay()
        assert (y.numpy() == number).all()
    world.barrier()


@worlds(1, 2)
def case_arrays_of_a_graph_are_not_freed(world):
    x, y, z = (world.array(np.full(8, v, np.float32)) for v in (1, 2, 3))
    plan = tdx.AllReduce(world, (8,), "float32")
    with tdx.graph(world) as graph:
        plan(x, out=y)
        z.copy_from(y)
    graph.replay()
    for array in (x, y, z):
        with pytest.raises(InvalidArgument, match="recorded graph"):
            array.free()
    assert (z.numpy() == world.size).all()
    del graph
    gc.collect()
    for array in (x, y):
        array.free()
    with contextlib.suppress(ZeroDivisionError), tdx.graph(world) as failed:
        z.copy_from(z.reshape(8))
        raise ZeroDivisionError
    z.free()
    with pytest.raises(Closed):
        failed.replay()
    world.barrier()


@worlds(2)
def case_calls_that_would_wait(world):
    """With arrays that have no stream: refused before anything is queued."""
    x, host = world.zeros((8, 8), "float32"), np.ones((8, 8), np.float32)
    for call in (
        lambda: tdx.all_reduce(host),
        lambda: tdx.all_reduce(host.T),
        lambda: tdx.all_reduce_rms_norm(host, host[0]),
        lambda: tdx.matmul_all_reduce(host, host),
        lambda: tdx.put(x, host, 1 - world.rank),
        lambda: tdx.get(host, x, 1 - world.rank),
    ):
        for _ in range(2):
            call()
        world.barrier()
        with pytest.raises(InvalidArgument, match=r"an array of numpy .* by world\.array"):  # noqa: SIM117
            with tdx.graph(world):
                call()
        world.barrier()


@worlds(1, 2)
def case_streams_that_were_closed_since(world):
    """A graph is replayed elsewhere then; where its own branches ran does not matter."""
    x, y = (world.zeros(8, "float32", symmetric=False) for _ in range(2))
    origin, side = world.new_stream(), world.new_stream()
    plan, other = (tdx.AllReduce(world, (8,), "float32") for _ in range(2))
    with world.on(origin), tdx.graph(world) as graph:
        side.wait(origin)
        plan(x, out=y, stream=side)
        origin.wait(side)
        other(y, out=x)
    side.close()
    origin.close()
    x[...] = np.ones(8, np.float32)
    with pytest.raises(Closed, match="pass stream="):
        graph.replay()
    for number in (2, 4):
        graph.replay(world.stream)
        assert (x.numpy() == world.size**number).all()
    world.barrier()
