"""The one-line functions: frameworks in and out, fresh results, refusals and disagreement."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import (
    Closed,
    CollectiveMismatch,
    DtypeError,
    InvalidArgument,
    TdxError,
    Unsupported,
)
from tests.helpers.cases import isolated, worlds
from tests.helpers.frameworks import jax_device, needs
from tests.helpers.reference import assert_same_bits, error_bound, product, reduced, values


def everybody(world, shape, dtype, salt=0):
    return [values(rank, shape, dtype, salt) for rank in range(world.size)]


@worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64"])
def case_numpy(world, dtype):
    """NumPy in, NumPy out, complete when the call returns; also of arrays that are not
    contiguous or cannot be written."""
    given = everybody(world, (6, 10), dtype)
    mine = given[world.rank].copy()
    mine.flags.writeable = False
    views = [
        lambda x: x, lambda x: x.T, lambda x: x[::2, 1::3], lambda x: x[::-1], lambda x: x[:, 4],
        lambda x: x[:0], lambda x: x[1, 1:2],
    ]  # fmt: skip
    for view in views:
        x = view(mine)
        result = tdx.all_reduce(x)
        assert type(result) is np.ndarray
        assert result.flags.writeable
        assert_same_bits(result, reduced([view(g) for g in given]))
        gathered = tdx.all_gather(x)
        assert type(gathered) is np.ndarray
        assert_same_bits(gathered, np.concatenate([view(g) for g in given]))
    out = np.empty((6, 10), mine.dtype)
    assert tdx.all_reduce(mine, out=out) is out
    assert_same_bits(out, reduced(given))


@worlds(1, 3)
def case_repeated(world):
    """A call like an earlier one gives the same with all kinds of results and operands."""
    team = world.team(range(world.size))
    size = (2 * world.size, 5)
    given = everybody(world, size, "float32")
    mine, bias = world.array(given[world.rank]), values(9, 5, "float32")
    tdx_bias = world.array(bias)
    blocks = np.array_split(reduced(given), world.size)
    for function, options, expected in (
        (tdx.all_reduce, {}, reduced(given)),
        (tdx.all_reduce, {"op": "max"}, np.maximum.reduce(given)),
        (tdx.all_reduce, {"bias": tdx_bias}, reduced(given, bias=bias)),
        (tdx.all_reduce, {"bias": bias}, reduced(given, bias=bias)),
        (tdx.all_gather, {}, np.concatenate(given)),
        (tdx.reduce_scatter, {}, blocks[world.rank]),
        (tdx.all_to_all, {}, np.concatenate([g[2 * world.rank :][:2] for g in given])),
        (tdx.broadcast, {"root": world.size - 1}, given[-1]),
    ):
        out, kept = world.empty(expected.shape, "float32"), []
        for turn in range(3):
            for group in (None, team):
                kept.append(function(mine, **options, team=group))
                assert_same_bits(kept[-1].numpy(), expected)
            assert function(mine, **options, out=out) is out
            assert_same_bits(out.numpy(), expected)
            foreign = np.zeros(expected.shape, "float32")
            function(mine, **options, out=foreign)
            assert_same_bits(foreign, expected)
            assert len({x._address for x in kept}) == 2 * turn + 2  # fresh while they are held
        with pytest.raises(InvalidArgument, match="shape"):
            function(mine, **options, out=world.empty((1, 1, 1), "float32"))
    with pytest.raises(InvalidArgument, match="not a team"):
        tdx.all_reduce(mine, team=7)
    with pytest.raises(InvalidArgument, match="no option takes"):
        tdx.all_reduce(mine, op=["sum"])
    mine.free()
    with pytest.raises(Closed, match="was freed"):
        tdx.all_reduce(mine)


@worlds(2)
def case_numpy_products(world):
    a, b = values(world.rank, (6, 20), "bfloat16"), values(9, (20, 14), "bfloat16")
    bias = values(8, 14, "bfloat16")
    whole = np.concatenate(everybody(world, (6, 20), "bfloat16"))
    bound = error_bound(20, "bfloat16", "bfloat16")
    for right in (b, np.asfortranarray(b), np.ascontiguousarray(b[::-1])[::-1]):
        result, gathered = tdx.all_gather_matmul(a, right, bias=bias, return_gathered=True)
        assert type(result) is type(gathered) is np.ndarray
        assert_same_bits(gathered, whole)
        assert np.abs(result - (product(whole, b) + bias)).max() <= bound
        result = tdx.matmul(a, right)
        assert np.abs(result - product(a, b)).max() <= bound
        result = tdx.matmul_reduce_scatter(a[:, ::-1], right)
        total = sum(product(x[:, ::-1], b) for x in everybody(world, (6, 20), "bfloat16"))
        assert np.abs(result - total[3 * world.rank : 3 * world.rank + 3]).max() <= 2 * bound


@worlds(1, 2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def case_jax(world, dtype):
    needs("jax", world.backend)
    device = jax_device(world)
    import jax

    given = everybody(world, (6, 10), dtype)
    x = jax.device_put(given[world.rank], device)
    for take in (lambda x: x, lambda x: x.T):
        result = tdx.all_reduce(take(x))
        assert isinstance(result, jax.Array)
        assert_same_bits(np.asarray(result), reduced([take(g) for g in given]))
    assert_same_bits(np.asarray(tdx.all_gather(x)), np.concatenate(given))
    if dtype == "float32":
        b = values(9, (10, 4), dtype)
        on_device = jax.device_put(b, device)
        result = tdx.all_gather_matmul(x, on_device)
        assert isinstance(result, jax.Array)
        bound = error_bound(10, dtype)
        assert np.abs(np.asarray(result) - product(np.concatenate(given), b)).max() <= bound
        total = sum(product(g, b) for g in given)
        result = np.asarray(tdx.matmul_reduce_scatter(x, on_device))
        rows = 6 // world.size
        mine = total[rows * world.rank : rows * (world.rank + 1)]
        assert np.abs(result - mine).max() <= 2 * bound
    with pytest.raises(InvalidArgument, match="read-only"):
        tdx.all_reduce(x, out=x)


@worlds(1, 2)
def case_jax_while_it_traces(world):
    """Copies refuse what has no values yet in the words of functions."""
    needs("jax", world.backend)
    device = jax_device(world)
    import jax

    y = world.zeros(4, "float32")

    def traced(x):
        for take in (tdx.all_reduce, world.array, y.copy_from, world.register):
            with pytest.raises(InvalidArgument, match=r"cannot be called inside jax\.jit"):
                take(x)
        return x

    jax.jit(traced)(jax.device_put(np.zeros(4, np.float32), device))


@worlds(1, 2)
def case_torch_parameters(world):
    """Without gradients they are arrays like others, for copies too; with them all calls refuse
    alike."""
    needs("torch", world.backend)
    import torch

    given = everybody(world, (6, 10), "float32")
    device = "cpu" if world.backend == "host" else f"cuda:{world.device.index}"
    x = torch.nn.Parameter(torch.from_numpy(given[world.rank]).to(device))
    y, turned = world.zeros((6, 10), "float32"), world.zeros((10, 6), "float32")
    with torch.no_grad():
        for take in (lambda x: x, lambda x: x.T):
            result = tdx.all_reduce(take(x))
            assert type(result) is torch.Tensor
            assert_same_bits(result.cpu().numpy(), reduced([take(g) for g in given]))
        assert_same_bits(world.array(x).numpy(), given[world.rank])
        assert_same_bits(y.copy_from(x).numpy(), given[world.rank])
        assert_same_bits(turned.copy_from(x.T).numpy(), given[world.rank].T)
    for take in (tdx.all_reduce, world.array, y.copy_from, world.register):
        with pytest.raises(InvalidArgument, match=r"requires a gradient.*torch\.no_grad"):
            take(x)


@worlds(2)
def case_results_are_fresh(world):
    """A result is never overwritten by later calls; a plan's own buffer is."""
    given = [everybody(world, 33, "float32", salt) for salt in range(5)]
    xs = [world.array(g[world.rank], symmetric=False) for g in given]
    results = [tdx.all_reduce(x) for x in xs]
    arrays = [tdx.all_reduce(g[world.rank]) for g in given]
    for g, result, array in zip(given, results, arrays, strict=True):
        assert_same_bits(result.numpy(), reduced(g))
        assert_same_bits(array, reduced(g))
    plan = tdx.AllReduce(world, 33, "float32")
    assert plan(xs[0]) is plan(xs[1])


