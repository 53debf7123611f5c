"""Products of float8 with scales, against float64 NumPy of the scaled inputs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import tdx
from tdx.kernels.all_gather_matmul import ALGORITHMS as GATHERS
from tdx.kernels.matmul import Config
from tdx.kernels.matmul_all_reduce import ALGORITHMS
from tdx.kernels.matmul_reduce_scatter import ALGORITHMS as SCATTERS
from tdx.runtime.errors import CollectiveMismatch, DtypeError, InvalidArgument
from tdx.runtime.init import current_world
from tests.helpers.blocks import copy_engines
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.reference import activated, assert_same_bits, poisoned, product, values

KIND = "float8_e4m3fn"
SMALL = Config(32, 32, 32, num_warps=4)
LARGE = Config(128, 128, 128)  # of fewer rows than 64 sums are made otherwise, and exact
SHAPES = [(2, 16, 3), (7, 33, 20), (16, 16, 16), (40, 65, 50), (17, 8, 129)]
# of a, of b
SCALES = [("one", "one"), ("each", "each"), ("scalar", "one"), ("array", "each"), (None, "each")]


def scale(kind, count, salt):
    """A scale as a call takes it, such that none passes for another."""
    if kind is None:
        return None
    each = (2.0 ** (np.arange(count) % 7 - 3) * (1 + salt / 8)).astype(np.float32)
    one = 0.5 + salt / 8
    return {"one": one, "scalar": np.array(one, "f4"), "array": each[:1], "each": each}[kind]


def scaled(x, factor, axis):
    """The inputs in float64, times their scales."""
    factor = np.asarray(1.0 if factor is None else factor, np.float64)
    return x.astype(np.float64) * (np.expand_dims(factor, axis) if factor.ndim else factor)


def operands(rank, m, k, n, kinds=("each", "each"), salt=0):
    """a, b and their scales."""
    lead = m if isinstance(m, tuple) else (m,)
    left = scale(kinds[0], int(np.prod(lead)), rank + salt)
    if kinds[0] == "each":
        left = left.reshape(lead)
    a, b = values(rank, (*lead, k), KIND, salt), values(rank, (k, n), KIND, 1000 + salt)
    return a, b, left, scale(kinds[1], n, 1 + rank + salt)


def exact(a, b, left, right):
    return product(scaled(a, left, -1), scaled(b, right, 0))


def close(got, wanted, dtype="bfloat16"):
    got = np.asarray(got.numpy() if hasattr(got, "numpy") else got)
    assert got.dtype.name == dtype
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    error = np.linalg.norm(got.astype(np.float64) - wanted)
    on_host = current_world().backend == "host"  # tensor cores add float8 in less than float32
    bound = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 1e-6 if on_host else 2e-4}[dtype]
    assert error <= bound * np.linalg.norm(wanted), error / np.linalg.norm(wanted)


@worlds(1)
@pytest.mark.parametrize("kinds", SCALES)
def case_matmul(world, kinds):
    for m, k, n in SHAPES:
        a, b, left, right = operands(0, m, k, n, kinds)
        x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
        turned = world.array(np.ascontiguousarray(b.T), symmetric=False)
        wanted = exact(a, b, left, right)
        for config in (None, SMALL):
            out = world.array(poisoned((m, n), "bfloat16"), symmetric=False)
            given = {"scale_a": left, "scale_b": right, "config": config}
            tdx.matmul(x, y, out=out, **given)
            close(out, wanted)
            assert_same_bits(tdx.matmul(x, turned.T, **given).numpy(), out.numpy())


@worlds(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def case_scales_come_before_bias_and_activation(world, dtype):
    a, b, left, right = operands(0, (3, 11), 40, 29)
    bias = values(2, 29, "float32")
    x, y, z = (world.array(v, symmetric=False) for v in (a, b, bias))
    result = tdx.matmul(
        x, y, bias=z, activation="gelu", scale_a=world.array(left, symmetric=False),
        scale_b=right, out_dtype=dtype,
    )  # fmt: skip
    close(result, activated(exact(a, b, left, right) + bias, "gelu"), dtype)


@worlds(1, 2)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        *(("AllGatherMatmul", name) for name in GATHERS),
        *(("MatmulReduceScatter", name) for name in SCATTERS),
        *(("MatmulAllReduce", name) for name in ALGORITHMS),
    ],
)
def case_plans_have_the_kernel_of_the_usual_bias(world, kind, algorithm, bias):
    """One of the result's type: its first call binds no kernel."""
    options = {"algorithm": algorithm, "bias": bias}
    plan = getattr(tdx, kind)(world, (16, 32), (32, 48), KIND, **options)
    x, y = (world.zeros(shape, KIND, symmetric=False) for shape in ((16, 32), (32, 48)))
    given = {"bias": world.zeros(48, "bfloat16", symmetric=False)} if bias else {}
    bound, bind = [], world.driver.bind
    world.driver.bind = lambda kernel, *args: bound.append(kernel) or bind(kernel, *args)
    try:
        plan(x, y, **given)
        assert not bound
        if bias:
            plan(x, y, bias=world.zeros(48, "float32", symmetric=False))
            assert bound
    finally:
        del world.driver.bind
    world.synchronize()


