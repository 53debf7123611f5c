"""Where arrays lie in a heap: arithmetic on offsets, without any memory behind it.

Every rank runs the same arithmetic on the same calls and so arrives at the same offsets. Only
`allocate`, `free`, `reclaim` and `extend` change the layout, and they must be called alike on
all ranks; a running hash of these calls tells whether that was so. Garbage collection happens
at different times on different ranks, therefore `drop` changes no offset: it only decides what
this rank offers in `dropped` for the ranks to agree on.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect, bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from .errors import Closed, InvalidArgument

__all__ = [
    "UNKNOWN",
    "Call",
    "Difference",
    "Heap",
    "HeapFull",
    "Made",
    "first_difference",
    "format_bytes",
]

ALIGNMENT = 256  # bytes; also the least size of a block
HISTORY = 64  # calls remembered for `first_difference`


class HeapFull(Exception):
    """The request fits no free block. Caught by the runtime, which reclaims, grows or gives up.

    Attributes
    ----------
    requested, free, largest_free : int
        Bytes asked for (before rounding), free in total, and in the largest free block.
    shortfall : int
        Bytes by which `extend` would have to grow the heap for the request to fit.
    """

    def __init__(self, requested: int, free: int, largest_free: int, shortfall: int):
        super().__init__(f"{requested} bytes requested, largest free block {largest_free}")
        self.requested = requested
        self.free = free
        self.largest_free = largest_free
        self.shortfall = shortfall


class Made(NamedTuple):
    """For messages: what is allocated, alike on all ranks, and where in this rank's program."""

    what: str = ""
    place: str = ""


UNKNOWN = Made()


class Call(NamedTuple):
    """One recorded call; sequence numbers start at 1."""

    sequence: int
    text: str
    place: str = ""  # need not be the same on all ranks


class Difference(NamedTuple):
    """The first call two histories do not share; None: that rank made no such call."""

    sequence: int
    mine: str | None
    theirs: str | None


