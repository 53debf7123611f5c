"""Reduce-scatter and reduce: values, bits, and the ways to call them."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

import tdx
from tdx.kernels.all_reduce import Config as AllReduceConfig
from tdx.kernels.reduce import Config as ReduceConfig
from tdx.kernels.reduce_scatter import Config as ScatterConfig
from tdx.runtime.errors import DtypeError, InvalidArgument, PeerTimeout, TdxError, Unsupported
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.reference import assert_same_bits, poisoned, reduced, values

DTYPES = [
    "float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2", "int32", "int64",
]  # fmt: skip
NARROW_OR_WIDE = {"float64", "float8_e4m3fn", "float8_e5m2", "int64"}  # not for words with flags


def inputs(world, shape, dtype, salt=0):
    return [values(rank, shape, dtype, salt) for rank in range(world.size)]


def own_part(world, whole):
    rows = whole.shape[0] // world.size
    return whole[world.rank * rows : (world.rank + 1) * rows]


def algorithms(dtype, large):
    return [large] if dtype in NARROW_OR_WIDE else [large, "low_latency"]


def operations(dtype):
    return ("sum", "max", "min") if dtype.startswith("int") else ("sum", "avg", "max", "min")


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def case_scattered_values(world, dtype):
    """Every op, size and algorithm gives the own rows of the rank-order reference."""
    for op in operations(dtype):
        for shape in ((1,), (7,), (1027,), (16, 3), (0,), (2, 0)):
            whole = (shape[0] * world.size, *shape[1:])
            given = inputs(world, whole, dtype)
            x = world.array(given[world.rank])
            for algorithm in algorithms(dtype, "push"):
                out = world.array(poisoned(shape, dtype))
                assert tdx.reduce_scatter(x, op, out=out, algorithm=algorithm) is out
                wanted = own_part(world, reduced(given, op))
                assert_same_bits(out.numpy(), wanted, (op, shape, algorithm))
            assert_same_bits(x.numpy(), given[world.rank], "the input")


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def case_reduced_values(world, dtype):
    """The root gets the bits of the rank-order reference, the others None."""
    for turn, op in enumerate(operations(dtype)):
        for shape in (1, 7, 1023, (0, 3), (3, 5), ()) if world.size < 4 else (7, 1023):
            given = inputs(world, shape, dtype)
            x = world.array(given[world.rank])
            for root in {0, turn % world.size, world.size - 1}:
                for algorithm in algorithms(dtype, "two_shot"):
                    here = world.rank == root
                    out = world.array(poisoned(shape, dtype), symmetric=False) if here else None
                    assert tdx.reduce(x, root, op, out=out, algorithm=algorithm) is out
                    if out is not None:
                        assert_same_bits(out.numpy(), reduced(given, op), (op, shape, algorithm))
            assert_same_bits(x.numpy(), given[world.rank], "the input")


@worlds(8)
def case_eight_ranks(world):
    for dtype in ("float32", "bfloat16"):
        given = inputs(world, 8 * 129, dtype)
        x = world.array(given[world.rank])
        for algorithm in ("push", "low_latency"):
            result = tdx.reduce_scatter(x, algorithm=algorithm)
            assert_same_bits(result.numpy(), own_part(world, reduced(given)), algorithm)
        result = tdx.reduce(x, 5, algorithm="two_shot")
        if world.rank == 5:
            assert_same_bits(result.numpy(), reduced(given))


@worlds(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def case_any_alignment_and_memory(world, dtype):
    """Inputs and outputs of local memory that start at odd elements; parts of odd sizes."""
    for begin, rows in ((1, 333), (2, 64), (3, 335)):
        size = rows * world.size
        given = inputs(world, size + begin, dtype)
        wanted = reduced([g[begin:] for g in given])
        x = world.array(given[world.rank], symmetric=False)[begin:]
        for algorithm in algorithms(dtype, "push"):
            whole = world.array(poisoned(rows + 8, dtype), symmetric=False)
            tdx.reduce_scatter(x, out=whole[3 : 3 + rows], algorithm=algorithm)
            expected = poisoned(rows + 8, dtype)
            expected[3 : 3 + rows] = own_part(world, wanted)
            assert_same_bits(whole.numpy(), expected, (begin, algorithm))
        for algorithm in algorithms(dtype, "two_shot"):
            whole = world.array(poisoned(size + 8, dtype), symmetric=False)
            out = whole[3 : 3 + size] if world.rank == 1 else None
            tdx.reduce(x, 1, out=out, algorithm=algorithm)
            expected = poisoned(size + 8, dtype)
            if world.rank == 1:
                expected[3 : 3 + size] = wanted
            assert_same_bits(whole.numpy(), expected, (begin, algorithm))


@worlds(2, 3)
def case_out_dtype(world):
    for dtype, out in [
        ("bfloat16", "float32"), ("float32", "bfloat16"), ("float64", "float32"),
        ("float8_e4m3fn", "bfloat16"), ("float32", "float64"),
    ]:  # fmt: skip
        given = inputs(world, (world.size * 5, 7), dtype)
        wanted = reduced(given, out_dtype=out)
        x = world.array(given[world.rank])
        for algorithm in algorithms(dtype, "push"):
            result = tdx.reduce_scatter(x, out_dtype=out, algorithm=algorithm)
            assert_same_bits(result.numpy(), own_part(world, wanted), (dtype, out, algorithm))
        for algorithm in algorithms(dtype, "two_shot"):
            result = tdx.reduce(x, 0, out_dtype=out, algorithm=algorithm)
            if result is not None:
                assert_same_bits(result.numpy(), wanted, (dtype, out, algorithm))


@worlds(2, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def case_bits_do_not_depend_on_the_way(world, dtype):
    """Blocks, steps, algorithms, graphs, plans and repetition: the same bits."""
    given = inputs(world, 611 * world.size, dtype)
    wanted = reduced(given)
    x = world.array(given[world.rank])
    for block, options in ((256, {}), (1024, {"blocks": 2}), (64, {"steps": 7, "blocks": 3})):
        plans = [
            tdx.ReduceScatter(world, x.shape, dtype, config=ScatterConfig(name, block, **options))
            for name in ("push", "low_latency")
        ] + [
            tdx.Reduce(world, x.shape, dtype, 1, config=ReduceConfig(name, block, **options))
            for name in ("two_shot", "low_latency")
        ]
        for plan in plans:
            expected = own_part(world, wanted) if plan.operation == "reduce_scatter" else wanted
            results = [plan(x) for _ in range(2)]
            with tdx.graph(world) as graph:
                results.append(plan(x))
            if results[0] is not None:
                assert_same_bits(results[1].numpy(), expected, plan.call)
                results[2].copy_from(poisoned(expected.shape, dtype))
            graph.replay()
            if results[2] is not None:
                assert_same_bits(results[2].numpy(), expected, (plan.call, "graph"))
    rows = slice(17, 17 + 499 * world.size)
    result = tdx.reduce_scatter(x[rows])
    assert_same_bits(result.numpy(), own_part(world, wanted[rows]), "a slice")


@worlds(2, 3)
def case_in_place(world):
    for algorithm in ("push", "low_latency"):
        for rows in (1, 7, 1025):
            given = inputs(world, rows * world.size, "float32")
            x = world.array(given[world.rank])
            part = x[world.rank * rows : (world.rank + 1) * rows]
            tdx.reduce_scatter(x, out=part, algorithm=algorithm)
            expected = given[world.rank].copy()
            expected[world.rank * rows : (world.rank + 1) * rows] = own_part(world, reduced(given))
            assert_same_bits(x.numpy(), expected, (algorithm, rows))
    for algorithm in ("two_shot", "low_latency"):
        given = inputs(world, 1025, "float32")
        x = world.array(given[world.rank])
        tdx.reduce(x, 1, out=x if world.rank == 1 else None, algorithm=algorithm)
        expected = reduced(given) if world.rank == 1 else given[world.rank]
        assert_same_bits(x.numpy(), expected, algorithm)


@worlds(2, 4)
@pytest.mark.parametrize("steps", [1, 3])
def case_back_to_back(world, steps):
    """Many calls without a host synchronisation, of all plans in turn, some ranks ahead."""
    rows, calls = 131, 20
    size = rows * world.size
    scatters = [
        tdx.ReduceScatter(world, size, "int32", config=ScatterConfig(name, 64, steps=steps))
        for name in ("push", "low_latency")
    ]
    reduces = [
        tdx.Reduce(world, size, "int32", root, config=ReduceConfig(name, 64, steps=steps))
        for name, root in (("two_shot", 0), ("low_latency", world.size - 1))
    ]
    given = inputs(world, size, "int32")
    xs = [world.array(given[world.rank] + np.int32(i)) for i in range(calls)]
    parts = [[world.empty(rows, "int32") for _ in range(calls)] for _ in scatters]
    wholes = [[world.empty(size, "int32") for _ in range(calls)] for _ in reduces]
    for i in range(calls):
        for plan, outs in zip(scatters, parts, strict=True):
            plan(xs[i], out=outs[i])
        for plan, outs in zip(reduces, wholes, strict=True):
            plan(xs[i], out=outs[i] if world.rank == plan.root else None)
    for i in range(calls):
        wanted = reduced([g + np.int32(i) for g in given])
        for outs in parts:
            assert_same_bits(outs[i].numpy(), own_part(world, wanted), i)
        for plan, outs in zip(reduces, wholes, strict=True):
            if world.rank == plan.root:
                assert_same_bits(outs[i].numpy(), wanted, i)


@worlds(3)
@pytest.mark.parametrize("algorithm", ["push", "low_latency"])
def case_graph_replays_changing_inputs(world, algorithm):
    shape = 3 * 341
    plan = tdx.ReduceScatter(world, shape, "float32", algorithm=algorithm)
    root = tdx.Reduce(world, shape, "float32", 2, algorithm=algorithm.replace("push", "two_shot"))
    x, part, whole = (world.empty(n, "float32") for n in (shape, 341, shape))
    with tdx.graph(world) as graph:
        plan(x, out=part)
        root(x, out=whole if world.rank == 2 else None)
    for turn in range(20):
        given = inputs(world, shape, "float32", salt=turn)
        x.copy_from(given[world.rank])
        part.copy_from(poisoned(341, "float32"))
        graph.replay()
        assert_same_bits(part.numpy(), own_part(world, reduced(given)), turn)
        if world.rank == 2:
            assert_same_bits(whole.numpy(), reduced(given), turn)
    for _ in range(10):  # without looking in between, eager calls among them
        graph.replay()
        plan(x, out=part)
    assert_same_bits(part.numpy(), own_part(world, reduced(given)))


@worlds(3)
def case_two_streams(world):
    """Different plans on two streams, and one plan on both in turn."""
    size = 3 * 683
    streams = [world.new_stream(), world.new_stream()]
    plans = [
        tdx.ReduceScatter(world, size, "float32", algorithm="push"),
        tdx.Reduce(world, size, "float32", 0, algorithm="two_shot"),
    ]
    given = inputs(world, size, "float32")
    x = world.array(given[world.rank])
    outs = [world.empty(683, "float32") for _ in range(20)]
    whole = world.empty(size, "float32", symmetric=False) if world.rank == 0 else None
    for i in range(20):
        plans[0](x, out=outs[i], stream=streams[i % 2 if i > 9 else 0])
        plans[1](x, out=whole, stream=streams[1])
    for out in outs:
        assert_same_bits(out.numpy(), own_part(world, reduced(given)))
    if whole is not None:
        assert_same_bits(whole.numpy(), reduced(given))


@isolated
@worlds(2, 3)
@limit(30)
def case_a_rank_that_does_not_call(comm, backend):
    """The others raise at the deadline, with the operation, the rank and the call."""
    world = tdx.init(comm, backend=backend, timeout_s=1.0)
    config = AllReduceConfig("two_shot", 64, steps=3)
    plans = [
        tdx.AllReduce(world, 1023, "float32", config=config),
        tdx.ReduceScatter(world, 30 * world.size, "float32", config=ScatterConfig("push", 64)),
    ]
    plan = plans[world.size % 2]
    x = world.zeros(plan.shape, "float32")
    for _ in range(2):
        plan(x)
    world.barrier()
    if world.rank != 1:
        plan(x)
        with pytest.raises(PeerTimeout) as caught:
            world.synchronize()
        fault = caught.value
        assert (fault.operation, fault.peer, fault.call_number) == (plan.operation, 1, 3)
    else:
        time.sleep(1.5)
    with contextlib.suppress(TdxError):
        world.close()


@worlds(1, 2)
def case_numpy(world):
    """NumPy in, NumPy out, also of arrays that are not contiguous."""
    given = inputs(world, (6, 2 * world.size), "bfloat16")
    x = given[world.rank].T
    wanted = reduced([g.T for g in given])
    result = tdx.reduce_scatter(x)
    assert type(result) is np.ndarray
    assert_same_bits(result, own_part(world, wanted))
    result = tdx.reduce(x, world.size - 1)
    assert (result is None) == (world.rank != world.size - 1)
    if result is not None:
        assert type(result) is np.ndarray
        assert_same_bits(result, wanted)


@worlds(2)
def case_bad_arguments(world):
    """The same mistake on all ranks: a clear error on all ranks, and the next call works."""
    x = world.zeros((4, 8), "float32")
    ints = world.zeros(4, "int32")
    wrong = [
        (InvalidArgument, "op='prod'", lambda: tdx.reduce_scatter(x, "prod")),
        (InvalidArgument, "algorithm='ring'", lambda: tdx.reduce_scatter(x, algorithm="ring")),
        (Unsupported, "avg", lambda: tdx.reduce_scatter(ints, "avg")),
        (DtypeError, "floats only", lambda: tdx.reduce_scatter(ints, out_dtype="float32")),
        (InvalidArgument, "5, is no multiple of the 2 ranks",
         lambda: tdx.reduce_scatter(world.zeros(5, "float32"))),
        (InvalidArgument, "at least one axis",
         lambda: tdx.reduce_scatter(world.zeros((), "float32"))),
        (InvalidArgument, r"expected \(2, 8\)", lambda: tdx.reduce_scatter(x, out=x)),
        (InvalidArgument, "contiguous", lambda: tdx.reduce_scatter(x.T)),
        (DtypeError, "int8", lambda: tdx.reduce_scatter(world.zeros(4, "int8"))),
        (InvalidArgument, "low_latency takes up to",
         lambda: tdx.ReduceScatter(world, 1 << 21, "float32", algorithm="low_latency")),
        (Unsupported, "types of 2 and 4 bytes",
         lambda: tdx.reduce_scatter(world.zeros(4, "float64"), algorithm="low_latency")),
        (InvalidArgument, "config=.* must be a tdx.kernels", lambda: tdx.ReduceScatter(
            world, 4, "float32", config=ReduceConfig("two_shot", 64))),
        (InvalidArgument, r"root 2 is outside 0\.\.1", lambda: tdx.reduce(x, 2)),
        (InvalidArgument, r"root -1 is outside 0\.\.1", lambda: tdx.reduce(x, -1)),
        (InvalidArgument, "root must be an int, got None", lambda: tdx.reduce(x, None)),
        (InvalidArgument, "algorithm='push'", lambda: tdx.reduce(x, 0, algorithm="push")),
        (Unsupported, "avg", lambda: tdx.reduce(ints, 0, "avg")),
    ]  # fmt: skip
    for kind, words, call in wrong:
        with pytest.raises(kind, match=words):
            call()
        assert_same_bits(tdx.reduce_scatter(ints).numpy(), np.zeros(2, np.int32))
    plan = tdx.Reduce(world, (4, 8), "float32", 0)
    if world.rank == 1:
        with pytest.raises(InvalidArgument, match="out= is for the root, rank 0"):
            plan(x, out=x)
    world.barrier()
    assert (plan(x) is None) == (world.rank == 1)
    if world.rank == 1:
        with pytest.raises(InvalidArgument, match="out= is for the root, rank 0"):
            plan(x, out=x)
