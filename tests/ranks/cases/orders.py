"""Work that must come before other work: graphs, freed memory, temporaries."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import InvalidArgument
from tests.helpers.cases import worlds
from tests.helpers.reference import values


@worlds(1, 2)
def case_a_temporary_is_kept_until_it_was_gathered(world):
    n = 1 << 18
    plan = tdx.AllGather(world, n, "float32", progress=True)
    world.barrier()
    for turn in range(3):
        # nobody holds the input
        buffer = plan(world.array(np.full(n, world.rank + turn, np.float32), symmetric=False))
        plan.join()
        tdx.barrier()
        got = buffer.numpy().reshape(world.size, n)
        assert (got == np.arange(world.size)[:, None] + turn).all()
        world.barrier()


@worlds(1, 2)
def case_a_replay_waits_for_work_on_other_streams(world):
    n = 4096
    stream = world.new_stream()
    plan = tdx.AllReduce(world, n, "float32")
    x = world.zeros(n, "float32", symmetric=False)
    out = world.empty(n, "float32", symmetric=False)
    source = world.array(np.full(n, 1.0, np.float32), symmetric=False)
    world.barrier()
    plan(source, x, stream=stream)
    with tdx.graph(world) as graph:
        plan(x, out)
    for _ in range(3):
        plan(source, x, stream=stream)  # x is written elsewhere, then read by the replay
        graph.replay()
        assert (out.numpy() == world.size**2).all()
    world.barrier()


@worlds(1, 2)
def case_freed_memory_is_reused_after_its_last_use(world):
    n = 1 << 16
    stream = world.new_stream()
    plan = tdx.AllReduce(world, n, "float32")
    source = world.array(np.full(n, 1.0, np.float32), symmetric=False)
    for _ in range(3):
        old = world.empty(n, "float32")
        plan(source, old, stream=stream)
        old.free()
        new = world.array(np.full(n, 5.0, np.float32))
        stream.synchronize()
        assert (new.numpy() == 5).all()
        new.free()
    world.barrier()


@worlds(1)
def case_odd_strides(world):
    vector = np.arange(64, dtype=np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(vector, 16)[:48]  # both strides are 1
    b = values(3, (16, 32), "float32")
    np.testing.assert_allclose(tdx.matmul(windows, b), windows @ b, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(tdx.matmul(b.T, windows.T), b.T @ windows.T, rtol=1e-5, atol=1e-3)
    x = values(5, (5, 16), "float32")
    np.testing.assert_allclose(tdx.matmul(x[:, None, :], b)[:, 0], x @ b, rtol=1e-5, atol=1e-4)


@worlds(1, 2)
def case_words_of_the_contract(world):
    x = world.array(np.ones(8, np.float32))
    plan = tdx.AllReduce(world, 8, "float32")
    assert (plan(x, None, world.stream).numpy() == world.size).all()
    eye = np.eye(3, dtype=np.float32)
    assert (tdx.matmul(eye, eye, team=None, algorithm=None) == eye).all()
    assert (tdx.all_reduce(x, algorithm="two_shot").numpy() == world.size).all()
    for wrong in (lambda: tdx.all_reduce(x, op=["sum"]), lambda: world.team(3)):
        with pytest.raises(InvalidArgument):
            wrong()
    with pytest.raises(InvalidArgument, match="Config"):
        tdx.AllReduce(world, 8, "float32", config="fast")
    for kind, rest in (
        (tdx.AllReduce, ()), (tdx.ReduceScatter, ()), (tdx.Reduce, (0,)),
        (tdx.AllReduceRmsNorm, ()),
    ):  # fmt: skip
        config = sys.modules[kind.__module__].Config("low_latency", 64)
        with pytest.raises(InvalidArgument, match=r"algorithm='.*' beside a config of 'low_lat"):
            kind(world, (2, 8), "float32", *rest, config=config, algorithm="two_shot")
    assert (tdx.all_reduce(x).numpy() == world.size).all()


@worlds(2)
def case_a_refused_call_leaves_the_ranks_in_step(world):
    x = world.array(np.ones(8, np.float32))
    assert (tdx.all_reduce(x).numpy() == world.size).all()
    if world.rank == 0:  # caught, and made again as it should be
        with pytest.raises(InvalidArgument):
            tdx.all_reduce(x, out=world.empty(3, "float32", symmetric=False))
    assert (tdx.all_reduce(x).numpy() == world.size).all()
    world.barrier()
    world.channel(1)
    world.barrier()
