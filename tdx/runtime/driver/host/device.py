"""The host tier's device: one thread that runs the work of all streams of the process.

Launches are asynchronous, as on a GPU: the caller's thread only queues. The device thread goes
round the streams and lets the head of each queue take a step. A kernel's step resumes each of
its resident programs once (see kernel.py); other work is done in one step. When nothing can
move, the thread yields the processor a few times and then sleeps for up to a millisecond, so
that oversubscribed ranks do not starve each other.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tdx.runtime.config import config
from tdx.runtime.driver.base import WAITING, not_recorded
from tdx.runtime.driver.host.tracebacks import users_part
from tdx.runtime.errors import DriverError, InvalidArgument

__all__ = ["Call", "Device", "Event", "Graph", "Operation", "Stream"]

_YIELDS = 8  # polls that only yield the processor before the first sleep
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3
_ANSWER_S = 1.0  # a program that computes for longer is not waited for


class Operation(Protocol):
    """An entry of a stream."""

    done: bool

    def step(self, device: Device) -> bool:
        """Do some of the work; whether anything moved."""

    def abandon(self) -> None:
        """Drop the work: an earlier one failed."""


class Call:
    """Work of one step: a copy, a fill, an event."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self.done = False

    def step(self, device: Device) -> bool:
        if self._function() is False:
            return False
        self.done = True
        return True

    def abandon(self) -> None:
        pass


class Event:
    """A point in a stream; records count up so that a replayed graph can record again."""

    def __init__(self) -> None:
        self.wanted = 0
        self.reached = 0
        self.seconds = 0.0

    def record(self) -> Call:
        self.wanted += 1
        number = self.wanted

        def reach() -> None:
            self.reached = max(self.reached, number)
            self.seconds = time.perf_counter()

        return Call(reach)

    def waiter(self) -> Call:
        number = self.wanted
        return Call(lambda: self.reached >= number)


class Stream:
    """A queue of operations, run in order."""

    def __init__(self, handle: int, priority: int):
        self.handle = handle
        self.priority = priority
        self.queue: collections.deque[Operation] = collections.deque()


class Graph:
    """What was queued while a capture was open: (stream handle, maker of the operation)."""

    def __init__(self, origin: int, number: int):
        self.origin = origin
        self.number = number
        self.streams = {origin}
        self.events: dict[int, int] = {}  # event -> stream of its record
        self.unjoined: set[int] = set()  # side streams with work nobody has waited for
        self.entries: list[tuple[int, Callable[[], Operation]]] = []


