"""float32 products are IEEE; with allow_tf32=True tensor cores round the operands."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import tdx
from tdx.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from tests.helpers.cases import worlds
from tests.helpers.reference import assert_same_bits, product, values

DEPTH, ROWS, COLUMNS = 256, 64, 96
OPERATIONS = [
    ("matmul", None),
    *(("all_gather_matmul", name) for name in all_gather_matmul.ALGORITHMS),
    *(("matmul_reduce_scatter", name) for name in matmul_reduce_scatter.ALGORITHMS),
    *(("matmul_all_reduce", name) for name in matmul_all_reduce.ALGORITHMS),
]


def left(rank):
    return values(rank, (ROWS, DEPTH), "float32")


def right(rank):
    return values(100 + rank, (DEPTH, COLUMNS), "float32")


def wanted_of(world, operation):
    mine = right(world.rank)
    if operation == "matmul":
        return product(left(world.rank), mine)
    if operation == "all_gather_matmul":
        return np.concatenate([product(left(rank), mine) for rank in range(world.size)])
    total = sum(product(left(rank), right(rank)) for rank in range(world.size))
    if operation == "matmul_all_reduce":
        return total
    rows = ROWS // world.size
    return total[world.rank * rows : (world.rank + 1) * rows]


@worlds(1, 2)
@pytest.mark.parametrize(("operation", "algorithm"), OPERATIONS)
def case_errors(world, operation, algorithm):
    """Relative to the largest result; the host tier rounds no operand, whatever is allowed."""
    a, b = (world.array(v, symmetric=False) for v in (left(world.rank), right(world.rank)))
    call = functools.partial(getattr(tdx, operation), a, b, algorithm=algorithm)
    usual, exact, rounded = (
        call(**options).numpy() for options in ({}, {"allow_tf32": False}, {"allow_tf32": True})
    )
    assert_same_bits(usual, exact)
    if world.backend == "host":
        assert_same_bits(rounded, exact)
    wanted = wanted_of(world, operation)
    error, error_rounded = (
        np.abs(result - wanted).max() / np.abs(wanted).max() for result in (exact, rounded)
    )
    assert error < 2e-5, error
    assert error_rounded < 5e-3, error_rounded
    if world.backend == "cuda":
        assert error_rounded > max(10 * error, 5e-5), (error, error_rounded)
