"""Inputs as functions of rank and index, and what the operations make of them, in NumPy.

References compute in float64. `reduced` is the exception: it repeats the operation's own order in
its own precision, because all-reduce promises its bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tdx.runtime import dtypes

__all__ = [
    "activated",
    "assert_same_bits",
    "error_bound",
    "poisoned",
    "product",
    "reduced",
    "values",
]


def values(rank: int, shape: int | Sequence[int], dtype: Any, salt: int = 0) -> np.ndarray:
    """Hashed values: floats in [-2, 2), integers of the type's whole range."""
    kind = dtypes.resolve(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = math.prod(shape)
    seed = (rank + 1) * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03
    x = np.arange(count, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    x = x + np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(29))
    if kind.kind in "iu":
        flat = x.view(np.int64).astype(kind)
    elif kind.kind == "b":
        flat = (x & np.uint64(1)).astype(kind)
    else:
        flat = (((x >> np.uint64(40)).astype(np.float64) - 2.0**23) / 2.0**22).astype(kind)
    return flat.reshape(shape)


def poisoned(shape: int | Sequence[int], dtype: Any) -> np.ndarray:
    """What outputs hold before: bytes that no result has."""
    kind = dtypes.resolve(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return np.full(math.prod(shape) * kind.itemsize, 0xA5, np.uint8).view(kind).reshape(shape)


def reduced(
    inputs: Sequence[np.ndarray],
    op: str = "sum",
    out_dtype: Any = None,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """The reduction of `inputs` in rank order, in the accumulator's type, rounded once."""
    kind = inputs[0].dtype
    wide = dtypes.accumulator(kind)
    combine = {"max": np.maximum, "min": np.minimum}.get(op, np.add)
    with np.errstate(over="ignore", invalid="ignore"):
        total = inputs[0].astype(wide)
        for x in inputs[1:]:
            total = combine(total, x.astype(wide))
        if op == "avg":
            total = total / wide.type(len(inputs))
        for extra in (bias, residual):
            if extra is not None:
                total = total + extra.astype(wide)
        return total.astype(kind if out_dtype is None else dtypes.resolve(out_dtype))


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a . b in float64; `a` may have leading axes."""
    return a.astype(np.float64) @ b.astype(np.float64)


def activated(x: np.ndarray, activation: str | None) -> np.ndarray:
    """The activation of a float64 array."""
    if activation == "relu":
        return np.maximum(x, 0.0)
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2)))
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x


def error_bound(depth: int, *kinds: Any) -> float:
    """Absolute error of a product over `depth` of values below 2, rounded to each of `kinds`."""
    steps = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
    size = 4.0 * math.sqrt(max(1, depth))  # what sums of products of random signs reach
    return 4 * size * sum(steps[dtypes.resolve(kind).name] for kind in kinds) + 1e-6 * depth


def assert_same_bits(got: Any, wanted: np.ndarray, where: Any = "") -> None:
    """Equal shape, dtype and bits; any NaN equals any other."""
    got = np.asarray(got)
    assert got.dtype == wanted.dtype, (got.dtype, wanted.dtype, where)
    assert got.shape == wanted.shape, (got.shape, wanted.shape, where)
    if not got.size:
        return
    mine, theirs = (
        np.ascontiguousarray(x).reshape(-1).view(f"u{x.itemsize}") for x in (got, wanted)
    )
    with np.errstate(invalid="ignore"):
        both_nan = (got != got).reshape(-1) & (wanted != wanted).reshape(-1)
    wrong = np.flatnonzero((mine != theirs) & ~both_nan)
    assert not wrong.size, (
        f"{wrong.size} of {got.size} differ, first at {wrong[0]}: {got.reshape(-1)[wrong[0]]} "
        f"instead of {wanted.reshape(-1)[wrong[0]]} {where}"
    )
