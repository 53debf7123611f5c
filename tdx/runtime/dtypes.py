"""Element types: which ones tdx takes, and their names in NumPy, Triton and DLPack.

The canonical form everywhere in tdx is `np.dtype`; bfloat16 and the two fp8 types are those of
ml_dtypes. Complex types can be moved, gathered and exchanged, but no kernel computes with them.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .errors import DtypeError

__all__ = [
    "SUPPORTED",
    "accumulator",
    "dlpack_type",
    "from_dlpack_type",
    "is_float",
    "is_kernel_dtype",
    "resolve",
]

# DLPack type codes
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL, _E4M3FN, _E5M2 = 0, 1, 2, 4, 5, 6, 10, 12


class _Facts(NamedTuple):
    triton: str | None  # as in a Triton signature; None: Triton has no such type
    code: int
    other_names: tuple[str, ...] = ()


_FACTS: dict[np.dtype[Any], _Facts] = {
    np.dtype(kind): facts
    for kind, facts in (
        (np.bool_, _Facts("u1", _BOOL, ("int1",))),
        (np.int8, _Facts("i8", _INT)),
        (np.int16, _Facts("i16", _INT)),
        (np.int32, _Facts("i32", _INT)),
        (np.int64, _Facts("i64", _INT)),
        (np.uint8, _Facts("u8", _UINT)),
        (np.uint16, _Facts("u16", _UINT)),
        (np.uint32, _Facts("u32", _UINT)),
        (np.uint64, _Facts("u64", _UINT)),
        (np.float16, _Facts("fp16", _FLOAT, ("fp16", "half"))),
        (np.float32, _Facts("fp32", _FLOAT, ("fp32",))),
        (np.float64, _Facts("fp64", _FLOAT, ("fp64",))),
        (ml_dtypes.bfloat16, _Facts("bf16", _BFLOAT, ("bf16",))),
        (ml_dtypes.float8_e4m3fn, _Facts("fp8e4nv", _E4M3FN, ("fp8e4nv", "float8e4nv"))),
        (ml_dtypes.float8_e5m2, _Facts("fp8e5", _E5M2, ("fp8e5", "float8e5"))),
        (np.complex64, _Facts(None, _COMPLEX)),
        (np.complex128, _Facts(None, _COMPLEX)),
    )
}

#: The element types of tdx arrays, in canonical form.
SUPPORTED: tuple[np.dtype[Any], ...] = tuple(_FACTS)

_CANONICAL = {dtype: dtype for dtype in _FACTS}
_BY_NAME = {name: d for d, facts in _FACTS.items() for name in (d.name, *facts.other_names)}
_BY_CODE = {(facts.code, d.itemsize * 8): d for d, facts in _FACTS.items()}
_PYTHON = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}


def resolve(dtype: Any) -> np.dtype[Any]:
    """The canonical `np.dtype` of anything that names an element type.

    Parameters
    ----------
    dtype
        An `np.dtype`, a NumPy or ml_dtypes scalar type, Python's bool, int, float or complex (8,
        64, 64 and 128 bits), a name ("float32", "fp32", "bf16", "fp8e4nv", "<f4"; short codes
        such as "i8" mean what they mean in NumPy), a Triton dtype, or a framework's dtype object
        or its name (`torch.bfloat16`, `jax.numpy.bfloat16`).

    Raises
    ------
    DtypeError
        It names no type, or one that tdx does not take: other byte orders, structured, object
        and string types, other floats.
    """
    if isinstance(dtype, np.dtype):
        return _known(dtype, dtype)
    if isinstance(dtype, str):
        return _by_name(dtype, dtype)
    if isinstance(dtype, type):
        if dtype in _PYTHON:
            return _PYTHON[dtype]
        if issubclass(dtype, np.generic):
            with contextlib.suppress(TypeError):  # abstract, as np.floating
                return _known(np.dtype(dtype), dtype)
        inner = getattr(dtype, "dtype", None)  # jax.numpy.float32 and its like
        if isinstance(inner, np.dtype):
            return _known(inner, dtype)
    elif dtype is not None and not hasattr(dtype, "shape"):
        # Dtype objects of Triton and of the frameworks print as their name; arrays have a shape.
        inner = getattr(dtype, "dtype", None)
        return _known(inner, dtype) if isinstance(inner, np.dtype) else _by_name(str(dtype), dtype)
    raise _refusal(dtype)


def is_kernel_dtype(dtype: Any) -> bool:
    """Whether kernels can compute with the type (false for the complex types)."""
    return _FACTS[resolve(dtype)].triton is not None


def is_float(dtype: Any) -> bool:
    """Whether the type is a real floating-point type, bfloat16 and fp8 included."""
    return _FACTS[resolve(dtype)].code in (_FLOAT, _BFLOAT, _E4M3FN, _E5M2)


def accumulator(dtype: Any) -> np.dtype[Any]:
    """The type in which a reduction of `dtype` accumulates.

    float32 for floats of up to 32 bits, float64 for float64, integers and bool their own type.
    Raises DtypeError for complex types, which cannot be reduced.
    """
    dtype = resolve(dtype)
    if not is_kernel_dtype(dtype):
        raise DtypeError(f"cannot reduce {dtype}: complex arrays can be moved but not reduced")
    return np.dtype(np.float32) if is_float(dtype) and dtype.itemsize < 4 else dtype


def dlpack_type(dtype: Any) -> tuple[int, int]:
    """DLPack's (type code, bits) of the type; lanes are always 1."""
    dtype = resolve(dtype)
    return _FACTS[dtype].code, dtype.itemsize * 8


def from_dlpack_type(code: int, bits: int, lanes: int = 1) -> np.dtype[Any]:
    """The canonical type of a DLPack (type code, bits, lanes).

    Raises DtypeError for vectors (lanes > 1) and for types tdx does not take.
    """
    dtype = _BY_CODE.get((code, bits)) if lanes == 1 else None
    if dtype is None:
        raise DtypeError(
            f"DLPack type (code {code}, {bits} bits, {lanes} lanes) is not one tdx takes; "
            f"it takes {_listing()}"
        )
    return dtype


def _by_name(name: str, given: Any) -> np.dtype[Any]:
    found = _BY_NAME.get(name) or _BY_NAME.get(name.rpartition(".")[2])
    if found is not None:
        return found
    if isinstance(given, str):
        try:
            return _known(np.dtype(name), given)
        except (TypeError, ValueError, SyntaxError):
            pass
    raise _refusal(given)


def _known(dtype: np.dtype[Any], given: Any) -> np.dtype[Any]:
    found = _CANONICAL.get(dtype)
    if found is None:
        raise _refusal(given)
    return found


def _refusal(given: Any) -> DtypeError:
    text = repr(given)
    text = text if len(text) <= 80 else text[:77] + "..."
    reason = ""
    if isinstance(given, (np.dtype, str)):
        try:
            if not np.dtype(given).isnative:
                reason = " (its byte order is not this machine's: convert with .astype)"
            elif np.dtype(given).kind in "OSU":
                reason = " (objects and text are no numbers: convert with .astype)"
        except (TypeError, ValueError, SyntaxError):
            pass
    return DtypeError(f"{text} is not a dtype tdx takes{reason}; it takes {_listing()}")


def _listing() -> str:
    return ", ".join(dtype.name for dtype in SUPPORTED)
