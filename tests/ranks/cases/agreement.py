"""Ranks that make different calls of plans they all have: the table of calls, on every rank."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest

import tdx
from tdx.kernels.matmul import Config
from tdx.runtime.errors import CollectiveMismatch, InvalidArgument, PeerTimeout
from tests.helpers.cases import isolated, limit, worlds

TIMEOUT_S = 1.0
N = 100


def make(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    x = world.array(np.full(N, world.rank + 1, np.float32))
    plans = [tdx.AllReduce(world, N, "float32", op=op) for op in ("sum", "max")]
    for plan in plans:
        plan(x)
    world.barrier()
    return world, x, plans


@isolated
@worlds(2, 3)
@limit(30)
@pytest.mark.parametrize("fault", ["skipped", "doubled", "swapped", "another"])
def case_different_calls(comm, backend, fault):
    world, x, (first, second) = make(comm, backend)
    guilty = world.size - 1
    calls = {
        "skipped": [second] if world.rank == guilty else [first, second],
        "doubled": [first, first] if world.rank == guilty else [first],
        "swapped": [second, first] if world.rank == guilty else [first, second],
        "another": [second] if world.rank == guilty else [first],
    }[fault]
    start = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:  # noqa: PT012
        for plan in calls:
            plan(x)
            if fault == "swapped":
                world.synchronize()
        world.barrier()
    assert time.monotonic() - start < 2 * TIMEOUT_S + 1
    table = caught.value.calls
    assert list(table) == list(range(world.size))
    assert all("all_reduce(shape=(100,)" in call or "barrier" in call for call in table.values())
    assert table[guilty] != table[0]
    assert f"rank {guilty}: {table[guilty]}" in str(caught.value)
    world.close()
    comm.barrier()


@isolated
@worlds(2, 3)
@limit(30)
@pytest.mark.parametrize("call", ["plan", "function", "foreign", "stream", "barrier"])
def case_refused(comm, backend, call):
    """What all ranks have called before, and one of them refuses now: the others learn why."""
    world, x, (plan, _) = make(comm, backend)
    guilty = world.size - 1
    for given in (x, np.ones(N, np.float32)):
        tdx.all_reduce(given)
    streams = ("stream", "barrier")
    wrong = np.zeros(N, np.float64) if call == "foreign" else world.zeros(N, "float64")
    bad = {"stream": "fast"} if call in streams else {"out": wrong}
    tdx.barrier()
    options = bad if world.rank == guilty else {}
    calls = {
        "plan": lambda **options: plan(x, **options),
        "function": lambda **options: tdx.all_reduce(x, **options),
        "foreign": lambda **options: tdx.all_reduce(np.ones(N, np.float32), **options),
        "stream": lambda **options: plan(x, **options),
        "barrier": tdx.barrier,
    }
    start = time.monotonic()
    if world.rank == guilty:
        with pytest.raises((InvalidArgument, tdx.errors.DtypeError)):
            calls[call](**options)
        time.sleep(2 * TIMEOUT_S)
        with pytest.raises(tdx.errors.TdxError):
            world.barrier()
    else:
        with pytest.raises(CollectiveMismatch) as caught:  # noqa: PT012
            calls[call](**options)
            world.synchronize()
        assert time.monotonic() - start < 2 * TIMEOUT_S
        assert caught.value.calls[guilty].startswith("refused call ")
        reason = "'fast' is not a stream" if call in streams else "out has dtype float64"
        assert reason in str(caught.value)
    world.close()
    comm.barrier()


@worlds(2)
def case_refused_and_then_made(world):
    x = world.array(np.full(N, world.rank + 1, np.float32))
    plan = tdx.AllReduce(world, N, "float32")
    for _ in range(3):
        if world.rank == 1:
            with pytest.raises(InvalidArgument):
                plan(x, out=world.empty(N + 1, np.float32, symmetric=False))
        assert (plan(x).numpy() == 3).all()


@isolated
@worlds(3)
@limit(30)
def case_who_knows_leaves_first(comm, backend):
    """The ranks that find out close at once; one that computes meanwhile learns the same."""
    world, x, (first, second) = make(comm, backend)
    (second if world.rank == 2 else first)(x)
    if world.rank == 1:
        time.sleep(2 * TIMEOUT_S)
    with pytest.raises(CollectiveMismatch):
        world.synchronize()
    del first, second
    world.close()
    comm.barrier()


@isolated
@worlds(3)
@limit(30)
def case_within_a_team(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    team = world.team([0, 2])
    world.barrier()
    if team:
        x = world.array(np.ones(N, np.float32), symmetric=False)
        first = tdx.AllReduce(world, N, "float32", team=team)
        second = tdx.AllReduce(world, N, "float32", op="max", team=team)
        with pytest.raises(CollectiveMismatch) as caught:  # noqa: PT012
            (first if world.rank else second)(x)
            world.synchronize()
        assert list(caught.value.calls) == [0, 2]
    comm.barrier()
    if team:
        world.close()
    else:
        with pytest.raises(tdx.errors.TdxError):  # the others have closed theirs
            world.close()
    comm.barrier()


@isolated
@worlds(2, 3)
@limit(30)
def case_a_late_rank_is_no_mismatch(comm, backend):
    """Rank 0 runs ahead by several calls of both plans; the last rank just does not come."""
    world, x, plans = make(comm, backend)
    late = world.size - 1
    if world.rank == late:
        time.sleep(2.5 * TIMEOUT_S)
        with pytest.raises((PeerTimeout, tdx.errors.PeerLost)):  # noqa: PT012
            for plan in plans * 3:
                plan(x)
            world.barrier()
    else:
        for plan in plans * 3:
            plan(x)
        with pytest.raises(PeerTimeout) as caught:
            world.synchronize()
        assert caught.value.peer == late
    world.close()
    comm.barrier()


@worlds(2, 3)
def case_the_spelling_of_a_dtype(world):
    """A plan is known by what was meant: ranks may spell it in turn, and need no new plan."""
    spelled = [None, "float32", np.float32, np.dtype("float32"), "fp32"]
    arrays = (world.array(np.ones(5, np.float32)), np.ones(5, np.float32))
    world.plans.clear()
    for function in (tdx.all_reduce, partial(tdx.reduce, root=0)):
        for turn in range(2 * len(spelled)):
            for x in arrays:
                function(x, out_dtype=spelled[(turn + world.rank) % len(spelled)])
        assert len({id(plan) for plan in world.plans[0].values()}) == 1
        for turn in range(4):
            wide = ("float64", np.float64)[(turn + world.rank) % 2]
            function(arrays[0], out_dtype=wide)
        assert len(world.plans[0]) == 2
        world.plans.clear()
    a, b = (world.zeros((16, 16), "float32", symmetric=False) for _ in range(2))
    for turn in range(6):
        given = spelled[(turn + world.rank) % len(spelled)]
        partial_dtype = ("float32", np.float32)[(turn + world.rank) % 2]
        tdx.matmul_all_reduce(a, b, out_dtype=given, partial_dtype=partial_dtype)
    assert len(world.plans[0]) == 1
    world.barrier()


@worlds(2)
@pytest.mark.parametrize("known", [False, True])
def case_algorithms_asked_for(world, known):
    """Ranks that ask for different ones are told, though it is the same one that is taken."""
    x = world.array(np.ones(5, np.float32))
    chosen = tdx.AllReduce(world, 5, "float32").config.algorithm
    with pytest.raises(CollectiveMismatch, match="differ in given_algorithm: "):
        tdx.AllReduce(world, 5, "float32", algorithm=chosen if world.rank else None)
    if not known:
        with pytest.raises(CollectiveMismatch, match="differ in given_algorithm: "):
            tdx.all_reduce(x, algorithm=chosen if world.rank else None)
    assert (tdx.all_reduce(x).numpy() == 2).all()


@worlds(2)
@pytest.mark.parametrize(
    "operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
)
def case_options_of_products_that_differ(world, operation):
    """Named at once, also where nothing else would depend on them."""
    x, y = np.ones((4, 16), np.float32), np.ones((16, 8), np.float32)
    call = getattr(tdx, operation)
    for name, value, words in (
        ("bias", np.ones(8, np.float32), "bias: False on rank 0, True on rank 1$"),
        ("activation", "relu", "activation: None on rank 0, relu on rank 1$"),
        ("out_dtype", "bfloat16", "out_dtype: float32 on rank 0, bfloat16 on rank 1"),
        ("allow_tf32", True, r"flags: \[\] on rank 0, \[allow_tf32\] on rank 1$"),
        (
            "config",
            Config(16, 16, 32),
            r"config: None on rank 0, \[16 x 16 x 32, .*\] on rank 1$",
        ),
        ("library", False, "library: None on rank 0, False on rank 1$"),
    ):
        world.plans.clear()
        with pytest.raises(CollectiveMismatch, match=f"They differ in {words}"):
            call(x, y, **({name: value} if world.rank else {}))
        assert (np.asarray(call(x, y)) == 16 * (1 if "gather" in operation else 2)).all()


@isolated
@worlds(2)
@limit(30)
@pytest.mark.parametrize("changed", ["size", "bias"])
@pytest.mark.parametrize("operation", ["all_gather_matmul", "matmul_all_reduce"])
def case_one_rank_makes_a_plan_alone(comm, backend, operation, changed):
    """Where another calls its own: what differs is in the table, or may differ and is explained."""
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    words = "goes with one of every other rank"
    if changed == "bias":
        words = r"rank 0: .*bias=True.*\n.*rank 1: .*bias=False(.|\n)*" + words
    with pytest.raises(CollectiveMismatch, match=words):  # noqa: PT012
        for other in (False, world.rank == 0):
            own = 48 if other and changed == "size" else 32
            k, n = (16, own) if operation == "all_gather_matmul" else (own, 16)
            shapes = ((4, k), (k, n), (n,))
            a, b, v = (world.zeros(shape, "float32", symmetric=False) for shape in shapes)
            bias = v if other and changed == "bias" else None
            getattr(tdx, operation)(a, b, bias=bias)
        world.synchronize()
    world.close()
    comm.barrier()


@worlds(2)
def case_a_team_that_is_none(world):
    """The ranks that wait for a plan to be made hear of it at once."""
    world.plans.clear()
    x = np.ones(5, np.float32)
    a, b = np.ones((4, 4), np.float32), np.ones((4, 4), np.float32)
    for call in (
        lambda team: tdx.all_reduce(x, team=team),
        lambda team: tdx.all_reduce(world.array(x), team=team),
        lambda team: tdx.reduce(x, 0, team=team),
        lambda team: tdx.matmul_all_reduce(a, b, team=team),
        lambda team: tdx.AllGather(world, 5, "float32", team=team),
        lambda team: tdx.barrier(team=team),
    ):
        start = time.monotonic()
        with pytest.raises(InvalidArgument if world.rank else CollectiveMismatch, match="team='q'"):
            call("q" if world.rank else None)
        assert time.monotonic() - start < 5
        world.barrier()
