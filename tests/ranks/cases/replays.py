"""Many replays with inputs that change on the device and are checked there; few on the host tier.

Those of all_reduce are in gpu.py.
"""

from __future__ import annotations

import pytest
import triton
import triton.language as tl

import tdx
from tdx.kernels import all_gather_matmul as gathered
from tdx.kernels import all_reduce_rms_norm as norm
from tdx.kernels import matmul_all_reduce as summed
from tdx.kernels import matmul_reduce_scatter as scattered
from tdx.kernels import reduce as rooted
from tests.helpers.cases import limit, worlds
from tests.helpers.hashed import (
    check_sum_kernel,
    count_moved,
    hashed,
    next_bytes_kernel,
    next_kernel,
)
from tests.helpers.movement import MOVES


@triton.jit
def next_round_kernel(count):
    tl.store(count, tl.load(count) + 1)


@triton.jit(do_not_specialize=["source", "first", "part", "n"])
def check_bytes_kernel(out, wrong, count, source, first, part, n, BLOCK: tl.constexpr):
    count_moved(out, wrong, source, first, part, tl.load(count), n, BLOCK)


@triton.jit(do_not_specialize=["m", "columns", "depth", "n"])
def check_product_kernel(out, y, wrong, count, m, columns, depth, n, BLOCK: tl.constexpr):
    """Count what is not the product of all ranks' (m, depth) integers and `y`."""
    salt = tl.load(count)
    bad = 0
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        row = i // columns
        total = tl.zeros((BLOCK,), tl.float32)
        for k in range(depth):
            left = hashed(row % m * depth + k, row // m, salt).to(tl.float32)
            total += left * tl.load(y + k * columns + i % columns, mask=i < n, other=0)
        seen = tl.load(out + i, mask=i < n, other=0)
        bad += tl.sum(((seen != total) & (i < n)).to(tl.int32))
    tl.atomic_add(wrong, bad)


@triton.jit(do_not_specialize=["ranks", "first", "columns", "depth", "n"])
def check_summed_product_kernel(
    out, y, wrong, count, ranks, first, columns, depth, n, BLOCK: tl.constexpr
):  # fmt: skip
    """Count what is not the product of the sum of all ranks' rows, from `first` on, and `y`."""
    salt = tl.load(count)
    bad = 0
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        row = first + i // columns
        total = tl.zeros((BLOCK,), tl.float32)
        for k in range(depth):
            left = hashed(row * depth + k, 0, salt)
            for rank in range(1, ranks):
                left += hashed(row * depth + k, rank, salt)
            right = tl.load(y + k * columns + i % columns, mask=i < n, other=0)
            total += left.to(tl.float32) * right
        seen = tl.load(out + i, mask=i < n, other=0)
        bad += tl.sum(((seen != total) & (i < n)).to(tl.int32))
    tl.atomic_add(wrong, bad)


@triton.jit(do_not_specialize=["ranks", "rows", "columns"])
def check_norm_kernel(
    out, kept, weight, wrong, count, ranks, rows, columns, BLOCK: tl.constexpr
):  # fmt: skip
    """Count what is not the sum h of all ranks' integers and a residual, or not the norm of h.

    The residual is hashed as of rank `ranks`. Sums of squares are exact, quotients are not.
    """
    salt = tl.load(count)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    scale = tl.load(weight + at, mask=inside, other=0)
    bad = 0
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        i = row * columns + at.to(tl.int64)
        total = hashed(i, ranks, salt)
        for rank in range(ranks):
            total += hashed(i, rank, salt)
        h = tl.where(inside, total, 0).to(tl.float32)
        wanted = h / tl.sqrt(tl.sum(h * h) / columns + 1e-6) * scale
        seen = tl.load(out + i, mask=inside, other=0)
        off = (tl.load(kept + i, mask=inside, other=0) != h) | (seen != seen)
        off = off | (tl.abs(seen - wanted) > 1e-5 * tl.abs(wanted))
        bad += tl.sum((off & inside).to(tl.int32))
    tl.atomic_add(wrong, bad)


class Rounds:
    """The number of a round, and how many elements were wrong so far, on the device."""

    def __init__(self, world):
        self.world = world
        self.count = world.zeros(1, "int32", symmetric=False)
        self.wrong = world.zeros(1, "int32", symmetric=False)

    def replay(self, step):
        """Three rounds in one graph, replayed 10,000 times, on the host tier a few times."""
        world = self.world
        replays = 3 if world.backend == "host" else 10_000

        def one():
            next_round_kernel[(1,)](self.count, num_warps=1)
            step()

        one()
        world.barrier()
        with tdx.graph(world) as graph:
            for _ in range(3):
                one()
        for i in range(replays):
            graph.replay()
            if i % 500 == 499:
                world.synchronize()
        assert self.wrong.numpy()[0] == 0
        assert self.count.numpy()[0] == 3 * replays + 1

    def sees(self, out, check, here=True):
        """`check` counts a single wrong element, if it looks `here`; after the last round."""
        self.world.barrier()
        given = out.numpy().copy()
        given.reshape(-1)[-1] += 1
        out.copy_from(given)
        check()
        assert self.wrong.numpy()[0] == int(here)
        self.world.barrier()


def reduce_scatter(world, algorithm):
    rows, ranks = 333, world.size
    rounds = Rounds(world)
    plan = tdx.ReduceScatter(world, rows * ranks, "int32", algorithm=algorithm)
    x = world.empty(rows * ranks, "int32", symmetric=False)
    out = world.empty(rows, "int32", symmetric=False)

    def check():
        first = world.rank * rows
        check_sum_kernel[(1,)](out, rounds.wrong, rounds.count, ranks, first, rows, BLOCK=512)

    def step():
        next_kernel[(1,)](x, rounds.count, world.rank, x.size, BLOCK=1024)
        plan(x, out)
        check()

    rounds.replay(step)
    rounds.sees(out, check)


def reduce(world, algorithm):
    size, root = 999, world.size - 1
    here = world.rank == root
    rounds = Rounds(world)
    plan = tdx.Reduce(world, size, "int32", root, algorithm=algorithm)
    x, out = (world.empty(size, "int32", symmetric=False) for _ in range(2))

    def check():
        if here:
            check_sum_kernel[(1,)](out, rounds.wrong, rounds.count, world.size, 0, size, BLOCK=1024)

    def step():
        next_kernel[(1,)](x, rounds.count, world.rank, size, BLOCK=1024)
        plan(x, out if here else None)
        check()

    rounds.replay(step)
    rounds.sees(out, check, here)


def movement(world, move):
    part, root = 2056, world.size - 1  # bytes; of whole words
    rounds = Rounds(world)
    plan = move.plan(world, (part,), "int8", root)
    x = world.empty(move.given_shape((part,), world.size), "int8", symmetric=False)
    out = plan._out
    source = root if move.operation == "broadcast" else 0
    first = world.rank * part if move.operation == "all_to_all" else 0

    def check():
        check_bytes_kernel[(1,)](
            out, rounds.wrong, rounds.count, source, first, part, out.size, BLOCK=1024
        )

    def step():
        next_bytes_kernel[(1,)](x, rounds.count, world.rank, x.size, BLOCK=1024)
        plan(x)
        check()

    rounds.replay(step)
    rounds.sees(out, check)


def all_gather_matmul(world, algorithm):
    """Of small integers, so that products are exact."""
    m, depth, columns = 17, 16, 24
    rounds = Rounds(world)
    plan = tdx.AllGatherMatmul(world, (m, depth), (depth, columns), "float32", algorithm=algorithm)
    x = world.empty((m, depth), "float32", symmetric=False)
    y = world.empty((depth, columns), "float32", symmetric=False)
    next_kernel[(1,)](y, rounds.count, world.size, y.size, BLOCK=512)
    out = world.empty((world.size * m, columns), "float32", symmetric=False)

    def check():
        check_product_kernel[(2,)](
            out, y, rounds.wrong, rounds.count, m, columns, depth, out.size, BLOCK=512
        )

    def step():
        next_kernel[(1,)](x, rounds.count, world.rank, x.size, BLOCK=512)
        plan(x, y, out)
        check()

    rounds.replay(step)
    rounds.sees(out, check)


def product_and_sum(world, make, m, first, algorithm):
    """Of (m, 16) integers of each rank; results begin with row `first`."""
    depth, columns = 16, 24
    rounds = Rounds(world)
    plan = make(world, (m, depth), (depth, columns), "float32", algorithm=algorithm)
    x = world.empty((m, depth), "float32", symmetric=False)
    y = world.empty((depth, columns), "float32", symmetric=False)
    next_kernel[(1,)](y, rounds.count, world.size, y.size, BLOCK=512)
    out = world.empty(plan.out_shape, "float32", symmetric=False)

    def check():
        check_summed_product_kernel[(2,)](
            out, y, rounds.wrong, rounds.count, world.size, first, columns, depth, out.size,
            BLOCK=512,
        )  # fmt: skip

    def step():
        next_kernel[(1,)](x, rounds.count, world.rank, x.size, BLOCK=512)
        plan(x, y, out)
        check()

    rounds.replay(step)
    rounds.sees(out, check)


def matmul_reduce_scatter(world, algorithm):
    rows = 9
    make, whole = tdx.MatmulReduceScatter, rows * world.size
    product_and_sum(world, make, whole, rows * world.rank, algorithm)


def matmul_all_reduce(world, algorithm):
    product_and_sum(world, tdx.MatmulAllReduce, 19, 0, algorithm)


def all_reduce_rms_norm(world, algorithm):
    rows, columns, ranks = 5, 200, world.size
    rounds = Rounds(world)
    shape, options = (rows, columns), {"residual": True, "algorithm": algorithm}
    if algorithm == "two_shot in steps":
        options = {"residual": True, "config": norm.Config("two_shot", 64, blocks=2, steps=3)}
    plan = tdx.AllReduceRmsNorm(world, shape, "float32", **options)
    x, residual, out, kept = (world.empty(shape, "float32", symmetric=False) for _ in range(4))
    weight = world.empty(columns, "float32", symmetric=False)
    next_kernel[(1,)](weight, rounds.count, ranks, columns, BLOCK=256)

    def check():
        check_norm_kernel[(2,)](
            out, kept, weight, rounds.wrong, rounds.count, ranks, rows, columns, BLOCK=256
        )

    def step():
        next_kernel[(1,)](x, rounds.count, world.rank, x.size, BLOCK=1024)
        next_kernel[(1,)](residual, rounds.count, ranks, x.size, BLOCK=1024)
        plan(x, weight, out, kept, residual=residual)
        check()

    rounds.replay(step)
    rounds.sees(out, check)


every_operation = pytest.mark.parametrize(
    ("operation", "algorithm"),
    [
        *((reduce_scatter, name) for name in ("low_latency", "push")),
        *((reduce, name) for name in rooted.Config.algorithms),
        *((movement, move) for move in MOVES),
        *((all_gather_matmul, name) for name in gathered.ALGORITHMS),
        *((matmul_reduce_scatter, name) for name in scattered.ALGORITHMS),
        *((matmul_all_reduce, name) for name in summed.ALGORITHMS),
        *((all_reduce_rms_norm, name) for name in (*norm.Config.algorithms, "two_shot in steps")),
    ],
)


@worlds(2)
@limit(120)
@every_operation
def case_replays(world, operation, algorithm):
    operation(world, algorithm)


@pytest.mark.gpu
@worlds(4)
@limit(120)
@every_operation
def case_replays_of_four(world, operation, algorithm):
    operation(world, algorithm)
