"""Shapes as arguments, and views computed by NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tdx.runtime.checks import as_int
from tdx.runtime.errors import InvalidArgument

__all__ = ["address_of", "check_shape", "complete_shape", "is_broadcast", "stand_in"]


def check_shape(shape: Any) -> tuple[int, ...]:
    """`shape` as a tuple of extents; InvalidArgument."""
    extents = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    ints = tuple(n for n in map(as_int, extents) if n is not None and n >= 0)
    if len(ints) < len(extents):
        raise InvalidArgument(f"shape {shape!r}: extents must be ints >= 0")
    return ints


def is_broadcast(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether NumPy broadcasts an array of the one shape to the other."""
    try:
        return np.broadcast_shapes(shape, wanted) == wanted
    except ValueError:
        return False


def stand_in(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Any:
    """A NumPy array that is never read, of which NumPy computes views."""
    byte = np.zeros(1, f"V{itemsize}")
    return np.lib.stride_tricks.as_strided(byte, shape, strides, writeable=False)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Of the first element."""
    return int(array.__array_interface__["data"][0])


def complete_shape(size: int, wanted: Sequence[Any]) -> tuple[int, ...]:
    """The shape to which `size` elements are reshaped, with what -1 stands for; InvalidArgument."""
    shape = tuple(n for n in map(as_int, wanted) if n is not None)
    if len(shape) < len(wanted):
        raise InvalidArgument(f"shape {tuple(wanted)}: extents must be ints")
    rest = math.prod(n for n in shape if n != -1)
    if shape.count(-1) > 1 or any(n < -1 for n in shape):
        raise InvalidArgument(f"shape {shape}: extents must be >= 0, at most one may be -1")
    if -1 in shape and rest and size % rest == 0:
        shape = tuple(size // rest if n == -1 else n for n in shape)
    if math.prod(shape) != size or -1 in shape:
        raise InvalidArgument(f"{size} elements cannot be reshaped to {shape}")
    return shape
