"""`and`, `or`, `not`, `max`, `min` and loops in interpreted kernels, as compiled ones have them.

Python asks for the truth of an operand, which a block has not: compiled kernels take its elements.
Of scalars the second one is evaluated only if the first does not decide, as in Python; a compiled
kernel evaluates both. See rewriting.py, which puts calls of these in the place of the operators.

A tensor counts as an index for Python, whatever it holds: loops are refused what compilers refuse.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

__all__ = [
    "both", "called", "either", "is_plain", "iterator", "negated", "returned_in_loop", "truth",
    "used_global",
]  # fmt: skip

_NO_INTEGERS = "{}: the bounds and the step of a loop are scalar integers, got {}: divide by //"
# of these compilers take as globals only those of Triton
_PLAIN = (
    int, float, complex, str, list, tuple, dict, set, np.ndarray, np.generic, type,
    types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip
_REDUCED = {builtins.max: "builtin_max", builtins.min: "builtin_min"}


def truth(tensor: Any) -> bool:
    """Whether a tensor of one element is true; Triton itself asks whether there is one at all."""
    data = tensor.handle.data
    if data.size != 1:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("triton."):
            return True
        raise TypeError(
            f"a block of shape {[int(n) for n in tensor.shape]} has no truth value: `if` and "
            "`while` take scalars; use tl.where, a mask, or tl.max over its elements"
        )
    return bool(data)


def _is_block(x: Any) -> bool:
    return isinstance(x, tl.tensor) and bool(x.shape)


def both(left: Any, right: Callable[[], Any]) -> Any:
    """left and right(), element by element where one is a block."""
    if not _is_block(left) and not left:
        return left
    return _joined("logical_and", left, right())


def either(left: Any, right: Callable[[], Any]) -> Any:
    """left or right(), element by element where one is a block."""
    if not _is_block(left) and left:
        return left
    return _joined("logical_or", left, right())


def _joined(how: str, left: Any, right: Any) -> Any:
    """Of tensors, one of them a block, what the method gives; else the second decides."""
    joins = _is_block(left) or (isinstance(left, tl.tensor) and _is_block(right))
    return getattr(left, how)(right) if joins else right


def negated(x: Any) -> Any:
    """not x, element by element of a block."""
    return x.__not__() if _is_block(x) else not x


def called(function: Any, *args: Any) -> Any:
    """function(*args): Python's max and min of tensors are Triton's; its range takes integers."""
    if function is builtins.range:
        _check_bounds("range", args)
        return range(*args)
    name = _REDUCED.get(function) if any(isinstance(x, tl.tensor) for x in args) else None
    return function(*args) if name is None else getattr(tl.core, name)(*args)


def iterator(name: str) -> Callable[..., range]:
    """What is in the place of `tl.range` and `tl.static_range`."""

    def run(arg1: Any, arg2: Any = None, step: Any = None, **_: Any) -> range:
        start, end = (0, arg1) if arg2 is None else (arg1, arg2)
        step = 1 if step is None else step
        _check_bounds(f"tl.{name}", (start, end, step))
        return range(start, end, step)

    return run


def returned_in_loop() -> None:
    """Refuse a `return` that is reached in a loop."""
    raise TypeError(
        "`return` inside a loop, which compilers refuse: let a `while` end by its condition, or "
        "mask what later iterations do"
    )


def is_plain(value: Any) -> bool:
    """Whether compilers refuse kernels this as a global: it is neither constexpr nor of Triton."""
    if not isinstance(value, _PLAIN):
        return False
    home = getattr(value, "__module__", None) or ""
    marked = any(hasattr(value, f"__triton_{mark}__") for mark in ("builtin", "aggregate"))
    named_tuple = isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")
    return not (marked or named_tuple or home.startswith(("triton.", "tdx.")))


def used_global(name: str, value: Any) -> Any:
    """`value`, which a kernel takes from outside, unless compilers refuse it."""
    if not is_plain(value):
        return value
    if callable(value):
        raise NameError(
            f"{name} is a plain function or class, of which compilers take none: use @triton.jit"
        )
    raise NameError(
        f"{name} is a global {type(value).__name__}, which compilers refuse: write {name} = "
        "tl.constexpr(...), or pass it as an argument"
    )


def _check_bounds(what: str, bounds: tuple[Any, ...]) -> None:
    for given in bounds:
        value = given.value if isinstance(given, tl.constexpr) else given
        if not isinstance(value, tl.tensor):
            if not hasattr(value, "__index__"):
                raise TypeError(_NO_INTEGERS.format(what, repr(value)))
        elif value.shape or not value.dtype.is_int():
            raise TypeError(_NO_INTEGERS.format(what, value.type))
        elif what == "tl.static_range":
            raise TypeError(
                f"{what}: the bounds and the step are constexpr, got {value.type}, known only when "
                "the kernel runs: use range, or pass a tl.constexpr"
            )
