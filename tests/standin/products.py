"""Scenarios of products: what their kernels are launched with."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.standin.ranks import Rank, scenario


@scenario(2)
def products_of_float8(rank: Rank) -> None:
    """Scales of both kinds reach kernels of all products; GPUs that lack float8 are refused."""
    import tdx

    names = ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    with rank.leaves_modules():
        world = rank.init()
        a, b = (world.zeros(s, "float8_e4m3fn", symmetric=False) for s in ((32, 64), (64, 48)))
        each = world.zeros(32, "float32", symmetric=False)
        for name in names:
            for scale in (each, each[:1], 2.0):
                made = getattr(tdx, name)(a, b, scale_a=scale, scale_b=each[:1])
                assert made.dtype.name == "bfloat16"
        with tdx.graph(world) as graph:
            for name in names:
                made = getattr(tdx, name)(a, b, scale_a=each, scale_b=each[:1])
        graph.replay()
        world.close()
        del a, b, each, made, graph
    rank.fake.compute = 80
    world = rank.init()
    try:
        a, b = (world.zeros(s, "float8_e4m3fn") for s in ((32, 64), (64, 48)))
        for name in names:
            refused: Any = None
            try:
                getattr(tdx, name)(a, b)
            except tdx.errors.Unsupported as error:
                refused = error
            assert "need sm_89 or later, not sm_80; use bfloat16" in str(refused)
            world.barrier()
        assert np.isfinite(tdx.matmul(np.ones((4, 4), "f4"), np.ones((4, 4), "f4"))).all()
    finally:
        rank.fake.compute = 90
        world.close()
