"""Random reductions one after another, checked where they run.

TDX_TEST_OPERATIONS sets how many operations a case runs. Inputs are small integers, hashed from
rank, index and round, so that sums are exact; outputs are poisoned before; a kernel counts what
differs. Nothing is looked at until the end, so that calls follow each other closely.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

import tdx
from tdx.kernels import all_reduce, reduce, reduce_scatter
from tdx.runtime import dtypes
from tests.helpers.cases import limit, worlds

OPERATIONS = int(os.environ.get("TDX_TEST_OPERATIONS", "60"))
_PLANS = 24
_DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64")


@triton.jit
def _hashed(i, rank, salt):
    """Integers from -8 to 7, int64."""
    mixed = (i * 2654435761 + rank * 40503 + salt * 97611) & 0x7FFFFFFF
    return ((mixed * 48271) >> 16 & 15) - 8


@triton.jit(do_not_specialize=["rank", "salt", "n", "poisoned"])
def fill_kernel(x, out, rank, salt, n, poisoned, BLOCK: tl.constexpr):
    """The input of a round, and an output that no result is."""
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(x + i, _hashed(i, rank, salt).to(x.dtype.element_ty), mask=i < n)
        lost = tl.full((BLOCK,), 99, tl.int32).to(out.dtype.element_ty)
        tl.store(out + i, lost, mask=i < poisoned)


@triton.jit(do_not_specialize=["ranks", "salt", "first", "n"])
def check_kernel(out, wrong, ranks, salt, first, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    """Count the elements of `out` that are not the reduction of elements `first` and on."""
    bad = 0
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        total = _hashed(first + i, 0, salt)
        for rank in range(1, ranks):
            value = _hashed(first + i, rank, salt)
            if OP == "max":
                total = tl.maximum(total, value)
            elif OP == "min":
                total = tl.minimum(total, value)
            else:
                total += value
        seen = tl.load(out + i, mask=i < n, other=0).to(tl.float32)
        bad += tl.sum(((seen != total.to(tl.float32)) & (i < n)).to(tl.int32))
    tl.atomic_add(wrong, bad)


class Operation:
    """A plan chosen at random, the same on every rank, with its arrays."""

    def __init__(self, world, rng, largest):
        ranks = world.size
        self.kind = ("all_reduce", "reduce_scatter", "reduce")[rng.integers(3)]
        self.op = ("sum", "max", "min")[rng.integers(3)]
        dtype = _DTYPES[rng.integers(len(_DTYPES))]
        rows = int(largest ** rng.random())
        self.numel = rows * ranks if self.kind == "reduce_scatter" else rows
        self.root = int(rng.integers(ranks))
        module = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "reduce": reduce}
        names = module[self.kind].Config.algorithms
        if dtypes.resolve(dtype).itemsize not in (2, 4):
            names = [name for name in names if not name.startswith("low_latency")]
        options = {"steps": int(rng.integers(1, 6)), "blocks": int(rng.integers(1, 40))}
        config = module[self.kind].Config(
            names[rng.integers(len(names))], int(2 ** rng.integers(6, 12)), 4, **options
        )
        self.own_buffer = bool(rng.integers(2))
        made = {"config": config, "buffer": True}
        if self.kind == "all_reduce":
            self.plan = tdx.AllReduce(world, self.numel, dtype, self.op, **made)
        elif self.kind == "reduce_scatter":
            self.plan = tdx.ReduceScatter(world, self.numel, dtype, self.op, **made)
        else:
            self.plan = tdx.Reduce(world, self.numel, dtype, self.root, self.op, **made)
        shift = int(rng.integers(3))
        self.x = world.empty(self.numel + shift, dtype, symmetric=bool(rng.integers(2)))[shift:]
        self.size = rows
        self.first = world.rank * rows if self.kind == "reduce_scatter" else 0
        self.out = world.empty(rows + shift, dtype, symmetric=False)[shift:]
        self.here = self.kind != "reduce" or world.rank == self.root

    def run(self, world, wrong, salt):
        own = self.own_buffer and self.here and self.plan._out is not None
        out = self.plan._out if own else self.out
        grid = (4,)
        fill_kernel[grid](self.x, out, world.rank, salt, self.numel, self.size, BLOCK=1024)
        self.plan(self.x, None if own or not self.here else out)
        if self.here:
            check_kernel[grid](
                out, wrong, world.size, salt, self.first, self.size, OP=self.op, BLOCK=1024
            )


@limit(max(60, OPERATIONS / 500))
@worlds(2, 3, 4)
def case_reductions(world, rng):
    largest = 3000 if world.backend == "host" else 3_000_000
    operations = [Operation(world, rng, largest) for _ in range(min(_PLANS, OPERATIONS))]
    wrong = world.zeros(1, "int32", symmetric=False)
    for turn in range(OPERATIONS):
        operations[rng.integers(len(operations))].run(world, wrong, turn)
        if turn % 10_000 == 9_999:
            assert wrong.numpy()[0] == 0, turn
    assert wrong.numpy()[0] == 0
    last = operations[0]  # that the check sees a single wrong element
    last.run(world, wrong, OPERATIONS)
    world.synchronize()
    if last.here and last.size:
        given = last.out.numpy()
        given[-1] = 99
        last.out.copy_from(given)
        check_kernel[(4,)](
            last.out, wrong, world.size, OPERATIONS, last.first, last.size, OP=last.op, BLOCK=1024
        )
        assert wrong.numpy()[0] > 0
    world.barrier()
