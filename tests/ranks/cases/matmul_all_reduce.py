"""Product and all-reduce in one."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tdx.kernels.library_product import may_multiply
from tdx.kernels.matmul import ACTIVATIONS, Config
from tdx.kernels.matmul_all_reduce import ALGORITHMS
from tdx.kernels.product import Product
from tdx.runtime.errors import CollectiveMismatch, DtypeError, InvalidArgument
from tests.helpers.blocks import many_blocks, phases
from tests.helpers.cases import isolated, limit, skip, worlds
from tests.helpers.reference import (
    activated,
    assert_same_bits,
    error_bound,
    poisoned,
    product,
    values,
)

# rows, depth, columns
SHAPES = [(1, 1, 1), (1, 40, 70), (3, 16, 3), (16, 16, 16), (37, 65, 130), (50, 33, 64)]
SMALL = Config(16, 32, 32, group_m=2, num_warps=4)


def operands(rank, m, depth, n, dtype, salt=0):
    return values(rank, (m, depth), dtype, salt), values(rank, (depth, n), dtype, 1000 + salt)


def reference(ranks, m, depth, n, dtype, salt=0):
    """The sum over `ranks`; `depth` a function of the rank."""
    return sum(product(*operands(rank, m, depth(rank), n, dtype, salt)) for rank in ranks)


def close(got, wanted, depth, *kinds):
    got = np.asarray(got.numpy() if hasattr(got, "numpy") else got).astype(np.float64)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    bound = error_bound(depth, *kinds)
    assert not got.size or np.abs(got - wanted).max() <= bound, (np.abs(got - wanted).max(), bound)


def same_on_all_ranks(world, array):
    mine = array.numpy()
    for other in tdx.all_gather(array[None]).numpy():
        assert_same_bits(other, mine)


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def case_values(world, dtype):
    """Any extents and strides; both algorithms give the same bits, on every rank."""
    size = world.size
    for m, k, n in SHAPES if size < 3 else SHAPES[1::3]:
        a, b = operands(world.rank, m, k, n, dtype)
        wanted = reference(range(size), m, lambda _, k=k: k, n, dtype)
        x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
        turned = world.array(np.ascontiguousarray(b.T), symmetric=False)
        rows = world.array(np.ascontiguousarray(a.T), symmetric=False)
        for config in (None, SMALL):
            out = world.array(poisoned((m, n), dtype), symmetric=False)
            assert tdx.matmul_all_reduce(x, y, out=out, config=config) is out
            close(out, wanted, k * size, *[dtype] * (size + 1))
            same_on_all_ranks(world, out)
            for algorithm in ALGORITHMS:
                again = tdx.matmul_all_reduce(x, y, config=config, algorithm=algorithm)
                assert_same_bits(again.numpy(), out.numpy(), (m, k, n, algorithm))
        for left, right in ((x, turned.T), (rows.T, y)):
            again = tdx.matmul_all_reduce(left, right, config=SMALL)
            assert_same_bits(again.numpy(), out.numpy(), (m, k, n))


@worlds(5)
def case_values_on_five_ranks(world):
    case_values(world, "bfloat16")


@worlds(8)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_eight_ranks(world, algorithm):
    a, b = operands(world.rank, 25, 20, 17, "float32")
    wanted = reference(range(8), 25, lambda _: 20, 17, "float32")
    for config in (None, SMALL):  # of the small tiles not every rank owns one
        result = tdx.matmul_all_reduce(a, b, config=config, algorithm=algorithm)
        close(result, wanted, 160, *["float32"] * 8)


@worlds(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_many_blocks(world, algorithm):
    m, k, n = 131, 24, 70
    with many_blocks():
        plan = tdx.MatmulAllReduce(world, (m, k), (k, n), "float32", algorithm=algorithm)
        a, b = operands(world.rank, m, k, n, "float32")
        x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
        wanted = reference(range(world.size), m, lambda _: k, n, "float32")
        for _ in range(4):
            close(plan(x, y), wanted, k * world.size, *["float32"] * world.size)


@pytest.mark.gpu
@worlds(3, 4)
@limit(120)
def case_phases_by_cublas(world):
    if not may_multiply(world, Product.make(world, "bfloat16", library=True), None):
        skip("there is no cuBLAS for this backend")
    check_phases(world, library=True)


@worlds(3, 4)
def case_phases(world):
    check_phases(world, library=False)


def check_phases(world, library):
    """Of rows that are no multiple of theirs, also replayed."""
    rows, k, n = 100 if world.backend == "host" else 1304, 64, 136
    m = rows * world.size
    with many_blocks(), phases():
        plan = tdx.MatmulAllReduce(
            world, (m, k), (k, n), "bfloat16", algorithm="copy_engine", library=library
        )
        assert len(plan._way.phases) == -(-rows // plan._way.parts.phase) >= 3
        loaded = []
        for salt in range(3):
            a, b = operands(world.rank, m, k, n, "bfloat16", salt)
            wanted = reference(range(world.size), m, lambda _: k, n, "bfloat16", salt)
            loaded.append((*(world.array(x, symmetric=False) for x in (a, b)), wanted))
        kinds = ["bfloat16"] * (world.size + 1)
        outs = [plan(x, y, world.empty((m, n), "bfloat16", symmetric=False)) for x, y, _ in loaded]
        for out, (_, _, wanted) in zip(outs, loaded, strict=True):
            close(out, wanted, k * world.size, *kinds)
            same_on_all_ranks(world, out)
        held = [world.empty(x.shape, x.dtype, symmetric=False) for x in loaded[0][:2]]
        with tdx.graph(world) as graph:
            plan(*held, outs[0])
        for x, y, wanted in loaded:
            held[0].copy_from(x)
            held[1].copy_from(y)
            graph.replay()
            close(outs[0], wanted, k * world.size, *kinds)


@worlds(3)
def case_depth_differs_between_ranks(world):
    def depth(rank):
        return (40, 0, 7)[rank]

    a, b = operands(world.rank, 17, depth(world.rank), 20, "float32")
    x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
    wanted = reference(range(3), 17, depth, 20, "float32")
    for algorithm in ALGORITHMS:
        result = tdx.matmul_all_reduce(x, y, config=SMALL, algorithm=algorithm)
        close(result, wanted, 64, "float32", "float32")


@worlds(2)
@pytest.mark.parametrize("depths", [(64, 65), (17, 48), (33, 47), (0, 5), (0, 64)])
def case_depth_is_ragged_on_some_ranks(world, depths):
    """Ranks meet tile by tile, of the same rows and columns."""
    a, b = operands(world.rank, 300, depths[world.rank], 272, "bfloat16")
    x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
    wanted = reference(range(2), 300, lambda rank: depths[rank], 272, "bfloat16")
    for algorithm in (None, *ALGORITHMS):
        plan = tdx.MatmulAllReduce(world, x.shape, y.shape, "bfloat16", algorithm=algorithm)
        close(plan(x, y), wanted, sum(depths), *["bfloat16"] * 3)


@worlds(2)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def case_bias_activation_and_types(world, activation):
    m, k, n = 19, 40, 29
    for dtype, out_dtype, partial in [
        ("float32", None, None), ("bfloat16", None, "float32"), ("bfloat16", "float32", None),
        ("float16", "bfloat16", "float32"), ("float32", "bfloat16", None),
    ]:  # fmt: skip
        a, b = operands(world.rank, m, k, n, dtype)
        bias = values(8, n, dtype)
        wanted = reference(range(2), m, lambda _, k=k: k, n, dtype) + bias.astype(np.float64)
        for algorithm in ALGORITHMS:
            result = tdx.matmul_all_reduce(
                a, b, bias=bias, activation=activation, out_dtype=out_dtype,
                partial_dtype=partial, algorithm=algorithm,
            )  # fmt: skip
            assert result.dtype.name == (out_dtype or dtype)
            rounding = [partial or out_dtype or dtype] * world.size
            close(result, activated(wanted, activation), 2 * k, out_dtype or dtype, *rounding)


@worlds(2)
def case_wide_partials_round_once(world):
    """With partial_dtype="float32" a bfloat16 result is that of float32, rounded."""
    x, y = operands(world.rank, 33, 48, 33, "bfloat16")
    wide = tdx.matmul_all_reduce(x, y, out_dtype="float32", config=SMALL)
    once = tdx.matmul_all_reduce(x, y, partial_dtype="float32", config=SMALL)
    assert_same_bits(once, wide.astype(once.dtype))


@worlds(2)
def case_rows_do_not_depend_on_their_number(world):
    """With a Config a row has the same bits whatever else is in the batch."""
    a, b = operands(world.rank, 70, 48, 40, "bfloat16")
    whole = tdx.matmul_all_reduce(a, b, config=SMALL, algorithm="two_shot")
    for rows in (1, 5, 33):
        for algorithm in (None, *ALGORITHMS):
            part = tdx.matmul_all_reduce(a[:rows], b, config=SMALL, algorithm=algorithm)
            assert_same_bits(part, whole[:rows], (rows, algorithm))


@worlds(1, 3)
def case_leading_axes_and_empty(world):
    size = world.size
    shape = (2, 3, 8)
    wanted = sum(
        product(values(rank, shape, "float32"), values(rank, (8, 5), "float32", 1))
        for rank in range(size)
    )
    x = world.array(values(world.rank, shape, "float32"), symmetric=False)
    y = world.array(values(world.rank, (8, 5), "float32", 1), symmetric=False)
    close(tdx.matmul_all_reduce(x, y), wanted, 8 * size, "float32", "float32")
    assert tdx.matmul_all_reduce(x[:0], y).shape == (0, 3, 5)
    assert tdx.matmul_all_reduce(x, y[:, :0]).shape == (2, 3, 0)
    zero = tdx.matmul_all_reduce(world.empty((4, 0), "float32"), world.empty((0, 5), "float32"))
    assert_same_bits(zero.numpy(), np.zeros((4, 5), np.float32))


@worlds(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def case_repetition_and_graphs(world, dtype, algorithm):
    """Many calls without the host, each with other inputs; then in a graph. The same bits."""
    m, k, n = 41, 20, 24
    plan = tdx.MatmulAllReduce(world, (m, k), (k, n), dtype, config=SMALL, algorithm=algorithm)
    given = [operands(world.rank, m, k, n, dtype, i) for i in range(12)]
    loaded = [[world.array(v, symmetric=False) for v in pair] for pair in given]
    outs = [world.empty((m, n), dtype, symmetric=False) for _ in given]
    for (x, y), out in zip(loaded, outs, strict=True):
        plan(x, y, out=out)
    for i, out in enumerate(outs):
        wanted = reference(range(world.size), m, lambda _: k, n, dtype, i)
        close(out, wanted, k * world.size, *[dtype] * (world.size + 1))
    x = world.empty((m, k), dtype, symmetric=False)
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


@worlds(3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_results_as_inputs(world, algorithm):
    """A chain of products: two plans' buffers in turn, without the host between."""
    m, k = 35, 20
    plans = [
        tdx.MatmulAllReduce(world, (m, k), (k, k), "float32", config=SMALL, algorithm=algorithm)
        for _ in range(2)
    ]
    b = values(world.rank, (k, k), "float32") / np.float32(16)
    y = world.array(b, symmetric=False)
    x = world.array(values(9, (m, k), "float32"), symmetric=False)
    wanted = values(9, (m, k), "float64")
    total = sum(values(rank, (k, k), "float32").astype(np.float64) / 16 for rank in range(3))
    for turn in range(8):
        x = plans[turn % 2](x, y)
        wanted = wanted @ total
    scale = np.abs(wanted).max()
    assert np.abs(x.numpy() - wanted).max() <= 1e-4 * scale


