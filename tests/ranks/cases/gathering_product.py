"""A gather in the kernel that multiplies."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tdx
from tdx.kernels import gathering_product
from tdx.kernels.all_gather_matmul import ALGORITHMS
from tdx.kernels.matmul import Config
from tests.helpers.blocks import many_blocks
from tests.helpers.cases import worlds
from tests.helpers.reference import (
    activated,
    assert_same_bits,
    error_bound,
    poisoned,
    product,
    values,
)

SMALL = Config(16, 16, 16, num_warps=4)
# rows a rank, depth, columns
SHAPES = [(5, 9, 20), (17, 16, 33), (40, 65, 50), (8, 300, 40)]


def plan_of(world, *shapes, dtype="float32", **given):
    with many_blocks():  # of which several push
        return tdx.AllGatherMatmul(world, *shapes, dtype, algorithm="one_kernel", **given)


def whole_a(world, shape, dtype="float32", salt=0):
    return np.concatenate([values(rank, shape, dtype, salt) for rank in range(world.size)])


def close(got, wanted, depth, *kinds):
    got = got.numpy().astype(np.float64)
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= error_bound(depth, *kinds)


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def case_values(world, dtype):
    """Bits of one Config are those of a product of all rows."""
    for m, k, n in SHAPES if world.size < 3 else SHAPES[1::2]:
        b, bias = values(100 + world.rank, (k, n), dtype), values(7, n, dtype)
        x = world.array(values(world.rank, (m, k), dtype), symmetric=False)
        y, z = (world.array(v, symmetric=False) for v in (b, bias))
        turned = world.array(np.ascontiguousarray(b.T), symmetric=False).T
        given = {"bias": True, "activation": "gelu", "dtype": dtype, "config": SMALL}
        plan = plan_of(world, (m, k), (k, n), **given)
        out = world.array(poisoned((world.size * m, n), dtype), symmetric=False)
        assert plan(x, y, out, bias=z) is out
        whole = whole_a(world, (m, k), dtype)
        close(out, activated(product(whole, b) + bias.astype(np.float64), "gelu"), k, dtype)
        assert_same_bits(plan.gathered().numpy(), whole)
        assert_same_bits(plan(x, turned, bias=z).numpy(), out.numpy())
        alone = tdx.matmul(
            world.array(whole, symmetric=False), y, bias=z, activation="gelu", config=SMALL
        )
        assert_same_bits(alone.numpy(), out.numpy())


@worlds(2, 3)
def case_blocks_that_push_join(world):
    """At any turn: each tile is taken once, and gathered rows are right in the next call, too."""
    m, k, n = 40, 33, 70
    b = values(9, (k, n), "float32")
    y = world.array(b, symmetric=False)
    for senders, late in ((1, 0), (2, 1), (3, 0), (3, 1), (3, 2), (5, 1), (2, 100)):
        with pytest.MonkeyPatch.context() as patch:
            chosen = (0.0, senders, late)
            patch.setattr(gathering_product, "schedule", lambda *_, chosen=chosen: chosen)
            plan = plan_of(world, (m, k), (k, n), config=SMALL)
            for salt in range(2):
                x = world.array(values(world.rank, (m, k), "float32", salt), symmetric=False)
                out = world.array(poisoned((world.size * m, n), "float32"), symmetric=False)
                whole = whole_a(world, (m, k), "float32", salt)
                close(plan(x, y, out), product(whole, b), k, "float32")
                assert_same_bits(plan.gathered().numpy(), whole)


@worlds(2, 3)
def case_bits_of_all_algorithms(world):
    m, k, n = 24, 200, 40
    x = world.array(values(world.rank, (m, k), "bfloat16"), symmetric=False)
    y = world.array(values(5, (k, n), "bfloat16"), symmetric=False)
    results = [
        tdx.all_gather_matmul(x, y, algorithm=name, config=SMALL).numpy() for name in ALGORITHMS
    ]
    for result in results[1:]:
        assert_same_bits(result, results[0])


@worlds(1, 2, 3)
@pytest.mark.parametrize("widths", [(0, 24, 9), (0, 0), (33,)])
def case_several_b(world, widths):
    """The first that has columns sends the rows, on each rank another; or the first if none has."""
    m, k = 19, 70
    widths = widths if world.rank % 2 else widths[::-1]
    with many_blocks():
        plan = tdx.AllGatherMatmul(
            world, (m, k), [(k, n) for n in widths], "float32", algorithm="one_kernel", config=SMALL
        )
    for salt in range(3):
        x = world.array(values(world.rank, (m, k), "float32", salt), symmetric=False)
        bs = [values(50 + i, (k, n), "float32") for i, n in enumerate(widths)]
        results = plan(x, [world.array(b, symmetric=False) for b in bs])
        whole = whole_a(world, (m, k), "float32", salt)
        for result, b in zip(results, bs, strict=True):
            if b.size:
                close(result, product(whole, b), k, "float32")
            assert result.shape == (m * world.size, b.shape[1])
        assert_same_bits(plan.gathered().numpy(), whole)


@worlds(2, 3)
def case_repetition_and_graphs(world):
    """Many calls without the host, each with other inputs; replays with the gathered rows."""
    m, k, n = 21, 120, 24
    plan = plan_of(world, (m, k), (k, n), config=SMALL)
    b = values(3, (k, n), "float32")
    y = world.array(b, symmetric=False)
    xs = [world.array(values(world.rank, (m, k), "float32", i), symmetric=False) for i in range(9)]
    outs = [world.empty((m * world.size, n), "float32", symmetric=False) for _ in xs]
    for x, out in zip(xs, outs, strict=True):
        plan(x, y, out=out)
    wholes = [whole_a(world, (m, k), "float32", i) for i in range(len(xs))]
    for whole, out in zip(wholes, outs, strict=True):
        close(out, product(whole, b), k, "float32")
    x = world.empty((m, k), "float32", symmetric=False)
    seen = [world.empty((m * world.size, k), "float32", symmetric=False) for _ in range(2)]
    with tdx.graph(world) as graph:
        result = plan(x, y)
        seen[0].copy_from(plan.gathered())
        plan(xs[0], y, out=outs[0])
        seen[1].copy_from(plan.gathered())
    other = world.new_stream()
    for i, out in enumerate(outs[1:], 1):
        x.copy_from(values(world.rank, (m, k), "float32", i))
        graph.replay(other if i % 2 else None)
        if i % 4 == 1:
            assert_same_bits(plan.gathered().numpy(), wholes[0], i)
        assert_same_bits(result.numpy(), out.numpy(), i)
        assert_same_bits(seen[0].numpy(), wholes[i], i)
        assert_same_bits(seen[1].numpy(), wholes[0], i)
        if i % 3 == 0:
            assert_same_bits(plan(x, y).numpy(), out.numpy(), i)


@worlds(3, 4)
def case_ranks_that_are_ahead(world):
    """One rank is late in each call, another each time: nobody overwrites what it has not read."""
    m, k, n = 18, 96, 16
    plan = plan_of(world, (m, k), (k, n), config=SMALL)
    b = values(3, (k, n), "float32")
    y = world.array(b, symmetric=False)
    xs = [world.array(values(world.rank, (m, k), "float32", i), symmetric=False) for i in range(8)]
    outs = [world.empty((m * world.size, n), "float32", symmetric=False) for _ in xs]
    world.barrier()
    for i, (x, out) in enumerate(zip(xs, outs, strict=True)):
        if i % world.size == world.rank:
            world.synchronize()
            time.sleep(0.05)
        plan(x, y, out=out)
    for i, out in enumerate(outs):
        close(out, product(whole_a(world, (m, k), "float32", i), b), k, "float32")


@worlds(3)
def case_a_team_in_another_order(world):
    team = world.team(range(world.size)[::-1])
    m, k, n = 9, 64, 20
    b = values(3, (k, n), "float32")
    x = world.array(values(world.rank, (m, k), "float32"), symmetric=False)
    plan = plan_of(world, (m, k), (k, n), config=SMALL, team=team)
    whole = np.concatenate([values(rank, (m, k), "float32") for rank in team.ranks])
    for _ in range(3):
        close(plan(x, world.array(b, symmetric=False)), product(whole, b), k, "float32")
        assert_same_bits(plan.gathered().numpy(), whole)


@worlds(2)
def case_gathered_behind_a_stream_that_was_closed(world):
    m, k, n = 5, 24, 8
    plan = plan_of(world, (m, k), (k, n), config=SMALL)
    x = world.array(values(world.rank, (m, k), "float32"), symmetric=False)
    side = world.new_stream()
    plan(x, world.zeros((k, n), "float32", symmetric=False), stream=side)
    side.close()
    assert_same_bits(plan.gathered().numpy(), whole_a(world, (m, k)))


@worlds(2)
def case_gathered_before_a_call(world):
    plan = plan_of(world, (3, 8), (8, 4))
    assert not plan.gathered().numpy().any()
