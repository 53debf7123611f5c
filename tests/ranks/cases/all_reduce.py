"""All-reduce: values, bits, and the ways to call it."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tdx
from tdx.kernels.all_reduce import Config
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported
from tests.helpers.cases import limit, worlds
from tests.helpers.reference import assert_same_bits, poisoned, reduced, values

FLOATS = ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"]
NARROW_OR_WIDE = {"float64", "float8_e4m3fn", "float8_e5m2", "int64"}  # not for words with flags
ALGORITHMS = ["one_shot", "two_shot", "copy_engine", "low_latency", "low_latency_two_shot"]
SHAPES = [1, 2, 7, 1023, 4099, (0,), (0, 3), (3, 5), ()]


def inputs(world, shape, dtype, salt=0):
    return [values(rank, shape, dtype, salt) for rank in range(world.size)]


def algorithms(dtype, adds=False):
    names = ALGORITHMS[:3] if dtype in NARROW_OR_WIDE else ALGORITHMS
    return [name for name in names if not (adds and name == "copy_engine")]


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64"])
def case_values(world, dtype):
    """Every op, size and algorithm gives the bits of the rank-order reference."""
    for op in ("sum", "max", "min") if dtype.startswith("int") else ("sum", "avg", "max", "min"):
        for shape in SHAPES if world.size < 4 else SHAPES[1::2]:
            given = inputs(world, shape, dtype)
            x = world.array(given[world.rank])
            short = shape in (2, 7, (0, 3), ())  # no other branches of two_shot than its neighbours
            for algorithm in algorithms(dtype):
                if short and algorithm.endswith("two_shot"):
                    continue
                out = world.array(poisoned(shape, dtype))
                result = tdx.all_reduce(x, op, out=out, algorithm=algorithm)
                assert result is out
                assert_same_bits(out.numpy(), reduced(given, op), (op, shape, algorithm))
            assert_same_bits(x.numpy(), given[world.rank], "the input")


@worlds(8)
def case_eight_ranks(world):
    for dtype in ("float32", "bfloat16"):
        given = inputs(world, 1023, dtype)
        for algorithm in algorithms(dtype):
            result = tdx.all_reduce(world.array(given[world.rank]), algorithm=algorithm)
            assert_same_bits(result.numpy(), reduced(given))


@worlds(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32"])
def case_any_alignment(world, dtype):
    """Inputs and outputs that start at odd elements."""
    size = 1023
    for begin in (1, 2, 3, 5):
        given = inputs(world, size + begin, dtype)
        x = world.array(given[world.rank])[begin:]
        for algorithm in algorithms(dtype):
            whole = world.array(poisoned(size + 8, dtype))
            tdx.all_reduce(x, out=whole[3 : 3 + size], algorithm=algorithm)
            wanted = poisoned(size + 8, dtype)
            wanted[3 : 3 + size] = reduced([g[begin:] for g in given])
            assert_same_bits(whole.numpy(), wanted, (begin, algorithm))


@worlds(3)
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def case_bias_and_residual(world, dtype, op):
    """Added after the reduction, before the one rounding."""
    shape = (7, 33)
    given = inputs(world, shape, dtype)
    bias = values(0, 33, dtype, salt=1)
    residual = values(world.rank, shape, dtype, salt=2)
    x = world.array(given[world.rank])
    b, r = world.array(bias, symmetric=False), world.array(residual, symmetric=False)
    for algorithm in algorithms(dtype, adds=True):
        for extra in ({"bias": b}, {"residual": r}, {"bias": b, "residual": r}):
            result = tdx.all_reduce(x, op, algorithm=algorithm, **extra)
            named = {k: bias if k == "bias" else residual for k in extra}
            assert_same_bits(result.numpy(), reduced(given, op, **named), (algorithm, *extra))


@worlds(2, 3)
def case_out_dtype(world):
    for dtype, out in [
        ("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float16"),
        ("float16", "float64"), ("float64", "float32"), ("float8_e4m3fn", "bfloat16"),
        ("float32", "float64"),
    ]:  # fmt: skip
        given = inputs(world, 257, dtype)
        x = world.array(given[world.rank])
        for algorithm in algorithms(dtype):
            if algorithm == "low_latency_two_shot" and out in NARROW_OR_WIDE:
                continue
            result = tdx.all_reduce(x, out_dtype=out, algorithm=algorithm)
            wanted = reduced(given, out_dtype=out)
            assert_same_bits(result.numpy(), wanted, (dtype, out, algorithm))


@worlds(3)
def case_nan_and_infinity(world):
    """max and min propagate NaN as NumPy does; sums give what IEEE gives."""
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 3e38, -3e38], np.float32)
    given = [np.roll(np.tile(special, 9), rank * 5)[:67] for rank in range(world.size)]
    x = world.array(given[world.rank])
    for op in ("sum", "avg", "max", "min"):
        for algorithm in algorithms("float32"):
            result = tdx.all_reduce(x, op, algorithm=algorithm).numpy()
            wanted = reduced(given, op)
            if op in ("max", "min"):  # the sign of a zero is open
                result, wanted = result + np.float32(0), wanted + np.float32(0)
            assert_same_bits(result, wanted, (op, algorithm))


@worlds(2, 4)
@limit(180)  # on a GPU some sixty kernels are compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def case_bits_do_not_depend_on_the_way(world, dtype):
    """Blocks, algorithms, slices, graphs, plans and repetition: the same bits."""
    shape = 3001
    given = inputs(world, shape, dtype)
    wanted = reduced(given)
    x = world.array(given[world.rank])
    for algorithm in algorithms(dtype):
        words = algorithm.startswith("low_latency") and world.backend != "host"
        for block, options in (
            (256, {}), (1024, {"blocks": 2}), (512 if words else 8192, {}),
            (256, {"steps": 3, "blocks": 1}), (128, {"steps": 9}),
        ):  # fmt: skip
            plan = tdx.AllReduce(world, shape, dtype, config=Config(algorithm, block, **options))
            for _ in range(2):
                assert_same_bits(plan(x).numpy(), wanted, (algorithm, block, options))
            with tdx.graph(world) as graph:
                plan(x)
            graph.replay()
            assert_same_bits(plan._out.numpy(), wanted, (algorithm, block, "graph"))
    for low, high in ((0, 1), (17, 1044), (2000, 3001)):
        for algorithm in (None, *algorithms(dtype)):
            result = tdx.all_reduce(x[low:high], algorithm=algorithm)
            assert_same_bits(result.numpy(), wanted[low:high], (low, high, algorithm))


@worlds(2, 3)
def case_in_place(world):
    for algorithm in algorithms("float32"):
        for size in (1, 7, 4099):
            given = inputs(world, size, "float32")
            x = world.array(given[world.rank])
            assert tdx.all_reduce(x, out=x, algorithm=algorithm) is x
            assert_same_bits(x.numpy(), reduced(given))


@worlds(2, 3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def case_in_place_of_what_is_added(world, dtype):
    """The result goes where the input or the residual was; several tiles of words a block."""
    for algorithm in algorithms(dtype, adds=True):
        config = Config(algorithm, 16, blocks=3)
        for rows in (1, 37, 150):
            given = inputs(world, (rows, 9), dtype)
            bias, residual = values(50, 9, dtype), values(60 + world.rank, (rows, 9), dtype)
            plan = tdx.AllReduce(
                world, (rows, 9), dtype, bias=True, residual=True, config=config, buffer=False
            )
            for place in range(3):
                x, r = world.array(given[world.rank]), world.array(residual)
                out = (x, r, world.empty((rows, 9), dtype))[place]
                plan(x, out, bias=world.array(bias), residual=r)
                wanted = reduced(given, bias=bias, residual=residual)
                assert_same_bits(out.numpy(), wanted, (algorithm, rows, place))


@worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def case_steps_through_slots(world, dtype):
    """Many steps a call, the last ones short; into the plan's buffer, other arrays and in place,
    also when ranks do not write to the same kind of place."""
    for algorithm, size, steps in (
        ("two_shot", 2053, 7), ("two_shot", 300, 1), ("copy_engine", 2053, 7), ("copy_engine", 5, 1)
    ):  # fmt: skip
        config = Config(algorithm, 64, steps=steps)
        plans = [
            tdx.AllReduce(world, size, dtype, config=config, buffer=own) for own in (False, True)
        ]
        for turn in range(2):
            given = inputs(world, size, dtype, turn)
            wanted = reduced(given)
            x = world.array(given[world.rank])
            for plan in plans:
                out = world.array(poisoned(size + 3, dtype), symmetric=False)[3:]
                plan(x, out=out)
                assert_same_bits(out.numpy(), wanted, (size, steps, turn))
            mixed = out if (turn + world.rank) % 2 else None
            assert_same_bits(plans[1](x, out=mixed).numpy(), wanted, (size, steps, turn))
            for plan in plans:
                y = world.array(given[world.rank])
                assert_same_bits(plan(y, out=y).numpy(), wanted, (size, steps, turn, "in place"))
        buffer = plans[1](x)
        assert_same_bits(
            plans[1](buffer).numpy(), reduced([wanted] * world.size), "buffer as input"
        )


@worlds(2, 4)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_back_to_back(world, algorithm):
    """A hundred calls without a host synchronisation; each is the next one's input."""
    shape, calls = 515, 100
    plan = tdx.AllReduce(world, shape, "int32", algorithm=algorithm)
    given = inputs(world, shape, "int32")
    x = world.array(given[world.rank])
    for _ in range(calls):
        plan(x, out=x)
    total = reduced(given)
    for _ in range(calls - 1):
        total = reduced([total] * world.size)
    assert_same_bits(x.numpy(), total)
    if world.size > 1:
        kept = [world.array(given[world.rank] + np.int32(i)) for i in range(calls)]
        outs = [world.empty(shape, "int32") for _ in range(calls)]
        for i in range(calls):
            plan(kept[i], out=outs[i])
        for i in range(calls):
            assert_same_bits(outs[i].numpy(), reduced([g + np.int32(i) for g in given]), i)