@isolated
@worlds(3)
@limit(60)
def case_teams(comm, backend):
    with tdx.init(backend=backend) as world:
        for ranks in ((2, 0), (1,), (2, 1, 0)):
            team = world.team(ranks)
            if not team:
                continue
            a, b = operands(world.rank, 37, 24, 18, "float32")
            wanted = reference(ranks, 37, lambda _: 24, 18, "float32")
            for algorithm in ALGORITHMS:
                result = tdx.matmul_all_reduce(a, b, team=team, algorithm=algorithm, config=SMALL)
                close(result, wanted, 72, *["float32"] * 3)


@worlds(2)
def case_bad_arguments(world):
    x, y = world.zeros((4, 8), "float32"), world.zeros((8, 5), "float32")
    call = tdx.matmul_all_reduce
    for kind, words, attempt in [
        (InvalidArgument, "differ in K", lambda: call(x, y.T)),
        (InvalidArgument, "shapes", lambda: call(x[0], y)),
        (DtypeError, "float32", lambda: call(x, world.zeros((8, 5), "float16"))),
        (DtypeError, "partial_dtype", lambda: call(x, y, partial_dtype="float16")),
        (InvalidArgument, "activation='tanh'", lambda: call(x, y, activation="tanh")),
        (InvalidArgument, "bias", lambda: call(x, y, bias=x[0])),
        (InvalidArgument, "algorithm='ring'", lambda: call(x, y, algorithm="ring")),
        (InvalidArgument, "scale_b is for", lambda: call(x, y, scale_b=1.0)),
        (InvalidArgument, "shape", lambda: call(x, y, out=x)),
    ]:
        with pytest.raises(kind, match=words):
            attempt()
        assert call(x, y).shape == (4, 5)


@worlds(2)
def case_different_columns_are_found(world):
    x = world.zeros((4, 8), "float32")
    y = world.zeros((8, 70 + world.rank), "float32", symmetric=False)
    with pytest.raises(CollectiveMismatch) as mismatch:
        tdx.matmul_all_reduce(x, y)
    assert set(mismatch.value.calls) == {0, 1}


@worlds(3)
def case_one_rank_is_wrong(world):
    """The others raise too, at once, and the world goes on."""
    x, y = world.zeros((4, 8), "float32"), world.zeros((8, 5), "float32")
    wrong = world.rank == 2
    with pytest.raises(DtypeError if wrong else CollectiveMismatch, match="partial_dtype"):
        tdx.matmul_all_reduce(x, y, partial_dtype="int32" if wrong else "float32")
    assert tdx.matmul_all_reduce(x, y).shape == (4, 5)
