"""Barriers in stream order."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import InvalidArgument
from tests.helpers.cases import worlds


@worlds(1, 2, 3, 5)
def case_work_before_is_seen_after(world):
    """Copies into peers, a barrier, and reading: many times, without the host."""
    x = world.zeros((world.size, 3), "int32")
    world.barrier()
    seen = []
    for turn in range(20):
        for peer in range(world.size):
            place = x.peer(peer)[world.rank]
            place.copy_from(world.array(np.full(3, 100 * turn + world.rank, "int32"), False))
        tdx.barrier()
        copy = world.empty(x.shape, "int32", symmetric=False)
        copy.copy_from(x)
        seen.append(copy)
        tdx.barrier()
    for turn, copy in enumerate(seen):
        wanted = 100 * turn + np.arange(world.size, dtype=np.int32)
        assert (copy.numpy() == wanted[:, None]).all(), turn


@worlds(2, 3)
def case_waits_for_the_late_rank(world):
    plan = tdx.Barrier(world)
    world.barrier()
    start = time.monotonic()
    if world.rank == 1:
        time.sleep(0.3)
    plan()
    assert time.monotonic() - start < 0.25 or world.rank == 1  # queued, not waited for
    world.synchronize()
    assert time.monotonic() - start >= 0.28


@worlds(3)
def case_graph(world):
    plan = tdx.Barrier(world)
    with tdx.graph(world) as graph:
        plan()
        plan()
    for _ in range(30):
        graph.replay()
        plan()
    world.synchronize()
    world.synchronize()


@worlds(2)
def case_bad_team(world):
    with pytest.raises(InvalidArgument, match="is not a team of this world"):
        tdx.Barrier(world, team=(0, 1))
