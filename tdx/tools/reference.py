"""Operands of the benches of products, and what the results must be: float64, at samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.runtime import dtypes

if TYPE_CHECKING:
    from tdx.runtime.array import Array
    from tdx.runtime.world import World

__all__ = [
    "BOUNDS", "FACTORS", "FLOAT8", "SCALES", "Gathered", "Matrix", "Result", "Summands", "sample",
]  # fmt: skip

# Of norm(error) / norm(reference), by type of the result: all that is checked.
BOUNDS = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 2e-5}
FLOAT8 = "float8_e4m3fn"
FACTORS = (*BOUNDS, FLOAT8)  # types of operands of products
# What float8 operands are to be multiplied by: numbers that are no powers of two, so that one that
# is forgotten shows.
SCALES = {"scale_a": 0.75, "scale_b": 1.25}
_PAGE = (1 << 20) + 13  # odd, so that the rows of a matrix differ
_MOST = 64  # rows and columns of a sample


class Matrix:
    """Normally distributed values that every rank can tell, in whole or in part, from the seed."""

    def __init__(self, seed: int, shape: tuple[int, int], dtype: np.dtype):
        length = min(_PAGE, shape[0] * shape[1])
        page = np.random.default_rng(seed).standard_normal(length, np.float32)
        self.shape = shape
        self._page = page.astype(dtype)

    def whole(self) -> np.ndarray[Any, Any]:
        """All of it."""
        return np.resize(self._page, self.shape)

    def part(self, rows: Any = None, columns: Any = None) -> np.ndarray[Any, Any]:
        """The elements where `rows` meet `columns`, float64; None: all."""
        rows, columns = (
            np.arange(extent) if some is None else np.asarray(some)
            for some, extent in zip((rows, columns), self.shape, strict=True)
        )
        at = rows[:, None] * self.shape[1] + columns[None, :]
        return self._page[at % self._page.size].astype(np.float64)


def sample(extent: int) -> np.ndarray[Any, Any]:
    """Indices below `extent`: all, or some at equal distances with the first and the last."""
    return np.linspace(0, extent - 1, min(extent, _MOST)).astype(np.int64)


class Result:
    """An array of (rows, columns) that results go to, and what they must be at a sample."""

    def __init__(self, out: Array, rows: Any, columns: Any, expected: np.ndarray[Any, Any]):
        self.out = out
        self._at = np.ix_(rows, columns)
        self._expected = expected

    def poison(self) -> None:
        """Fill the array with NaNs of all bits set, which no operation gives."""
        out = self.out
        self.out.copy_from(np.full(out.nbytes, 0xFF, np.uint8).view(out.dtype).reshape(out.shape))

    def fault(self) -> str:
        """What is wrong with the array, or "": elements never written, or too large an error."""
        got = self.out.numpy()
        bits = got.view(f"u{got.itemsize}")
        missing = int((bits == np.iinfo(bits.dtype).max).sum())
        if missing:
            return f"{missing} of {got.size} elements were not written"
        difference = np.linalg.norm(got[self._at].astype(np.float64) - self._expected)
        error = difference / np.linalg.norm(self._expected)
        bound = BOUNDS[got.dtype.name]
        return "" if error < bound else f"relative error {error:.1e}, bound {bound:.0e}"


def _second(world: World, matrix: Matrix, dtype: np.dtype) -> Array:
    """B as an array that is not symmetric; of float8 contiguous along K, as tensor cores read."""
    if dtype.name != FLOAT8:
        return world.array(matrix.whole(), symmetric=False)
    return world.array(np.ascontiguousarray(matrix.whole().T), symmetric=False).T


def _scales(dtype: np.dtype) -> dict[str, Any]:
    return SCALES if dtype.name == FLOAT8 else {}


def _output(dtype: np.dtype) -> np.dtype:
    """The type of a product."""
    return dtypes.resolve("bfloat16") if dtype.name == FLOAT8 else dtype


class Gathered:
    """Of every rank M / size rows of A (M, K), and the own B (K, N).

    Attributes
    ----------
    a, whole, b : Array
        The own rows, all rows, and B; not symmetric.
    scales : dict
        What a product takes besides: scale_a and scale_b of float8.
    result : Result
        For A . B.
    """

    def __init__(self, world: World, shape: tuple[int, int, int], dtype: np.dtype):
        (m, n, k), size = shape, world.size
        height = m // size
        parts = [Matrix(rank, (height, k), dtype) for rank in range(size)]
        own = Matrix(size + world.rank, (k, n), dtype)
        self.scales = _scales(dtype)
        self.a = world.array(parts[world.rank].whole(), symmetric=False)
        self.whole = world.array(np.concatenate([p.whole() for p in parts]), symmetric=False)
        self.b = _second(world, own, dtype)
        rows, columns = sample(m), sample(n)
        lines = np.concatenate([parts[row // height].part([row % height]) for row in rows])
        out = world.empty((m, n), _output(dtype), symmetric=False)
        expected = lines @ own.part(columns=columns) * math.prod(self.scales.values())
        self.result = Result(out, rows, columns, expected)


class Summands:
    """Of every rank A (M, K) and B (K, N), whose products are to be added.

    Attributes
    ----------
    a, b : Array
        This rank's, not symmetric.
    scales : dict
        What a product takes besides: scale_a and scale_b of float8.
    """

    def __init__(self, world: World, shape: tuple[int, int, int], dtype: np.dtype):
        m, n, k = shape
        self._world, self._dtype, self._extents = world, dtype, (m, n)
        self._pairs = [
            (Matrix(rank, (m, k), dtype), Matrix(world.size + rank, (k, n), dtype))
            for rank in range(world.size)
        ]
        a, b = self._pairs[world.rank]
        self.a = world.array(a.whole(), symmetric=False)
        self.b, self.scales = _second(world, b, dtype), _scales(dtype)

    def product(self) -> Result:
        """This rank's product alone, (M, N)."""
        return self._result(0, self._extents[0], self._pairs[self._world.rank :][:1])

    def total(self, first: int, count: int) -> Result:
        """Rows `first` to `first + count` of the sum over ranks."""
        return self._result(first, count, self._pairs)

    def _result(self, first: int, count: int, pairs: Sequence[tuple[Matrix, Matrix]]) -> Result:
        width = self._extents[1]
        rows, columns = sample(count), sample(width)
        expected = sum(a.part(first + rows) @ b.part(columns=columns) for a, b in pairs)
        out = self._world.empty((count, width), _output(self._dtype), symmetric=False)
        return Result(out, rows, columns, expected * math.prod(self.scales.values()))
