"""Operations of teams: subsets in permuted order, one after another and side by side."""

from __future__ import annotations

import numpy as np

import tdx
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.reference import assert_same_bits, error_bound, product, reduced, values


def check_reductions(world, team, ranks):
    size, me = len(ranks), (team or world).rank
    x = world.array(values(world.rank, 77 * size, "float32"), symmetric=False)
    wanted = reduced([values(rank, 77 * size, "float32") for rank in ranks])
    for algorithm in ("one_shot", "two_shot", "low_latency", "low_latency_two_shot"):
        result = tdx.all_reduce(x, algorithm=algorithm, team=team)
        assert_same_bits(result.numpy(), wanted, (ranks, algorithm))
    for algorithm in ("push", "low_latency"):
        result = tdx.reduce_scatter(x, algorithm=algorithm, team=team)
        assert_same_bits(result.numpy(), wanted[77 * me : 77 * (me + 1)], (ranks, algorithm))
    for algorithm in ("two_shot", "low_latency"):
        result = tdx.reduce(x, size - 1, algorithm=algorithm, team=team)
        assert (result is not None) == (me == size - 1)
        if result is not None:
            assert_same_bits(result.numpy(), wanted, (ranks, algorithm))


def check_gathers(world, team, ranks):
    x = world.array(values(world.rank, (3, 5), "float32"), symmetric=False)
    wanted = np.concatenate([values(rank, (3, 5), "float32") for rank in ranks])
    assert_same_bits(tdx.all_gather(x, team=team).numpy(), wanted, ranks)


def check_products(world, team, ranks):
    m, k, n = 5, 24, 18
    a, b = (values(world.rank, shape, "float32") for shape in ((m, k), (k, n)))
    result = tdx.all_gather_matmul(
        world.array(a, symmetric=False), world.array(b, symmetric=False), team=team
    ).numpy()
    wanted = np.concatenate([product(values(rank, (m, k), "float32"), b) for rank in ranks])
    assert np.abs(result - wanted).max() <= error_bound(k, "float32")

    def tall(rank):
        return values(rank, (m * len(ranks), k), "float32")

    result = tdx.matmul_reduce_scatter(
        world.array(tall(world.rank), symmetric=False), world.array(b, symmetric=False), team=team
    ).numpy()
    whole = sum(product(tall(rank), values(rank, (k, n), "float32")) for rank in ranks)
    wanted = whole[team.rank * m : (team.rank + 1) * m]
    assert np.abs(result - wanted).max() <= error_bound(k * len(ranks), "float32")


@isolated
@worlds(2, 3, 5)
@limit(90)
def case_every_operation(comm, backend):
    with tdx.init(backend=backend) as world:
        groups = [tuple(range(world.size))[::-1], (world.size - 1, 0), (1,)]
        teams = [world.team(ranks) for ranks in groups]
        for ranks, team in zip(groups, teams, strict=True):
            assert bool(team) == (world.rank in ranks)
            if team:
                assert team.ranks[team.rank] == world.rank
                tdx.barrier(team=team)
                check_reductions(world, team, ranks)
                check_gathers(world, team, ranks)
                if world.backend != "host" or len(ranks) > 1:
                    check_products(world, team, ranks)
        check_reductions(world, None, range(world.size))
        check_gathers(world, None, range(world.size))


@isolated
@worlds(4)
def case_disjoint_teams_at_the_same_time(comm, backend):
    with tdx.init(backend=backend) as world:
        even, odd = world.team((0, 2)), world.team((3, 1))
        team = even or odd
        ranks = (0, 2) if even else (3, 1)
        plan = tdx.AllReduce(world, 1023, "float32", team=team)
        x = world.array(values(world.rank, 1023, "float32"))
        for _ in range(20):
            plan(x)
            tdx.all_reduce(x)
        assert_same_bits(plan(x).numpy(), reduced([values(r, 1023, "float32") for r in ranks]))
