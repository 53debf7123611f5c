"""Operations of teams: subsets in permuted order, one after another and side by side."""

from __future__ import annotations

import numpy as np

import tdx
from tdx.kernels.all_reduce import Config
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.reference import assert_same_bits, error_bound, product, reduced, values


def check_reductions(world, team, ranks):
    size, me = len(ranks), (team or world).rank
    x = world.array(values(world.rank, 77 * size, "float32"), symmetric=False)
    wanted = reduced([values(rank, 77 * size, "float32") for rank in ranks])
    for algorithm in Config.algorithms:
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


def rounds_of_teams(world, make, wanted, shape=(3, 24)):
    """Plans of two teams that share ranks, each on a stream of its own, called in turn.

    Nobody waits on the host, nor one stream for the other; operands differ in each round.
    """
    everybody = range(world.size)
    teams = [world.team(ranks) for ranks in (everybody[:-1], everybody[1:])]
    plans = {team: (make(team), world.new_stream()) for team in teams if team}
    calls = []
    for salt in range(12):
        team = teams[salt % 2]
        if team:
            inputs = [values(rank, shape, "float32", salt) for rank in team.ranks]
            expected = wanted(team, inputs)
            x = world.array(inputs[team.rank], symmetric=False)
            out = world.empty(expected.shape, "float32", symmetric=False)
            calls.append((*plans[team], x, out, expected))
    world.synchronize()
    for plan, stream, x, out, _ in calls:
        plan(x, out, stream=stream)
    for number, (*_, out, expected) in enumerate(calls):
        assert_same_bits(out.numpy(), expected, number)
    world.barrier()


def own_rows(team, whole):
    return np.split(whole, team.size)[team.rank]


@worlds(3)
def case_overlapping_teams_on_two_streams(world):
    for algorithm in ("one_shot", "two_shot", "low_latency", "copy_engine"):
        rounds_of_teams(
            world,
            lambda team, name=algorithm: tdx.AllReduce(
                world, (3, 24), "float32", algorithm=name, team=team
            ),
            lambda team, inputs: reduced(inputs),
        )
    rounds_of_teams(
        world,
        lambda team: tdx.AllGather(world, (3, 24), "float32", algorithm="push", team=team),
        lambda team, inputs: np.concatenate(inputs),
    )
    rounds_of_teams(
        world,
        lambda team: tdx.ReduceScatter(world, (6, 24), "float32", algorithm="push", team=team),
        lambda team, inputs: own_rows(team, reduced(inputs)),
        (6, 24),
    )
