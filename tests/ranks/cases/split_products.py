"""Products with communication whose K is split: they are not fused."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tdx.kernels.matmul import Config
from tdx.runtime.errors import InvalidArgument
from tests.helpers.cases import worlds
from tests.helpers.reference import assert_same_bits, error_bound, product, values

SPLIT = Config(16, 16, 16, split_k=3)
M, K, N = 24, 70, 20
KINDS = (tdx.AllGatherMatmul, tdx.MatmulReduceScatter, tdx.MatmulAllReduce)


def operands(rank, dtype, salt=0):
    return values(rank, (M, K), dtype, salt), values(rank, (K, N), dtype, 1000 + salt)


def wanted_of(kind, world, dtype, salt=0):
    given = [operands(rank, dtype, salt) for rank in range(world.size)]
    if kind is tdx.AllGatherMatmul:
        return product(np.concatenate([a for a, _ in given]), given[world.rank][1])
    total = sum(product(a, b) for a, b in given)
    rows = M // world.size
    part = slice(rows * world.rank, rows * (world.rank + 1))
    return total[part] if kind is tdx.MatmulReduceScatter else total


@worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def case_unfused(world, kind, dtype):
    """Calls one behind the other, and replays: the same bits."""
    plan = kind(world, (M, K), (K, N), dtype, algorithm="unfused", config=SPLIT)
    loaded = [
        [world.array(given, symmetric=False) for given in operands(world.rank, dtype, salt)]
        for salt in range(4)
    ]
    shape = wanted_of(kind, world, dtype).shape
    outs = [world.empty(shape, dtype, symmetric=False) for _ in loaded]
    for pair, out in zip(loaded, outs, strict=True):
        plan(*pair, out=out)
    a, b = (world.empty(s, dtype, symmetric=False) for s in ((M, K), (K, N)))
    with tdx.graph(world) as graph:
        result = plan(a, b)
    bound = error_bound(K * world.size, dtype, *["float32"] * 3, *[dtype] * world.size)
    for salt, ((x, y), out) in enumerate(zip(loaded, outs, strict=True)):
        got = out.numpy().astype(np.float64)
        assert np.abs(got - wanted_of(kind, world, dtype, salt)).max() <= bound
        a.copy_from(x.numpy())
        b.copy_from(y.numpy())
        graph.replay()
        assert_same_bits(result.numpy(), out.numpy(), salt)


@worlds(2)
def case_fused_ones_refuse(world):
    x, y = world.zeros((M, K), "float32"), world.zeros((K, N), "float32")
    for call, algorithms in (
        (tdx.all_gather_matmul, ("fused", "one_kernel")),
        (tdx.matmul_reduce_scatter, ("fused", "one_kernel", "low_latency")),
        (tdx.matmul_all_reduce, ("one_shot", "two_shot", "copy_engine")),
    ):  # fmt: skip
        for algorithm in algorithms:
            with pytest.raises(InvalidArgument, match=r'split_k=3 is not for .*"unfused"'):
                call(x, y, algorithm=algorithm, config=SPLIT)
    for wrong in (0, 17):
        with pytest.raises(InvalidArgument, match=f"split_k={wrong} must be from 1 to 16"):
            Config(16, 16, 16, split_k=wrong)
    assert tdx.matmul_all_reduce(x, y).shape == (M, N)


@worlds(1, 2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def case_make_unfused_the_usual_algorithm(world, kind):
    for rows in (24, 4096):  # few are unfused anyway
        plan = kind(world, (rows, K), (K, N), "float32", config=SPLIT, buffer=False)
        assert (plan.algorithm, plan.config.split_k) == ("unfused", 3)
