"""Epochs that wrap: every protocol across 2**31 calls, and across 2**32."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.kernels.all_reduce import Config
from tdx.kernels.all_reduce_rms_norm import Config as NormConfig
from tdx.kernels.barrier import Barrier
from tests.helpers.blocks import many_blocks
from tests.helpers.cases import worlds
from tests.helpers.epochs import STARTS, age, assert_age
from tests.helpers.movement import MOVES, many_rounds
from tests.helpers.reference import assert_same_bits, reduced, values

CALLS = 8  # from four before the wrap on

starts = pytest.mark.parametrize("start", STARTS, ids=["2^31", "2^32"])


@triton.jit
def pass_on_kernel(x, inbox, seen, arrived, channel, world):
    """To the right neighbour, by notify and wait; the epoch as the kernel sees it."""
    me, size = tdl.rank(world), tdl.num_ranks(world)
    call = tdl.epoch(channel)
    tl.store(tdl.symm_at(inbox, (me + 1) % size, world), tl.load(x))
    tdl.notify(arrived, (me + 1) % size, world, call)
    ok = tdl.wait(arrived, world, call, peer=(me + size - 1) % size)
    tl.store(seen, tl.load(inbox), mask=ok)
    tl.store(seen + 1, call)
    ok = tdl.barrier(channel, world)  # the inbox was read before it is written again
    tl.store(seen + 2, ok.to(tl.int32))


@worlds(2, 3)
@starts
def case_notify_wait_and_barrier(world, start):
    channel = world.channel(1)
    inbox, arrived = world.zeros(1, "int32"), world.zeros(1, "int32")
    seen = world.zeros(3, "int32", symmetric=False)
    age(world, start, channel, arrived)
    left = (world.rank - 1) % world.size
    for call in range(1, CALLS + 1):
        x = world.array(np.int32(10 * world.rank + call), symmetric=False)
        pass_on_kernel[(1,)](x, inbox, seen, arrived, channel, world.handle)
        number = np.uint32((start + call) % (1 << 32)).view(np.int32)
        assert seen.numpy().tolist() == [10 * left + call, number, 1]


@triton.jit
def gather_any_kernel(data, total, signals, channel, world):
    """Add what all ranks sent, each by a signal of its own, in the order of their arrival."""
    me, size = tdl.rank(world), tdl.num_ranks(world)
    call = tdl.epoch(channel)
    for hop in range(0, size):
        peer = (me + hop) % size
        tl.store(tdl.symm_at(data + me, peer, world), call * 100 + me)
        tdl.notify(signals + me, peer, world, call)
    done = tdl.nothing_done()
    sum_ = call * 0
    for _ in range(0, size):
        index, done, ok = tdl.wait_any(signals, size, world, call, done, first=me)
        sum_ += tl.where(ok, tl.load(data + index), 0)
    tl.store(total, sum_)
    tdl.barrier(channel, world)


@worlds(2, 3)
@starts
def case_wait_any(world, start):
    channel = world.channel(1)
    data, signals = world.zeros(world.size, "int32"), world.zeros(world.size, "int32")
    total = world.zeros(1, "int32", symmetric=False)
    age(world, start, channel, signals)
    for call in range(1, CALLS + 1):
        gather_any_kernel[(1,)](data, total, signals, channel, world.handle)
        number = (start + call) % (1 << 32)
        wanted = sum(number * 100 + rank for rank in range(world.size)) % (1 << 32)
        assert total.numpy().view(np.uint32)[0] == wanted


@worlds(2, 3)
@starts
@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        ("low_latency", "float32"),
        ("low_latency", "bfloat16"),
        ("one_shot", "float32"),
        ("copy_engine", "float32"),
    ],
)
def case_all_reduce(world, start, algorithm, dtype):
    """Several blocks, a ragged end; flags pass 0 in memory that starts zeroed."""
    plan = tdx.AllReduce(world, 333, dtype, config=Config(algorithm, 64))
    age(world, start, plan)
    given = [[values(r, 333, dtype, call) for r in range(world.size)] for call in range(CALLS)]
    xs = [world.array(inputs[world.rank], symmetric=False) for inputs in given]
    outs = [world.empty(333, dtype, symmetric=False) for _ in xs]
    for x, out in zip(xs, outs, strict=True):  # as far ahead of each other as ranks can get
        plan(x, out)
    for call, out in enumerate(outs):
        assert_same_bits(out.numpy(), reduced(given[call]), call)
    assert_age(start + CALLS, plan)


@worlds(2, 3)
@starts
@pytest.mark.parametrize("algorithm", NormConfig.algorithms)
def case_all_reduce_rms_norm(world, start, algorithm):
    """As above; the updated residual is the sum. Blocks share rows by words, which wrap too."""
    shape, dtype = (9, 37), "bfloat16"
    config = NormConfig(algorithm, 16, blocks=6)
    plan = tdx.AllReduceRmsNorm(world, shape, dtype, residual=True, config=config)
    age(world, start, plan)
    weight = world.array(values(7, shape[-1], dtype), symmetric=False)
    residual = world.zeros(shape, dtype, symmetric=False)
    given = [[values(r, shape, dtype, call) for r in range(world.size)] for call in range(CALLS)]
    xs = [world.array(inputs[world.rank], symmetric=False) for inputs in given]
    outs = [world.empty(shape, dtype, symmetric=False) for _ in xs]
    for x, out in zip(xs, outs, strict=True):
        plan(x, weight, residual_out=out, residual=residual)
    for call, out in enumerate(outs):
        assert_same_bits(out.numpy(), reduced(given[call]), call)
    assert_age(start + CALLS, plan)


@worlds(2)
@starts
@pytest.mark.parametrize("algorithm", ["low_latency", "one_shot"])
def case_a_graph(world, start, algorithm):
    plan = tdx.AllReduce(world, 100, "float32", algorithm=algorithm)
    x, out = world.zeros(100, "float32"), world.zeros(100, "float32")
    with tdx.graph(world) as graph:
        plan(x, out)
        plan(out, out)
    age(world, start, plan)
    for call in range(CALLS // 2):
        x[...] = np.full(100, call + world.rank, np.float32)
        graph.replay()
        wanted = world.size * (world.size * call + sum(range(world.size)))
        assert (out.numpy() == wanted).all()
    assert_age(start + CALLS, plan)


@worlds(2, 3)
@starts
def case_all_gather_pull(world, start):
    with many_blocks():
        plan = tdx.AllGather(world, 3000, "int32", algorithm="pull")
    age(world, start, plan)
    outs = [world.empty(3000 * world.size, "int32", symmetric=False) for _ in range(CALLS)]
    for call, out in enumerate(outs):
        plan(world.array(values(world.rank, 3000, "int32", call), symmetric=False), out)
    for call, out in enumerate(outs):
        wanted = [values(rank, 3000, "int32", call) for rank in range(world.size)]
        assert_same_bits(out.numpy(), np.concatenate(wanted), call)
    assert_age(start + CALLS, plan)


@worlds(2, 3)
@starts
@pytest.mark.parametrize("move", MOVES, ids=str)
def case_movement(world, start, move):
    """Several blocks and rounds; results in symmetric memory and elsewhere."""
    shape, ranks = (600,), range(world.size)
    with many_rounds():
        plan = move.plan(world, shape, "int32")
    age(world, start, plan)
    outs = []
    for call in range(CALLS):
        x = world.array(move.given(world.rank, world.size, shape, "int32", call), symmetric=False)
        wanted = move.wanted(world.rank, ranks, shape, "int32", call)
        out = world.empty(wanted.shape, "int32", symmetric=bool(call % 2))
        outs.append((plan(x, out=out), wanted))
    for call, (out, wanted) in enumerate(outs):
        assert_same_bits(out.numpy(), wanted, call)
    if move.algorithm != "copy_engine":  # which has no epoch, and meets twice a call
        assert_age(start + CALLS, plan)


@triton.jit
def copy_arrived_kernel(buffer, out, progress, epoch, world, rows, chunks, BLOCK: tl.constexpr):
    """Program p copies rank p's rows when all its chunks are there."""
    source = tl.program_id(0)
    ok = tdl.wait_all(progress + source * chunks, chunks, world, tl.load(epoch), first_peer=source)
    lanes = tl.arange(0, BLOCK)
    mask = (lanes < rows) & ok
    at = source * rows + lanes
    tl.store(out + at, tl.load(buffer + at, mask=mask), mask=mask)