class Heap:
    """First-fit allocator of offsets in [0, capacity), lowest address first, with coalescing.

    Parameters
    ----------
    capacity_bytes, limit_bytes : int
        Bytes available now, and how far `extend` may grow them; rounded down to the alignment.
    alignment : int
        Power of two; offsets and block sizes are multiples of it.
    gap : int
        Bytes behind each block that stay unused.

    All methods may be called from any thread. `drop` may also be called from finalizers, which
    can run in the middle of any other method: it takes no lock.
    """

    def __init__(
        self, capacity_bytes: int, limit_bytes: int, alignment: int = ALIGNMENT, gap: int = 0
    ):
        if alignment < 1 or alignment & (alignment - 1):
            raise InvalidArgument(f"alignment must be a power of two, got {alignment}")
        if not 0 <= capacity_bytes <= limit_bytes:
            raise InvalidArgument(
                f"heap capacity must be in 0..{limit_bytes} bytes (its limit), got {capacity_bytes}"
            )
        self.alignment = alignment
        self._gap = gap
        self._capacity = capacity_bytes // alignment * alignment
        self._limit = limit_bytes // alignment * alignment
        self._starts = [0] if self._capacity else []  # free blocks, ascending; sizes in parallel
        self._sizes = [self._capacity] if self._capacity else []
        self._live: dict[int, tuple[int, int, str]] = {}  # offset -> bytes taken, asked for; what
        self._order: list[int] = []  # of the live offsets
        self._freed: set[int] = set()  # freed offsets at which no new block begins
        self._dropped: set[int] = set()
        self._marks: deque[int] = deque()  # dropped, not yet looked at
        self._lock = threading.Lock()
        self._sequence = 0
        self._digest = b"\0" * 16
        self._recent: deque[Call] = deque(maxlen=HISTORY)

    # -- the layout: called alike on all ranks

    def allocate(self, nbytes: int, made: Made = UNKNOWN) -> int:
        """The offset of a new block of at least `nbytes` bytes (0 takes a block of its own).

        `made.what` is a part of the call. Raises HeapFull without any effect when no free block is
        large enough.
        """
        if nbytes < 0:
            raise InvalidArgument(f"cannot allocate {nbytes} bytes")
        size = self._rounded(nbytes)
        with self._lock:
            self._drain()  # marks made for earlier blocks must not hit the new one
            i = next((i for i, available in enumerate(self._sizes) if available >= size), None)
            if i is None:
                raise self._full(nbytes, size)
            offset = self._starts[i]
            if self._sizes[i] == size:
                del self._starts[i], self._sizes[i]
            else:
                self._starts[i] += size
                self._sizes[i] -= size
            self._live[offset] = size, nbytes, made.what
            insort(self._order, offset)
            self._freed.discard(offset)
            self._record(f"allocate({nbytes}) -> {offset}", made.what, made.place)
            return offset

    def free(self, offset: int, place: str = "") -> None:
        """Free a block now, dropped or not; `place`: where in the program.

        Raises Closed for a block freed before, InvalidArgument for an offset where none begins.
        """
        with self._lock:
            self._drain()
            self._check_live(offset)
            what = self._live[offset][2]
            self._release(offset)
            self._record(f"free({offset})", what and f"free of {what}", place)

    def reclaim(self, offsets: Iterable[int]) -> int:
        """Free the blocks that all ranks reported by `dropped`; returns the bytes gained.

        Raises InvalidArgument, without any effect, if one is not dropped here.
        """
        with self._lock:
            self._drain()
            agreed = sorted(set(offsets))
            for offset in agreed:
                if offset not in self._dropped:
                    raise InvalidArgument(f"the block at offset {offset} is in use on this rank")
            gained = sum(self._live[offset][0] for offset in agreed)
            for offset in agreed:
                self._release(offset)
            if agreed:
                self._record(f"reclaim({', '.join(map(str, agreed))})")
            return gained

    def extend(self, nbytes: int) -> None:
        """Grow the capacity by `nbytes` bytes, a multiple of the alignment, up to the limit."""
        if nbytes <= 0 or nbytes % self.alignment:
            raise InvalidArgument(
                f"a heap grows by a positive multiple of {self.alignment} bytes, got {nbytes}"
            )
        with self._lock:
            if self._capacity + nbytes > self._limit:
                raise InvalidArgument(
                    f"cannot grow the heap by {nbytes} bytes: capacity {self._capacity}, "
                    f"limit {self._limit}"
                )
            self._insert(self._capacity, nbytes)
            self._capacity += nbytes
            self._record(f"extend({nbytes})")

    # -- this rank only

    def drop(self, offset: int) -> None:
        """Note that this rank no longer uses the block. Never blocks and never raises.

        Not to be called for a block that was freed: a later block may begin at its offset.
        """
        self._marks.append(offset)

    def dropped(self) -> tuple[int, ...]:
        """Offsets of the blocks this rank has dropped, ascending."""
        with self._lock:
            self._drain()
            return tuple(sorted(self._dropped))

    # -- state

    @property
    def capacity(self) -> int:
        """Bytes the heap has."""
        return self._capacity

    @property
    def limit(self) -> int:
        """Bytes to which the heap may grow."""
        return self._limit

    @property
    def free_bytes(self) -> int:
        """Bytes in free blocks."""
        with self._lock:
            return sum(self._sizes)

    @property
    def used(self) -> int:
        """Bytes in allocated blocks, rounding included."""
        return self._capacity - self.free_bytes

    @property
    def largest_free(self) -> int:
        """Bytes of the largest array that has room."""
        with self._lock:
            return self._largest()

    @property
    def digest(self) -> bytes:
        """16 bytes: equal on two ranks exactly if they made the same layout calls in order."""
        return self._digest

    @property
    def recent(self) -> tuple[Call, ...]:
        """The last layout calls, oldest first."""
        with self._lock:
            return tuple(self._recent)

    @property
    def blocks(self) -> dict[int, int]:
        """Offset -> bytes of every allocated block."""
        with self._lock:
            return {offset: size for offset, (size, *_) in self._live.items()}

    def block_at(self, offset: int) -> tuple[int, int] | None:
        """(first byte, bytes asked for) of the allocated block that an offset is in."""
        with self._lock:
            index = bisect(self._order, offset) - 1
            if index < 0:
                return None
            start = self._order[index]
            nbytes = self._live[start][1]
            return (start, nbytes) if offset < start + nbytes else None

    # -- inside

    def _largest(self) -> int:
        return max(max(self._sizes, default=0) - self._gap, 0)

    def _rounded(self, nbytes: int) -> int:
        return max(-(-(nbytes + self._gap) // self.alignment), 1) * self.alignment

    def _full(self, requested: int, size: int) -> HeapFull:
        last = 0  # the free block at the end grows with the heap
        if self._starts and self._starts[-1] + self._sizes[-1] == self._capacity:
            last = self._sizes[-1]
        return HeapFull(requested, sum(self._sizes), self._largest(), size - last)

    def _check_live(self, offset: int) -> None:
        if offset in self._live:
            return
        if offset in self._freed:
            raise Closed(f"the block at offset {offset} of the heap was freed before")
        raise InvalidArgument(f"no block begins at offset {offset} of the heap")

    def _release(self, offset: int) -> None:
        self._insert(offset, self._live.pop(offset)[0])
        del self._order[bisect_left(self._order, offset)]
        self._dropped.discard(offset)
        self._freed.add(offset)

    def _insert(self, start: int, size: int) -> None:
        """Add a free block, merged with its neighbours."""
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and start + size == self._starts[i]:
            size += self._sizes[i]
            del self._starts[i], self._sizes[i]
        if i and self._starts[i - 1] + self._sizes[i - 1] == start:
            self._sizes[i - 1] += size
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, size)

    def _drain(self) -> None:
        while self._marks:
            offset = self._marks.popleft()
            if offset in self._live:
                self._dropped.add(offset)

    def _record(self, text: str, what: str = "", place: str = "") -> None:
        """Note a call, which messages show as `what`, or else `text`, at `place`."""
        self._sequence += 1
        state = self._digest + f"{text} {what}".encode("utf-8", "backslashreplace")
        self._digest = hashlib.blake2b(state, digest_size=16).digest()
        self._recent.append(Call(self._sequence, what or text, place))


def first_difference(mine: Iterable[Call], theirs: Iterable[Call]) -> Difference | None:
    """The first call that differs between two histories, as given by `Heap.recent`.

    None if the remembered parts agree and end alike: the histories are then equal, or they
    differ before what is still remembered (the digests tell which).
    """
    a, b = ({call.sequence: call.text for call in calls} for calls in (mine, theirs))
    if not a and not b:
        return None
    # Earlier calls are no longer remembered by one side and cannot be compared.
    first = max(min(side) for side in (a, b) if side)
    for sequence in range(first, max([*a, *b]) + 1):
        if a.get(sequence) != b.get(sequence):
            return Difference(sequence, a.get(sequence), b.get(sequence))
    return None


def format_bytes(nbytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:g} {unit}" if value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