@worlds(1, 2)
@pytest.mark.parametrize(
    "operation", ["matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
)
@pytest.mark.parametrize("transposed", [True, False])
def case_sums_go_on_in_float32(world, operation, transposed):
    """Beside one large product, a Hopper tensor core loses all small ones of its own sum."""
    depth = 2048
    a, b = np.ones((256, depth)), np.ones((depth, 128))
    a[:, 0] = b[0] = 256
    x = world.array(a.astype(KIND), symmetric=False)
    y = world.array((b.T if transposed else b).astype(KIND), symmetric=False)
    call = partial(
        getattr(tdx, operation), x, y.T if transposed else y, out_dtype="float32",
        scale_a=1 / world.size if "reduce" in operation else None, config=LARGE,
    )  # fmt: skip
    usual, fast = (call(fast_accum=each).numpy() for each in (False, True))
    wanted = 256 * 256 + depth - 1
    lost, lost_fast = wanted - usual, wanted - fast
    assert (lost >= 0).all()
    assert (lost < 512).all()
    if world.backend == "host":
        assert_same_bits(usual, fast)
        assert not lost.any()
    elif world.device.arch == "sm_90":
        assert (lost_fast >= 512).all()


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", GATHERS)
def case_all_gather_matmul(world, algorithm):
    """Several b for one gather, scales of rows and single ones, different on each rank."""
    for i, (m, k, n) in enumerate(SHAPES):
        config, kind = (SMALL if i % 3 else None), ("one" if i % 2 else "each")
        given = [operands(rank, m, k, n, (kind, "each")) for rank in range(world.size)]
        whole = np.concatenate([scaled(a, left, -1) for a, _, left, _ in given])
        a, b, left, right = given[world.rank]
        other = values(77, (k, n + 3), KIND)
        y = world.array(np.ascontiguousarray(b.T), symmetric=False).T
        first, second, gathered = tdx.all_gather_matmul(
            world.array(a, symmetric=False), [y, world.array(other, symmetric=False)],
            scale_a=left, scale_b=[right, 0.25], return_gathered=True, config=config,
            algorithm=algorithm,
        )  # fmt: skip
        close(first, product(whole, scaled(b, right, 0)))
        close(second, product(whole, scaled(other, 0.25, 0)))
        assert_same_bits(gathered.numpy(), np.concatenate([a for a, *_ in given]))


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("kinds", SCALES[:2])
def case_reduced(world, kinds):
    """Scales apply to each rank's part of the sum; ragged K, other depths on other ranks."""
    size = world.size
    for m, k, n in SHAPES[1:] if size < 3 else SHAPES[-1:]:
        given = [operands(rank, m * size, k + rank, n, kinds) for rank in range(size)]
        wanted = sum(exact(*each) for each in given)
        a, b, left, right = given[world.rank]
        x = world.array(a, symmetric=False)
        y = world.array(np.ascontiguousarray(b.T), symmetric=False).T
        scales = {"scale_a": left, "scale_b": right, "config": SMALL}
        mine = tdx.matmul_reduce_scatter(x, y, **scales)
        close(mine, wanted[world.rank * m : (world.rank + 1) * m])
        close(tdx.matmul_reduce_scatter(x, y, partial_dtype="float32", **scales),
              wanted[world.rank * m : (world.rank + 1) * m])  # fmt: skip
        for algorithm in SCATTERS:
            again = tdx.matmul_reduce_scatter(x, y, algorithm=algorithm, **scales)
            assert_same_bits(again.numpy(), mine.numpy(), algorithm)
        whole = tdx.all_gather(mine).numpy()
        for algorithm in ALGORITHMS:
            result = tdx.matmul_all_reduce(x, y, algorithm=algorithm, **scales)
            close(result, wanted)
            # the same partial sums, added in the same order
            assert_same_bits(result.numpy(), whole)


@worlds(1, 2)
def case_empty(world):
    x, y = world.zeros((2 * world.size, 32), KIND), world.zeros((32, 5), KIND)
    left, right = np.ones(2 * world.size, "f4"), np.ones(5, "f4")
    for call in (tdx.matmul, tdx.all_gather_matmul, tdx.matmul_reduce_scatter,
                 tdx.matmul_all_reduce):  # fmt: skip
        assert call(x[:0], y, scale_a=left[:0], scale_b=right).size == 0
        assert call(x, y[:, :0], scale_a=left, scale_b=right[:0]).size == 0
        a, b = world.empty((2 * world.size, 0), KIND), world.empty((0, 5), KIND)
        result = call(a, b, scale_a=left, scale_b=right).numpy()
        assert result.size
        assert not result.any()


def _plans(world):
    m, k, n = 12 * world.size, 40, 24
    shapes = ((m, k), (k, n), KIND)
    return [
        tdx.AllGatherMatmul(world, *shapes, config=SMALL, chunks_per_rank=3, row_scales=True),
        *(
            tdx.AllGatherMatmul(world, *shapes, config=SMALL, algorithm=algorithm, row_scales=True)
            for algorithm in ("one_kernel", "unfused")
        ),
        tdx.MatmulReduceScatter(world, *shapes, config=SMALL, partial_dtype="float32"),
        *(
            tdx.MatmulAllReduce(
                world, *shapes, config=SMALL, partial_dtype="float32", algorithm=algorithm
            )
            for algorithm in ALGORITHMS
        ),
    ]


@worlds(2, 3)
@pytest.mark.parametrize("engines", [False, True])
def case_repetition_and_graphs(world, engines):
    """Many calls without the host, each with other inputs and scales; then in a graph."""
    m, k, n = 12 * world.size, 40, 24
    given = [operands(world.rank, m, k, n, salt=i) for i in range(8)]
    loaded = [[world.array(v, symmetric=False) for v in each] for each in given]
    held = [world.empty(v.shape, v.dtype, symmetric=False) for v in loaded[0]]
    with copy_engines(engines):
        plans = _plans(world)
    for plan in plans[:1] if engines else plans:
        shape = plan.out_shape if hasattr(plan, "out_shape") else plan.out_shapes[0]
        outs = [world.empty(shape, "bfloat16", symmetric=False) for _ in given]
        for (x, y, left, right), out in zip(loaded, outs, strict=True):
            plan(x, y, out, scale_a=left, scale_b=right)
        for i, out in enumerate(outs):
            everybody = [operands(rank, m, k, n, salt=i) for rank in range(world.size)]
            if plan.operation == "all_gather_matmul":
                whole = np.concatenate([scaled(a, left, -1) for a, _, left, _ in everybody])
                wanted = product(whole, scaled(given[i][1], given[i][3], 0))
            else:
                wanted = sum(exact(*each) for each in everybody)
            if plan.operation == "matmul_reduce_scatter":
                wanted = wanted[12 * world.rank : 12 * world.rank + 12]
            close(out, wanted)
        x, y, left, right = held
        with tdx.graph(world) as graph:
            result = plan(x, y, scale_a=left, scale_b=right)
        for i, out in enumerate(outs):
            for to, source in zip(held, given[i], strict=True):
                to.copy_from(source)
            graph.replay()
            assert_same_bits(result.numpy(), out.numpy(), i)


@worlds(1)
def case_numbers_in_a_graph(world):
    """A number is copied to the device by its first call, which cannot be recorded."""
    x, y = world.zeros((4, 32), KIND), world.zeros((32, 5), KIND)
    plan = tdx.MatmulAllReduce(world, (4, 32), (32, 5), KIND)
    with tdx.graph(world) as graph, pytest.raises(InvalidArgument, match=r"scale_b=0\.375"):
        plan(x, y, scale_b=0.375)
    plan(x, y, scale_b=0.375)
    with tdx.graph(world) as graph:
        plan(x, y, scale_b=0.375)
    graph.replay()
    world.synchronize()


@isolated
@worlds(1, 2)
@limit(60)
def case_no_scales_in_a_graph(comm, backend):
    """A plan that was never called can be recorded."""
    with tdx.init(comm, backend=backend) as world:
        x, y = world.zeros((4, 32), KIND), world.zeros((32, 5), KIND)
        plan = tdx.MatmulAllReduce(world, (4, 32), (32, 5), KIND)
        for i in range(70):  # numbers that are kept do not push it out
            plan(x, y, scale_a=2.0 + i)
        with tdx.graph(world) as graph:
            plan(x, y)
        graph.replay()
        world.synchronize()


@isolated
@worlds(3)
@limit(60)
def case_teams(comm, backend):
    with tdx.init(backend=backend) as world:
        for ranks in ((2, 0), (1,), (2, 1, 0)):
            team = world.team(ranks)
            if not team:
                continue
            given = [operands(rank, 6, 24, 18) for rank in ranks]
            a, b, left, right = operands(world.rank, 6, 24, 18)
            scales = {"scale_a": left, "scale_b": right, "team": team, "config": SMALL}
            whole = np.concatenate([scaled(a, left, -1) for a, _, left, _ in given])
            close(tdx.all_gather_matmul(a, b, **scales), product(whole, scaled(b, right, 0)))
            wanted = sum(exact(*each) for each in given)
            for algorithm in ALGORITHMS:
                close(tdx.matmul_all_reduce(a, b, algorithm=algorithm, **scales), wanted)


@worlds(2)
@pytest.mark.parametrize(
    "name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
)
def case_bad_arguments(world, name):
    call = getattr(tdx, name)
    x, y = world.zeros((4, 32), KIND), world.zeros((32, 5), KIND)
    f, g = world.zeros((4, 32), "float32"), world.zeros((32, 5), "float32")
    for kind, words, attempt in [
        (InvalidArgument, "scale_a is for inputs of float8_e4m3fn, not of float32",
         lambda: call(f, g, scale_a=1.0)),
        (InvalidArgument, "scale_b is for", lambda: call(f, g, scale_b=g[0])),
        (InvalidArgument, r"scale_a must be .* \(4,\); got shape \(5,\)",
         lambda: call(x, y, scale_a=g[0])),
        (InvalidArgument, r"scale_b must be .* \(5,\); got shape \(4,\)",
         lambda: call(x, y, scale_b=g[:4, 0])),
        (InvalidArgument, "contiguous", lambda: call(x, y, scale_a=g[:4, 0])),
        (DtypeError, "scale_a must be float32, got float16",
         lambda: call(x, y, scale_a=world.zeros(4, "float16"))),
        (DtypeError, "out_dtype float8_e4m3fn", lambda: call(x, y, out_dtype=KIND)),
        (DtypeError, "float8_e5m2", lambda: call(x.view("float8_e5m2"), y.view("float8_e5m2"))),
        (DtypeError, "a and b must be", lambda: call(x, y.view("float8_e5m2"))),
        (InvalidArgument, "block_k=16 must be >= 32",
         lambda: call(x, y, config=Config(16, 16, 16))),
        (TypeError, "scales", lambda: call(x, y, scales=1.0)),
    ]:  # fmt: skip
        with pytest.raises(kind, match=words):
            attempt()
        assert call(x, y).dtype.name == "bfloat16"


@worlds(2)
def case_one_scale_for_several_b(world):
    x, y = world.zeros((4, 32), KIND), world.zeros((32, 5), KIND)
    with pytest.raises(InvalidArgument, match=r"scale_b: expected a sequence of 2, .* got 1\.0"):
        tdx.all_gather_matmul(x, [y, y], scale_b=1.0)


@worlds(3)
def case_one_rank_is_wrong(world):
    """The others raise too, at once, and the world goes on."""
    x, y = world.zeros((3, 32), KIND), world.zeros((32, 5), KIND)
    wrong = world.rank == 2
    with pytest.raises(InvalidArgument if wrong else CollectiveMismatch, match="block_k=16"):
        tdx.matmul_all_reduce(x, y, config=Config(16, 16, 16 if wrong else 32))
    assert tdx.matmul_all_reduce(x, y).shape == (3, 5)


@worlds(1, 2)
def case_arrays_of_one_element(world):
    """A scale for all, of any rank; where a has one row and the plan row scales, that row's."""
    y = values(1, (32, 8), KIND)
    for rows, shape in ((2, (1,)), (2, (1, 1)), (1, (1,)), (1, (1, 1, 1))):
        x, factor = values(world.rank, (rows, 32), KIND), np.full(shape, 2.0, np.float32)
        for call in (tdx.matmul, tdx.all_gather_matmul, tdx.matmul_all_reduce):
            assert_same_bits(call(x, y, scale_a=factor), call(x, y, scale_a=2.0))
    plan = tdx.AllGatherMatmul(world, (1, 32), (32, 8), KIND, row_scales=True)
    each = np.full(1, 2.0 + world.rank, np.float32)
    whole = np.concatenate([values(rank, (1, 32), KIND) for rank in range(world.size)])
    wanted = tdx.matmul(whole, y, scale_a=2.0 + np.arange(world.size, dtype=np.float32))
    x = values(world.rank, (1, 32), KIND)
    assert_same_bits(plan(x, y, scale_a=each).numpy(), wanted)
    for much in (1e300, 10**400, -1e39):
        with pytest.raises(InvalidArgument, match=r"scale_a is .*: float32 ends at 3\.40282e\+38"):
            tdx.matmul(x, y, scale_a=much)
