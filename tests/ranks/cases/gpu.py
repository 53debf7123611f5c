"""What only a GPU can show: many replays, large heaps, streams that really run at once."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.frameworks import needs

GIB = 1 << 30


@triton.jit
def fill_kernel(x, value, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, (i % 1021 + value).to(x.dtype.element_ty), mask=i < n)


@triton.jit
def count_kernel(x, value, n, wrong, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(x + i, mask=i < n, other=0)
    bad = (seen != (i % 1021 + value).to(x.dtype.element_ty)) & (i < n)
    tl.atomic_add(wrong, tl.sum(bad.to(tl.int32)))


@triton.jit
def read_peer_kernel(x, out, n, peer, world, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(tdl.symm_at(x, peer, world) + i, mask=i < n), mask=i < n)


@triton.jit
def next_input_kernel(x, rank, n, BLOCK: tl.constexpr):
    """x = x + rank + 1: the input changes with every replay."""
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + rank + 1, mask=i < n)


@triton.jit
def check_sum_kernel(total, count, ranks, n, wrong, BLOCK: tl.constexpr):
    """The sum over ranks of (round * (rank + 1)), counted on the device."""
    i = tl.arange(0, BLOCK)
    number = tl.load(count) + 1
    tl.debug_barrier()  # one thread stores what all have loaded
    tl.store(count, number)
    expected = number * (ranks * (ranks + 1) // 2)
    bad = (tl.load(total + i, mask=i < n) != expected) & (i < n)
    tl.atomic_add(wrong, tl.sum(bad.to(tl.int32)))


@pytest.mark.gpu
@worlds(2, 4)
@limit(300)
@pytest.mark.parametrize(
    "algorithm", ["low_latency", "low_latency_two_shot", "one_shot", "two_shot", "copy_engine"]
)
def case_a_hundred_thousand_replays(world, algorithm):
    n = 1000
    x = world.zeros(n, "int32")
    count = world.zeros(1, "int32", symmetric=False)
    wrong = world.zeros(1, "int32", symmetric=False)
    plan = tdx.AllReduce(world, n, "int32", algorithm=algorithm)

    def step():
        next_input_kernel[(1,)](x, world.rank, n, BLOCK=1024)
        total = plan(x)
        check_sum_kernel[(1,)](total, count, world.size, n, wrong, BLOCK=1024)

    step()
    world.barrier()
    with tdx.graph(world) as graph:
        for _ in range(10):
            step()
    for i in range(10_000):
        graph.replay()
        if i % 500 == 499:
            world.synchronize()
    assert (wrong.numpy()[0], count.numpy()[0]) == (0, 100_001)
    world.barrier()


@triton.jit
def add_one_kernel(x, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) + 1)


@pytest.mark.gpu
@isolated
@worlds(1, 2)
def case_plain_launches_with_pytorch(comm, backend):
    """They go to PyTorch's stream, in order with copies, plans and replays on the world's."""
    needs("torch", backend)
    import torch

    n = 1 << 24
    with tdx.init(comm, backend=backend) as world:
        torch.cuda.init()
        x, y = (world.zeros(n, "int32", symmetric=False) for _ in range(2))
        plan = tdx.AllReduce(world, n, "int32", op="max")

        def add_one(x):
            add_one_kernel[(n // 1024,)](x, BLOCK=1024)

        add_one(x)
        with tdx.graph(world) as graph:
            add_one(x)
        for _ in range(50):
            add_one(x)
            y.copy_from(x)
            add_one(y)
            plan(y, out=x)
            graph.replay()
        assert (x.numpy() == 151).all()


@pytest.mark.gpu
@worlds(2, 4)
def case_two_streams(world):
    streams = [world.new_stream(), world.new_stream()]
    algorithms = ("low_latency", "one_shot")
    plans = [tdx.AllReduce(world, 5000, "float32", algorithm=a) for a in algorithms]
    inputs = [world.array(np.full(5000, world.rank + 1 + k, np.float32)) for k in range(2)]
    world.barrier()
    results = [world.empty(5000, "float32", symmetric=False) for _ in range(2)]
    for _ in range(200):
        for k in range(2):
            plans[k](inputs[k], results[k], stream=streams[k])
    for k in range(2):
        expected = sum(r + 1 + k for r in range(world.size))
        assert (results[k].numpy() == expected).all()
    world.barrier()


@pytest.mark.gpu
@worlds(4)
def case_overlapping_teams(world):
    first, second = world.team([0, 1, 2]), world.team([1, 2, 3])
    x = world.array(np.full(3000, world.rank + 1, np.float32))
    plans = [
        (team, tdx.AllReduce(world, 3000, "float32", team=team)) for team in (first, second) if team
    ]
    for _ in range(300):
        for _, plan in plans:
            plan(x)
    for team, plan in plans:
        result = plan(x)
        assert (result.numpy() == sum(r + 1 for r in team.ranks)).all()
    world.barrier()


@isolated
@worlds(2)
@limit(120)
@pytest.mark.gpu
def case_heaps_above_4_gib(comm, backend):
    with tdx.init(comm, backend=backend) as world:
        blocks = []
        for k in range(3):  # grows while arrays are live, offsets go above 4 GiB
            x = world.empty(2 * GIB, "int8", name=f"block{k}")
            fill_kernel[(-(-x.size // 4096),)](x, world.rank + k, x.size, BLOCK=4096)
            blocks.append(x)
        last = world.empty(1 << 20, "int32", name="last")
        fill_kernel[(256,)](last, 1000 * world.rank, last.size, BLOCK=4096)
        assert last._block.offset - blocks[0]._block.offset > 4 * GIB
        world.barrier()
        peer = (world.rank + 1) % world.size
        got = world.empty(1 << 20, "int32", symmetric=False)
        read_peer_kernel[(256,)](last, got, last.size, peer, world.handle, BLOCK=4096)
        assert (got.numpy() == np.arange(1 << 20) % 1021 + 1000 * peer).all()
        wrong = world.zeros(1, "int32", symmetric=False)
        for k, x in enumerate(blocks):
            count_kernel[(-(-x.size // 4096),)](x, world.rank + k, x.size, wrong, BLOCK=4096)
        assert wrong.numpy()[0] == 0
        world.barrier()
