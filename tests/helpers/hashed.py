"""Inputs hashed from rank, index and round on the device, and what checks results there.

Kernels for any number of blocks; those that take a pointer `count` read the round from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "check_moved_kernel",
    "check_sum_kernel",
    "count_moved",
    "fill_bytes_kernel",
    "hashed",
    "hashed_byte",
    "next_bytes_kernel",
    "next_kernel",
    "poison_bytes_kernel",
    "store_bytes",
]


@triton.jit
def _mixed(i, rank, salt):
    mixed = (i * 2654435761 + rank * 40503 + salt * 97611) & 0x7FFFFFFF
    return (mixed * 48271) >> 16


@triton.jit
def hashed(i, rank, salt):
    """Integers from -8 to 7, int64, for an int64 `i`."""
    return (_mixed(i, rank, salt) & 15) - 8


@triton.jit
def hashed_byte(i, rank, salt):
    """Integers from -127 to 127, int64: outputs are poisoned with -128."""
    return _mixed(i, rank, salt) % 255 - 127


@triton.jit
def store_bytes(x, rank, salt, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(x + i, hashed_byte(i, rank, salt).to(tl.int8), mask=i < n)


@triton.jit
def count_moved(out, wrong, source, first, part, salt, n, BLOCK: tl.constexpr):
    """Add to `wrong` the bytes of `out` that are not what was moved there.

    Part p, of `part` bytes, holds the bytes `first` and on of rank `source` + p.
    """
    bad = 0
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        wanted = hashed_byte(first + i % part, source + i // part, salt)
        seen = tl.load(out + i, mask=i < n, other=0)
        bad += tl.sum(((seen != wanted) & (i < n)).to(tl.int32))
    tl.atomic_add(wrong, bad)


@triton.jit(do_not_specialize=["rank", "salt", "n"])
def fill_bytes_kernel(x, rank, salt, n, BLOCK: tl.constexpr):
    store_bytes(x, rank, salt, n, BLOCK)


@triton.jit(do_not_specialize=["n"])
def poison_bytes_kernel(out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(out + i, tl.full((BLOCK,), -128, tl.int8), mask=i < n)


@triton.jit(do_not_specialize=["source", "first", "part", "salt", "n"])
def check_moved_kernel(out, wrong, source, first, part, salt, n, BLOCK: tl.constexpr):
    count_moved(out, wrong, source, first, part, salt, n, BLOCK)


@triton.jit(do_not_specialize=["rank", "n"])
def next_bytes_kernel(x, count, rank, n, BLOCK: tl.constexpr):
    """The bytes of the round `count` is at."""
    store_bytes(x, rank, tl.load(count), n, BLOCK)


@triton.jit(do_not_specialize=["rank", "n"])
def next_kernel(x, count, rank, n, BLOCK: tl.constexpr):
    """Small integers of the round `count` is at."""
    salt = tl.load(count)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(x + i, hashed(i, rank, salt).to(x.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=["ranks", "first", "n"])
def check_sum_kernel(out, wrong, count, ranks, first, n, BLOCK: tl.constexpr):
    """Count what is not the sum over ranks of elements `first` and on."""
    salt = tl.load(count)
    bad = 0
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        total = hashed(first + i, 0, salt)
        for rank in range(1, ranks):
            total += hashed(first + i, rank, salt)
        seen = tl.load(out + i, mask=i < n, other=0).to(tl.int64)
        bad += tl.sum(((seen != total) & (i < n)).to(tl.int32))
    tl.atomic_add(wrong, bad)
