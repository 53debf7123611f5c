"""Which of cuBLAS's algorithms for a product takes the least time, of those with the same bits.

cuBLAS thinks of one that it is the fastest, which is so for most products, but not for all. Plans
measure those that it names next when they first meet a layout: as they are made, or in the first
call with operands that lie otherwise, which then waits for the device. They do so on a stream of
its own, never while a graph is recorded, and once in a world for each layout. One-line functions
take the first one: products of a shape that does not come again would be faster than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tdx.kernels.plan_cache import remembered
from tdx.kernels.product import least_us
from tdx.runtime import dtypes
from tdx.runtime.array import Array
from tdx.runtime.driver.cublas import Gemm, Layout
from tdx.runtime.errors import DriverError, HeapExhausted
from tdx.runtime.stream import Event
from tdx.runtime.world import World

__all__ = ["take_fastest"]

_ARCH = "sm_90"  # where bits were found to be the same
_MOST = 8  # algorithms
_LEAST = 1 << 32  # multiplications of a product: for fewer the host takes as long as the GPU
_MOST_US = 20_000  # of one, while peers may wait
_ROUNDS, _FILL_US = 3, 100  # and microseconds that calls of an algorithm fill in a round
_GAIN = 0.98  # of the time of the first one


def take_fastest(world: World, gemm: Gemm, layout: Layout, operands: Sequence[int]) -> None:
    """Let a product multiply by the algorithm that is the fastest here.

    `operands`: bytes of a, b, c and the longest vector. Where so much memory is short the first
    algorithm stays.
    """
    size = dtypes.resolve(layout.dtype).itemsize
    us = least_us(world, size, layout.rows, layout.columns, layout.depth)
    large = layout.rows * layout.columns * layout.depth >= _LEAST and us <= _MOST_US
    if not large or world.device.arch != _ARCH or world.recording is not None:
        return
    calls = max(1, int(_FILL_US / us))
    with contextlib.suppress(HeapExhausted):
        gemm.take(
            remembered(
                world, "compared", layout, lambda: _fastest(world, gemm, layout, operands, calls)
            )
        )


def _fastest(
    world: World, gemm: Gemm, layout: Layout, operands: Sequence[int], calls: int
) -> Any:  # fmt: skip
    found = gemm.alternatives(_MOST)
    if len(found) == 1:
        return found[0]
    driver = world.driver
    stream = driver.stream_create(0)
    try:
        with driver.working_on(stream):
            return _measured(world, stream, gemm, found, layout.dtype, operands, calls)
    finally:
        driver.stream_destroy(stream)


def _measured(
    world: World, stream: int, gemm: Gemm, found: Sequence[Any], dtype: str,
    operands: Sequence[int], calls: int,
) -> Any:  # fmt: skip
    """The fastest for random operands of so many bytes."""
    begins = [0]
    for nbytes in (*operands, max(one.workspace for one in found)):
        begins.append(begins[-1] + -(-nbytes // 256) * 256)
    memory = world.empty((begins[-1],), "int8", symmetric=False)
    _fill(memory, dtype)
    a, b, c, vector, workspace = (memory._address + begin for begin in begins[:-1])

    def multiply(one: Any, count: int) -> None:
        gemm.take(one)
        with world.driver.using():
            for _ in range(count):
                gemm(stream, a, b, c, *(vector,) * 3, workspace)

    return _in_turn(world, stream, found, multiply, calls)


def _in_turn(
    world: World, stream: int, found: Sequence[Any], multiply: Callable[[Any, int], None],
    calls: int,
) -> Any:  # fmt: skip
    """The first of the algorithms, or another one if that takes clearly less time."""
    usable = []
    for one in found:
        try:
            multiply(one, 1)  # which loads its code
            usable.append(one)
        except DriverError:  # cuBLAS may name one and then refuse it
            if one is found[0]:
                raise
    spans: list[list[tuple[Event, Event]]] = [[] for _ in usable]
    for _ in range(_ROUNDS):
        for one, taken in zip(usable, spans, strict=True):
            start = Event(world.driver, stream, world.check)
            multiply(one, calls)
            taken.append((start, Event(world.driver, stream, world.check)))
    world.driver.stream_synchronize(stream)
    times = [min(start.elapsed(end) for start, end in taken) for taken in spans]
    best = times.index(min(times))
    return usable[best if times[best] < _GAIN * times[0] else 0]


def _fill(memory: Array, dtype: str) -> None:
    """Random values, for which a GPU has lower clocks than for equal ones."""
    values = np.random.default_rng(0).standard_normal(1 << 18, np.float32)
    piece = values.astype(dtypes.resolve(dtype)).view(np.int8)[: memory.size]
    done = piece.size
    memory[:done].copy_from(piece)
    while done < memory.size:
        more = min(done, memory.size - done)
        memory[done : done + more].copy_from(memory[:more])
        done += more