@worlds(2, 3)
@starts
def case_all_gather_with_progress(world, start):
    """Credits and progress signals; a rank may be a call ahead of another."""
    rows = 50
    plan = tdx.AllGather(world, rows, "int32", progress=True, chunks_per_rank=4)
    age(world, start, plan)
    outs = [world.zeros(rows * world.size, "int32", symmetric=False) for _ in range(CALLS)]
    for call, out in enumerate(outs):
        x = world.array(values(world.rank, rows, "int32", call), symmetric=False)
        buffer = plan(x)
        copy_arrived_kernel[(world.size,)](
            buffer, out, plan.progress, plan.epoch, world.handle, rows, plan.chunks, BLOCK=64
        )
    for call, out in enumerate(outs):
        wanted = [values(rank, rows, "int32", call) for rank in range(world.size)]
        assert_same_bits(out.numpy(), np.concatenate(wanted), call)
    assert_age(start + CALLS, plan)


PRODUCTS = {  # the plan, and the rows of its result
    "all_gather_matmul": (
        partial(tdx.AllGatherMatmul, algorithm="fused"), lambda m, size: m * size,
    ),
    "all_gather_matmul-one_kernel": (
        partial(tdx.AllGatherMatmul, algorithm="one_kernel"), lambda m, size: m * size,
    ),
    "matmul_reduce_scatter": (
        partial(tdx.MatmulReduceScatter, algorithm="fused"), lambda m, size: m // size,
    ),
    "matmul_reduce_scatter-low_latency": (
        partial(tdx.MatmulReduceScatter, algorithm="low_latency"), lambda m, size: m // size,
    ),
    "matmul_reduce_scatter-one_kernel": (
        partial(tdx.MatmulReduceScatter, algorithm="one_kernel"), lambda m, size: m // size,
    ),
    "matmul_all_reduce-one_shot": (
        partial(tdx.MatmulAllReduce, algorithm="one_shot"), lambda m, size: m,
    ),
    "matmul_all_reduce-two_shot": (
        partial(tdx.MatmulAllReduce, algorithm="two_shot"), lambda m, size: m,
    ),
    "matmul_all_reduce-copy_engine": (
        partial(tdx.MatmulAllReduce, algorithm="copy_engine"), lambda m, size: m,
    ),
}  # fmt: skip


