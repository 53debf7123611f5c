"""Pieces of memory behind arrays: who owns them, which streams used them last, who else holds them.

A block is shared by all views of an array and by everything the array was exported to. The
last reference that goes marks a symmetric block as dropped (ranks agree on reclaiming it later)
and returns a local block to the driver.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tdx.runtime.errors import Closed, InvalidArgument
from tdx.runtime.heap import UNKNOWN, Made
from tdx.runtime.places import caller
from tdx.runtime.stream import ANYWHERE, NOWHERE, follow

if TYPE_CHECKING:
    from tdx.runtime.driver.base import Driver
    from tdx.runtime.window import Region

__all__ = ["Block", "Exports", "LocalBlock", "SymmetricBlock"]


class Exports:
    """Which exports of a world's memory are still held by consumers, and whether it is closed.

    `mapped` of them are of symmetric memory, which ends with the window.

    Finalizers call this in any thread, so it only adds to and discards from a set. When the
    world has been closed, `closed` says why.
    """

    def __init__(self) -> None:
        self._held: set[object] = set()
        self._in_window: set[object] = set()
        self._at_end: list[Callable[[], None]] = []
        self.closed = ""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def mapped(self) -> int:
        return len(self._in_window)

    def hold(self, symmetric: bool) -> object:
        token = object()
        self._held.add(token)
        if symmetric:
            self._in_window.add(token)
        return token

    def release(self, token: object) -> None:
        self._held.discard(token)
        self._in_window.discard(token)
        self._see()

    def when_empty(self, action: Callable[[], None]) -> None:
        """Run `action` with the last release of symmetric memory, or now."""
        self._at_end.append(action)
        self._see()

    def _see(self) -> None:
        with contextlib.suppress(IndexError):  # two threads may come here with the last ones
            while not self._in_window:
                action = self._at_end.pop()
                action()


class Block:
    """Memory of `nbytes` bytes at `address`; `stream` is where it was last used, or NOWHERE.

    `last` has that stream first, then others with uses that it does not come after.
    """

    symmetric = False
    named = True  # by the user, or made up?
    shows_stream = True  # or does its owner order its own work only?
    ranks: Sequence[int] | None = None  # of the world that have it mapped; None: all
    freed = False
    recorded = 0  # by how many calls in graphs that are there
    recorded_at = (0, NOWHERE)  # see follow_recorded
    scattered = False  # read by consumers on streams that may be gone before the memory
    _held = 0

    def __init__(
        self, driver: Driver, exports: Exports, address: int, nbytes: int, name: str,
        stream: int = NOWHERE,
    ):  # fmt: skip
        self.driver = driver
        self.exports = exports
        self.address = address
        self.nbytes = nbytes
        self.name = name
        self.last = [stream]  # where also the finalizer sees it

    @property
    def stream(self) -> int:
        return self.last[0]

    @stream.setter
    def stream(self, handle: int) -> None:
        self.last[0] = handle

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"array {self.name}" if self.named else "the array"

    def check(self) -> None:
        """Raise Closed if the memory, or its world, is gone."""
        if self.exports.closed:
            raise Closed(f"{self.title}: {self.exports.closed}")
        if self.freed:
            raise Closed(f"{self.title} was freed")

    def note(self, stream: int) -> None:
        """Work that others order is about to use the block on `stream`: plain launches, say.

        In no order with other streams: reads need none, and whoever comes next waits for all.
        """
        others = [used for used in self.last if used not in (stream, NOWHERE)]
        self.last[:] = [stream, *others]

    def enter(self, stream: int) -> None:
        """Work on `stream` is about to use the block: order it after all uses elsewhere."""
        last = self.last
        if last[0] != stream or len(last) > 1:
            if last != [NOWHERE]:
                if self.driver.capturing(stream):
                    return  # what is recorded does not run now: the replay enters
                for used in last:
                    follow(self.driver, used, stream)
            last[:] = [stream]

    def settled(self, default: int) -> int:
        """A stream that is there and comes after all uses: the last one, or else `default`."""
        stream = self.last[0]
        alone = len(self.last) == 1 and stream != NOWHERE
        if alone and self.driver.left_at(stream) is None:
            return stream
        self.enter(default)
        return default

    def wait(self, default: int) -> None:
        """Block the calling thread until all uses are done, by way of stream `default`."""
        if self.last != [NOWHERE]:
            self.driver.stream_synchronize(self.settled(default))

    def export(self) -> tuple[object, Callable[[], None]]:
        """Note a consumer: (owner to keep alive, what to call when it is done)."""
        token = self.exports.hold(self.symmetric)
        self._held += 1

        def released() -> None:
            self._held -= 1
            self.exports.release(token)

        return self, released

    def scatter(self) -> None:
        """A consumer uses the memory where nobody can ask: it is free when the device is idle."""
        self.scattered = True

    def free(self) -> None:
        """Give the memory back now; InvalidArgument while a consumer or a graph holds it."""
        self.check()
        if self._held:
            raise InvalidArgument(
                f"{self.title} is exported to {self._held} consumer(s) that still hold it; "
                "drop those arrays first, or drop the last reference instead of calling free()"
            )
        if self.recorded:
            raise InvalidArgument(
                f"{self.title} is used by a recorded graph, which could be replayed; drop the "
                "graph first (other libraries do not tell when theirs are gone: close the world), "
                "or drop the last reference instead of calling free()"
            )
        self.freed = True


class LocalBlock(Block):
    """Memory of the own device only."""

    address = 0  # for `__del__`, if there is no memory

    def __init__(self, driver: Driver, exports: Exports, nbytes: int, name: str, stream: int):
        Block.__init__(
            self, driver, exports, driver.alloc(nbytes or 1, stream), nbytes, name, stream
        )

    def free(self) -> None:
        super().free()
        self._return()
        self.last[:] = [NOWHERE]

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # cheaper than weakref.finalize, which other blocks use; modules may be gone at the end
        if self.address and not self.freed and not ending():
            self._return()

    def _return(self) -> None:
        last = self.last
        if self.scattered:
            self.driver.free(self.address, ANYWHERE)
        elif len(last) == 1:
            self.driver.free(self.address, last[0])
        else:
            self.driver.free(self.address, last[0], last[1:])


class SymmetricBlock(Block):
    """The same offset in every rank's heap."""

    symmetric = True

    def __init__(
        self, driver: Driver, exports: Exports, region: Region, nbytes: int, name: str,
        made: Made = UNKNOWN,
    ):  # fmt: skip
        self.region, self.ranks = region, region.ranks
        self.offset = region.allocate(nbytes, made.what or name, made)
        window = region.window
        super().__init__(driver, exports, window.address(window.rank, self.offset), nbytes, name)
        self._finish_with(self.last)

    def _finish_with(self, last: list[int]) -> None:
        self._finalizer = weakref.finalize(self, self.region.drop, self.offset, last)
        self._finalizer.atexit = False

    def scatter(self) -> None:
        if not self.scattered:
            self._finalizer.detach()
            self._finish_with([ANYWHERE])
        super().scatter()

    def free(self) -> None:
        self.check()
        # the next owner of the memory may use it on any stream
        if self.scattered:
            self.driver.synchronize()
        else:
            self.wait(self.driver.current_stream())
        super().free()
        self.last[:] = [NOWHERE]
        self._finalizer.detach()
        self.region.heap.free(self.offset - self.region.start, caller())