@worlds(2)
def case_what_no_operation_takes(world):
    """The same wrong operand on every rank; the world is usable afterwards."""
    good = world.zeros(4, "float32")
    freed = world.zeros(4, "float32", symmetric=False)
    freed.free()
    readonly = np.zeros(4, np.float32)
    readonly.flags.writeable = False

    class Elsewhere:
        """A producer on a device that the world is not on."""

        def __dlpack_device__(self):
            return (7, 0)

        def __dlpack__(self, **_):
            raise BufferError("on another device")

    for kind, words, call in [
        (InvalidArgument, "a peer's array", lambda: tdx.all_reduce(good.peer(1 - world.rank))),
        (Closed, "was freed", lambda: tdx.all_reduce(freed)),
        (TdxError, "read-only|DLPack device", lambda: tdx.all_reduce(good, out=readonly)),
        (InvalidArgument, "expected a tdx array", lambda: tdx.all_reduce([1.0, 2.0])),
        (InvalidArgument, "expected a tdx array", lambda: tdx.all_gather(3.0)),
        (InvalidArgument, "expected a tdx array", lambda: tdx.all_reduce(None)),
        (InvalidArgument, "on another device", lambda: tdx.all_reduce(Elsewhere())),
        (DtypeError, "complex", lambda: tdx.all_reduce(np.zeros(3, np.complex64))),
        (DtypeError, "not a dtype", lambda: tdx.all_reduce(np.array([None, "a"]))),
        (InvalidArgument, "b must be|b: expected", lambda: tdx.matmul(np.eye(3), None)),
        (InvalidArgument, "is not a team", lambda: tdx.all_reduce(good, team=3)),
        (InvalidArgument, "is not a stream", lambda: tdx.all_reduce(good, stream="fast")),
    ]:
        with pytest.raises(kind, match=words):
            call()
        assert_same_bits(tdx.all_reduce(good).numpy(), np.zeros(4, np.float32))


