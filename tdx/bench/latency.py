"""What the smallest things cost: launches, signals, barriers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.tools.timing import device_time, host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

COLUMNS = ("what", "us")
_ROUNDS = 100


@triton.jit
def empty_kernel(x):
    pass


@triton.jit
def ping_pong_kernel(signal, epoch, world, rounds):
    """Ranks 0 and 1 answer each other `rounds` times; the others do nothing."""
    me = tdl.rank(world)
    number = tl.load(epoch)
    peer = 1 - me
    if me < 2:
        for turn in range(0, rounds):
            value = number + turn + 1
            if me == 0:
                tdl.notify(signal, peer, world, value)
                tdl.wait(signal, world, value, peer=peer)
            else:
                tdl.wait(signal, world, value, peer=peer)
                tdl.notify(signal, peer, world, value)
        tl.store(epoch, number + rounds)


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    x = world.zeros(1, np.int32)
    signal, epoch = world.zeros(1, np.int32), world.zeros(1, np.int32, symmetric=False)
    world.barrier()

    def row(what: str, us: float) -> dict[str, Any]:
        return {"what": what, "us": us}

    yield row("empty kernel in a graph", device_time(world, lambda: empty_kernel[(1,)](x)))
    yield row("kernel[grid] launch, host time", host_time(world, lambda: empty_kernel[(1,)](x)))
    barrier = tdx.Barrier(world)
    yield row("barrier in a graph", device_time(world, barrier))
    yield row("barrier call, host time", host_time(world, barrier))
    if world.size > 1:
        round_trips = device_time(
            world,
            lambda: ping_pong_kernel[(1,)](signal, epoch, world.handle, _ROUNDS, num_warps=1),
            calls=1,
        )
        yield row("signal, one way", round_trips / _ROUNDS / 2)
