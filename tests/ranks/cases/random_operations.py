"""Random reductions one after another, checked where they run.

TDX_TEST_OPERATIONS sets how many operations a case runs. Inputs are small integers, hashed from
rank, index and round, so that results are exact; outputs are poisoned before; a kernel counts what
differs. Nothing is looked at until the end, so that calls follow each other closely.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

import tdx
from tdx.kernels import all_reduce, reduce, reduce_scatter
from tdx.kernels.select import takes_low_latency
from tdx.runtime import dtypes
from tests.helpers.cases import limit, worlds
from tests.helpers.hashed import hashed

OPERATIONS = int(os.environ.get("TDX_TEST_OPERATIONS", "60"))
PLANS = 24
_DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64")


@triton.jit(do_not_specialize=["rank", "salt", "n", "poisoned"])
def fill_kernel(x, out, rank, salt, n, poisoned, BLOCK: tl.constexpr):
    """The input of a round, and an output that no result is."""
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(x + i, hashed(i, rank, salt).to(x.dtype.element_ty), mask=i < n)
        lost = tl.full((BLOCK,), 99, tl.int32).to(out.dtype.element_ty)
        tl.store(out + i, lost, mask=i < poisoned)


@triton.jit(do_not_specialize=["rank", "ranks", "salt", "first", "n", "columns"])
def check_kernel(
    out, wrong, rank, ranks, salt, first, n, columns,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the elements of `out` that are not the reduction of elements `first` and on.

    The bias is hashed as of rank `ranks`, the residual as of rank `ranks` + 1 + `rank`.
    """
    bad = 0
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        total = hashed(first + i, 0, salt)
        for peer in range(1, ranks):
            value = hashed(first + i, peer, salt)
            if OP == "max":
                total = tl.maximum(total, value)
            elif OP == "min":
                total = tl.minimum(total, value)
            else:
                total += value
        wanted = total.to(tl.float32)
        if OP == "avg":
            wanted = wanted / ranks
        if HAS_BIAS:
            wanted += hashed(i % columns, ranks, salt).to(tl.float32)
        if HAS_RESIDUAL:
            wanted += hashed(i, ranks + 1 + rank, salt).to(tl.float32)
        seen = tl.load(out + i, mask=i < n, other=0).to(tl.float32)
        bad += tl.sum(((seen != wanted) & (i < n)).to(tl.int32))
    tl.atomic_add(wrong, bad)