@worlds(2, 3)
@starts
@pytest.mark.parametrize("operation", PRODUCTS)
def case_products(world, start, operation):
    """The same bits as from a plan that is new."""
    m, k, n = 12 * world.size, 16, 20
    kind, rows_of = PRODUCTS[operation]
    with many_blocks():
        old, new = (kind(world, (m, k), (k, n), "float32") for _ in range(2))
    age(world, start, old)
    b = world.array(values(world.rank, (k, n), "float32"), symmetric=False)
    shape = (rows_of(m, world.size), n)
    outs = []
    for call in range(CALLS):
        a = world.array(values(world.rank, (m, k), "float32", call), symmetric=False)
        pair = [world.empty(shape, "float32", symmetric=False) for _ in range(2)]
        outs.append([plan(a, b, out) for plan, out in zip((old, new), pair, strict=True)])
    for call, (got, wanted) in enumerate(outs):
        assert_same_bits(got.numpy(), wanted.numpy(), call)
    assert_age(start + CALLS, old)
    assert_age(CALLS, new)


@worlds(2, 3)
@starts
def case_barrier(world, start):
    """A rank's store before the barrier is read by its neighbour after it."""
    plan = Barrier(world)
    x = world.zeros(1, "int32")
    age(world, start, plan)
    for call in range(CALLS):
        x.copy_from(np.array([10 * world.rank + call], np.int32))
        plan()
        peer = (world.rank + 1) % world.size
        assert x.peer(peer).numpy().tolist() == [10 * peer + call]
        plan()
    assert_age(start + 2 * CALLS, plan)
