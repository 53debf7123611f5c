"""Random products and norms one after another, checked where they are.

As random_operations.py, whose TDX_TEST_OPERATIONS counts here too. Operands are small integers and
not too many of a row are other than 0, so that sums are exact in every type that they travel in.
Each operation has two sets of operands, with results that NumPy made of them.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
from tdx.kernels import (
    all_gather_matmul,
    all_reduce_rms_norm,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from tdx.kernels.matmul import Config
from tdx.runtime import dtypes
from tests.helpers.blocks import copy_engines, many_blocks
from tests.helpers.cases import limit, worlds
from tests.helpers.reference import activated
from tests.ranks.cases.random_operations import OPERATIONS, PLANS, run_in_turn

_KINDS = {
    "matmul": (None,),
    "all_gather_matmul": (None, *all_gather_matmul.ALGORITHMS),
    "matmul_reduce_scatter": (None, *matmul_reduce_scatter.ALGORITHMS),
    "matmul_all_reduce": (None, *matmul_all_reduce.ALGORITHMS),
    "all_reduce_rms_norm": (None, *all_reduce_rms_norm.Config.algorithms),
}
_PLANS = {
    "all_gather_matmul": tdx.AllGatherMatmul, "matmul_reduce_scatter": tdx.MatmulReduceScatter,
    "matmul_all_reduce": tdx.MatmulAllReduce,
}  # fmt: skip
_EXACT = {"bfloat16": 1 << 8, "float16": 1 << 11, "float32": 1 << 24}  # integers up to these
_TILES = ((32, 32, 32), (16, 64, 16), (32, 16, 32))  # as many rows as many_blocks allows


@triton.jit(do_not_specialize=["n"])
def poison_kernel(out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        lost = tl.full((BLOCK,), float("nan"), tl.float32).to(out.dtype.element_ty)
        tl.store(out + i, lost, mask=i < n)


@triton.jit(do_not_specialize=["n", "tolerance"])
def compare_kernel(out, wanted, wrong, n, tolerance, BLOCK: tl.constexpr):
    """Count the elements that differ by more than `tolerance`, relative to what is wanted."""
    bad = 0
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        seen = tl.load(out + i, mask=i < n, other=0).to(tl.float32)
        right = tl.load(wanted + i, mask=i < n, other=0)
        near = tl.abs(seen - right) <= tolerance * tl.abs(right)  # NaN is not
        bad += tl.sum(tl.where(near, 0, 1) * (i < n).to(tl.int32))
    tl.atomic_add(wrong, bad)


class Operation:
    """Base of both kinds: results are poisoned, made, and compared."""

    tolerances = (0.0,)
    results: tuple  # arrays that a call fills
    rounds: list  # (arguments, keywords, wanted results)
    own_buffer = False

    def run(self, world, wrong, salt):
        args, extras, _ = self.rounds[salt % 2]
        for out in self.results:
            poison_kernel[(4,)](out, out.size, BLOCK=1024)
        self.call(
            *args, *((None,) * len(self.results) if self.own_buffer else self.results), extras
        )
        self.check(wrong, salt)

    def check(self, wrong, salt):
        wanted = self.rounds[salt % 2][2]
        for out, right, tolerance in zip(self.results, wanted, self.tolerances, strict=True):
            compare_kernel[(4,)](out, right, wrong, out.size, tolerance, BLOCK=1024)


class Product(Operation):
    """A plan of a product chosen at random, the same on every rank, with its operands."""

    def __init__(self, world, rng, largest):
        self.kind = list(_PLANS)[rng.integers(3)] if rng.integers(4) else "matmul"
        names, size = _KINDS[self.kind], world.size
        dtype = list(_EXACT)[rng.integers(3)]
        out_dtype = (dtype, "float32")[rng.integers(2)]
        algorithm = names[rng.integers(len(names))]
        m, k, n = (int(largest ** rng.random()) for _ in range(3))
        rows = m * size if self.kind == "matmul_reduce_scatter" else m
        bias = bool(rng.integers(2))
        options = {
            "activation": (None, "relu")[rng.integers(2)], "out_dtype": out_dtype,
            "config": self._config(rng, algorithm),
        }  # fmt: skip
        self.own_buffer = self.kind != "matmul" and bool(rng.integers(2))
        blocks = many_blocks if rng.integers(2) else contextlib.nullcontext
        with blocks(), copy_engines(bool(rng.integers(2))):
            if self.kind == "matmul":
                self.call = lambda a, b, out, extras: tdx.matmul(a, b, out=out, **extras, **options)
            else:
                plan = _PLANS[self.kind](
                    world, (rows, k), (k, n), dtype, bias=bias, algorithm=algorithm, **options
                )
                self.call = lambda a, b, out, extras: plan(a, b, out, **extras)
        shift, turned = int(rng.integers(3)), bool(rng.integers(2))

        def array(values, kind=dtype):
            memory = world.empty(values.size + shift, kind, symmetric=False)[shift:]
            return memory.reshape(values.shape).copy_from(values.astype(dtypes.resolve(kind)))

        self.rounds = []
        for _ in range(2):
            given = [_integers(rng, rows, k, n, out_dtype, size) for _ in range(size)]
            vector = rng.integers(-1, 2, n)
            a, b = given[world.rank]
            right = array(b.T).T if turned else array(b)
            whole = self._whole(world, given) + (vector if bias else 0)
            wanted = activated(whole, options["activation"])
            extras = {"bias": array(vector)} if bias else {}
            self.rounds.append(((array(a), right), extras, (array(wanted, "float32"),)))
        if self.own_buffer:
            self.results = (plan._outs[0] if self.kind == "all_gather_matmul" else plan._out,)
        else:
            self.results = (array(np.zeros(wanted.shape), out_dtype),)

    def _config(self, rng, algorithm):
        tile, group, split = _TILES[rng.integers(3)], int(rng.integers(1, 9)), rng.integers(1, 4)
        if rng.integers(2):
            return None
        shared = self.kind == "matmul" or algorithm == "unfused"
        return Config(*tile, group_m=group, num_warps=4, split_k=int(split) if shared else 1)

    def _whole(self, world, given):
        """This rank's result, without bias and activation, in float64."""
        products = [a.astype(float) @ b.astype(float) for a, b in given]
        if self.kind == "matmul":
            return products[world.rank]
        if self.kind == "all_gather_matmul":
            return np.concatenate([a for a, _ in given]).astype(float) @ given[world.rank][1]
        total = np.sum(products, axis=0)
        if self.kind == "matmul_all_reduce":
            return total
        return np.split(total, world.size)[world.rank]


