"""bfloat16 and float8 as Triton's GPUs compute them, for the interpreter's builder.

The interpreter keeps these types as unsigned bit patterns. Arithmetic on them happens here in
float32 and is rounded to nearest even; conversions to float8 saturate, as the hardware's do.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl

__all__ = ["NARROW", "from_float32", "to_float32"]

NARROW: dict[Any, Any] = {
    tl.bfloat16: ml_dtypes.bfloat16,
    tl.float8e4nv: ml_dtypes.float8_e4m3fn,
    tl.float8e5: ml_dtypes.float8_e5m2,
}
_BITS = {tl.bfloat16: np.uint16, tl.float8e4nv: np.uint8, tl.float8e5: np.uint8}
_MAX = {tl.float8e4nv: np.float32(448.0), tl.float8e5: np.float32(57344.0)}


def to_float32(bits: np.ndarray, dtype: Any) -> np.ndarray:
    """Bit patterns of a narrow float type as float32 values."""
    if dtype == tl.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(NARROW[dtype]).astype(np.float32)


def from_float32(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Bit patterns of float values rounded to nearest even; float8 saturates, NaN stays NaN."""
    values = np.asarray(values)
    with np.errstate(over="ignore", invalid="ignore"):
        values = _to_odd(values) if values.dtype == np.float64 else values.astype(np.float32)
        limit = _MAX.get(dtype)
        if limit is not None:
            values = np.clip(values, -limit, limit)
        return values.astype(NARROW[dtype]).view(_BITS[dtype])


def _to_odd(values: np.ndarray) -> np.ndarray:
    """float64 as float32, inexact ones to the odd neighbour: rounding on then rounds as if once."""
    nearest = values.astype(np.float32)
    back = nearest.astype(np.float64)
    inexact = back != values
    bits = nearest.view(np.uint32) - (inexact & (np.abs(back) > np.abs(values)))
    return (bits | inexact).astype(np.uint32).view(np.float32)
