"""Reductions that push shards, with one lane of blocks and with two: the same bits."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tdx.kernels.all_reduce import Config as AllReduceConfig
from tdx.kernels.reduce import Config as ReduceConfig
from tdx.kernels.reduce_scatter import Config as ScatterConfig
from tests.helpers.cases import worlds
from tests.helpers.reference import assert_same_bits, poisoned, reduced, values

CALLS = 3


def plans_for(world, rows, dtype, **options):
    """Plans of all reductions that push shards, and the elements of each one's input."""
    size = rows * world.size
    two_shot = AllReduceConfig("two_shot", 32, **options)
    to_root = ReduceConfig("two_shot", 32, **options)
    scatter = ScatterConfig("push", 32, **options)
    return [
        (tdx.ReduceScatter(world, size, dtype, config=scatter), size),
        (tdx.Reduce(world, size - 1, dtype, world.size - 1, config=to_root), size - 1),
        (tdx.AllReduce(world, size - 1, dtype, config=two_shot), size - 1),
        (tdx.AllReduce(world, size - 1, dtype, config=two_shot, buffer=False), size - 1),
    ]


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    ("rows", "steps", "blocks"),
    [(2, 3, None), (17, None, None), (101, 2, 3), (333, 5, 2)],
)
def case_lanes(world, rows, steps, blocks, lanes):
    """Shards shorter than a lane and a step, ragged ones, odd blocks, calls back to back, some
    ranks ahead; into other arrays, the plan's buffer and in place."""
    for plan, size in plans_for(world, rows, "bfloat16", steps=steps, blocks=blocks, lanes=lanes):
        given = [[values(r, size, "bfloat16", salt) for r in range(world.size)]
                 for salt in range(CALLS)]  # fmt: skip
        xs = [world.array(each[world.rank]) for each in given]
        scatters, root = plan.operation == "reduce_scatter", getattr(plan, "root", world.rank)
        part = slice(world.rank * rows, (world.rank + 1) * rows) if scatters else slice(0, size)
        wanted = [reduced(each)[part] for each in given]
        here = world.rank == root
        outs = [world.array(poisoned(wanted[0].shape, "bfloat16")) for _ in xs]
        for x, out in zip(xs, outs, strict=True):
            plan(x, out=out if here else None)
        if plan._out is not None and here:
            assert_same_bits(plan(xs[0]).numpy(), wanted[0], (plan.call, "its buffer"))
        elif plan.operation != "all_reduce" or plan._out is not None:
            plan(xs[0])
        for x in xs:
            plan(x, out=x[part] if here else None)
        for x, out, each, result in zip(xs, outs, given, wanted, strict=True):
            if here:
                assert_same_bits(out.numpy(), result, plan.call)
            expected = each[world.rank].copy()
            if here:
                expected[part] = result
            assert_same_bits(x.numpy(), expected, (plan.call, "in place"))


@worlds(2, 3)
def case_bias_and_residual_with_lanes(world):
    """Many steps; results travel in float32 and are rounded at their destination."""
    shape = (37, 33)
    given = [values(rank, shape, "bfloat16") for rank in range(world.size)]
    bias, residual = values(0, 33, "bfloat16", 1), values(world.rank, shape, "bfloat16", 2)
    wanted = reduced(given, "avg", bias=bias, residual=residual)
    extras = {name: world.array(array) for name, array in (("bias", bias), ("residual", residual))}
    x = world.array(given[world.rank])
    for lanes in (1, 2):
        config = AllReduceConfig("two_shot", 64, steps=4, lanes=lanes)
        plan = tdx.AllReduce(
            world, shape, "bfloat16", "avg", bias=True, residual=True, config=config
        )
        for _ in range(2):
            assert_same_bits(plan(x, **extras).numpy(), wanted, lanes)


@worlds(2)
def case_lanes_in_graphs(world):
    """Plans with two lanes and with one, recorded: steps are counted on from replay to replay."""
    rows = 157
    plans = [
        tdx.ReduceScatter(world, 2 * rows, "int32", config=ScatterConfig("push", 32, **options))
        for options in ({"lanes": 2, "steps": 3}, {"lanes": 1, "steps": 3}, {"lanes": 2})
    ]
    x, outs = world.empty(2 * rows, "int32"), [world.empty(rows, "int32") for _ in plans]
    with tdx.graph(world) as graph:
        for plan, out in zip(plans, outs, strict=True):
            plan(x, out=out)
    for turn in range(7):
        given = [values(rank, 2 * rows, "int32", turn) for rank in range(2)]
        x.copy_from(given[world.rank])
        graph.replay()
        wanted = np.split(reduced(given), 2)[world.rank]
        for out in outs:
            assert_same_bits(out.numpy(), wanted, turn)
