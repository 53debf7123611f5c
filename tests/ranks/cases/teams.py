"""Teams: their numbering, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import CollectiveMismatch, InvalidArgument, Unsupported
from tests.helpers.cases import isolated, worlds


@worlds(1, 2, 3, 4)
def case_numbering(world):
    ranks = list(range(world.size))[::-1]
    team = world.team(ranks)
    assert (team.rank, team.size, team.ranks) == (ranks.index(world.rank), world.size, tuple(ranks))
    alone = [world.team([rank]) for rank in ranks]
    assert [bool(t) for t in alone] == [rank == world.rank for rank in ranks]
    first = world.team(np.array([0]))
    assert bool(first) == (world.rank == 0)
    if not first:
        refused = r"no tdx.Team: rank \d is not one of \(0,\)>: only members"
        with pytest.raises(InvalidArgument, match=refused):
            tdx.all_reduce(world.zeros(3, "float32", symmetric=False), team=first)
        with pytest.raises(InvalidArgument, match=refused):
            tdx.AllReduce(world, 3, "float32", team=first)
    assert team.check_rank(world.size - 1) == world.size - 1
    with pytest.raises(InvalidArgument, match="outside"):
        team.check_rank(world.size)
    assert "Team" in repr(team)


@worlds(1, 2)
def case_what_is_refused_on_every_rank(world):
    for ranks in ([], [0, 0], [world.size], [-1], [0.5], [True]):
        with pytest.raises(InvalidArgument, match="team"):
            world.team(ranks)
        world.barrier()
    with pytest.raises(InvalidArgument, match="not a team of this world"):
        world.group("team")


@worlds(2, 3)
def case_what_is_refused_on_one_rank(world):
    wrong = [0, 0] if world.rank == 1 else [0, 1]
    error = InvalidArgument if world.rank == 1 else CollectiveMismatch
    with pytest.raises(error, match="different ranks"):
        world.team(wrong)
    with pytest.raises(CollectiveMismatch, match=r"rank 1: team\(\[1, 0\]\)"):
        world.team([1, 0] if world.rank == 1 else [0, 1])
    for blocks in (0, -1, 1 << 20, 2.5, True):
        error = InvalidArgument if world.rank == 0 else CollectiveMismatch
        with pytest.raises(error, match="a channel takes"):
            world.channel(blocks if world.rank == 0 else 1)
    world.barrier()


@isolated
@worlds(2)
def case_the_number_of_teams_is_limited(comm, backend):
    from tdx import abi

    with tdx.init(comm, backend=backend) as world:
        for _ in range(abi.MAX_TEAMS):
            world.team([0, 1])
        with pytest.raises(Unsupported, match="at most 63 teams"):
            world.team([0, 1])
        world.barrier()
