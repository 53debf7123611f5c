"""Elementwise copying: whole blocks as vectors, the rest under a mask."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["VECTOR", "copy_share", "copy_shares", "padded"]

# Slots lie at multiples of this many elements from each other, passed to kernels as multiples of
# it: the compiler then knows their alignment, whatever the size.
VECTOR = 16


def padded(count: int) -> int:
    """`count` elements in units of VECTOR, at least one."""
    return max(1, -(-count // VECTOR))


@triton.jit
def copy_share(
    to, source, count, index, parts, BLOCK: tl.constexpr, GROUP: tl.constexpr = 1, also=None
):  # fmt: skip
    """Copy part `index` of `parts` of `count` elements; all parts together copy all.

    GROUP blocks in a row belong to the same part. `also`: a second place to copy them to.
    """
    whole = count // BLOCK
    for turn in range(index, _turns(whole, parts, GROUP), parts):
        block = _block(turn, index, parts, GROUP)
        if GROUP == 1 or block < whole:
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(source + at)
            tl.store(to + at, value)
            if also is not None:
                tl.store(also + at, value)
    if (whole * BLOCK < count) & (whole // GROUP % parts == index):
        at = tl.cast(whole, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < count)
        tl.store(to + at, value, mask=at < count)
        if also is not None:
            tl.store(also + at, value, mask=at < count)


@triton.jit
def copy_shares(
    to, source, other_to, other_source, count, index, parts,
    BLOCK: tl.constexpr, GROUP: tl.constexpr = 1, third_to=None, third_source=None,
):  # fmt: skip
    """`copy_share` of two or three pairs at once: stores to peers hide local ones."""
    whole = count // BLOCK
    for turn in range(index, _turns(whole, parts, GROUP), parts):
        block = _block(turn, index, parts, GROUP)
        if GROUP == 1 or block < whole:
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            _copy_at(to, source, other_to, other_source, third_to, third_source, at, None)
    if (whole * BLOCK < count) & (whole // GROUP % parts == index):
        at = tl.cast(whole, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        _copy_at(to, source, other_to, other_source, third_to, third_source, at, at < count)


@triton.jit
def _copy_at(to, source, other_to, other_source, third_to, third_source, at, mask):
    """All loads before the first store."""
    value = tl.load(source + at, mask=mask)
    other = tl.load(other_source + at, mask=mask)
    if third_to is not None:
        third = tl.load(third_source + at, mask=mask)
        tl.store(third_to + at, third, mask=mask)
    tl.store(to + at, value, mask=mask)
    tl.store(other_to + at, other, mask=mask)


@triton.jit
def _turns(whole, parts, GROUP: tl.constexpr):
    """Turns that the parts together need for `whole` blocks; those of one are `parts` apart."""
    stride = parts * GROUP
    return whole if GROUP == 1 else (whole + stride - 1) // stride * stride


@triton.jit
def _block(turn, index, parts, GROUP: tl.constexpr):
    """The block of part `index` at this turn; with groups it may lie behind the end."""
    if GROUP == 1:
        block = turn
    else:
        own = turn // parts
        block = (own // GROUP * parts + index) * GROUP + own % GROUP
    return block
