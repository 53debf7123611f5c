"""What the operators of interpreted tensors give, one JSON line for each pair of operands.

`python -m tests.helpers.operator_results` prints tdx's, with the word "stock" those of Triton.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tdx.runtime.driver.host import interpreter

OPERATORS = (
    "add", "sub", "mul", "mod", "floordiv", "truediv", "and_", "or_", "xor", "lshift", "rshift",
    "eq", "ne", "lt", "le", "gt", "ge",
)  # fmt: skip
_ARRAYS = {
    "int1": bool, "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint8": "uint8", "uint32": "uint32", "uint64": "uint64", "float16": "float16",
    "float32": "float32", "float64": "float64", "bfloat16": "uint16",
}  # fmt: skip
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (4,), (4, 4), (4, 1), (1, 4), (8,))


def tensor(kind: Any, shape: tuple[int, ...], seed: int) -> Any:
    """Values of both signs, the largest and the smallest of integers among them."""
    name = "uint64" if kind.is_ptr() else _ARRAYS[_name(kind)]
    data = np.random.default_rng(seed).integers(1, 100, shape or (1,)).astype(name)
    if data.dtype.kind in "if" and not kind.is_ptr():
        data[..., ::2] = -data[..., ::2]
    if data.dtype.kind in "iu" and data.size > 3 and not kind.is_ptr():
        data.flat[1], data.flat[2] = np.iinfo(data.dtype).max, np.iinfo(data.dtype).min + 1
    return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def _name(kind: Any) -> str:
    return next(name for name in _ARRAYS if getattr(tl, name) == kind)


def operands() -> Iterator[tuple[Any, Any]]:
    kinds = [getattr(tl, name) for name in _ARRAYS]
    pointers = [tl.pointer_type(kind) for kind in (tl.float32, tl.int1, tl.int64)]
    pointers.append(tl.pointer_type(pointers[0]))
    for left in kinds + pointers:
        for right in kinds + pointers[:1]:
            yield tensor(left, (4,), 1), tensor(right, (4,), 2)
            yield tensor(left, (), 3), tensor(right, (), 4)
        for value in (0, 1, 5, 31, 32, -1, -7, 1 << 31, -(1 << 31), 1 << 40, True, 0.5):
            yield tensor(left, (4,), 5), value
            yield tensor(left, (), 6), tl.constexpr(value)
            yield value, tensor(left, (4,), 7)
    for kind in (tl.int32, tl.float32, pointers[0]):
        for first in _SHAPES:
            for second in _SHAPES:
                yield tensor(kind, first, 8), tensor(tl.int32, second, 9)
                yield tensor(kind, first, 10), tensor(tl.int64, second, 11)


def outcome(name: str, left: Any, right: Any) -> list[Any]:
    try:
        result = getattr(operator, name)(left, right)
    except Exception as error:
        return [type(error).__name__]
    if not isinstance(result, tl.tensor):
        return [repr(result)]
    data = np.asarray(result.handle.data)
    shape = [int(n) for n in result.shape]
    kinds = [str(result.type), str(result.dtype), str(result.handle.dtype), int(result.numel)]
    return [data.tobytes().hex(), str(data.dtype), list(data.shape), shape, *kinds]


def _text(value: Any) -> str:
    return f"{value.type}" if isinstance(value, tl.tensor) else repr(value)


def main() -> None:
    if "stock" in sys.argv[1:]:
        interpreter.shorten = lambda: None
    interpreter.take_over()
    with np.errstate(all="ignore"):
        for name in OPERATORS:
            for left, right in operands():
                line = [name, _text(left), _text(right), outcome(name, left, right)]
                sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
