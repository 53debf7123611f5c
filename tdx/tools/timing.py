"""How times are taken: graphs for the device, a plain clock for the host, slowest rank's median."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tdx.runtime.graph import graph

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = ["device_time", "host_time", "replay_time", "slowest"]

_WARM_UP_S = 0.05


def slowest(world: World, value: float) -> float:
    """The largest of all ranks' values."""
    everybody = world.channels.allgather(struct.pack("<d", value), "measurement")
    return max(struct.unpack("<d", payload)[0] for payload in everybody)


def replay_time(world: World, replay: Callable[[], None], calls: int, repeats: int = 30) -> float:
    """Microseconds of one of the `calls` calls that `replay` queues on the world's stream.

    Median over `repeats` replays, each begun together; the slowest rank counts.
    """
    stream = world.stream
    samples = []
    for _ in range(repeats):
        world.barrier()
        start = stream.record()
        replay()
        end = stream.record()
        end.wait()
        samples.append(start.elapsed(end) * 1e3 / calls)
    return slowest(world, statistics.median(samples))


def device_time(
    world: World, call: Callable[[], object], calls: int = 50, repeats: int = 30
) -> float:
    """Microseconds a call takes when `calls` of them are replayed as one graph; see replay_time."""
    if world.backend == "host":  # nothing there is worth a thousand calls
        calls, repeats = min(calls, 2), min(repeats, 5)
    call()
    world.synchronize()
    with graph(world) as recorded:
        for _ in range(calls):
            call()
    _warm_up(world, recorded.replay)
    return replay_time(world, recorded.replay, calls, repeats)


def _warm_up(world: World, replay: Callable[[], None]) -> None:
    """Replay for a while, as often on every rank: clocks that were idle need time to rise."""
    start = time.perf_counter()
    replay()
    world.synchronize()
    taken = slowest(world, time.perf_counter() - start)
    for _ in range(min(500, int(_WARM_UP_S / max(taken, 1e-6)))):
        replay()
    world.synchronize()


def host_time(world: World, call: Callable[[], object], calls: int = 100) -> float:
    """Microseconds of host time a call takes until it returns.

    Median of several rounds of `calls` calls; the slowest rank counts.
    """
    rounds = 15
    if world.backend == "host":
        calls, rounds = min(calls, 5), 1
    samples = []
    for _ in range(rounds):
        call()
        world.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    world.barrier()
    return slowest(world, statistics.median(samples))
