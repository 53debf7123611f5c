"""What the smallest things cost: launches, signals, barriers.

`limit` is the budget of a call's host time, from that of a prebuilt launch in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.kernels.operand import operand
from tdx.tools.timing import device_time, host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

COLUMNS = ("what", "us", "limit")
_ROUNDS = 100
_LAUNCHES, _PLAN_US, _ONE_LINE_US = 1.3, 2, 5  # budget: so many launches, and so much more


@triton.jit
def empty_kernel(x):
    pass


@triton.jit(do_not_specialize=["first", "second", "rounds"])
def ping_pong_kernel(signal, epoch, world, first, second, rounds):
    """Ranks `first` and `second` answer each other `rounds` times; the others only count them."""
    me = tdl.rank(world)
    number = tl.load(epoch)
    if me == first:
        for turn in range(0, rounds):
            tdl.notify(signal, second, world, number + turn + 1)
            tdl.wait(signal, world, number + turn + 1, peer=second)
    if me == second:
        for turn in range(0, rounds):
            tdl.wait(signal, world, number + turn + 1, peer=first)
            tdl.notify(signal, first, world, number + turn + 1)
    tl.store(epoch, number + rounds)


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    x = world.zeros(1, np.int32)
    signal, epoch = world.zeros(1, np.int32), world.zeros(1, np.int32, symmetric=False)
    world.barrier()

    def row(what: str, us: float, more: float | None = None) -> dict[str, Any]:
        budget = {} if bare_us is None or more is None else {"limit": _LAUNCHES * bare_us + more}
        return {"what": what, "us": us, **budget}

    bare_us: float | None = None
    yield row("empty kernel in a graph", device_time(world, lambda: empty_kernel[(1,)](x)))
    yield row("kernel[grid] launch, host time", host_time(world, lambda: empty_kernel[(1,)](x)))
    barrier = tdx.Barrier(world)
    yield row("barrier in a graph", device_time(world, barrier))
    run = world.driver.bind(empty_kernel, 1, (x.dtype,), (), {})
    if hasattr(run, "bare"):  # on a GPU
        # on the stream that calls go to, which may be PyTorch's
        bare_us = host_time(world, run.bare(world.driver.current_stream(), operand(world, x, "x")))
        yield row("prebuilt cuLaunchKernelEx, host time", bare_us)
    yield row("barrier call, host time", host_time(world, barrier), _PLAN_US)
    small = world.zeros(1024, np.float32)
    plan = tdx.AllReduce(world, small.shape, small.dtype)
    given = host_time(world, lambda: plan(small))
    yield row("all_reduce plan call, host time", given, _PLAN_US)
    result = world.zeros(small.shape, small.dtype)
    given = host_time(world, lambda: tdx.all_reduce(small, out=result))
    yield row("tdx.all_reduce(out=) call, host time", given, _ONE_LINE_US)
    given = host_time(world, lambda: tdx.all_reduce(small))
    yield row("tdx.all_reduce call, host time", given, _ONE_LINE_US)
    if world.size > 1:
        round_trips = device_time(
            world,
            lambda: ping_pong_kernel[(1,)](signal, epoch, world.handle, 0, 1, _ROUNDS, num_warps=1),
            calls=1,
        )
        yield row("signal, one way", round_trips / _ROUNDS / 2)
