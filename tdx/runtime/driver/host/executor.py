"""Waits of device code on the host tier: what `tdx.language` calls when it is interpreted.

Every wait has the world's deadline. On expiry the first one claims the world's fault word and
writes the fault record (layouts: tdx/abi.py), as the GPU's device code does.
"""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable

import numpy as np
from triton._C.libtriton import interpreter as native

from tdx import abi
from tdx.runtime.driver.host.addresses import Addresses, Checks, HandleView
from tdx.runtime.driver.host.bounds import Heaps
from tdx.runtime.driver.host.device import Device
from tdx.runtime.errors import InvalidArgument

__all__ = ["HostExecutor"]

# on x86 every load is an acquire; elsewhere an atomic read orders what follows
_STRONG_LOADS = platform.machine() in ("x86_64", "AMD64", "i686")


class HostExecutor:
    """Suspends the running fibre until words in symmetric memory have their values."""

    def __init__(self, device: Device, addresses: Addresses):
        self._device = device
        self._addresses = addresses
        self.report: Callable[[], list[str]] = list  # who waits for what, set by the driver
        self.waiting: list[str] = []  # that report, taken when the first wait gave up
        self.kernel = ""  # the kernel whose wait that was
        self.launched = ""  # where it was launched, "file:line"
        self.signal = ""  # and for which signal: the array may be gone when somebody asks
        self.name: Callable[[int], str] = hex  # of the signal at an address
        self.heaps: Heaps | None = None

    def introduce(self, rank: int, name: Callable[[int], str], heaps: Heaps) -> None:
        """This process's rank, what tells the name of the signal at an address, and the heaps."""
        self._device.rank = rank
        self.name, self.heaps = name, heaps
        self.waiting, self.kernel, self.launched, self.signal = [], "", "", ""

    def wait(
        self,
        addresses: np.ndarray,
        values: np.ndarray,
        cmp: str,
        control: int,
        team: int,
        peers: np.ndarray,
    ) -> bool:
        """Wait until every int32 word satisfies `cmp` ("ge": wrap-safe, "eq"); False: gave up."""
        flat = np.atleast_1d(addresses).reshape(-1)
        self._check(flat)
        wanted = np.broadcast_to(values, flat.shape).reshape(-1).astype(np.int64)
        who = np.broadcast_to(peers, flat.shape).reshape(-1)
        pending = [
            (ctypes.c_int32.from_address(int(a)), int(v), int(p), int(a))
            for a, v, p in zip(flat, wanted, who, strict=True)
        ]

        def satisfied(cell: ctypes.c_int32, value: int) -> bool:
            difference = (cell.value - value) & 0xFFFFFFFF
            return difference == 0 if cmp == "eq" else difference < 0x80000000

        def finished() -> bool:
            pending[:] = [entry for entry in pending if not satisfied(entry[0], entry[1])]
            return not pending

        def describe() -> str:
            cell, value, peer, address = pending[0]
            sign = "==" if cmp == "eq" else ">="
            who = f" from peer {peer}" if peer >= 0 else ""
            return f"{self.name(address)} {sign} {value} (is {cell.value}){who}"

        def give_up() -> None:
            cell, value, peer, address = pending[0]
            self._fault(control, team, peer, address, value, cell.value)

        ok = self._bounded(finished, describe, give_up, control)
        if ok and not _STRONG_LOADS:
            self._acquire(flat)
        return ok

    def wait_any(
        self, addresses: np.ndarray, value: int, last: int, control: int, team: int
    ) -> tuple[np.ndarray, bool]:
        """Wait until an int32 word is >= `value`, wrap-safe: which ones are; False: gave up.

        The fault is that of the word at `last`, 0 if there are none.
        """
        self._check(addresses)
        cells = [ctypes.c_int32.from_address(int(a)) for a in addresses]
        first = int(addresses[0]) if cells else 0  # there may be none to wait for
        ready = np.zeros(len(cells), bool)

        def finished() -> bool:
            ready[:] = [(cell.value - value) & 0xFFFFFFFF < 0x80000000 for cell in cells]
            return bool(ready.any())

        def describe() -> str:
            return f"one of {len(cells)} words from {self.name(first)} on >= {value}"

        def give_up() -> None:
            seen = ctypes.c_int32.from_address(last).value if last else 0
            self._fault(control, team, -1, last, value, seen)

        ok = self._bounded(finished, describe, give_up, control)
        if ok and not _STRONG_LOADS:
            self._acquire(addresses)
        return ready, ok

    def load_words(
        self,
        addresses: np.ndarray,
        shift: int,
        flag: int,
        mask: np.ndarray,
        control: int,
        team: int,
        peers: np.ndarray,
    ) -> tuple[np.ndarray, bool]:
        """Wait until every unmasked 64-bit word has `flag` from bit `shift` on; the words."""
        self._check(addresses[mask], 8)
        nothing = np.zeros(addresses.shape, np.uint64)
        words = nothing
        expected, bits = np.uint64(flag & (1 << 64 - shift) - 1), np.uint64(shift)

        def missing() -> np.ndarray:
            nonlocal words
            words = native.load(addresses, mask, nothing, np.dtype(np.uint64))
            return np.asarray((words >> bits != expected) & mask)

        def finished() -> bool:
            return not missing().any()

        def describe() -> str:
            left = missing()
            first = int(addresses[left][0]) if left.any() else 0
            return (
                f"{int(left.sum())} of {left.size} data words with flag {flag}, the first "
                f"{self.name(first)}"
            )

        def give_up() -> None:
            left = np.flatnonzero(missing().reshape(-1))
            first = int(left[0]) if left.size else 0  # they may have come just now
            seen = int((words.reshape(-1)[first] >> bits).astype(np.uint32).view(np.int32))
            peer = int(np.broadcast_to(peers, addresses.shape).reshape(-1)[first])
            self._fault(control, team, peer, int(addresses.reshape(-1)[first]), flag, seen)

        ok = self._bounded(finished, describe, give_up, control)
        return words, ok

    def distance(
        self, pointers: np.ndarray, peers: np.ndarray, handle: tuple[int, int, int, bool]
    ) -> np.ndarray:
        """Bytes from `pointers` to `peers`' copies; see tdx.language.host.Executor."""
        run = self._device.running.run
        view = HandleView(*handle)

        def checks() -> Checks:
            if run.checks is None:
                run.checks = Checks(self._addresses, run.prepared.argument_at)
            return run.checks

        return self._addresses.distance(pointers, peers, view, checks)

    def name_of(self, address: int) -> str:
        """What the running kernel was given at an address."""
        return str(self._device.running.run.prepared.name_of(address))

    def resident(self) -> int:
        """How many programs of the running kernel there are at once, at most."""
        return self._device.running.run.resident

    def _check(self, signals: np.ndarray, size: int = 4) -> None:
        """Raise InvalidArgument for signals, of `size` bytes, that no peer could set."""
        if not signals.size:
            return
        run = self._device.running.run
        if run.checks is not None:
            run.checks.check(signals, np.True_)
        if not self._addresses.in_windows(signals.astype(np.int64)).all():
            name = run.prepared.name_of(int(signals.flat[0]))
            raise InvalidArgument(
                f"the wait is for {name}, which is not in the symmetric heap, so that no peer "
                "sets it: make it by world.zeros, without symmetric=False"
            )
        run.bounds.check(signals, np.True_, size, "wait for")

    @staticmethod
    def _acquire(addresses: np.ndarray) -> None:
        mask, zero = np.ones(addresses.shape, bool), np.zeros(addresses.shape, np.int32)
        native.atomic_rmw(native.RMW_OP.ADD, addresses, zero, mask, native.MEM_SEMANTIC.ACQUIRE)

    def fault(self, control: int) -> bool:
        """Whether a fault stands."""
        return ctypes.c_int64.from_address(control + 8 * abi.CONTROL_FAULT).value != 0

    def _bounded(
        self,
        finished: Callable[[], bool],
        describe: Callable[[], str],
        give_up: Callable[[], None],
        control: int,
    ) -> bool:
        words = (ctypes.c_int64 * abi.CONTROL_TABLE).from_address(control)
        fibre = self._device.running
        deadline = 0
        ok = True

        def poll() -> bool:
            nonlocal deadline, ok
            if finished():
                return True
            if words[abi.CONTROL_FAULT]:
                ok = False
                return True
            now = time.monotonic_ns()
            limit = words[abi.CONTROL_TIMEOUT_NS]
            if deadline == 0:
                deadline = now + limit
            if limit and now >= deadline:
                if not words[abi.CONTROL_FAULT]:
                    self.kernel = fibre.run.prepared.name
                    self.launched = fibre.run.prepared.launched
                give_up()
                ok = False
                return True
            return False

        fibre.wait_until(poll, describe)
        fibre.gave_up |= not ok
        return ok

    def _fault(
        self, control: int, team: int, peer: int, address: int, expected: int, seen: int
    ) -> None:
        words = (ctypes.c_int64 * abi.CONTROL_TABLE).from_address(control)
        if words[abi.CONTROL_FAULT]:
            return  # only the device thread writes it: no other claim can come between
        self.waiting, self.signal = self.report(), self.name(address)
        words[abi.CONTROL_FAULT] = abi.FAULT_TIMEOUT
        record = (ctypes.c_int64 * abi.RECORD_WORDS).from_address(words[abi.CONTROL_RECORD])
        record[abi.RECORD_KIND] = abi.FAULT_TIMEOUT
        record[abi.RECORD_TEAM] = team
        record[abi.RECORD_PEER] = peer
        record[abi.RECORD_SIGNAL] = address
        record[abi.RECORD_EXPECTED] = expected
        record[abi.RECORD_SEEN] = seen
        record[abi.RECORD_STATE] = 1
