"""What each framework's arrays can do with tdx, found out by doing it.

`column` fills one column of the table under "Frameworks" in README.md; the rank case
framework_table.py compares the two.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import tdx
from tdx.interop import owner_of
from tests.helpers.commands import ROOT

__all__ = ["DTYPES", "column", "published"]

DTYPES = ("float64", "int64", "bool", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def published() -> dict[str, dict[str, str]]:
    """The table as README.md has it: framework -> row -> cell."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Frameworks") :].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    (_, *names), _, *rows = ([c.strip() for c in re.split(r"\|", line)[1:-1]] for line in lines)
    return {name: {row[0]: row[n + 1] for row in rows} for n, name in enumerate(names)}


def column(world: Any, module: str) -> dict[str, str]:
    """Row -> "yes", or the error that says no; "-" where the question makes no sense."""
    make, address, transpose = _functions(module)
    x, empty = (make(np.arange(4 * n, dtype=np.float32).reshape(n, 4)) for n in (3, 0))
    framework = owner_of(x)
    assert framework is not None
    cells = {
        "read where it is": _yes(lambda: framework.describe(x).address == address(x)),
        "result of the same type": _yes(lambda: type(tdx.all_reduce(x)) is type(x)),
        "sees a tdx array without a copy": _yes(lambda: _sees(world, framework, x, address)),
        "`out=`": _yes(lambda: _writes(x, make(np.zeros((3, 4), np.float32)))),
        "transposed input": _yes(lambda: _equal(tdx.all_gather(transpose(x)), transpose(x))),
        "empty input": _yes(lambda: tuple(tdx.all_gather(empty).shape) == (0, 4)),
        "inside its compiler or autograd": _inside(module, x),
    }
    for name in DTYPES:
        kind = np.dtype(getattr(ml_dtypes, name, None) or name)
        cells[name] = _yes(lambda kind=kind: _gathers(make, kind))
    return cells


def _functions(module: str) -> tuple[Callable[..., Any], Callable[[Any], int], Callable[..., Any]]:
    """How to make an array of a NumPy one, its address, and its transpose."""
    space = importlib.import_module(module)
    if module == "numpy":
        return np.array, lambda x: x.ctypes.data, np.transpose
    if module == "jax":
        return space.numpy.asarray, lambda x: x.unsafe_buffer_pointer(), space.numpy.transpose

    def make(array: np.ndarray) -> Any:
        if array.dtype.isbuiltin == 1:
            return space.from_numpy(array.copy())
        return space.from_numpy(array.view(f"i{array.itemsize}").copy()).view(
            getattr(space, array.dtype.name)
        )

    return make, lambda x: x.data_ptr(), lambda x: x.T


def _yes(question: Callable[[], Any]) -> str:
    try:
        assert question(), "the answer is wrong, not just no"
    except tdx.errors.TdxError as error:
        return type(error).__name__
    return "yes"


def _sees(world: Any, framework: Any, like: Any, address: Callable[[Any], int]) -> bool:
    ours = world.array(np.arange(16, dtype=np.float32), symmetric=False)
    return address(framework.adopt(ours, like)) == ours.data_ptr()


def _writes(x: Any, out: Any) -> bool:
    return tdx.all_reduce(x, out=out) is out and _equal(out, x)


def _equal(one: Any, other: Any) -> bool:
    return bool((np.asarray(one) == np.asarray(other)).all())


def _gathers(make: Callable[..., Any], kind: np.dtype) -> bool:
    """A round trip through symmetric memory keeps the bytes and the type."""
    x = make(np.arange(6).astype(kind))
    result = tdx.all_gather(x)
    held = [owner_of(a).describe(a) for a in (x, result)]  # type: ignore[union-attr]
    before, after = (ctypes.string_at(memory.address, 6 * kind.itemsize) for memory in held)
    return result.dtype == x.dtype and before == after


def _inside(module: str, x: Any) -> str:
    if module == "numpy":
        return "-"
    space = importlib.import_module(module)
    if module == "jax":
        return _yes(lambda: space.jit(tdx.all_reduce)(x) is not None)
    return _yes(lambda: tdx.all_reduce(x.clone().requires_grad_()) is not None)
