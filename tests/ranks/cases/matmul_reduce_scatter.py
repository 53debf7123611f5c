"""Product and reduce-scatter in one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import numpy as np
import pytest

import tdx
from tdx.kernels.matmul import ACTIVATIONS, Config
from tdx.kernels.matmul_reduce_scatter import ALGORITHMS
from tdx.kernels.select import CONSTANTS
from tdx.runtime.errors import CollectiveMismatch, DtypeError, InvalidArgument
from tests.helpers.blocks import many_blocks
from tests.helpers.cases import limit, worlds
from tests.helpers.reference import (
    activated,
    assert_same_bits,
    error_bound,
    poisoned,
    product,
    values,
)

# rows a rank, depth, columns
SHAPES = [(1, 1, 1), (2, 16, 3), (7, 33, 20), (16, 16, 16), (40, 65, 50), (17, 8, 129)]
SMALL = Config(32, 32, 32, num_warps=4)


def operands(rank, m, depth, n, dtype, salt=0):
    return values(rank, (m, depth), dtype, salt), values(rank, (depth, n), dtype, 1000 + salt)


def reference(world, m, depth, n, dtype, salt=0):
    """This rank's rows; `m` rows a rank, `depth` a function of the rank."""
    total = sum(
        product(*operands(rank, m * world.size, depth(rank), n, dtype, salt))
        for rank in range(world.size)
    )
    return total[world.rank * m : (world.rank + 1) * m]


def close(got, wanted, depth, *kinds):
    got = np.asarray(got.numpy() if hasattr(got, "numpy") else got).astype(np.float64)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    bound = error_bound(depth, *kinds)
    assert not got.size or np.abs(got - wanted).max() <= bound, (np.abs(got - wanted).max(), bound)


@worlds(1, 2, 3, 4, 5)
@limit(120)  # on GPUs some hundred kernels are compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def case_values(world, dtype):
    size = world.size
    for m, k, n in SHAPES if size < 3 else SHAPES[2::2]:
        a, b = operands(world.rank, m * size, k, n, dtype)
        wanted = reference(world, m, lambda _, k=k: k, n, dtype)
        x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
        turned = world.array(np.ascontiguousarray(b.T), symmetric=False)
        rows = world.array(np.ascontiguousarray(a.T), symmetric=False)
        pinned = [{"algorithm": name} for name in ALGORITHMS]
        for options in ({}, {"config": SMALL}, *pinned):
            out = world.array(poisoned((m, n), dtype), symmetric=False)
            assert tdx.matmul_reduce_scatter(x, y, out=out, **options) is out
            close(out, wanted, k * size, *[dtype] * size)
            for left, right in ((x, turned.T), (rows.T, y)):
                again = tdx.matmul_reduce_scatter(left, right, **options)
                assert_same_bits(again.numpy(), out.numpy())


@worlds(2, 3)
@pytest.mark.parametrize("group_m", [1, 3, 8])
def case_a_part_in_two_halves(world, group_m):
    """So sent where it keeps all blocks at work; tiles of any groups have the same bits."""
    few = dataclasses.replace(
        CONSTANTS["host"], tile=(16, 16, 64), described_columns=16, blocks=1, matmul_blocks=3,
        scattered_rows=128,
    )  # fmt: skip
    m, k, n, size = 100, 24, 70, world.size
    x, y = (world.array(z, symmetric=False) for z in operands(world.rank, m * size, k, n, "f"))
    config = Config(16, 16, 16, group_m=group_m, num_warps=4)
    make = functools.partial(tdx.MatmulReduceScatter, world, x.shape, y.shape, "f", config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONSTANTS, "host", few)
        plan = make(algorithm="fused")
        if world.backend == "host":
            assert plan._way.parts.chunk == 64
            with pytest.raises(InvalidArgument, match="block_m=128 must be <= 64"):
                make(algorithm="fused", config=Config(128, 16, 16))
    wanted = make(algorithm="unfused")(x, y).numpy()
    for _ in range(3):
        assert_same_bits(plan(x, y).numpy(), wanted)


@worlds(8)
def case_eight_ranks(world):
    a, b = operands(world.rank, 24, 20, 17, "float32")
    x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
    wanted = reference(world, 3, lambda _: 20, 17, "float32")
    for algorithm in ALGORITHMS:
        result = tdx.matmul_reduce_scatter(x, y, algorithm=algorithm)
        close(result, wanted, 160, *["float32"] * 8)


