"""What counts as a number or a bool in an argument: Python's, NumPy's, and what is like them."""

from __future__ import annotations

import math
import operator
from numbers import Number, Real
from typing import Any

from .errors import InvalidArgument

__all__ = [
    "as_float",
    "as_int",
    "check_bool",
    "check_flag",
    "check_int",
    "check_kind",
    "has_elements",
    "is_array",
    "make_ints",
]

_BOOLS = ("bool", "bool_")  # NumPy's own, by its name before 2.0


def as_int(value: Any) -> int | None:
    """`value` as an int; None if it is a bool or no integer."""
    if type(value).__name__ in _BOOLS:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_float(value: Any) -> float | None:
    """`value` as a float (inf beyond all floats); None if it is a bool or no real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_array(value: Any) -> bool:
    """Whether it is an array, or a scalar, of some library."""
    kind = type(value)  # the class itself has the methods, too, and is none
    return hasattr(kind, "__dlpack__") or hasattr(kind, "__array__")


def has_elements(value: Any) -> bool:
    """Whether NumPy would compare it with an array element by element."""
    return isinstance(value, (Number, list, tuple)) or is_array(value)


def check_int(value: Any, what: str, least: int, most: int | None = None) -> int:
    """`value` as an int from `least` to `most`; InvalidArgument."""
    whole = as_int(value)
    if whole is None or whole < least or (most is not None and whole > most):
        limit = f">= {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgument(f"{what}={value!r} must be an int {limit}")
    return whole


def check_bool(what: str, value: Any, why: str = "") -> bool:
    """`value` as a bool; InvalidArgument, which says `why`, for anything else, such as an array."""
    if type(value).__name__ in _BOOLS:
        return bool(value)
    shape = getattr(value, "shape", None)
    given = repr(value) if shape is None else f"<array of shape {tuple(shape)}>"
    raise InvalidArgument(f"{what}={given} must be True or False{why}")


def check_flag(operation: str, name: str, value: Any) -> bool:
    """`value`, which says whether calls of a plan pass an array `name`, as a bool.

    Raises InvalidArgument for anything else, such as the array itself.
    """
    why = ": a plan is made with whether there is one, and its calls take the array"
    return check_bool(f"{operation}: {name}", value, why)


def check_kind(symmetric: Any, name: Any) -> None:
    """Raise InvalidArgument unless these say which kind of array is wanted, and its name."""
    if type(symmetric).__name__ not in _BOOLS:
        raise InvalidArgument(
            f"symmetric={symmetric!r} must be True or False; what messages call the array is name="
        )
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"name={name!r} must be a str, or None")


def make_ints(settings: Any, *names: str) -> None:
    """Make the named fields of a frozen dataclass ints; InvalidArgument."""
    for name in names:
        value = getattr(settings, name)
        whole = as_int(value)
        if whole is None:
            raise InvalidArgument(f"{name}={value!r} must be an int")
        object.__setattr__(settings, name, whole)