class Device:
    """Streams, events, graphs and the thread that serves them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.graphs: dict[int, Graph] = {}
        self.capture: Graph | None = None
        self.error: BaseException | None = None
        self.timeout_s = 30.0
        self.rank = 0  # for messages
        self.report: Callable[[], list[str]] = list  # who waits for what, set by the driver
        self.running: Any = None  # the fibre that runs now, set by kernel.py
        self.random = random.Random(config.host_seed) if config.host_seed else None
        self._handles = iter(range(16, 1 << 62))  # below are names of a GPU's default streams
        self._process = os.getpid()
        self._stopping = False
        self._abandoning = False
        self._asked = self._told = False  # for the report, by an interrupted wait
        self._answer: list[str] = []
        self._thread: threading.Thread | None = None
        self._order: list[Stream] = []

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="tdx-host-device", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Abandon what is queued and end the thread."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Drop what is queued, without an error; returns when nothing runs any more."""
        with self.changed:
            self._abandoning = self._thread is not None
            self.changed.notify_all()
            while self._abandoning:
                self.changed.wait(1.0)

    @property
    def forked(self) -> bool:
        """Whether this is a forked copy of the process, which has no device thread."""
        return self._process != os.getpid()

    @property
    def on_device_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # ---- streams, events, graphs
    def create_stream(self, priority: int) -> int:
        with self.changed:
            handle = next(self._handles)
            self.streams[handle] = Stream(handle, priority)
            self._order = sorted(self.streams.values(), key=lambda s: s.priority)
        return handle

    def destroy_stream(self, handle: int) -> None:
        with contextlib.suppress(DriverError):
            self.synchronize_stream(handle)
        with self.changed:
            self.streams.pop(handle, None)
            self._order = sorted(self.streams.values(), key=lambda s: s.priority)

    def create_event(self) -> int:
        with self.changed:
            handle = next(self._handles)
            self.events[handle] = Event()
        return handle

    def enqueue(self, handle: int, make: Callable[[], Operation]) -> None:
        """Queue an operation, or record it when the stream is being captured."""
        with self.changed:
            stream = self.streams.get(handle)
            if stream is None:
                raise InvalidArgument(f"stream {handle} is not an open stream of the host tier")
            if self.capture is not None and handle in self.capture.streams:
                self.capture.entries.append((handle, make))
                if handle != self.capture.origin:
                    self.capture.unjoined.add(handle)
                return
            stream.queue.append(make())
            self.changed.notify_all()
        if config.launch_blocking and not self.on_device_thread:
            self.synchronize_stream(handle)

    def record(self, event: int, stream: int) -> None:
        with self.changed:
            self.enqueue(stream, self.events[event].record)
            if self.capture is not None and stream in self.capture.streams:
                self.capture.events[event] = stream

    def wait_event(self, stream: int, event: int) -> None:
        with self.changed:
            if self.capture is not None and event in self.capture.events:
                self.capture.streams.add(stream)
                self.capture.unjoined.discard(self.capture.events[event])
            self.enqueue(stream, self.events[event].waiter)

    def capture_begin(self, stream: int) -> None:
        with self.changed:
            if self.capture is not None:
                raise InvalidArgument("a graph is being captured already; end it first")
            self.capture = Graph(stream, next(self._handles))

    def capture_end(self, stream: int) -> int:
        with self.changed:
            graph, self.capture = self.capture, None
            if graph is None or graph.origin != stream:
                raise InvalidArgument("no capture is open on this stream")
            if graph.unjoined:
                raise InvalidArgument(
                    f"streams {sorted(graph.unjoined)} joined the graph and were not joined back; "
                    "let the recording stream wait for them: world.stream.wait(side)"
                )
            handle = next(self._handles)
            self.graphs[handle] = graph
        return handle

    def launch_graph(self, handle: int, stream: int) -> None:
        with self.changed:
            graph = self.graphs[handle]
            for recorded, make in graph.entries:  # in an order that will do on one stream
                own = recorded != graph.origin and recorded in self.streams
                self.enqueue(recorded if own else stream, make)

    # ---- waiting
    def refuse_recorded(self, what: str, handle: int) -> None:
        """What waits for the device cannot be part of a graph."""
        graph = self.capture
        if graph is not None and handle in graph.streams:
            raise not_recorded(what)

    def wait(self, finished: Callable[[], bool]) -> None:
        """Block the calling thread until `finished`; raises the error of failed work."""
        with self.changed:
            try:
                while not finished() and self.error is None and not self._stopping:
                    self.changed.wait(1.0)
            except KeyboardInterrupt:
                self._tell_waiting()
                raise
            error, self.error = self.error, None
        if error is not None:
            raise error

    def _tell_waiting(self) -> None:
        """Write to stderr, once, who waits for what: that is what the interruption asks.

        The device thread is asked, if it answers soon: nobody else can look at its fibres.
        """
        self._asked = not self._told
        self._told = True
        self.changed.notify_all()
        until = time.monotonic() + _ANSWER_S
        while self._asked and not self._stopping and time.monotonic() < until:
            self.changed.wait(_LONGEST_SLEEP_S)
        programs, self._answer = self._answer, []
        if programs:
            lines = "".join(f"\n  {line}" for line in programs)
            with contextlib.suppress(Exception):  # stderr may be closed, or None
                sys.stderr.write(f"waiting programs of rank {self.rank}:{lines}\n")

    def synchronize(self) -> None:
        def finished() -> bool:
            return all(not stream.queue for stream in self.streams.values())

        if self.capture is not None:
            raise not_recorded(WAITING)
        self.wait(finished)

    def synchronize_stream(self, handle: int) -> None:
        stream = self.streams.get(handle)
        if stream is None:
            raise InvalidArgument(f"stream {handle} is not an open stream of the host tier")
        self.refuse_recorded("waiting for a stream", handle)
        self.wait(lambda: not stream.queue)

    def fail(self, error: BaseException) -> None:
        """Keep the first error for the next synchronising call and drop all queued work."""
        with self.changed:
            self.error = self.error or error
            self._drop_all()

    def _drop_all(self) -> None:
        for stream in self.streams.values():
            while stream.queue:
                stream.queue.popleft().abandon()
        for event in self.events.values():
            event.reached = event.wanted
        self.changed.notify_all()

    # ---- the device thread
    def _run(self) -> None:
        np.seterr(all="ignore")  # overflow and the like are values, as on a GPU
        idle = 0
        still_since = 0.0
        while True:
            with self.changed:
                while not (self._stopping or self._abandoning or any(s.queue for s in self._order)):
                    self.changed.wait()
                    idle = 0
                if self._stopping or self._abandoning:
                    self._drop_all()
                    self.error, self._abandoning = None, False
                    if self._stopping:
                        return
                    continue
                if self._asked:
                    self._answer, self._asked = self.report(), False
                    self.changed.notify_all()
                order = list(self._order)
            if self.random is not None:
                self.random.shuffle(order)
            if self._pass(order):
                idle = 0
                continue
            idle += 1
            if idle == 1:
                still_since = time.monotonic()
            self._rest(idle)
            if self.timeout_s and time.monotonic() - still_since > self.timeout_s + 0.5:
                self._stuck(order)
                idle = 0

    def _pass(self, order: list[Stream]) -> bool:
        """Let the head of every stream take a step; whether anything moved."""
        moved = False
        for stream in order:
            if not stream.queue:
                continue
            operation = stream.queue[0]
            try:
                moved |= operation.step(self)
            except BaseException as error:
                if isinstance(error, DriverError) and not config.debug:
                    error.__traceback__ = users_part(error.__traceback__)  # not of this thread
                self.fail(error)
                return True
            if operation.done:
                with self.changed:
                    if stream.queue and stream.queue[0] is operation:
                        stream.queue.popleft()
                    self.changed.notify_all()
                moved = True
        return moved

    def _rest(self, idle: int) -> None:
        if idle <= _YIELDS:
            os.sched_yield()
            return
        pause = min(_LONGEST_SLEEP_S, _FIRST_SLEEP_S * (idle - _YIELDS))
        # the lock is free while sleeping, and a host thread that queues work ends the sleep
        with self.changed:
            self.changed.wait(pause)

    def _stuck(self, order: list[Stream]) -> None:
        """Programs that spin without `wait` have no deadline of their own: end them here."""
        spinning = [
            text for s in order if s.queue for text in getattr(s.queue[0], "spinning", list)()
        ]
        if spinning:
            self.fail(
                DriverError(
                    f"rank {self.rank}: deadlock: nothing moved for {self.timeout_s:g} s: "
                    + "; ".join(spinning)
                    + "; for what a peer stores wait with tdl.wait, whose deadline names the peer"
                )
            )