@worlds(2, 3)
def case_many_blocks(world):
    m, k, n = 65, 24, 70
    with many_blocks():
        plan = tdx.MatmulReduceScatter(world, (m * world.size, k), (k, n), "float32")
        a, b = operands(world.rank, m * world.size, k, n, "float32")
        x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
        wanted = reference(world, m, lambda _: k, n, "float32")
        for _ in range(4):
            close(plan(x, y), wanted, k * world.size, *["float32"] * world.size)


@worlds(3)
def case_depth_differs_between_ranks(world):
    def depth(rank):
        return (40, 0, 7)[rank]

    a, b = operands(world.rank, 15, depth(world.rank), 20, "float32")
    x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
    wanted = reference(world, 5, depth, 20, "float32")
    for config in (None, SMALL):
        for algorithm in (None, "low_latency", "one_kernel"):
            result = tdx.matmul_reduce_scatter(x, y, config=config, algorithm=algorithm)
            close(result, wanted, 64, "float32", "float32")


@worlds(2)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def case_bias_activation_and_types(world, activation):
    m, k, n = 18, 40, 29
    for dtype, out_dtype, partial in [
        ("float32", None, None), ("bfloat16", None, "float32"), ("bfloat16", "float32", None),
        ("float16", "bfloat16", "float32"), ("float32", "bfloat16", None),
    ]:  # fmt: skip
        a, b = operands(world.rank, m * world.size, k, n, dtype)
        bias = values(8, n, dtype)
        result = tdx.matmul_reduce_scatter(
            world.array(a, symmetric=False), world.array(b, symmetric=False),
            bias=world.array(bias, symmetric=False), activation=activation, out_dtype=out_dtype,
            partial_dtype=partial,
        )  # fmt: skip
        wanted = reference(world, m, lambda _, k=k: k, n, dtype) + bias.astype(np.float64)
        assert result.dtype.name == (out_dtype or dtype)
        rounding = [partial or out_dtype or dtype] * world.size
        close(result, activated(wanted, activation), 2 * k, out_dtype or dtype, *rounding)


@worlds(2)
def case_wide_partials_round_once(world):
    """With partial_dtype="float32" a bfloat16 result is that of float32, rounded."""
    a, b = operands(world.rank, 32, 48, 33, "bfloat16")
    x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
    config = Config(32, 32, 16, num_warps=4)
    wide = tdx.matmul_reduce_scatter(x, y, out_dtype="float32", config=config)
    once = tdx.matmul_reduce_scatter(x, y, partial_dtype="float32", config=config)
    assert_same_bits(once.numpy(), wide.numpy().astype(once.dtype))


