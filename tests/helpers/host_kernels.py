"""Small kernels that tests of the host tier's device share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nothing():
    pass


@triton.jit
def add(x, n, amount, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + amount, mask=i < n)


@triton.jit
def spin(flag, goal):
    while tl.atomic_add(flag, 0) < goal:
        pass


@triton.jit
def count(counter):
    tl.atomic_add(counter, 1)
