"""The case runner itself."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import tdx
from tests.helpers.cases import isolated, worlds


@worlds(1, 2, 3, 4, 5)
@pytest.mark.smoke
def case_ranks_meet(comm):
    assert comm.allgather(comm.Get_rank()) == list(range(comm.Get_size()))


@worlds(2)
@pytest.mark.parametrize("dtype", [np.int32, np.float64])
@pytest.mark.parametrize("root", [0, 1])
def case_parameters(comm, rng, dtype, root):
    values = rng.random(5).astype(dtype)
    assert np.array_equal(comm.bcast(values, root), values)


@isolated(dies=[1])
@worlds(3)
def case_survivors_go_on(comm):
    if comm.Get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@isolated
@worlds(2)
def case_own_process(comm, backend):
    assert backend in ("host", "cuda", "hip")


@pytest.mark.smoke
def case_world_is_shared_by_cases(world, comm):
    assert (world.rank, world.size) == (comm.Get_rank(), comm.Get_size())
    world.barrier()


@isolated
@worlds(1, 2)
def case_world_of_ones_own(comm, backend):
    with tdx.init(backend=backend) as world:
        assert world.size == comm.Get_size()