@worlds(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_rows_do_not_depend_on_their_number(world, algorithm):
    """With a Config a row has the same bits whatever else is in the batch, by each algorithm."""
    m, k, n = 70, 48, 40
    a, b = operands(world.rank, m * world.size, k, n, "bfloat16")
    parts = a.reshape(world.size, m, k)  # the rows of each rank
    whole = tdx.matmul_reduce_scatter(a, b, config=SMALL, algorithm="unfused")
    for rows in (70, 1, 5, 33):
        few = np.ascontiguousarray(parts[:, :rows]).reshape(-1, k)
        part = tdx.matmul_reduce_scatter(few, b, config=SMALL, algorithm=algorithm)
        assert_same_bits(part, whole[:rows], rows)


@worlds(1, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_leading_axes_and_empty(world, algorithm):
    size = world.size
    call = functools.partial(tdx.matmul_reduce_scatter, algorithm=algorithm)
    shape = (2 * size, 3, 8)
    total = sum(
        product(values(rank, shape, "float32"), values(rank, (8, 5), "float32", 1))
        for rank in range(size)
    )
    x = world.array(values(world.rank, shape, "float32"), symmetric=False)
    y = world.array(values(world.rank, (8, 5), "float32", 1), symmetric=False)
    wanted = total[2 * world.rank : 2 * world.rank + 2]
    close(call(x, y), wanted, 8 * size, "float32", "float32")
    assert call(x[:0], y).shape == (0, 3, 5)
    assert call(x, y[:, :0]).shape == (2, 3, 0)
    zero = call(world.empty((size, 0), "float32"), world.empty((0, 5), "float32"))
    assert_same_bits(zero.numpy(), np.zeros((1, 5), np.float32))


@worlds(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def case_repetition_and_graphs(world, dtype, algorithm):
    """Many calls without the host, each with other inputs; then in a graph. The same bits."""
    m, k, n = 41, 20, 24
    with many_blocks():
        plan = tdx.MatmulReduceScatter(
            world, (m * world.size, k), (k, n), dtype, config=SMALL, algorithm=algorithm
        )
    given = [operands(world.rank, m * world.size, k, n, dtype, i) for i in range(8)]
    loaded = [[world.array(v, symmetric=False) for v in pair] for pair in given]
    outs = [world.empty((m, n), dtype, symmetric=False) for _ in given]
    for (x, y), out in zip(loaded, outs, strict=True):
        plan(x, y, out=out)
    for i, out in enumerate(outs):
        wanted = reference(world, m, lambda _: k, n, dtype, i)
        close(out, wanted, k * world.size, *[dtype] * world.size)
    x = world.empty((m * world.size, k), dtype, symmetric=False)
    y = world.empty((k, n), dtype, symmetric=False)
    with tdx.graph(world) as graph:
        result = plan(x, y)
    for i, out in enumerate(outs):
        x.copy_from(given[i][0])
        y.copy_from(given[i][1])
        graph.replay()
        assert_same_bits(result.numpy(), out.numpy(), i)
        if i % 3 == 0:
            assert_same_bits(plan(x, y).numpy(), out.numpy(), i)


@worlds(1, 2, 4)
def case_all_algorithms_give_the_same_bits(world):
    """Also of ranks with nothing to add, with a bias, and of ragged tiles."""
    for m, k, n in SHAPES[2:] if world.size < 4 else SHAPES[-2:-1]:
        k = 0 if world.rank == 1 else k
        a, b = operands(world.rank, m * world.size, k, n, "bfloat16")
        x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
        bias = world.array(values(8, n, "bfloat16"), symmetric=False)
        config = Config(16, 32, 32, num_warps=4)
        for more, extras in (({"bias": True, "activation": "silu"}, {"bias": bias}), ({}, {})):
            for partial in ("float32", None):
                options = {"config": config, "partial_dtype": partial, **more}
                results = []
                for algorithm, blocks in (
                    *((name, contextlib.nullcontext) for name in ALGORITHMS),
                    *((name, many_blocks) for name in ALGORITHMS),
                ):  # fmt: skip
                    with blocks():
                        plan = tdx.MatmulReduceScatter(
                            world, a.shape, b.shape, "bfloat16", algorithm=algorithm, **options
                        )
                    results.append(plan(x, y, **extras).numpy())
                for other in results[1:]:
                    assert_same_bits(results[0], other)


@worlds(2)
def case_bad_arguments(world):
    x, y = world.zeros((4, 8), "float32"), world.zeros((8, 5), "float32")
    square = world.zeros((8, 8), "float32")
    call = tdx.matmul_reduce_scatter
    for kind, words, attempt in [
        (InvalidArgument, "differ in K", lambda: call(x, y.T)),
        (InvalidArgument, "shapes", lambda: call(x[0], y)),
        (InvalidArgument, "3, is no multiple of the 2 ranks; pad it", lambda: call(x[:3], y)),
        (
            InvalidArgument,
            r"1, is no multiple of the 2 ranks; give it as \(4, ",
            lambda: call(x[None, :4], y),
        ),
        (DtypeError, "float32", lambda: call(x, world.zeros((8, 5), "float16"))),
        (DtypeError, "partial_dtype", lambda: call(x, y, partial_dtype="float16")),
        (InvalidArgument, "activation='tanh'", lambda: call(x, y, activation="tanh")),
        (InvalidArgument, "bias", lambda: call(x, y, bias=x[0])),
        (InvalidArgument, "algorithm='ring'", lambda: call(x, y, algorithm="ring")),
        (InvalidArgument, "block_m=", lambda: call(x, y, config=Config(1 << 21, 16, 16))),
        (InvalidArgument, "scale_b is for", lambda: call(x, y, scale_b=1.0)),
        (InvalidArgument, "shape", lambda: call(x, y, out=x)),
        (InvalidArgument, "overlaps", lambda: call(x, square, out=x[:2])),
        (InvalidArgument, "overlaps", lambda: call(x, square, out=square[3:5], algorithm="fused")),
    ]:
        with pytest.raises(kind, match=words):
            attempt()
        assert call(x, y).shape == (2, 5)


@worlds(2)
def case_different_columns_are_found(world):
    x = world.zeros((4, 8), "float32")
    y = world.zeros((8, 70 + world.rank), "float32", symmetric=False)
    with pytest.raises(CollectiveMismatch) as mismatch:
        tdx.matmul_reduce_scatter(x, y)
    assert set(mismatch.value.calls) == {0, 1}
