"""Streams and events, and what users may pass as `stream=`."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tdx.runtime.checks import as_int
from tdx.runtime.errors import Closed, InvalidArgument
from tdx.runtime.pickling import refuse_pickling

if TYPE_CHECKING:
    from tdx.runtime.driver.base import Driver
    from tdx.runtime.world import World

__all__ = [
    "ANYWHERE", "DEFAULT_STREAM", "NOWHERE", "Event", "Here", "InFlight", "Stream", "Streams",
    "after", "before_which", "finished", "follow", "follow_recorded", "order", "stream_handle",
]  # fmt: skip

DEFAULT_STREAM = 1  # the default stream's other name: 0 also means that no stream is given
NOWHERE = -1  # where memory was used that has not been used
ANYWHERE = -2  # where a consumer used it who does not say
_LAUNCHED_S = 60.0  # by then what a thread held memory for has been queued


class Here(threading.local):
    """Where each thread queues its work.

    Attributes
    ----------
    stream : int
        What the thread chose, 0 for nothing; not there in one that has queued nothing.
    launching : int or None
        Where the plain launch under way, or the latest, goes. None: arrays must ask.
    """

    stream: int
    launching: int | None = None


class Event:
    """A point in a stream, made by `Stream.record`."""

    def __init__(self, driver: Driver, stream: int, check: Callable[[], None]):
        self._driver = driver
        self._check = check
        self.handle = driver.event_create(timing=True)
        weakref.finalize(self, driver.event_destroy, self.handle).atexit = False
        driver.event_record(self.handle, stream)

    def wait(self) -> None:
        """Block the calling thread until the point is reached. Raises a pending fault, Closed."""
        self._check()
        self._driver.event_synchronize(self.handle)
        self._check()

    def query(self) -> bool:
        """Whether the point is reached. Raises a pending fault, Closed."""
        self._check()
        return self._driver.event_query(self.handle)

    def elapsed(self, later: Event) -> float:
        """Milliseconds from this event to `later`; both must be reached. Raises as `wait`."""
        self._check()
        return self._driver.event_elapsed(self.handle, later.handle)

    def __reduce__(self) -> Any:
        return refuse_pickling(self)


class Stream:
    """A queue of device work, run in order. Made by `world.new_stream`."""

    def __init__(self, driver: Driver, priority: int, check: Callable[[], None]):
        """`check` raises what stands against using the world: a fault, or that it is closed."""
        self._driver = driver
        self._check_world = check
        self.own = driver.stream_create(priority)
        self._open = True

    @property
    def handle(self) -> int:
        """The driver's stream, as `__cuda_stream__` gives it.

        Of `world.stream` the current one of PyTorch, where the program uses that on GPUs, while
        no graph is recorded.
        """
        return self._driver.instead_of(self.own)

    def wait(self, other: Stream | Event | Any) -> None:
        """Later work of this stream waits for what `other` (a stream or event) holds now."""
        self._check()
        if isinstance(other, Event):
            other._check()
            self._driver.stream_wait(self.handle, other.handle)
            return
        order(self._driver, stream_handle(other), self.handle)

    def record(self) -> Event:
        """An event that is reached when the work queued so far is done."""
        self._check()
        return Event(self._driver, self.handle, self._check_world)

    def synchronize(self) -> None:
        """Wait for the work queued so far. Raises a pending fault, DriverError, Closed."""
        self._check()
        self._driver.stream_synchronize(self.handle)
        self._check_world()

    def close(self) -> None:
        """Destroy the stream once its work is done; repeated calls do nothing."""
        if self._open:
            self._open = False
            self._driver.stream_destroy(self.own)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def __reduce__(self) -> Any:
        return refuse_pickling(self)

    def _check(self) -> None:
        if not self._open:
            raise Closed("the stream was closed, by itself or with its world")


class Streams:
    """All streams of a world: they end with it, because arrays remember where they were used."""

    def __init__(self, driver: Driver, check: Callable[[], None]):
        self._driver = driver
        self._check = check
        self._all: list[Stream] = []
        self._idle: dict[int, list[Stream]] = {}  # priority -> lent before, and given back

    def new(self, priority: int) -> Stream:
        """A stream of its own."""
        if not hasattr(priority, "__index__") or isinstance(priority, bool):
            raise InvalidArgument(f"priority={priority!r} must be an int; lower numbers go first")
        stream = Stream(self._driver, priority, self._check)
        self._all.append(stream)
        return stream

    def lend(self, borrower: object, priority: int) -> Stream:
        """A stream for as long as `borrower` lives; then another borrower may have it."""
        idle = self._idle.setdefault(priority, [])
        stream = idle.pop() if idle else self.new(priority)
        weakref.finalize(borrower, idle.append, stream).atexit = False
        return stream

    def close(self) -> None:
        """Destroy all of them."""
        for stream in self._all:
            stream.close()


class _Held:
    """Owners of memory that a call on `stream` reads, and an event behind it, 0 for none."""

    def __init__(self, owners: list[Any], stream: int):
        self.owners, self.stream, self.event = owners, stream, 0
        self.thread = threading.current_thread()
        self.since = time.monotonic()
        self.queued = False  # for certain: the thread has come back since

    def is_queued(self, thread: threading.Thread) -> bool:
        """Whether the call was launched, as `thread` sees it: a moment after it was held."""
        return (
            self.queued
            or self.thread is thread
            or not self.thread.is_alive()
            or time.monotonic() - self.since > _LAUNCHED_S
        )


class InFlight:
    """Memory of owners who show no stream, held while work that they do not know of reads it."""

    def __init__(self, driver: Driver):
        self._driver = driver
        self._held: dict[threading.Thread, deque[_Held]] = {}  # of each thread, in its order
        self._lock = threading.RLock()

    def hold(self, owners: list[Any], stream: int) -> None:
        """Until the call that this thread queues next on `stream` is done.

        Lets go of what is done by now: each thread's calls from the first on, up to what is not.
        """
        thread = threading.current_thread()
        with self._lock:
            own = self._held.setdefault(thread, deque())
            if own:
                self._follow(own[-1])
            done = self._take(lambda entry: self._is_done(entry, thread))
            self._held.setdefault(thread, deque()).append(_Held(owners, stream))
        del done  # now that the lock is free: owners do what they like

    def _take(self, ready: Callable[[_Held], bool]) -> list[_Held]:
        """Remove what is `ready` from the front of each thread's calls."""
        taken = []
        for thread, entries in [*self._held.items()]:
            while entries and ready(entries[0]):
                taken.append(entries.popleft())
            if not entries:
                del self._held[thread]
        for entry in taken:
            if entry.event:
                self._driver.event_destroy(entry.event)
        return taken

    def _follow(self, entry: _Held) -> None:
        """The entry's call has been queued: put an event behind it, if it has none."""
        driver, stream = self._driver, entry.stream
        if not entry.queued and driver.left_at(stream) is None:
            if driver.recorded_elsewhere(stream):
                return  # the event would belong to the recording
            entry.event = driver.event_create(timing=False)
            driver.event_record(entry.event, stream)
        entry.queued = True

    def _is_done(self, entry: _Held, thread: threading.Thread) -> bool:
        if not entry.is_queued(thread):
            return False
        driver = self._driver
        return driver.event_query(entry.event) if entry.event else finished(driver, entry.stream)

    def release(self, stream: int | None = None) -> None:
        """What this thread has queued on `stream`, or anywhere, is done: let go of that, too."""
        thread = threading.current_thread()
        with self._lock:
            done = self._take(
                lambda entry: (
                    (entry.thread is thread and stream in (None, entry.stream))
                    or self._is_done(entry, thread)
                )
            )
        del done