def _integers(rng, rows, k, n, out_dtype, ranks):
    """A rank's (rows, k) and (k, n), of which the sums over all ranks are exact."""
    largest = 3 if out_dtype == "float32" else 1
    most = (_EXACT[out_dtype] - 1) // (ranks * largest**2)  # in a row, beside a bias of 1
    a, b = (rng.integers(-largest, largest + 1, shape) for shape in ((rows, k), (k, n)))
    a[:, rng.permutation(k)[most:]] = 0
    return a, b


class Norm(Operation):
    """A plan of all_reduce_rms_norm chosen at random."""

    def __init__(self, world, rng, largest):
        dtype = list(_EXACT)[rng.integers(3)]
        kind = dtypes.resolve(dtype)
        shape = tuple(int(largest ** rng.random()) for _ in range(2))
        bias, residual = (bool(rng.integers(2)) for _ in range(2))
        names = _KINDS["all_reduce_rms_norm"]
        algorithm = names[rng.integers(len(names))]
        block, blocks, steps = 1 << int(rng.integers(5, 9)), *map(int, rng.integers(1, 6, 2))
        config = algorithm and all_reduce_rms_norm.Config(
            algorithm, block, blocks=blocks, steps=steps
        )
        self.own_buffer = bool(rng.integers(2))
        self.plan = tdx.AllReduceRmsNorm(
            world, shape, dtype, bias=bias, residual=residual, config=config
        )

        def array(values, kind=dtype):
            return world.array(values.astype(dtypes.resolve(kind)), symmetric=False)

        self.rounds = []
        for _ in range(2):
            given = rng.integers(-8, 9, (world.size, *shape))
            weight, vector = rng.integers(-3, 4, shape[1]), rng.integers(-8, 9, shape[1])
            kept = rng.integers(-8, 9, shape)
            h = (given.sum(axis=0) + bias * vector + residual * kept).astype(float)
            norm = h / np.sqrt((h * h).mean(axis=-1, keepdims=True) + 1e-6) * weight
            extras = {"bias": array(vector)} if bias else {}
            extras |= {"residual": array(kept)} if residual else {}
            wanted = (norm, h) if residual else (norm,)
            arguments = array(given[world.rank]), array(weight)
            self.rounds.append((arguments, extras, tuple(array(w, "float32") for w in wanted)))
        step = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}[kind.name]
        self.tolerances = (step + 1e-5, 0.0)[: len(wanted)]
        buffers = (self.plan._out, self.plan._kept)
        places = buffers if self.own_buffer else [array(np.zeros(shape)) for _ in range(2)]
        self.results = tuple(places[: len(wanted)])

    def call(self, x, weight, *results_and_extras):
        *results, extras = results_and_extras
        self.plan(x, weight, *results, **extras)


def run_products(world, rng):
    largest = 50 if world.backend == "host" else 700
    operations = [
        (Product if rng.integers(4) else Norm)(world, rng, largest)
        for _ in range(min(PLANS, OPERATIONS))
    ]
    wrong = run_in_turn(world, rng, operations)
    last = operations[0]  # that the check sees a single wrong element
    last.run(world, wrong, OPERATIONS)
    assert wrong.numpy()[0] == 0
    world.barrier()
    out = last.results[0]
    given = out.numpy().copy()
    given.reshape(-1)[-1] += 3
    out.copy_from(given)
    last.check(wrong, OPERATIONS)
    assert wrong.numpy()[0] == 1
    world.barrier()


@limit(max(120, OPERATIONS / 100))
@worlds(2, 3)
def case_products(world, rng):
    run_products(world, rng)


@pytest.mark.gpu
@limit(max(180, OPERATIONS / 100))
@worlds(4)
def case_products_of_four(world, rng):
    run_products(world, rng)
