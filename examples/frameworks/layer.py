"""The layer that all scripts of this folder compute: y = relu(x . up) . down, split over ranks.

A rank has a slice of the columns of `up` and of the rows of `down`, so that its product is one
summand of y. Two ways to put y together: add the summands up on every rank (all-reduce), or keep x
and y split by rows as well, and overlap their exchange with the products.
"""

from __future__ import annotations

import numpy as np

TOKENS_PER_RANK, HIDDEN, INNER_PER_RANK = 16, 64, 48


def numbers(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x (size * 16, 64), up (64, size * 48), down (size * 48, 64), float32; the same everywhere."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((size * TOKENS_PER_RANK, HIDDEN), np.float32)
    up = rng.standard_normal((HIDDEN, size * INNER_PER_RANK), np.float32) / 8
    down = rng.standard_normal((size * INNER_PER_RANK, HIDDEN), np.float32) / 8
    return x, up, down


def rows(rank: int, size: int) -> np.ndarray:
    """The rank's rows of x."""
    return np.split(numbers(size)[0], size)[rank]


def weights(rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The rank's columns of `up` and rows of `down`."""
    _, up, down = numbers(size)
    own_up, own_down = np.split(up, size, axis=1)[rank], np.split(down, size)[rank]
    return np.ascontiguousarray(own_up), own_down


def check(y: np.ndarray, size: int, rank: int | None = None) -> None:
    """Raise AssertionError unless y is right: all of it, or the rows of one rank."""
    x, up, down = (array.astype(np.float64) for array in numbers(size))
    expected = np.maximum(x @ up, 0) @ down
    if rank is not None:
        expected = np.split(expected, size)[rank]
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)
