"""The window: one reserved address range in which every rank's heap is mapped.

Byte b of rank r's heap is at `base + r * stride + b` in every process, so a peer's copy of
anything is one addition away. The range of a rank is divided into regions, each with its own
allocator and grown on its own: `runtime` for workspaces and channels, `user` for arrays.
Growing maps another piece of physical memory at the same offset on all ranks, collectively;
base and stride never change. Teams have runtime regions of their own, mapped by their members
only: what a team allocates must not move what others allocate. Memory that others have allocated
is mapped in a part of its own (registration.py).

Of a rank's addresses the world's runtime region has the first eighth, registered memory the
second, teams the second quarter, and the user region the second half.
"""

from __future__ import annotations

import functools
import gc
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tdx import abi
from tdx.runtime.descriptors import exchange_fds
from tdx.runtime.errors import HeapExhausted
from tdx.runtime.heap import UNKNOWN, Heap, HeapFull, Made, format_bytes
from tdx.runtime.stream import ANYWHERE, NOWHERE, finished
from tdx.runtime.undo import Undo

if TYPE_CHECKING:
    from tdx.runtime.driver.base import Driver
    from tdx.runtime.group import Group
    from tdx.runtime.host_channel import HostChannel

__all__ = ["Region", "RuntimeRegions", "Window"]

_FIRST_RUNTIME_BYTES = 2 << 20
_SCATTERED_BYTES = 256 << 20  # dropped where only an idle device shows that it is not read
_LARGEST_STEP = 1 << 30  # a region doubles as it grows, by at most this much at once


class Window:
    """Reserves the addresses; regions map memory into them.

    Owns the reservation, every mapping and every handle, and releases them in `close`.
    """

    def __init__(self, driver: Driver, channel: HostChannel, rank: int, size: int):
        self.driver = driver
        self.channel = channel
        self.rank = rank
        self.size = size
        self.stride = driver.default_stride()
        self.base = 0
        self._mappings: list[tuple[int, int]] = []  # (address, bytes)
        # of the regions, which must not be held: first offset, allocator, ranks
        self.heaps: list[tuple[int, Heap, Sequence[int]]] = []

        def reserve() -> None:
            self.base = driver.addr_reserve(self.stride * size)

        try:
            channel.together(reserve, "reserving addresses for the heaps")
        except BaseException:
            self.close()
            raise

    def address(self, rank: int, offset: int = 0) -> int:
        """Where byte `offset` of rank `rank`'s heap is mapped here."""
        return self.base + rank * self.stride + offset

    def rank_of(self, address: int) -> tuple[int, int] | None:
        """(rank, offset) of an address inside the window, else None."""
        rank, offset = divmod(address - self.base, self.stride)
        return (rank, offset) if 0 <= rank < self.size else None

    def block_at(self, address: int) -> tuple[int, int] | None:
        """(address, bytes) of the array of which some rank's copy is at an address, or None.

        Of registered memory the whole allocation.
        """
        place = self.rank_of(address)
        if place is None:
            return None
        rank, offset = place
        for start, heap, ranks in list(self.heaps):
            inside = offset - start
            if 0 <= inside < heap.limit:
                block = heap.block_at(inside) if rank in ranks else None
                return None if block is None else (address - inside + block[0], block[1])
        return next((m for m in list(self._mappings) if 0 <= address - m[0] < m[1]), None)

    def granularity(self) -> int:
        return self.driver.granularity()

    def map(self, offset: int, nbytes: int, what: str, ranks: Sequence[int]) -> None:
        """Put memory behind [offset, offset + nbytes) of the heaps of `ranks`. Collective of those.

        A failure on any of them raises on all of them and leaves nothing mapped.
        """
        with self.channel.busy(what):
            create = functools.partial(self.driver.mem_create, nbytes)
            self._share(create, dict.fromkeys(ranks, (offset, nbytes)), what, ranks)

    def map_found(
        self, offset: int, pieces: Sequence[int], sizes: Sequence[Sequence[int]], what: str
    ) -> None:
        """Put memory that others have allocated behind `offset` of the heaps. Collective, as map.

        `pieces` are addresses in this rank's pieces of it, `sizes` the bytes of those of each
        rank; they come to lie behind one another. Raises Unsupported too: see Driver.mem_retain.
        """
        at = [offset] * self.size
        with self.channel.busy(what), Undo() as undo:
            for number in range(max(map(len, sizes))):
                places = {}
                for rank, (start, own) in enumerate(zip(at, sizes, strict=True)):
                    if number < len(own):
                        places[rank] = start, own[number]
                        at[rank] += own[number]
                has_one = number < len(pieces)
                take = (
                    functools.partial(self.driver.mem_retain, pieces[number]) if has_one else None
                )
                self._share(take, places, what, range(self.size))
                undo.add(self.unmap, offset, max(at) - offset)
            undo.commit()

    def _share(
        self,
        take: Callable[[], int] | None,
        places: Mapping[int, tuple[int, int]],
        what: str,
        ranks: Sequence[int],
    ) -> None:
        """Map a piece of memory of each rank in `places` on all of `ranks`, or on none.

        `take` gets the handle of this rank's piece, None where it has none; `places` says at
        which offset a rank's goes, and its bytes.
        """
        driver, channel = self.driver, self.channel
        with Undo() as undo:

            def export() -> int | None:
                if take is None:
                    return None
                handle = take()
                undo.add(driver.mem_release, handle)
                fd = driver.mem_export(handle)
                undo.add(os.close, fd)
                return fd

            fd = channel.together(export, what, ranks)
            fds = exchange_fds(channel, fd, what, ranks)

            def map_all() -> None:
                for peer, theirs in zip(ranks, fds, strict=True):
                    if peer not in places:
                        continue
                    assert theirs is not None
                    offset, nbytes = places[peer]
                    handle = driver.mem_import(theirs, nbytes)
                    try:
                        address = self.address(peer, offset)
                        driver.mem_map(address, nbytes, handle)
                        undo.add(driver.mem_unmap, address, nbytes)
                    finally:
                        driver.mem_release(handle)  # the mapping keeps the memory

            try:
                channel.together(map_all, what, ranks)
            finally:
                for theirs in fds:
                    if theirs is not None:
                        os.close(theirs)
            undo.forget(driver.mem_unmap)
            self._mappings += [(self.address(r, at), nbytes) for r, (at, nbytes) in places.items()]

    def unmap(self, offset: int, nbytes: int) -> None:
        """Take away what is mapped behind [offset, offset + nbytes) of all heaps."""
        for address, size in list(self._mappings):
            if offset <= (address - self.base) % self.stride < offset + nbytes:
                self._mappings.remove((address, size))
                self.driver.mem_unmap(address, size)

    def unmap_peers(self) -> None:
        """Keep this rank's own memory only."""
        kept = []
        for address, nbytes in self._mappings:
            if self.address(self.rank) <= address < self.address(self.rank + 1):
                kept.append((address, nbytes))
            else:
                self.driver.mem_unmap(address, nbytes)
        self._mappings = kept

    def close(self) -> None:
        """Unmap everything. Arrays and their views must not be used afterwards."""
        if not self.base:
            return
        for address, nbytes in self._mappings:
            self.driver.mem_unmap(address, nbytes)
        self._mappings.clear()
        base, self.base = self.base, 0
        self.driver.addr_free(base, self.stride * self.size)


