"""How times are taken: graphs for the device, a plain clock for the host, slowest rank's median."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tdx.runtime.graph import graph

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = [
    "calls_for",
    "device_time",
    "host_time",
    "recorded",
    "replay_time",
    "slowest",
    "times_in_turn",
    "warm_time",
]

_WARM_UP_S = 0.05
_HOT_S = 0.5  # until a GPU under load has lowered its clocks


def slowest(world: World, value: float) -> float:
    """The largest of all ranks' values."""
    everybody = world.channels.allgather(struct.pack("<d", value), "measurement")
    return max(struct.unpack("<d", payload)[0] for payload in everybody)


def replay_time(world: World, replay: Callable[[], None], calls: int, repeats: int = 30) -> float:
    """Microseconds of one of the `calls` calls that `replay` queues on the world's stream.

    Median over `repeats` replays, each right behind another; the slowest rank counts.
    """
    samples = [_sample(world, replay) / calls for _ in range(repeats)]
    return slowest(world, statistics.median(samples))


def times_in_turn(
    world: World, replays: Mapping[str, Callable[[], None]], calls: int, repeats: int = 30
) -> dict[str, float]:
    """The same for each of several replays.

    They take turns, on a device that is hot, so that all are taken at the same clocks.
    """
    repeats = 3 if world.backend == "host" else repeats

    def round_() -> None:
        for replay in replays.values():
            replay()

    _warm_up(world, round_, _HOT_S)
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(repeats):
        for name, replay in replays.items():
            samples[name].append(_sample(world, replay) / calls)
    return {name: slowest(world, statistics.median(taken)) for name, taken in samples.items()}


def _sample(world: World, replay: Callable[[], None]) -> float:
    """Microseconds of one replay behind another, in which ranks that began apart have met."""
    stream = world.stream
    world.barrier()
    replay()
    start = stream.record()
    replay()
    end = stream.record()
    end.wait()
    return start.elapsed(end) * 1e3


def calls_for(nbytes: int) -> int:
    """Calls a graph: fewer of large ones."""
    return max(2, min(50, (64 << 20) // max(1, nbytes)))


def device_time(
    world: World, call: Callable[[], object], calls: int = 50, repeats: int = 30
) -> float:
    """Microseconds a call takes when `calls` of them are replayed as one graph; see replay_time."""
    if world.backend == "host":  # nothing there is worth a thousand calls
        calls, repeats = min(calls, 2), min(repeats, 3)
    call()
    world.synchronize()
    return warm_time(world, recorded(world, call, calls), calls, repeats)


def warm_time(world: World, replay: Callable[[], None], calls: int, repeats: int = 30) -> float:
    """replay_time, of a GPU whose clocks have had time to rise."""
    _warm_up(world, replay, _WARM_UP_S)
    return replay_time(world, replay, calls, repeats)


def recorded(world: World, call: Callable[[], object], calls: int) -> Callable[[], None]:
    """What replays `calls` calls on the world's stream, recorded as one graph."""
    with graph(world) as recording:
        for _ in range(calls):
            call()
    return recording.replay


def _warm_up(world: World, replay: Callable[[], None], seconds: float) -> None:
    """Replay for a while, as often on every rank: clocks of an idle GPU need time to rise."""
    start = time.perf_counter()
    replay()
    world.synchronize()
    if world.backend == "host":
        return
    taken = slowest(world, time.perf_counter() - start)
    for _ in range(min(500, int(seconds / max(taken, 1e-6)))):
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
