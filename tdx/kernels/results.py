"""Results that a plan makes for its callers, and small ones that it gives out again.

To make and to drop an array takes the host as long as all else that a small call does, so the last
few are kept. One is free once nobody else refers to the array or to its memory.
"""

from __future__ import annotations

import sys
from collections import deque
from sys import getrefcount

import numpy as np

from tdx.runtime.array import Array
from tdx.runtime.world import World

__all__ = ["Results"]

_BYTES = 256 << 10  # of the largest that is kept: calls with larger ones take the device longer
# Callers have the last result while they ask for the next. Only the lock counts references exactly.
_KEPT = 3 if getattr(sys, "_is_gil_enabled", lambda: True)() else 0


class Results:
    """Arrays of one shape and type in local memory. Part of a plan."""

    def __init__(self) -> None:
        self._kept: deque[Array] = deque()
        self._alone = (0, 0)  # references to one that was just made

    def take(self, world: World, shape: tuple[int, ...], dtype: np.dtype, name: str) -> Array:
        """One that nobody has."""
        kept = self._kept
        for _ in range(len(kept)):
            try:
                array = kept.popleft()  # no other thread gets it now
            except IndexError:
                break
            block = array._block
            if block.freed or block.scattered or block.recorded:
                continue  # others may use the memory whom no reference shows
            del block
            if _references(array) == self._alone:
                kept.append(array)
                return array
            if len(kept) < _KEPT - 1:
                kept.append(array)
        array = world.local(shape, dtype, name)
        if array._block.nbytes <= _BYTES and _KEPT:
            self._alone = _references(array)
            kept.append(array)
        return array


def _references(array: Array) -> tuple[int, int]:
    """To the array and to its memory, but for the two of the operand made of it."""
    return getrefcount(array), getrefcount(array._block) - (array.operand is not None) * 2
