"""Graphs: work recorded once and queued again in one call.

On a GPU a CUDA or HIP graph; on the host tier a recorded list, with the same rules.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tdx.runtime.block import Block
from tdx.runtime.errors import Closed, InvalidArgument, TdxError
from tdx.runtime.pickling import refuse_pickling
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
        self._was_chosen = bool(world.driver.chosen())
        self._stream = world.driver.chosen() or world.stream.own
        self._is_ours = world.driver.owns(self._stream)  # others do not tell when they close one
        self._handle = 0
        self._thread = 0  # that records
        self._keep: list[Any] = []
        self._before: list[Callable[[int], None]] = []
        self._calls: Counter[Usage] = Counter()
        weakref.finalize(self, _count, self._keep, -1).atexit = False

    def __reduce__(self) -> Any:
        return refuse_pickling(self)

    def keep(self, *objects: Any) -> None:
        """Hold objects as long as the graph lives; arrays among them cannot be freed before.

        Raises as `check_thread`.
        """
        self.check_thread()
        self._keep.extend(objects)
        _count(objects, 1)

    def before_replay(self, join: Callable[[int], None]) -> None:
        """Call `join(stream)` before each replay: work outside the graph comes first."""
        if join not in self._before:
            self._before.append(join)

    def check_thread(self) -> None:
        """Raise InvalidArgument in a thread that does not record: nobody would expect it here."""
        if self._thread != threading.get_ident():
            raise InvalidArgument(
                "another thread records a graph of this world: wait until its block has ended, or "
                "make the call there"
            )

    def counts(self, usage: Usage) -> None:
        """Each replay makes one more call."""
        self._calls[usage] += 1

    def discard(self) -> None:
        """End the recording and drop what it holds."""
        world = self._world
        world.recording = None
        self._let_go()
        with contextlib.suppress(TdxError):
            world.driver.graph_destroy(world.driver.capture_end(self._stream))

    def _let_go(self) -> None:
        _count(self._keep, -1)
        for held in (self._keep, self._before, self._calls):
            held.clear()

    def __enter__(self) -> Graph:
        world = self._world
        world.check()
        if self._handle:
            raise InvalidArgument("a graph is recorded once; make a new one with tdx.graph(world)")
        world.driver.capture_begin(self._stream)
        self._thread = threading.get_ident()
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
        try:
            self._handle = world.driver.capture_end(self._stream)
        except TdxError:
            self._let_go()
            raise
        finalizer = weakref.finalize(self, world.driver.graph_destroy, self._handle)
        finalizer.atexit = False

    def replay(self, stream: Any = None) -> None:
        """Queue the recorded work on `stream`.

        None: the one it was recorded on; for `world.stream` what that stands for now. Raises a
        pending fault, Closed (also for a stream that was closed).
        """
        world = self._world
        world.check()
        if not self._handle:
            raise Closed("the graph holds nothing: it is still recording, or its block failed")
        if stream is None and self._is_ours and not world.driver.owns(self._stream):
            raise Closed("the stream that the graph was recorded on was closed; pass stream=")
        target = self._usual_stream() if stream is None else stream_handle(stream)
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

    def _usual_stream(self) -> int:
        driver = self._world.driver
        stream = self._stream if self._was_chosen else driver.instead_of(self._stream)
        return self._stream if driver.recorded_elsewhere(stream) else stream


def _count(objects: Iterable[Any], times: int) -> None:
    """Count graphs' calls at the memory of the arrays and blocks among the objects."""
    for each in objects:
        block = getattr(each, "_block", each)
        if isinstance(block, Block):
            block.recorded += times


def hold(world: World, *objects: Any) -> None:
    """Hold what a graph of another library uses until the world is closed.

    Nobody tells when such a graph is gone.
    """
    new = {id(each): each for each in objects if id(each) not in world.captured}
    world.captured.update(new)
    _count(new.values(), 1)


def graph(world: World) -> Graph:
    """Record device work: `with tdx.graph(world) as g: plan(x)`, then `g.replay()`.

    Records what goes to the current stream (the world's, unless inside `world.on`) and to streams
    that join it by events, which must have been joined back at the end. Nothing may synchronise
    or make a plan inside; functions that were called so before are fine. No other thread may call
    the world meanwhile. Raises InvalidArgument when a recording is open already.
    """
    if getattr(world, "world", None) is not world:
        raise InvalidArgument(f"tdx.graph takes a world, as tdx.init returns it; got {world!r}")
    return Graph(world)
