"""Which addresses kernels may use on the host tier, and where a peer's copy of one is.

`distance` cannot refuse at once, because a mask may forbid what it leads to: from a wrong pointer
or peer it leads to where no memory can be, and `Checks` says why when that is used.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tdx import abi
from tdx.runtime.errors import InvalidArgument

__all__ = ["Addresses", "Checks", "HandleView", "LocalMemory"]

_WILD = 1 << 62  # addresses from here on stand for refusals, whose number is in the bits from 48 on
_NUMBER = 48
_MOST = 1 << 13
_BLOCKS = 64  # of wrong peers that a launch remembers
_Reason = tuple[int, int | None]  # a wrong peer and None, or a peer and the pointer without a copy


class HandleView(NamedTuple):
    """What a kernel's `world` says: see tdx/abi.py."""

    control: int
    packed: int
    stride: int
    is_team: bool

    @property
    def me(self) -> int:
        return self.packed >> abi.PACK_RANK_SHIFT & abi.PACK_FIELD_MASK

    @property
    def size(self) -> int:
        return self.packed >> abi.PACK_SIZE_SHIFT & abi.PACK_FIELD_MASK

    def ranks(self) -> list[int] | range:
        """The world rank of each."""
        if not self.is_team:
            return range(self.size)
        row = abi.CONTROL_TABLE + (self.packed >> abi.PACK_TEAM_SHIFT) * abi.MAX_RANKS
        return list((ctypes.c_int64 * self.size).from_address(self.control + 8 * row))


class LocalMemory:
    """Allocations of this process alone. Any thread makes them, finalizers end them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._gone: deque[int] = deque()  # ended, not yet taken out
        self._lock = threading.Lock()

    def add(self, address: int, nbytes: int, owner: Any) -> None:
        """Memory that is there as long as `owner`."""
        with self._lock:
            self._drain()
            bisect.insort(self._starts, address)
            self._sizes[address] = nbytes
        weakref.finalize(owner, self._gone.append, address).atexit = False

    def block_at(self, address: int) -> tuple[int, int] | None:
        """(address, bytes) of the allocation that an address is in."""
        with self._lock:
            self._drain()
            index = bisect.bisect(self._starts, address) - 1
            if index < 0:
                return None
            start = self._starts[index]
            nbytes = self._sizes[start]
            return (start, nbytes) if address < start + nbytes else None

    def _drain(self) -> None:
        while self._gone:
            address = self._gone.popleft()
            del self._sizes[address], self._starts[bisect.bisect_left(self._starts, address)]


class Addresses:
    """The reserved windows of a process, and its local memory.

    The host's thread notes changes, the device's thread asks.
    """

    def __init__(self) -> None:
        self.local = LocalMemory()
        self._windows: dict[int, int] = {}  # base -> bytes

    # ---- for the driver
    def reserved(self, base: int, nbytes: int) -> None:
        self._windows[base] = nbytes

    def released(self, base: int) -> None:
        self._windows.pop(base, None)

    # ---- for device code
    def in_windows(self, addresses: np.ndarray) -> np.ndarray:
        """Which of the addresses are reserved for heaps."""
        inside = np.zeros(addresses.shape, bool)
        for base, nbytes in list(self._windows.items()):
            inside |= (addresses >= base) & (addresses < base + nbytes)
        return inside

    def distance(
        self,
        pointers: np.ndarray,
        peers: np.ndarray,
        handle: HandleView,
        checks: Callable[[], Checks],
    ) -> np.ndarray:
        """Bytes from pointers into the own heap to `peers`' copies.

        One number if one does for all, else as many as pointers and peers broadcast to. `checks`
        is called where some of the pointers must not be used.
        """
        me, size, ranks = handle.me, handle.size, handle.ranks()
        single = peers.size == 1
        if single:
            peer = int(peers.flat[0])
            if not 0 <= peer < size:
                return np.array([checks().refuse(peer, None, handle)])
            step = (ranks[peer] - ranks[me]) * handle.stride
            if step == 0 or self._owned(pointers.astype(np.int64), ranks[me], handle.stride).all():
                return np.array([step])
        at, peers = np.broadcast_arrays(pointers.astype(np.int64), peers)
        known = (peers >= 0) & (peers < size)
        owners = np.array(ranks, np.int64)[np.where(known, peers, me)]
        steps = (owners - ranks[me]) * handle.stride
        strange = known & (steps != 0) & ~self._owned(at, ranks[me], handle.stride)
        if not known.all():
            steps[~known] = checks().refuse_peers(peers[~known], handle)
        if strange.any():
            address, peer = int(at[strange][0]), int(peers[strange][0])
            steps[strange] = checks().refuse(peer, address, handle)
        return steps.ravel()[:1] if single and not (steps != steps.flat[0]).any() else steps

    def _owned(self, addresses: np.ndarray, rank: int, stride: int) -> np.ndarray:
        """Where in `rank`'s part of a window the addresses are."""
        found = np.zeros(addresses.shape, bool)
        for base in list(self._windows):
            found |= (addresses - base) // stride == rank
        return found

    # ---- for refusals
    def not_own(self, address: int, handle: HandleView, argument_at: Callable[[int], str]) -> str:
        """What is wrong with a pointer that is not into the own heap."""
        given = argument_at(address)
        for base, nbytes in list(self._windows.items()):
            if base <= address < base + nbytes:
                owner, offset = divmod(address - base, handle.stride)
                own = argument_at(base + handle.ranks()[handle.me] * handle.stride + offset)
                view = f"pass the own array, not its view by peer({owner})"
                twice = (
                    "leave out the earlier symm_at, which is for tl.load, tl.store and atomics: "
                    "put, get, notify and the like go to the peer's copy themselves"
                )
                remedy = view if given else twice if own else f"{view}; or {twice}"
                name = given or own or f"address {address:#x}"
                return f"{name}, which is in the heap of rank {owner} already: {remedy}"
        return (
            f"{given or f'address {address:#x}'}, which is not in the symmetric heap: make it by "
            "world.empty, zeros or array, without symmetric=False"
        )


