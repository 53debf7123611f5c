"""Somebody else's memory on a GPU: an allocator on cuMemCreate, and DLPack producers over it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tdx.runtime import dlpack

__all__ = ["PIECE", "Allocator", "Producer", "allocated"]

PIECE = 2 << 20  # bytes, the least that is allocated
POSIX_FD, FABRIC = 1, 8  # kinds of handles


class Producer:
    """An array of somebody else on a GPU, and for which streams it was asked."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: Any, device: int):
        self.address, self.shape, self.dtype = address, shape, np.dtype(dtype)
        self.device = (dlpack.CUDA, device)
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> Any:
        self.streams.append(stream)
        strides = dlpack.row_major(self.shape, self.dtype.itemsize)
        return dlpack.capsule(
            self, self.address, self.shape, strides, self.dtype, self.device, max_version
        )


class Allocator:
    """Pieces of memory mapped behind one another, as PyTorch's expandable segments are."""

    def __init__(self, device: int, pieces: int, size: int = PIECE, kinds: int = POSIX_FD):
        from cuda.bindings import driver as cu

        self.cu, self.device, self.nbytes, self.size = cu, device, pieces * size, size
        property_, access = cu.CUmemAllocationProp(), cu.CUmemAccessDesc()
        property_.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for place in (property_.location, access.location):
            place.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            place.id = device
        property_.requestedHandleTypes = cu.CUmemAllocationHandleType(kinds)
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.base = int(self._checked(cu.cuMemAddressReserve(self.nbytes, 0, 0, 0)))
        for at in range(self.base, self.base + self.nbytes, size):
            handle = self._checked(cu.cuMemCreate(size, property_, 0))
            self._checked(cu.cuMemMap(at, size, 0, handle, 0))
            self._checked(cu.cuMemSetAccess(at, size, [access], 1))
            self._checked(cu.cuMemRelease(handle))

    @staticmethod
    def _checked(result: Any) -> Any:
        assert int(result[0]) == 0, result
        return result[1] if len(result) > 1 else None

    def array(self, offset: int, count: int) -> Producer:
        """`count` int32 from byte `offset` on."""
        return Producer(self.base + offset, (count,), np.int32, self.device)

    def free(self) -> None:
        for at in range(self.base, self.base + self.nbytes, self.size):
            self._checked(self.cu.cuMemUnmap(at, self.size))
        self._checked(self.cu.cuMemAddressFree(self.base, self.nbytes))


@contextlib.contextmanager
def allocated(*args: Any, **options: Any) -> Iterator[Allocator]:
    allocator = Allocator(*args, **options)
    yield allocator
    allocator.free()
