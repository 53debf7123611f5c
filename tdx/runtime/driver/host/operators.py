"""The operators of interpreted tensors, without detours where operands are alike.

Triton resolves types and shapes of `a + b` anew in each call, in a dozen layers that take some
15 us. Between operands of one type, of int32 and int64, or with a Python int, the result's type is
plain, and NumPy computes what those layers would have it compute. All else goes through them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

__all__ = ["shorten"]

_INTEGERS = {
    name: (getattr(np, name), np.iinfo(name).min, np.iinfo(name).max)
    for name in ("int32", "int64", "uint32", "uint64")
}
_ARRAYS = {name: np.dtype(name) for name in _INTEGERS} | {
    "fp32": np.dtype("float32"), "fp64": np.dtype("float64"), "int1": np.dtype(bool),
}  # fmt: skip
_SIGNED = frozenset(("int32", "int64"))
_NUMBERS = frozenset((*_INTEGERS, "fp32", "fp64"))
_WIDE = frozenset(_INTEGERS)
_BITS = frozenset((*_INTEGERS, "int1"))

Compute = Callable[[Any, Any], Any]


def shorten() -> None:
    """Replace the operators of Triton's tensors, which are those of its interpreter already."""
    for name, compute, kinds in (
        ("add", operator.add, _NUMBERS), ("sub", operator.sub, _NUMBERS),
        ("mul", operator.mul, _NUMBERS), ("mod", np.fmod, _SIGNED), ("floordiv", _divided, _SIGNED),
        ("and", operator.and_, _BITS), ("or", operator.or_, _BITS), ("xor", operator.xor, _BITS),
    ):  # fmt: skip
        _replace(f"__{name}__", compute, kinds)
        _replace(f"__r{name}__", functools.partial(_swapped, compute), kinds)
    for name, compute in (("lshift", operator.lshift), ("rshift", operator.rshift)):
        _replace(f"__{name}__", compute, _WIDE, most=31)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        _replace(f"__{name}__", getattr(operator, name), _NUMBERS, is_comparison=True)
    tl.tensor.__add__ = _pointer_add(tl.tensor.__add__)


def _divided(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b  # toward zero, as on GPUs


def _swapped(compute: Compute, a: Any, b: Any) -> Any:
    return compute(b, a)


def _replace(
    name: str, compute: Compute, kinds: frozenset[str], is_comparison: bool = False,
    most: int | None = None,
) -> None:  # fmt: skip
    """`most`: only with Python ints from 0 to that."""
    stock = getattr(tl.tensor, name)

    def run(self: Any, other: Any) -> Any:
        kind = self.dtype
        value = other.value if type(other) is tl.constexpr else other
        left = self.handle.data
        if kind.name not in kinds or type(left) is not np.ndarray:
            return stock(self, other)
        if type(value) is int:
            known = _INTEGERS.get(kind.name)
            if known is None or not known[1] <= value <= known[2]:
                return stock(self, other)
            if most is not None and not 0 <= value <= most:
                return stock(self, other)
            shape, right = self, known[0](value)
        elif type(value) is tl.tensor and most is None:
            if value.dtype.name != kind.name:
                if kind.name not in _SIGNED or value.dtype.name not in _SIGNED:
                    return stock(self, other)
                kind = tl.int64
            shape, right = _shape(self, value), value.handle.data
        else:
            return stock(self, other)
        if shape is None:
            return stock(self, other)
        data = compute(left, right)
        kind = tl.int1 if is_comparison else kind
        if type(data) is not np.ndarray or data.dtype != _ARRAYS[kind.name]:
            return stock(self, other)
        return _made(shape, data, kind)

    setattr(tl.tensor, name, run)


def _pointer_add(general: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A pointer and an offset in elements."""

    def run(self: Any, other: Any) -> Any:
        kind = self.dtype
        pointers = self.handle.data
        if not kind.is_ptr() or kind.element_ty.is_ptr() or type(pointers) is not np.ndarray:
            return general(self, other)
        value = other.value if type(other) is tl.constexpr else other
        size = max(kind.element_ty.primitive_bitwidth // 8, 1)
        if type(value) is int and -(1 << 31) <= value < 1 << 31:
            shape, offset = self, np.int64(size * value).astype(np.uint64)
        elif type(value) is tl.tensor and value.dtype.name in _SIGNED:
            shape, offset = _shape(self, value), size * value.handle.data.astype(np.uint64)
        else:
            return general(self, other)
        data = None if shape is None else pointers + offset
        if type(data) is not np.ndarray or data.dtype != np.uint64:
            return general(self, other)
        return _made(shape, data, kind)

    return run


def _shape(a: Any, b: Any) -> Any:
    """The one of two tensors whose shape the result has; None if neither does."""
    rank, other = len(a.shape), len(b.shape)
    if not other or (rank == other and a.handle.data.shape == b.handle.data.shape):
        return a
    return None if rank else b


def _made(like: Any, data: np.ndarray, kind: Any) -> Any:
    """A tensor of the shape of `like` and the type `kind`."""
    made = tl.tensor.__new__(tl.tensor)
    made.__dict__.update(like.__dict__)
    made.handle = TensorHandle(data, kind)
    if like.dtype is not kind:
        made.dtype = kind
        made.type = tl.block_type(kind, list(data.shape)) if like.shape else kind
    return made