class Checks:
    """What is wrong with pointers of one launch, told once one of them is used."""

    def __init__(self, addresses: Addresses, argument_at: Callable[[int], str]):
        self._addresses = addresses
        self._argument_at = argument_at  # "" where the kernel was given nothing
        self._numbers: dict[tuple[_Reason, HandleView], int] = {}
        self._blocks: dict[tuple[bytes, HandleView], np.ndarray] = {}

    def refuse(self, peer: int, pointer: int | None, handle: HandleView) -> int:
        """A distance that leads to no memory: of a wrong peer, or of a pointer without a copy."""
        key = (peer, pointer), handle
        number = self._numbers.get(key)
        if number is None:
            number = min(len(self._numbers), _MOST)  # numbers are few
            if number < _MOST:
                self._numbers[key] = number
        return _WILD + (number << _NUMBER)

    def refuse_peers(self, peers: np.ndarray, handle: HandleView) -> np.ndarray:
        """`refuse` of wrong peers, remembered because a loop meets the same ones again."""
        key = peers.tobytes(), handle
        if key not in self._blocks:
            if len(self._blocks) >= _BLOCKS:
                self._blocks.clear()
            numbers = [self.refuse(peer, None, handle) for peer in peers.tolist()]
            self._blocks[key] = np.array(numbers)
        return self._blocks[key]

    def check(self, addresses: np.ndarray, mask: np.ndarray) -> None:
        """Raise InvalidArgument where an active address is one that must not be used."""
        if int(addresses.max()) < _WILD:
            return
        addresses, mask = np.broadcast_arrays(addresses, mask)
        used = addresses[mask != 0].astype(np.int64)
        wild = used >= _WILD
        if wild.any():
            raise InvalidArgument(self._text(int(used[wild][0]) - _WILD >> _NUMBER))

    def _text(self, number: int) -> str:
        if number >= len(self._numbers):
            return "the peer or the pointer is wrong"
        (peer, pointer), handle = list(self._numbers)[number]
        if pointer is None:
            limit = f"0..{handle.size - 1}: the handle is of {handle.size} ranks"
            return f"peer {peer} is outside {limit}"
        reason = self._addresses.not_own(pointer, handle, self._argument_at)
        return f"peer {peer} has no copy of {reason}"
