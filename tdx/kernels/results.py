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
        self._alone: tuple[int, int] | None = None  # references to one that was just made

    def take(self, world: World, shape: tuple[int, ...], dtype: np.dtype, name: str) -> Array:
        """One that nobody has."""
        kept = self._kept
        for _ in range(len(kept)):
            try:
                cell = [kept.popleft()]  # no other thread gets it now
            except IndexError:
                break
            found = _references(cell)
            if found is None:
                continue
            if found == self._alone:
                kept.append(cell[0])
                return cell[0]
            if len(kept) < _KEPT - 1:
                kept.append(cell[0])
        cell = [world.local(shape, dtype, name)]
        if cell[0].nbytes <= _BYTES and _KEPT:
            self._alone = _references(cell)
            kept.append(cell[0])
        return cell[0]


def _references(cell: list[Array]) -> tuple[int, int] | None:
    """To the array in the list and to its memory, but for the two of the operand made of it.

    By the list, since interpreters differ in whether a variable counts, and always from here.
    None: the memory may be in use though nothing refers to it, or is gone.
    """
    block = cell[0]._block
    if block.freed or block.scattered or block.recorded:
        return None
    operands = (cell[0].operand is not None) * 2
    return getrefcount(cell[0]), getrefcount(block) - operands