class Operation:
    """A plan chosen at random, the same on every rank, with its arrays."""

    def __init__(self, world, rng, largest):
        ranks, self.on_gpu = world.size, world.backend != "host"
        self.ranks = ranks
        self.kind = ("all_reduce", "reduce_scatter", "reduce")[rng.integers(3)]
        dtype = _DTYPES[rng.integers(len(_DTYPES))]
        floats = "float" in dtype
        exact = floats and ranks & (ranks - 1) == 0  # a mean of integers
        self.op = ("sum", "max", "min", "avg")[rng.integers(4 if exact else 3)]
        self.columns = int(largest ** (rng.random() / 2))
        rows = -(-int(largest ** rng.random()) // self.columns)
        self.size = rows * self.columns
        self.numel = self.size * ranks if self.kind == "reduce_scatter" else self.size
        shape = (self.numel // self.columns, self.columns)
        self.root = int(rng.integers(ranks))
        adds = [self.kind == "all_reduce" and floats and rng.random() < 0.4 for _ in range(2)]
        self.adds = dict(zip(("HAS_BIAS", "HAS_RESIDUAL"), adds, strict=True))
        made = {"config": self._config(rng, dtype, any(adds)), "buffer": True}
        self.own_buffer = bool(rng.integers(2))
        if self.kind == "all_reduce":
            made |= {"bias": adds[0], "residual": adds[1]}
            self.plan = tdx.AllReduce(world, shape, dtype, self.op, **made)
        elif self.kind == "reduce_scatter":
            self.plan = tdx.ReduceScatter(world, shape, dtype, self.op, **made)
        else:
            self.plan = tdx.Reduce(world, shape, dtype, self.root, self.op, **made)
        shift = int(rng.integers(3))

        def array(count, *axes, symmetric=False):
            return world.empty(count + shift, dtype, symmetric)[shift:].reshape(axes)

        self.x = array(self.numel, *shape, symmetric=bool(rng.integers(2)))
        self.first = world.rank * self.size if self.kind == "reduce_scatter" else 0
        self.out = array(self.size, rows, self.columns)
        self.bias = array(self.columns, self.columns) if adds[0] else None
        self.residual = array(self.numel, *shape) if adds[1] else None
        self.here = self.kind != "reduce" or world.rank == self.root

    def _config(self, rng, dtype, adds):
        module = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "reduce": reduce}
        config = module[self.kind].Config
        names = config.algorithms
        kind = dtypes.resolve(dtype)
        if not takes_low_latency(self.numel * kind.itemsize, self.ranks, (kind,)):
            names = [name for name in names if not name.startswith("low_latency")]
        if adds:
            names = [name for name in names if name != "copy_engine"]
        options = {"steps": int(rng.integers(1, 6)), "blocks": int(rng.integers(1, 40))}
        block = int(2 ** rng.integers(6, 12))
        name = names[rng.integers(len(names))]
        if self.on_gpu and name.startswith("low_latency"):
            block = min(block, 2048 // kind.itemsize)  # whose tile threads have registers for
        return config(name, block, 4, **options)

    def run(self, world, wrong, salt):
        own = self.own_buffer and self.here and self.plan._out is not None
        out = self.plan._out if own else self.out
        rank, ranks, grid, extras = world.rank, world.size, (4,), {}
        fill_kernel[grid](self.x, out, rank, salt, self.numel, self.size, BLOCK=1024)
        if (bias := self.bias) is not None:
            fill_kernel[grid](bias, bias, ranks, salt, self.columns, 0, BLOCK=1024)
            extras["bias"] = bias
        if (residual := self.residual) is not None:
            hashed_as = ranks + 1 + rank
            fill_kernel[grid](residual, residual, hashed_as, salt, self.numel, 0, BLOCK=1024)
            extras["residual"] = residual
        self.plan(self.x, None if own or not self.here else out, **extras)
        self.check(world, wrong, salt, out)

    def check(self, world, wrong, salt, out):
        if self.here:
            check_kernel[(4,)](
                out, wrong, world.rank, world.size, salt, self.first, self.size, self.columns,
                OP=self.op, **self.adds, BLOCK=1024,
            )  # fmt: skip


def run_in_turn(world, rng, operations):
    """Run OPERATIONS of them in random order; returns the array that counts wrong elements."""
    wrong = world.zeros(1, "int32", symmetric=False)
    for turn in range(OPERATIONS):
        operations[rng.integers(len(operations))].run(world, wrong, turn)
        if turn % 10_000 == 9_999:
            assert wrong.numpy()[0] == 0, turn
    assert wrong.numpy()[0] == 0
    return wrong


@limit(max(60, OPERATIONS / 500))
@worlds(2, 3, 4)
def case_reductions(world, rng):
    largest = 3000 if world.backend == "host" else 3_000_000
    operations = [Operation(world, rng, largest) for _ in range(min(PLANS, OPERATIONS))]
    wrong = run_in_turn(world, rng, operations)
    last = operations[0]  # that the check sees a single wrong element
    last.own_buffer = False
    last.run(world, wrong, OPERATIONS)
    assert wrong.numpy()[0] == 0
    if last.here:
        given = last.out.numpy()
        given[-1, -1] = 99
        last.out.copy_from(given)
        last.check(world, wrong, OPERATIONS, last.out)
        assert wrong.numpy()[0] == 1
    world.barrier()
