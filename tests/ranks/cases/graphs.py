"""Graphs of several ranks: kernels that meet are replayed any number of times."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import InvalidArgument
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
