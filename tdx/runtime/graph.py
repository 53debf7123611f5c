"""Graphs: work recorded once and queued again in one call.

On a GPU a CUDA or HIP graph; on the host tier a recorded list, with the same rules.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tdx.runtime.errors import Closed, InvalidArgument, TdxError
from tdx.runtime.signals import Usage
from tdx.runtime.stream import follow, order, stream_handle

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = ["Graph", "graph", "hold"]


class Graph:
    """What was queued inside `with tdx.graph(world) as g`; `g.replay()` queues it again.

    Holds the plans and arrays that were used, so that they outlive the caller's references.
    """

    def __init__(self, world: World):
        self._world = world
        self._stream = world.driver.current_stream()
        self._handle = 0
        self._keep: list[Any] = []
        self._before: list[Callable[[int], None]] = []
        self._calls: Counter[Usage] = Counter()

    def keep(self, *objects: Any) -> None:
        """Hold objects as long as the graph lives."""
        self._keep.extend(objects)

    def before_replay(self, join: Callable[[int], None]) -> None:
        """Call `join(stream)` before each replay: work outside the graph comes first."""
        if join not in self._before:
            self._before.append(join)

    def counts(self, usage: Usage) -> None:
        """Each replay makes one more call."""
        self._calls[usage] += 1

    def discard(self) -> None:
        """End the recording and drop what it holds."""
        world = self._world
        world.recording = None
        with contextlib.suppress(TdxError):
            world.driver.graph_destroy(world.driver.capture_end(self._stream))

    def __enter__(self) -> Graph:
        world = self._world
        world.check()
        if self._handle:
            raise InvalidArgument("a graph is recorded once; make a new one with tdx.graph(world)")
        world.driver.capture_begin(self._stream)
        world.recording = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        world = self._world
        if error is not None:  # the recording may be unusable because of it
            self.discard()
            return
        if world.closed:
            world.check()  # raises
        world.recording = None
        self._handle = world.driver.capture_end(self._stream)
        finalizer = weakref.finalize(self, world.driver.graph_destroy, self._handle)
        finalizer.atexit = False

    def replay(self, stream: Any = None) -> None:
        """Queue the recorded work on `stream` (None: the one it was recorded on).

        Raises a pending fault, Closed.
        """
        world = self._world
        world.check()
        if not self._handle:
            raise Closed("the graph holds nothing: it is still recording, or its block failed")
        target = self._stream if stream is None else stream_handle(stream)
        # arrays remember the recording's stream: keep it in step with where the work runs
        follow(world.driver, self._stream, target)
        for join in self._before:
            join(target)
        for usage, calls in self._calls.items():
            usage.add(calls)
        world.driver.graph_launch(self._handle, target)
        if world.driver.left_at(self._stream) is None:
            order(world.driver, target, self._stream)
        else:
            world.driver.mark(self._stream, target)


def hold(world: World, *objects: Any) -> None:
    """Hold what a graph of another library uses until the world is closed.

    Nobody tells when such a graph is gone.
    """
    world.captured.update((id(each), each) for each in objects)


def graph(world: World) -> Graph:
    """Record device work: `with tdx.graph(world) as g: plan(x)`, then `g.replay()`.

    Records what goes to the current stream (the world's, unless inside `world.on`) and to streams
    that join it by events, which must have been joined back at the end. Nothing may synchronise
    or allocate inside. Raises InvalidArgument when a recording is open already.
    """
    return Graph(world)
