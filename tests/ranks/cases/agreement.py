"""Ranks that make different calls of plans they all have: the table of calls, on every rank."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import CollectiveMismatch, PeerTimeout
from tests.helpers.cases import isolated, limit, worlds

TIMEOUT_S = 1.0
N = 100


def make(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    x = world.array(np.full(N, world.rank + 1, np.float32))
    plans = [tdx.AllReduce(world, N, "float32", op=op) for op in ("sum", "max")]
    for plan in plans:
        plan(x)
    world.barrier()
    return world, x, plans


@isolated
@worlds(2, 3)
@limit(30)
@pytest.mark.parametrize("fault", ["skipped", "doubled", "swapped", "another"])
def case_different_calls(comm, backend, fault):
    world, x, (first, second) = make(comm, backend)
    guilty = world.size - 1
    calls = {
        "skipped": [second] if world.rank == guilty else [first, second],
        "doubled": [first, first] if world.rank == guilty else [first],
        "swapped": [second, first] if world.rank == guilty else [first, second],
        "another": [second] if world.rank == guilty else [first],
    }[fault]
    start = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:  # noqa: PT012
        for plan in calls:
            plan(x)
            if fault == "swapped":
                world.synchronize()
        world.barrier()
    assert time.monotonic() - start < 2 * TIMEOUT_S + 1
    table = caught.value.calls
    assert list(table) == list(range(world.size))
    assert all("all_reduce(shape=(100,)" in call or "barrier" in call for call in table.values())
    assert table[guilty] != table[0]
    assert f"rank {guilty}: {table[guilty]}" in str(caught.value)
    world.close()
    comm.barrier()


@isolated
@worlds(3)
@limit(30)
def case_within_a_team(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    team = world.team([0, 2])
    world.barrier()
    if team is not None:
        x = world.array(np.ones(N, np.float32), symmetric=False)
        first = tdx.AllReduce(world, N, "float32", team=team)
        second = tdx.AllReduce(world, N, "float32", op="max", team=team)
        with pytest.raises(CollectiveMismatch) as caught:  # noqa: PT012
            (first if world.rank else second)(x)
            world.synchronize()
        assert list(caught.value.calls) == [0, 2]
    comm.barrier()
    if team is not None:
        world.close()
    else:
        with pytest.raises(tdx.errors.TdxError):  # the others have closed theirs
            world.close()
    comm.barrier()


@isolated
@worlds(2, 3)
@limit(30)
def case_a_late_rank_is_no_mismatch(comm, backend):
    """Rank 0 runs ahead by several calls of both plans; the last rank just does not come."""
    world, x, plans = make(comm, backend)
    late = world.size - 1
    if world.rank == late:
        time.sleep(2.5 * TIMEOUT_S)
        with pytest.raises((PeerTimeout, tdx.errors.PeerLost)):  # noqa: PT012
            for plan in plans * 3:
                plan(x)
            world.barrier()
    else:
        for plan in plans * 3:
            plan(x)
        with pytest.raises(PeerTimeout) as caught:
            world.synchronize()
        assert caught.value.peer == late
    world.close()
    comm.barrier()