@worlds(3)
def case_one_rank_refuses(world):
    """Its own error there; CollectiveMismatch with rank and reason elsewhere, at once."""
    wrong = world.rank == 1
    attempts = [
        (lambda: tdx.all_reduce(np.zeros(77, np.complex64 if wrong else np.float32)), DtypeError),
        (lambda: tdx.all_reduce(np.zeros(78, "f"), "prod" if wrong else "sum"), InvalidArgument),
        (lambda: tdx.all_reduce(None if wrong else np.zeros(79, "f")), InvalidArgument),
        (lambda: tdx.all_gather(np.zeros(() if wrong else 80, "f")), InvalidArgument),
        (lambda: tdx.matmul_reduce_scatter(np.zeros((81, 4 + wrong), "f"), np.zeros((4, 5), "f")),
         InvalidArgument),
        (lambda: tdx.all_gather_matmul(np.zeros((82, 4), "f"), np.zeros((4 + wrong, 5), "f")),
         InvalidArgument),
        (lambda: tdx.AllReduce(world, 83, "int8" if wrong else "int32"), DtypeError),
        (lambda: tdx.all_reduce(np.zeros(84), algorithm="low_latency" if wrong else None),
         Unsupported),
    ]  # fmt: skip
    for attempt, kind in attempts:
        start = time.monotonic()
        if wrong:
            with pytest.raises(kind):
                attempt()
        else:
            with pytest.raises(CollectiveMismatch, match="rank 1") as mismatch:
                attempt()
            assert mismatch.value.calls[1].startswith(f"refused: {kind.__name__}: ")
        assert time.monotonic() - start < 1.5
    assert_same_bits(tdx.all_reduce(np.ones(5, np.float32)), np.full(5, 3, np.float32))


@worlds(3)
def case_ranks_disagree(world):
    """Different shapes, types, operations, order: the table of calls on every rank."""
    rank = world.rank
    shape = 100 + rank
    swapped = [lambda: tdx.AllReduce(world, 201, "float32"), lambda: tdx.AllGather(world, 201, "f")]
    attempts = [
        (lambda: tdx.all_reduce(np.zeros(shape, np.float32)), ("(100,)", "(101,)", "(102,)")),
        (lambda: tdx.all_reduce(np.zeros(103, "f" if rank else "d")), ("float64", "float32")),
        (lambda: tdx.all_reduce(np.zeros(104, "f"), "max" if rank else "sum"), ("sum", "max")),
        (lambda: tdx.all_reduce(np.zeros(105, "f"), algorithm="two_shot" if rank == 2 else None),
         ("all_reduce", "all_reduce", "'two_shot'")),
        (lambda: tdx.all_gather(np.zeros((106, 1 + rank), "f")), ("1)", "2)", "3)")),
        (lambda: tdx.all_gather_matmul(np.zeros((4, 8 + rank), "f"), np.zeros((8 + rank, 5), "f")),
         ("8)", "9)", "10)")),
        (swapped[rank == 1], ("all_reduce", "all_gather", "all_reduce")),
    ]  # fmt: skip
    for attempt, words in attempts:
        with pytest.raises(CollectiveMismatch) as mismatch:
            attempt()
        calls = mismatch.value.calls
        assert sorted(calls) == [0, 1, 2]
        for i, word in enumerate(words):
            assert word in calls[i], calls
    assert_same_bits(tdx.all_reduce(np.ones(5, np.float32)), np.full(5, 3, np.float32))


@worlds(2)
def case_plan_while_recording(world):
    x = world.zeros(301, "float32")
    tdx.all_reduce(world.zeros(302, "float32"))
    with pytest.raises(InvalidArgument, match="while a graph is being recorded"), tdx.graph(world):
        tdx.all_reduce(x)
    out = world.zeros(302, "float32")
    y = world.array(values(world.rank, 302, "float32"))
    with tdx.graph(world) as graph:
        tdx.all_reduce(y, out=out)
    graph.replay()
    assert_same_bits(out.numpy(), reduced(everybody(world, 302, "float32")))


@isolated
@worlds(2)
def case_another_world(comm, backend):
    with tdx.init(backend=backend) as world:
        old = world.zeros(4, "float32")
        plan = tdx.AllReduce(world, 4, "float32")
    with pytest.raises(Closed):
        tdx.all_reduce(old)
    with pytest.raises(Closed):
        plan(old)
    with pytest.raises(Closed, match="no world is open"):
        tdx.all_reduce(np.zeros(4, np.float32))
    with tdx.init(backend=backend) as world:
        new = world.zeros(4, "float32")
        with pytest.raises((Closed, InvalidArgument), match=r"closed|another world"):
            tdx.all_reduce(new, out=old)
        with pytest.raises((Closed, InvalidArgument), match=r"closed|another world"):
            tdx.AllReduce(world, 4, "float32")(old)
        assert tdx.all_reduce(new).numpy().sum() == 0
