"""Elementwise copying: whole blocks as vectors, the rest under a mask."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["VECTOR", "copy_share", "padded"]

# Slots lie at multiples of this many elements from each other, passed to kernels as multiples of
# it: the compiler then knows their alignment, whatever the size.
VECTOR = 16


def padded(count: int) -> int:
    """`count` elements in units of VECTOR, at least one."""
    return max(1, -(-count // VECTOR))


@triton.jit
def copy_share(to, source, count, index, parts, BLOCK: tl.constexpr):
    """Copy part `index` of `parts` of `count` elements; all parts together copy all."""
    whole = count // BLOCK
    for block in range(index, whole, parts):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at))
    if (whole * BLOCK < count) & (whole % parts == index):
        at = tl.cast(whole, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < count), mask=at < count)