def order(driver: Driver, before: int, after: int) -> None:
    """Later work of stream `after` waits for what is queued on stream `before` now."""
    if before == after:
        return
    event = driver.event_create(timing=False)
    try:
        driver.event_record(event, before)
        driver.stream_wait(after, event)
    finally:
        driver.event_destroy(event)


def after(driver: Driver, before: int, stream: int) -> None:
    """As `order`, unless one of the two is recorded: that does not run now."""
    if not (driver.capturing(before) or driver.capturing(stream)):
        order(driver, before, stream)


def before_which(world: World, stream: int) -> int:
    """Which stream producers are to order their work before, for a call on `stream`."""
    # one that another library records cannot wait for what runs now
    return world.stream.own if world.driver.recorded_elsewhere(stream) else stream


def follow(driver: Driver, used: int, stream: int) -> None:
    """Later work of `stream` waits for what tdx has queued on stream `used`, which may be gone."""
    if used in (NOWHERE, stream):
        return
    event = driver.left_at(used)
    if event is None:
        order(driver, used, stream)
    elif event:
        driver.stream_wait(stream, event)


def follow_recorded(driver: Driver, stream: int, uses: Sequence[Any]) -> None:
    """In a recording, `stream` comes after what it holds of `uses`, plans and memory, elsewhere.

    Each of them has `recorded_at`, the number of a recording and the stream of its last use there.
    """
    number = driver.recording_of(stream)
    if not number:
        return
    before = {used.recorded_at[1] for used in uses if used.recorded_at[0] == number}
    for other in before - {stream}:
        order(driver, other, stream)
    for used in uses:
        used.recorded_at = (number, stream)


def finished(driver: Driver, used: int) -> bool:
    """Whether what tdx has queued on stream `used`, which may be gone, is done.

    Not while the stream is recorded.
    """
    if used in (NOWHERE, ANYWHERE):
        return used == NOWHERE
    event = driver.left_at(used)
    if event is None:
        return not driver.capturing(used) and driver.stream_query(used)
    return not event or driver.event_query(event)


def stream_handle(stream: Any) -> int:
    """The driver's handle of a Stream, an int, `__cuda_stream__`, a CuPy or a torch stream.

    Never 0.
    """
    if isinstance(stream, Stream):
        stream._check()
        return stream.handle
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream or DEFAULT_STREAM
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # a method by the protocol; some libraries have it as an attribute
        return int((protocol() if callable(protocol) else protocol)[1]) or DEFAULT_STREAM
    for name in ("cuda_stream", "ptr"):  # torch, CuPy
        value = getattr(stream, name, None)
        if isinstance(value, int):
            return value or DEFAULT_STREAM
    if (handle := as_int(stream)) is not None and handle >= 0:
        return handle or DEFAULT_STREAM
    raise InvalidArgument(
        f"stream={stream!r} is not a stream; pass a tdx, CuPy or PyTorch stream, an int handle, "
        "or an object with __cuda_stream__"
    )
