"""What the reducing operations share: types, how two values combine, the one rounding at the end.

Floats are accumulated in float32, float64 in float64, integers in their own type, wrapping. max and
min propagate NaN. "avg" is the sum divided by the number of ranks.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from tdx.runtime import dtypes
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported

__all__ = ["OPERATIONS", "check_types", "combine", "finish", "from_words", "to_words", "widen"]

OPERATIONS = ("sum", "avg", "max", "min")


def check_types(
    operation: str, dtype: np.dtype, out: np.dtype, op: str, adds: bool = False
) -> None:
    """Raise unless `op` takes `dtype` and may round to `out`; `adds`: bias or residual follow."""
    if op not in OPERATIONS:
        raise InvalidArgument(f"op={op!r} is not one of {', '.join(OPERATIONS)}")
    if dtype.name in ("int32", "int64"):
        if op == "avg":
            raise Unsupported(f"{operation}: op='avg' of integers is not offered; use op='sum'")
        if out != dtype or adds:
            raise DtypeError(
                f"{operation} of {dtype}: out_dtype, bias and residual are for floats only"
            )
    elif not dtypes.is_float(dtype):
        raise DtypeError(
            f"{operation} does not take {dtype}; it takes float16, float32, float64, bfloat16, "
            "float8_e4m3fn, float8_e5m2, int32 and int64"
        )
    elif not dtypes.is_float(out):
        raise DtypeError(f"{operation} of {dtype}: out_dtype {out} must be a float type")


@triton.jit
def widen(x):
    """Values in the type they are accumulated in."""
    if x.dtype.is_floating() and x.dtype != tl.float64:
        x = x.to(tl.float32)
    return x


@triton.jit
def combine(total, value, OP: tl.constexpr):
    """Two accumulated values as one."""
    if OP == "max":
        total = tl.maximum(total, value, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "min":
        total = tl.minimum(total, value, propagate_nan=tl.PropagateNan.ALL)
    else:
        total = total + value
    return total


@triton.jit
def finish(
    total, out, bias, residual, offsets, mask, columns, ranks,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Divide, add bias and residual, round once and store."""
    if OP == "avg":
        if total.dtype == tl.float64:
            total = total / ranks.to(tl.float64)
        else:
            total = tl.div_rn(total, ranks.to(tl.float32) + tl.zeros_like(total))
    if HAS_BIAS:
        total = total + tl.load(bias + offsets % columns, mask=mask).to(total.dtype)
    if HAS_RESIDUAL:
        total = total + tl.load(residual + offsets, mask=mask).to(total.dtype)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def to_words(values, PAIRS: tl.constexpr):
    """Elements as what store_ll takes: 4 or 8 bytes each, those of 2 bytes in pairs."""
    if PAIRS:
        low, high = tl.split(tl.reshape(values, (values.shape[0] // 2, 2)))
        words = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = words | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        words = values
    return words


@triton.jit
def from_words(words, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """Undo to_words."""
    if PAIRS:
        low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        values = tl.interleave(low, high)
    else:
        values = words
    return values
