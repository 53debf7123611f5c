"""world.recover() on a rank that has an error, or work, of its own."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import CollectiveMismatch, DtypeError, PeerTimeout
from tests.helpers.cases import isolated, limit, worlds
from tests.ranks.cases.recovery import await_kernel, check_works, wait_for_fault


@isolated
@worlds(2, 3)
@limit(60)
@pytest.mark.parametrize("timeout_s", [0.6, 30.0])
def case_an_error_of_one_rank_that_recovers(comm, backend, timeout_s):
    """Peers whose calls wait for it hear of it within seconds, and none is left out."""
    world = tdx.init(comm, backend=backend, timeout_s=timeout_s)
    rank, size = world.rank, world.size
    x = world.array(np.full(3, rank, np.float32))
    plan = tdx.AllReduce(world, (3,), "float32", algorithm="one_shot")
    plan(x)
    world.barrier()
    start = time.monotonic()
    if rank == size - 1:
        with pytest.raises(DtypeError):
            plan(world.array(np.ones(3)))
    else:
        plan(x)
        with pytest.raises((PeerTimeout, CollectiveMismatch)):
            wait_for_fault(world)
    new = world.recover()
    assert time.monotonic() - start < 8
    check_works(new, list(range(size)), rank)
    new.close()


@isolated
@worlds(2)
@limit(60)
def case_work_ends_before_recover(comm, backend):
    """At its deadline, not because a peer has gone on to it."""
    world = tdx.init(comm, backend=backend, timeout_s=3)
    rank = world.rank
    signals = world.zeros(1, "int32")
    world.barrier()
    start = time.monotonic()
    if rank == 0:
        await_kernel[(1,)](signals, world.handle)
    new = world.recover()
    assert time.monotonic() - start > 2.9
    check_works(new, [0, 1], rank)
    new.close()
