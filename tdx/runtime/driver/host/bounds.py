"""Which memory a kernel may use on the host tier: live arrays, and what it was launched with.

A GPU reports an access beyond all mappings only, and says neither which nor where. Here each one is
looked at before it is made: with the heaps' gaps, one that runs over the end of an array meets
no other array.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from tdx.runtime.driver.host.addresses import Addresses
from tdx.runtime.driver.host.tracebacks import running_verb
from tdx.runtime.errors import InvalidArgument

__all__ = ["Bounds", "Heaps", "address_of", "flat"]

_REMEMBERED = 32  # places that a launch uses in turn
_MASK = "mask what is outside", "mask what is outside"  # before the array, and behind it
_COPY = "begin at one of them", "begin earlier, copy fewer elements"
_REMEDIES = {  # of functions of tdx.language that take no mask
    **dict.fromkeys(("put", "get", "put_signal", "broadcast"), _COPY),
    "notify": (
        "notify one of them, or leave it out with when=False",
        "notify one of them, leave it out with when=False",
    ),
    "wait": ("wait for one of them", "wait for one of them"),
    **dict.fromkeys(("wait_all", "wait_any"), ("begin at one of them", "wait for fewer of them")),
}
_FAR = 1 << 30  # bytes from an argument that an address has nothing to do with


class Heaps(Protocol):
    """The heaps of all ranks: Window."""

    def rank_of(self, address: int) -> tuple[int, int] | None:
        """(rank, offset) of an address in a heap."""

    def block_at(self, address: int) -> tuple[int, int] | None:
        """(address, bytes) of the array in a heap that an address is in."""


class Bounds:
    """What one launch may use; `given` are its arguments."""

    def __init__(self, addresses: Addresses, heaps: Heaps | None, given: dict[str, Any]):
        self._addresses = addresses
        self._heaps = heaps
        self._given = given
        self._spans: list[tuple[int, int]] = []  # used lately: first byte, end
        self._foreign: list[tuple[int, int]] | None = None
        self._unknown = False  # an argument does not say where its memory ends

    def check(self, pointers: np.ndarray, mask: np.ndarray, size: int, access: str) -> None:
        """Raise InvalidArgument if one of the active accesses, of `size` bytes, is outside."""
        if pointers.size == 1:
            low = high = int(pointers.item())
        else:
            low, high = int(pointers.min()), int(pointers.max())
        for start, end in self._spans:
            if start <= low and high + size <= end:
                return
        pointers, mask = np.broadcast_arrays(pointers, mask)
        left = pointers[mask != 0].astype(np.int64)
        for start, end in self._spans:
            left = left[(left < start) | (left > end - size)]
        while left.size:
            address = int(left[0])
            span = self._span(address)
            if span is None and self._unknown:
                in_heaps = self._addresses.in_windows(left)
                if not in_heaps[0]:
                    left = left[in_heaps]
                    continue
            if span is None or address > span[1] - size:
                raise InvalidArgument(self._text(address, size, access))
            if len(self._spans) == _REMEMBERED:
                self._spans.clear()
            self._spans.append(span)
            left = left[(left < span[0]) | (left > span[1] - size)]

    def _span(self, address: int) -> tuple[int, int] | None:
        """First byte and end of the memory that an address is in."""
        block = self._addresses.local.block_at(address)
        if block is None and self._heaps is not None:
            block = self._heaps.block_at(address)
        if block is not None:
            return block[0], block[0] + block[1]
        if self._foreign is None:
            self._foreign = list(self._others())
        return next((span for span in self._foreign if span[0] <= address < span[1]), None)

    def _others(self) -> Iterator[tuple[int, int]]:
        """Memory of arguments that is not tdx's."""
        for _, value in flat("", self._given):
            start = address_of(value)
            if self._addresses.local.block_at(start) or self._in_heap(start):
                continue
            if hasattr(value, "untyped_storage"):  # a tensor, perhaps with strides
                storage = value.untyped_storage()
                yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            elif hasattr(value, "nbytes"):
                yield start, start + int(value.nbytes)
            else:
                self._unknown = True

    def _in_heap(self, address: int) -> bool:
        return self._heaps is not None and self._heaps.rank_of(address) is not None

    def _text(self, address: int, size: int, access: str) -> str:
        """Which element of the nearest argument an access outside of all memory would be."""
        nearest = _FAR
        text = f"{access} address {address:#x}: the kernel was given no memory there"
        for name, value in flat("", self._given):
            base = address_of(value)
            span = self._span(base)
            if span is None:
                continue
            step, copy = self._copy(base, address)
            low, high = span[0] - base, span[1] - base
            beyond = address - base - step
            distance = max(low - beyond, beyond + size - high)
            if distance >= nearest:
                continue
            nearest = distance
            item = getattr(value.dtype, "itemsize", size)
            bytes_at = "" if size == item else f"{size} bytes at "
            number = beyond // item
            text = (
                f"{access} {bytes_at}element {number}{_index(value, number)} of argument {name!r}"
                f"{copy}"
            )
            if distance <= 0:
                text += ": it was made for a team without that rank"
            else:
                before, behind = _REMEDIES.get(running_verb(_REMEDIES), _MASK)
                remedy = before if beyond < low else f"{behind}, or make the array larger"
                text += (
                    f", whose memory has the elements {low // item}..{high // item - 1}: {remedy}"
                )
        return text

    def _copy(self, base: int, address: int) -> tuple[int, str]:
        """Bytes from the copy of an array that is at `base` to the copy near an address."""
        if self._heaps is None:
            return 0, ""
        own, other = self._heaps.rank_of(base), self._heaps.rank_of(address)
        if own is None or other is None or own[0] == other[0]:
            return 0, ""
        return address - other[1] - (base - own[1]), f" of rank {other[0]}"


def _index(value: Any, number: int) -> str:
    """Where an element of a matrix, or of more dimensions, would be."""
    if getattr(value, "is_contiguous", None) is not True or value.ndim < 2 or not value.size:
        return ""
    row, rest = divmod(number, value.size // value.shape[0])
    index = (row, *map(int, np.unravel_index(rest, value.shape[1:])))
    return f", {list(index)} of shape {value.shape},"


def address_of(value: Any) -> int:
    """The address of an argument."""
    # data_ptr() of tdx's own arrays would note a launch
    return int(value._address if hasattr(value, "_address") else value.data_ptr())


def flat(prefix: str, values: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what has an address among launch arguments, also inside of tuples."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        name = f"{prefix}[{key}]" if prefix else str(key)
        if hasattr(value, "_fields"):
            yield from flat("", {f"{name}.{k}": v for k, v in value._asdict().items()})
        elif isinstance(value, tuple):
            yield from flat(name, value)
        elif hasattr(value, "data_ptr"):
            yield name, value
        elif hasattr(value, "block_shape"):  # a tensor descriptor
            yield f"{name}.base", value.base