@worlds(3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_graph_replays_changing_inputs(world, algorithm):
    shape = 1023
    plan = tdx.AllReduce(world, shape, "float32", algorithm=algorithm)
    x = world.empty(shape, "float32")
    out = world.empty(shape, "float32")
    with tdx.graph(world) as graph:
        plan(x, out=out)
        plan(out, out=out)
    for turn in range(30):
        given = inputs(world, shape, "float32", salt=turn)
        x.copy_from(given[world.rank])
        out.copy_from(poisoned(shape, "float32"))
        graph.replay()
        first = reduced(given)
        assert_same_bits(out.numpy(), reduced([first] * world.size), turn)
    for _ in range(20):  # without looking in between, eager calls among them
        graph.replay()
        plan(x, out=out)
    assert_same_bits(out.numpy(), reduced(given))


@worlds(3)
def case_two_streams(world):
    """The same plan and different plans on two streams."""
    shape = 2049
    streams = [world.new_stream(), world.new_stream()]
    plans = [tdx.AllReduce(world, shape, "float32") for _ in streams]
    given = [inputs(world, shape, "float32", salt) for salt in range(2)]
    xs = [world.array(g[world.rank]) for g in given]
    outs = [world.empty(shape, "float32") for _ in range(20)]
    for i in range(20):
        plans[i % 2](xs[i % 2], out=outs[i], stream=streams[i % 2])
    for i in range(20):
        assert_same_bits(outs[i].numpy(), reduced(given[i % 2]), i)
    for i in range(20):  # one plan, streams in turn: calls follow one another
        plans[0](xs[0], out=outs[i], stream=streams[i % 2])
    for i in range(20):
        assert_same_bits(outs[i].numpy(), reduced(given[0]), i)


@worlds(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_two_streams_of_one_graph(world, algorithm):
    """One plan on both branches of a recording: calls follow one another."""
    shape, side = 2049, world.new_stream()
    plan = tdx.AllReduce(world, shape, "float32", algorithm=algorithm)
    given = [inputs(world, shape, "float32", salt) for salt in range(2)]
    xs = [world.array(g[world.rank]) for g in given]
    outs = [world.array(poisoned(shape, "float32")) for _ in range(8)]
    plan(xs[0], out=outs[0])
    with tdx.graph(world) as graph:
        side.wait(world.stream)
        for i, out in enumerate(outs):
            plan(xs[i % 2], out=out, stream=side if i % 2 else world.stream)
        world.stream.wait(side)
    for _ in range(3):
        graph.replay()
    for i, out in enumerate(outs):
        assert_same_bits(out.numpy(), reduced(given[i % 2]), i)


@worlds(2)
def case_bad_arguments(world):
    """The same mistake on all ranks: a clear error on all ranks, and the next call works."""
    x = world.zeros((4, 8), "float32")
    ints = world.zeros(4, "int32")
    wrong = [
        (InvalidArgument, "op='prod' is not one of", lambda: tdx.all_reduce(x, "prod")),
        (InvalidArgument, "algorithm='ring'", lambda: tdx.all_reduce(x, algorithm="ring")),
        (Unsupported, "avg", lambda: tdx.all_reduce(ints, "avg")),
        (DtypeError, "floats only", lambda: tdx.all_reduce(ints, out_dtype="float32")),
        (DtypeError, "complex64", lambda: tdx.all_reduce(np.zeros(3, np.complex64))),
        (DtypeError, "float32", lambda: tdx.all_reduce(x, out=world.zeros((4, 8), "float16"))),
        (InvalidArgument, "shape", lambda: tdx.all_reduce(x, out=world.zeros(8, "float32"))),
        (InvalidArgument, "contiguous", lambda: tdx.all_reduce(x.T)),
        (InvalidArgument, r"expected \(8,\)", lambda: tdx.all_reduce(x, bias=ints.view("float32"))),
        (DtypeError, "int8", lambda: tdx.all_reduce(world.zeros(4, "int8"))),
        (InvalidArgument, "algorithm=3 is", lambda: tdx.AllReduce(world, 8, "int32", algorithm=3)),
        (InvalidArgument, "power of two", lambda: Config("one_shot", 100)),
        (InvalidArgument, "low_latency takes up to",
         lambda: tdx.AllReduce(world, 1 << 21, "float32", algorithm="low_latency")),
        (InvalidArgument, "steps=0", lambda: Config("two_shot", 256, steps=0)),
        (InvalidArgument, "blocks=0", lambda: Config("two_shot", 256, blocks=0)),
        (Unsupported, "types of 2 and 4 bytes, not float64",
         lambda: tdx.all_reduce(x, out_dtype="float64", algorithm="low_latency_two_shot")),
        (Unsupported, "types of 2 and 4 bytes",
         lambda: tdx.all_reduce(world.zeros(4, "float64"), algorithm="low_latency")),
        (InvalidArgument, "copy_engine adds neither bias nor residual; use two_shot",
         lambda: tdx.all_reduce(x, residual=x, algorithm="copy_engine")),
    ]  # fmt: skip
    for kind, words, call in wrong:
        with pytest.raises(kind, match=words):
            call()
        assert_same_bits(tdx.all_reduce(ints).numpy(), np.zeros(4, np.int32))
    plan = tdx.AllReduce(world, (4, 8), "float32", bias=True)
    with pytest.raises(InvalidArgument, match="bias=True"):
        plan(x)
    with pytest.raises(InvalidArgument, match="shape"):
        plan(world.zeros(32, "float32"), bias=x[0])


@limit(120)
@worlds(4)
def case_speed(world):
    """65,536 float32 at 4 ranks; the figure is for two idle cores, the limit for busy ones."""
    plan = tdx.AllReduce(world, 65536, "float32")
    x = world.array(values(world.rank, 65536, "float32"))
    for _ in range(3):
        plan(x)
    world.barrier()
    times = []
    for _ in range(7):
        world.barrier()
        start = time.perf_counter()
        plan(x)
        world.synchronize()
        times.append(time.perf_counter() - start)
    median = sorted(times)[3]
    if world.rank == 0:
        print(f"all_reduce of 65536 float32, 4 ranks: {median * 1e3:.1f} ms")  # noqa: T201
    assert median < 0.4
