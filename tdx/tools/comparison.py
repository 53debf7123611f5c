"""Several ways to the same result: each is checked and recorded, then all are timed in turn.

What fails of others, or gives wrong results, is left out of the times and named with its reason in
`row["failed"]`. A wrong result of our own is an error, `row["error"]`; what it raises goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tdx.tools.timing import recorded, times_in_turn

if TYPE_CHECKING:
    from tdx.runtime.world import World
    from tdx.tools.reference import Result

__all__ = ["Comparison", "Way", "WrongResult", "attempt", "shared_reason"]

_LONGEST_REASON = 200


class WrongResult(Exception):
    """A result is not what it must be."""


@dataclass(frozen=True)
class Way:
    """How a result is computed.

    Attributes
    ----------
    call : callable
        Queues it once on the world's stream.
    record : callable, optional
        `record(calls)` returns what replays so many calls on the world's stream; None: a graph of
        tdx.
    keep : callable, optional
        Copies what `call` returned to the array that is checked; None: the call writes there.
    """

    call: Callable[[], Any]
    record: Callable[[int], Callable[[], None]] | None = None
    keep: Callable[[Any], object] | None = None


class Comparison:
    """The ways of one row of a bench. Collective: every rank adds the same ones, then times them.

    Parameters
    ----------
    world : World
    row : dict
        Gets the microseconds of a call by name.
    calls : int
        Calls that are recorded together.
    """

    def __init__(self, world: World, row: dict[str, Any], calls: int):
        self._world, self._row = world, row
        self._calls = 1 if world.backend == "host" else calls
        self._replays: dict[str, Callable[[], None]] = {}
        self._ways: list[Way] = []  # a graph of PyTorch does not hold what it uses

    def ours(self, name: str, call: Callable[[], Any], result: Result) -> None:
        """Check and record a way of tdx, and check the recording."""
        way = Way(call)
        reason = self._wrong(name, way, result)
        self._replays[name] = self._record(way)
        reason = reason or self._wrong(name, Way(self._replays[name]), result)
        if reason:
            earlier = [self._row["error"]] if "error" in self._row else []
            self._row["error"] = "; ".join([*earlier, f"{name}: {reason}"])

    def peers(self, makers: Mapping[str, Callable[[], Way]], result: Result) -> None:
        """Check and record what `makers` give; what fails on one rank is left out on all."""
        for name, make in makers.items():
            way, reason = attempt(self._world, name, make)
            if not reason:
                _, reason = attempt(self._world, name, partial(self._check, way, result))
            if not reason:
                replay, reason = attempt(self._world, name, partial(self._record, way))
            if reason:
                self._row.setdefault("failed", {})[name] = reason
            else:
                self._replays[name] = replay

    def time(self) -> None:
        """Add the times to the row."""
        self._row |= times_in_turn(self._world, self._replays, self._calls)

    def _wrong(self, name: str, way: Way, result: Result) -> str:
        """What is wrong with the result on any rank, or ""."""
        reason = ""
        try:
            self._check(way, result)
        except WrongResult as error:
            reason = str(error)
        return shared_reason(self._world, name, reason)

    def _check(self, way: Way, result: Result) -> None:
        """Run it once, on poisoned memory."""
        result.poison()
        value = way.call()
        if way.keep is not None:
            way.keep(value)
        self._world.synchronize()
        fault = result.fault()
        if fault:
            raise WrongResult(fault)

    def _record(self, way: Way) -> Callable[[], None]:
        self._ways.append(way)
        if way.record is not None:
            return way.record(self._calls)
        return recorded(self._world, way.call, self._calls)


def attempt(world: World, name: str, step: Callable[[], Any]) -> tuple[Any, str]:
    """What `step` of peer `name` gives here, and why it failed on any rank, or "". Collective."""
    found, reason = None, ""
    with world.channels.busy(name):
        try:
            found = step()
        except Exception as error:  # other libraries raise what they like
            reason = f"{type(error).__name__}: {error}"
    return found, shared_reason(world, name, reason)


def shared_reason(world: World, what: str, reason: str) -> str:
    """Why `what` failed on the first rank that has a reason, in one line, or "". Collective."""
    line = " ".join(reason.split())[:_LONGEST_REASON]
    told = [text.decode() for text in world.channels.allgather(line.encode(), f"bench: {what}")]
    if len(set(told)) == 1:
        return line
    return next(f"rank {rank}: {text}" for rank, text in enumerate(told) if text)