class Region:
    """A part of the heaps of some ranks, with an allocator of its own.

    Allocation is local arithmetic, the same on every rank. Only a full region communicates:
    ranks agree on the blocks that all of them have dropped, reclaim those, and then grow.
    """

    def __init__(
        self,
        window: Window,
        name: str,
        start: int,
        first_bytes: int,
        limit_bytes: int,
        ranks: Sequence[int],
    ):
        self.window = window
        self.ranks = ranks
        self.name = name
        self.start = start
        granularity = window.granularity()
        self._limit = limit_bytes
        mapped_limit = -(-limit_bytes // granularity) * granularity
        first_bytes = min(-(-first_bytes // granularity) * granularity, mapped_limit)
        window.map(start, first_bytes, f"{name} heap of {format_bytes(first_bytes)}", ranks)
        self._mapped = first_bytes
        self.heap = Heap(min(first_bytes, limit_bytes), limit_bytes, gap=window.driver.gap)
        window.heaps.append((start, self.heap, ranks))
        self._last: dict[int, list[int]] = {}  # dropped block -> streams of its last uses
        self.waits_first = False  # for queued work, before it grows
        self.diverged = False  # from other ranks', and the caller has been told
        self.remedy, self.larger = "free arrays", ""  # and how to get a larger region
        # what is given up if it cannot grow: plans that one-line functions have made
        self.before_reclaim: Callable[[], object] = lambda: None

    def allocate(self, nbytes: int, label: str, made: Made = UNKNOWN) -> int:
        """Offset (from the rank's heap start) of a new block; HeapExhausted on every rank."""
        offset, why = self._place(nbytes, made), ""
        steps = (self._reclaim_idle, self._grow, self._reclaim_all)
        if self.waits_first:
            steps = (self._reclaim_all, self._grow, self._give_up)
        for make_room in steps:
            if isinstance(offset, HeapFull):
                why += make_room(offset)
                offset = self._place(nbytes, made)
        if isinstance(offset, HeapFull):
            raise self._exhausted(offset, label, why)
        return self.start + offset

    def _place(self, nbytes: int, made: Made) -> int | HeapFull:
        try:
            return self.heap.allocate(nbytes, made)
        except HeapFull as full:
            return full

    def drop(self, offset: int, last: list[int]) -> None:
        """Note that this rank no longer uses the block, last used on the streams in `last`."""
        self._last[offset - self.start] = last
        self.heap.drop(offset - self.start)

    def _reclaim_idle(self, full: HeapFull) -> str:
        """Reclaim what all ranks have dropped and no queued work uses; waits for no work."""
        # dropped first, streams after: finalizers go on dropping meanwhile
        dropped = [(offset, self._last[offset]) for offset in self.heap.dropped()]
        streams = {stream for _, last in dropped for stream in last}
        busy = {stream for stream in streams if not finished(self.window.driver, stream)}
        mine = [offset for offset, last in dropped if busy.isdisjoint(last)]
        sizes = self.heap.blocks
        waiting = sum(sizes[offset] for offset, last in dropped if ANYWHERE in last)
        payload = struct.pack(f"<{1 + len(mine)}Q", waiting, *mine)
        what = f"{self.name} heap is full at {full.requested} bytes"  # names may differ
        everybody = self.window.channel.allgather(payload, what, self.ranks)
        agreed, least = set(mine), waiting
        for theirs in everybody:
            (amount,), *offsets = struct.iter_unpack("<Q", theirs)
            agreed &= {offset for (offset,) in offsets}
            least = min(least, amount)
        self.heap.reclaim(sorted(agreed))
        for offset in agreed:
            del self._last[offset]
        # rather than to grow for ever, wait for consumers who do not say what they still read
        return self._reclaim_all(full) if least > _SCATTERED_BYTES else ""

    def _reclaim_all(self, full: HeapFull) -> str:
        """As _reclaim_idle, after the queued work and a garbage collection."""
        window = self.window
        what = f"{self.name} heap waits at {full.requested} bytes"
        dropped = [self._last[offset] for offset in self.heap.dropped()]
        window.channel.together(window.driver.synchronize, what, self.ranks)
        for last in dropped:
            last[:] = [NOWHERE]
        gc.collect()
        return self._reclaim_idle(full)

    def _give_up(self, full: HeapFull) -> str:
        """As _reclaim_all, once the cached plans are given up."""
        self.before_reclaim()
        return self._reclaim_all(full)

    def _grow(self, full: HeapFull) -> str:
        """Map more memory, on all ranks or none; why it could not be had."""
        heap = self.heap
        if full.shortfall > heap.limit - heap.capacity:
            return ""
        least = self._rounded(heap.capacity + full.shortfall) - self._mapped
        most = self._rounded(min(heap.limit, heap.capacity + min(heap.capacity, _LARGEST_STEP)))
        why = ""
        for step in sorted({least, max(least, most - self._mapped)}, reverse=True):
            if step > 0:
                what = f"{self.name} heap grows by {format_bytes(step)}"
                try:
                    self.window.map(self.start + self._mapped, step, what, self.ranks)
                except HeapExhausted as error:
                    why = f" ({error})"
                    continue
                self._mapped += step
            heap.extend(min(self._mapped, heap.limit) // 256 * 256 - heap.capacity)
            return ""
        return why

    def _rounded(self, nbytes: int) -> int:
        granularity = self.window.granularity()
        return -(-nbytes // granularity) * granularity

    def _exhausted(self, full: HeapFull, label: str, why: str) -> HeapExhausted:
        heap, gap = self.heap, self.window.driver.gap
        never = full.requested > heap.limit - gap
        room = heap.limit if never else full.largest_free
        # rounded, what lacks little would seem to fit
        size = "{} bytes".format if full.requested <= room + room // 8 else format_bytes
        request = f"{self.name} heap: {size(full.requested)} requested for {label}"
        if gap:
            request += f" and {gap} bytes that stay free behind it"
        if never:
            return HeapExhausted(
                f"{request}, but it grows up to {size(heap.limit)} at most, so that to free what "
                f"it holds is of no use; use smaller arrays{self.larger}"
            )
        return HeapExhausted(
            f"{request}, {size(full.free)} free of {size(heap.capacity)}, the largest free run "
            f"{size(full.largest_free)}, and it grows up to {size(heap.limit)} at most{why}; "
            f"{self.remedy}{self.larger}"
        )


class RuntimeRegions:
    """Where the plans and channels of each group live, apart from the user's arrays."""

    def __init__(self, window: Window, limit_bytes: int, before_reclaim: Callable[[int], object]):
        self._window = window
        self._before_reclaim = before_reclaim  # takes the group's index
        self._limit = limit_bytes
        self._regions: dict[int, Region] = {}

    def of(self, group: Group) -> Region:
        """The group's region, made on first use by all its ranks."""
        region = self._regions.get(group.index)
        if region is None:
            quarter = self._window.stride // 4
            share = quarter // (abi.MAX_TEAMS + 1)
            start = quarter + group.index * share if group.index else 0
            limit = min(self._limit, share if group.index else quarter // 2) // 256 * 256
            region = Region(
                self._window, "runtime", start, _FIRST_RUNTIME_BYTES, limit, group.ranks
            )
            # who makes a plan or a channel waits for the device anyway
            region.waits_first = True
            region.remedy = "drop plans and channels that are not used any more"
            region.before_reclaim = functools.partial(self._before_reclaim, group.index)
            self._regions[group.index] = region
        return region
