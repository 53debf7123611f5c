"""All-reduce and RMS norm in one: values, bits, and the ways to call it."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tdx.kernels import all_reduce_rms_norm as norms
from tdx.kernels import rms_norm_kernels
from tdx.kernels.all_reduce_rms_norm import Config
from tdx.runtime.errors import CollectiveMismatch, DtypeError, InvalidArgument
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.reference import assert_same_bits, poisoned, reduced, values

ALGORITHMS = list(Config.algorithms)
SHAPES = [(1, 1), (2, 7), (5, 33), (3, 2, 64), (130,), (11, 257)]
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # relative, largest


def inputs(ranks, shape, dtype, salt=0):
    return [values(rank, shape, dtype, salt) for rank in ranks]


def extras(shape, dtype, salt=0):
    """Weight, bias and residual: the same on every rank."""
    weight, bias = (values(7, shape[-1], dtype, salt + i) for i in (1, 2))
    return weight, bias, values(7, shape, dtype, salt + 3)


def check_norm(got, h, weight, eps, where=""):
    """The norm of h in float64, within the rounding of the result and a few of float32."""
    got, kind = np.asarray(got), h.dtype.name
    assert (got.dtype, got.shape) == (h.dtype, h.shape), where
    h, weight = h.astype(np.float64), weight.astype(np.float64)
    wanted = h / np.sqrt((h * h).mean(axis=-1, keepdims=True) + eps) * weight
    bound = (1.01 * ROUNDING[kind] + 16 * ROUNDING["float32"]) * np.abs(wanted) + 1e-7
    error = np.abs(got.astype(np.float64) - wanted)
    assert (error <= bound).all(), (np.nanmax(error / bound), where)


@worlds(1, 2, 3, 4)
@limit(180)  # on GPUs dozens of kernels are compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def case_values(world, dtype):
    """h has the bits of the all-reduce, the norm is that of h, and the same for most algorithms."""
    for shape in SHAPES if world.size < 3 else SHAPES[1::3]:
        given = inputs(range(world.size), shape, dtype)
        weight, bias, residual = extras(shape, dtype)
        x, w, b, r = (world.array(v) for v in (given[world.rank], weight, bias, residual))
        first = {}
        for algorithm in ALGORITHMS:
            for named in ((), ("bias",), ("residual",), ("bias", "residual")):
                options = {"bias": b, "residual": r}
                plain = {"bias": bias, "residual": residual}
                where = (shape, algorithm, named)
                out, kept = (world.array(poisoned(shape, dtype)) for _ in range(2))
                result = tdx.all_reduce_rms_norm(
                    x, w, eps=1e-5, out=out, algorithm=algorithm,
                    residual_out=kept if "residual" in named else None,
                    **{name: options[name] for name in named},
                )  # fmt: skip
                h = reduced(given, **{name: plain[name] for name in named})
                if "residual" in named:
                    assert result[0] is out
                    assert result[1] is kept
                    assert_same_bits(kept.numpy(), h, where)
                else:
                    assert result is out
                check_norm(out.numpy(), h, weight, 1e-5, where)
                # what a block has of a row tells the order of the sum, on GPUs its layout too
                if world.backend == "host" and algorithm != "low_latency_two_shot":
                    assert_same_bits(out.numpy(), first.setdefault(named, out.numpy()), where)
        assert_same_bits(x.numpy(), given[world.rank], "the input")


@worlds(2)
def case_unfused_rows_of_several_pieces(world):
    """Which registers do not hold: 16 elements of 50 at a time here, 8192 on GPUs."""
    host = world.backend == "host"
    shape = (3, 50 if host else 20001)
    given = inputs(range(2), shape, "bfloat16")
    weight, _, residual = extras(shape, "bfloat16")
    x, w, r = (world.array(v) for v in (given[world.rank], weight, residual))
    h = reduced(given, residual=residual)
    with pytest.MonkeyPatch.context() as patch:
        if host:
            patch.setattr(rms_norm_kernels, "row_block", lambda *_: (16, 8))
        plan = tdx.AllReduceRmsNorm(world, shape, "bfloat16", residual=True, algorithm="unfused")
    for kept in (world.empty(shape, "bfloat16"), r):
        y, kept = plan(x, w, residual_out=kept, residual=r)
        check_norm(y.numpy(), h, weight, 1e-6)
        assert_same_bits(kept.numpy(), h)


@worlds(5)
def case_values_on_five_ranks(world):
    case_values(world, "bfloat16")


@worlds(8)
def case_eight_ranks(world):
    shape = (9, 40)
    given = inputs(range(8), shape, "bfloat16")
    weight, _, residual = extras(shape, "bfloat16")
    for algorithm in ALGORITHMS:
        y, kept = tdx.all_reduce_rms_norm(
            given[world.rank], weight, residual=residual, algorithm=algorithm
        )
        h = reduced(given, residual=residual)
        assert_same_bits(kept, h)
        check_norm(y, h, weight, 1e-6)


@worlds(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def case_blocks_pieces_and_steps(world, dtype):
    """Rows in pieces, many blocks, many steps through the slots, eager and in a graph: the same
    bits on every rank, call after call."""
    shape = (13, 50)
    given = inputs(range(world.size), shape, dtype)
    weight, bias, residual = extras(shape, dtype)
    x, w, b, r = (world.array(v) for v in (given[world.rank], weight, bias, residual))
    h = reduced(given, bias=bias, residual=residual)
    for algorithm in ALGORITHMS:
        for block, options in (
            (16, {"blocks": 3}), (64, {"blocks": 1}), (32, {"steps": 3}),
            (64, {"steps": 100, "blocks": 2}),
        ):  # fmt: skip
            if "steps" in options and algorithm.startswith("unfused"):
                continue  # it has none
            config = Config(algorithm, block, **options)
            plan = tdx.AllReduceRmsNorm(
                world, shape, dtype, bias=True, residual=True, config=config
            )
            y, kept = plan(x, w, bias=b, residual=r)
            first = y.numpy()
            assert_same_bits(kept.numpy(), h, (algorithm, block))
            check_norm(first, h, weight, 1e-6, (algorithm, block))
            with tdx.graph(world) as graph:
                plan(x, w, bias=b, residual=r)
            for _ in range(2):
                graph.replay()
                assert_same_bits(y.numpy(), first, (algorithm, block, "graph"))
            everybody = tdx.all_gather(y[None]).numpy()
            for other in everybody:
                assert_same_bits(other, first, (algorithm, block, "ranks"))


@worlds(1, 2, 4)
@pytest.mark.parametrize(("columns", "dtype"), [(8200, "float32"), (20001, "bfloat16")])
def case_rows_of_which_registers_hold_no_three(world, columns, dtype):
    """In one step and in several, in results of its own and over x and the residual."""
    shape = (9, columns)
    given = inputs(range(world.size), shape, dtype)
    weight, _, residual = extras(shape, dtype)
    h, w = reduced(given, residual=residual), world.array(weight)
    for steps in (None, 3):
        usual = norms.choose(world.backend, *shape, h.dtype, world.size, "two_shot")
        config = Config("two_shot", usual.block, usual.num_warps, 2, steps)
        plan = tdx.AllReduceRmsNorm(world, shape, dtype, residual=True, config=config)
        for over in (False, True, True):
            x, r = world.array(given[world.rank]), world.array(residual)
            y, kept = plan(x, w, *((x, r) if over else ()), residual=r)
            check_norm(y.numpy(), h, weight, 1e-6, (steps, over))
            assert_same_bits(kept.numpy(), h, (steps, over))


@worlds(1, 2, 3)
def case_large_arrays_go_in_steps(world):
    """Two steps above a size, and as many as keep the slots within theirs."""
    shape = (24, 32)  # 3 KiB
    given = inputs(range(world.size), shape, "float32")
    weight, _, residual = extras(shape, "float32")
    x, w, r = (world.array(v) for v in (given[world.rank], weight, residual))
    h = reduced(given, residual=residual)
    for one, most, least in ((3072, 3072, 1), (3071, 3072, 2), (3072, 1000, 4), (10, 100, 8)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(norms, "_ONE_STEP_BYTES", one)
            patch.setattr(norms, "STEP_BYTES", most)
            plan = tdx.AllReduceRmsNorm(
                world, shape, "float32", residual=True, algorithm="two_shot"
            )
            shard, step, steps = plan._steps()
        assert least <= steps <= shard
        assert (steps - 1) * step < shard <= steps * step
        assert most < 1000 or steps == least
        for _ in range(3):
            y, kept = plan(x, w, residual=r)
            check_norm(y.numpy(), h, weight, 1e-6, (one, most))
            assert_same_bits(kept.numpy(), h, (one, most))


@worlds(2, 4)
@pytest.mark.parametrize("algorithm", ["low_latency", "low_latency_two_shot"])
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((5, 100), "bfloat16", {"block": 16, "blocks": 7}),  # one row after another
        ((9, 50), "float32", {"block": 16, "blocks": 8}),  # several at once
        ((3, 301), "bfloat16", {"block": 128, "blocks": 4, "num_warps": 1}),  # two words a thread
        ((2, 600), "float32", {"block": 16, "blocks": 3}),  # several pieces for each block
    ],
)
def case_blocks_share_rows(world, algorithm, shape, dtype, options):
    """More calls than there are slots, as far ahead of each other as ranks and blocks get."""
    calls, ranks = 5, range(world.size)
    weight, bias, residual = extras(shape, dtype)
    config = Config(algorithm, **options)
    plan = tdx.AllReduceRmsNorm(world, shape, dtype, bias=True, residual=True, config=config)
    given = [inputs(ranks, shape, dtype, 10 * call) for call in range(calls)]
    w, b, r = (world.array(v) for v in (weight, bias, residual))
    xs = [world.array(arrays[world.rank]) for arrays in given]
    ys, hs = ([world.array(poisoned(shape, dtype)) for _ in xs] for _ in range(2))

    def run():
        for x, y, h in zip(xs, ys, hs, strict=True):
            plan(x, w, y, h, bias=b, residual=r)

    run()
    first = [y.numpy() for y in ys]
    for call, (y, kept) in enumerate(zip(first, hs, strict=True)):
        h = reduced(given[call], bias=bias, residual=residual)
        assert_same_bits(kept.numpy(), h, call)
        check_norm(y, h, weight, 1e-6, call)
    with tdx.graph(world) as graph:
        run()
    graph.replay()
    for call, y in enumerate(ys):
        for other in tdx.all_gather(y[None]).numpy():
            assert_same_bits(other, first[call], call)


@worlds(3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_in_place(world, algorithm):
    """The results over x and the residual, whichever way round."""
    shape, dtype = (13, 40), "bfloat16"
    given = inputs(range(world.size), shape, dtype)
    weight, _, residual = extras(shape, dtype)
    h = reduced(given, residual=residual)
    config = Config(algorithm, 16, blocks=4, steps=2)
    plan = tdx.AllReduceRmsNorm(world, shape, dtype, residual=True, config=config)
    w = world.array(weight)
    for turn in range(2):
        x, r = world.array(given[world.rank]), world.array(residual)
        places = (x, r) if turn == 0 else (r, x)
        results = plan(x, w, *places, residual=r)
        assert results[0] is places[0]
        assert results[1] is places[1]
        check_norm(places[0].numpy(), h, weight, 1e-6, turn)
        assert_same_bits(places[1].numpy(), h, turn)


@worlds(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_layers_back_to_back(world, algorithm):
    """As in a model: the residual goes from call to call, without the host; then in a graph."""
    shape, dtype, layers = (5, 24), "float32", 12
    config = Config(algorithm, 32, blocks=2, steps=2)
    plan = tdx.AllReduceRmsNorm(world, shape, dtype, residual=True, config=config)
    weight = values(7, 24, dtype)
    w = world.array(weight)
    xs = [world.empty(shape, dtype) for _ in range(layers)]
    ys = [world.empty(shape, dtype) for _ in range(layers)]
    stream = world.empty(shape, dtype)

    def run():
        for x, y in zip(xs, ys, strict=True):
            plan(x, w, y, stream, residual=stream)

    def load(salt):
        stream.copy_from(values(9, shape, dtype, salt))
        for layer, x in enumerate(xs):
            x.copy_from(values(world.rank, shape, dtype, 50 * salt + layer))

    def check(salt):
        h = values(9, shape, dtype, salt)
        for layer, y in enumerate(ys):
            h = reduced(inputs(range(world.size), shape, dtype, 50 * salt + layer), residual=h)
            check_norm(y.numpy(), h, weight, 1e-6, (salt, layer))
        assert_same_bits(stream.numpy(), h, salt)

    load(0)
    run()
    check(0)
    with tdx.graph(world) as graph:
        run()
    for salt in (1, 2, 3):
        load(salt)
        graph.replay()
        check(salt)


@worlds(2, 3)
def case_choice_and_empty(world):
    """Whatever is chosen by size; arrays without elements; eps counts."""
    for shape in ((1, 16), (40, 64), (3, 5000)):
        given = inputs(range(world.size), shape, "bfloat16")
        weight = values(7, shape[-1], "bfloat16")
        y = tdx.all_reduce_rms_norm(given[world.rank], weight, eps=0.5)
        check_norm(y, reduced(given), weight, 0.5, shape)
    for shape in ((0, 8), (3, 0), (0,), (2, 0, 4)):
        x, w = np.zeros(shape, np.float32), np.zeros(shape[-1], np.float32)
        assert tdx.all_reduce_rms_norm(x, w).shape == shape
        y, h = tdx.all_reduce_rms_norm(x, w, residual=x)
        assert y.shape == h.shape == shape
    zero = tdx.all_reduce_rms_norm(np.zeros((2, 3), np.float32), np.ones(3, np.float32))
    assert_same_bits(zero, np.zeros((2, 3), np.float32))


@isolated
@worlds(3)
@limit(60)
def case_teams(comm, backend):
    with tdx.init(backend=backend) as world:
        for ranks in ((2, 0), (1,), (2, 1, 0)):
            team = world.team(ranks)
            if not team:
                continue
            shape = (7, 20)
            weight, bias, _ = extras(shape, "bfloat16")
            x, w, b = (world.array(v, symmetric=False)
                       for v in (values(world.rank, shape, "bfloat16"), weight, bias))  # fmt: skip
            h = reduced(inputs(ranks, shape, "bfloat16"), bias=bias)
            for algorithm in ALGORITHMS:
                y = tdx.all_reduce_rms_norm(x, w, bias=b, algorithm=algorithm, team=team)
                check_norm(y.numpy(), h, weight, 1e-6, (ranks, algorithm))


@worlds(2)
def case_bad_arguments(world):
    x, w = world.zeros((4, 8), "float32"), world.zeros(8, "float32")
    call = tdx.all_reduce_rms_norm
    for kind, words, attempt in [
        (DtypeError, "float64", lambda: call(world.zeros((4, 8), "float64"), w)),
        (InvalidArgument, r"weight has shape \(4,\)", lambda: call(x, w[:4])),
        (DtypeError, "weight has dtype float16", lambda: call(x, world.zeros(8, "float16"))),
        (InvalidArgument, "last axis", lambda: call(world.zeros((), "float32"), w)),
        (InvalidArgument, "at most 65536", lambda: call(world.zeros((1, 70000), "float32"), w)),
        (InvalidArgument, "eps=-1", lambda: call(x, w, eps=-1)),
        (InvalidArgument, "eps=nan", lambda: call(x, w, eps=float("nan"))),
        (InvalidArgument, "algorithm='ring'", lambda: call(x, w, algorithm="ring")),
        (InvalidArgument, "residual_out needs", lambda: call(x, w, residual_out=x)),
        (InvalidArgument, "one array", lambda: call(x, w, residual=x, out=x, residual_out=x)),
        (InvalidArgument, "residual has shape", lambda: call(x, w, residual=w)),
        (InvalidArgument, "out has shape", lambda: call(x, w, out=w)),
        (InvalidArgument, "low_latency takes up to",
         lambda: tdx.AllReduceRmsNorm(world, (200, 8192), "float32", algorithm="low_latency")),
        (InvalidArgument, "unfused_two_shot takes up to",
         lambda: tdx.AllReduceRmsNorm(world, (300, 8192), "float32", algorithm="unfused_two_shot")),
        (InvalidArgument, "power of two", lambda: Config("one_shot", 100)),
        (InvalidArgument, "block=262144 must be at most", lambda: Config("unfused", 1 << 18)),
    ]:  # fmt: skip
        with pytest.raises(kind, match=words):
            attempt()
        assert call(x, w).shape == (4, 8)
    plan = tdx.AllReduceRmsNorm(world, (4, 8), "float32", bias=True)
    with pytest.raises(InvalidArgument, match="bias=True"):
        plan(x, w)
    bare = tdx.AllReduceRmsNorm(world, (4, 8), "float32", buffer=False)
    with pytest.raises(InvalidArgument, match="pass out="):
        bare(x, w)


@worlds(3)
def case_one_rank_is_wrong(world):
    """The others raise too, at once, and the world goes on."""
    x, w = world.zeros((4, 8), "float32"), world.zeros(8, "float32")
    wrong = world.rank == 1
    with pytest.raises(InvalidArgument if wrong else CollectiveMismatch, match="eps=-1"):
        tdx.all_reduce_rms_norm(x, w, eps=-1.0 if wrong else 1e-4)
    with pytest.raises(CollectiveMismatch):
        tdx.all_reduce_rms_norm(x, w, eps=1e-3 if wrong else 1e-4)
    assert tdx.all_reduce_rms_norm(x, w).shape == (4, 8)
