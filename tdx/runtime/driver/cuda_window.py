"""Memory that ranks share: the CUDA driver's verbs for the symmetric window's mappings."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

from tdx import abi
from tdx.runtime.driver.cuda_device import CudaDevice, call, cu
from tdx.runtime.driver.neighbours import memory_remedies
from tdx.runtime.errors import HeapExhausted, TdxError, Unsupported

__all__ = ["DEVICE", "PINNED", "CudaWindow"]

_FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
DEVICE = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
PINNED = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE_KIND, _FD_KIND = int(DEVICE), int(_FD)
# what the driver answers for addresses that it does not know, or that cuMemCreate is not behind
_NOT_MAPPED = (1, 500, 800, 801)  # invalid value, not found, not permitted, not supported
_EXPORTABLE = (
    "a GPU can share memory of cuMemCreate with POSIX file descriptors. PyTorch allocates such "
    "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before its first allocation; CuPy "
    "with such an allocator in cupy.cuda.set_allocator; ncclMemAlloc gives it. Not so cudaMalloc "
    "and cudaMallocAsync, and what JAX allocates by default: copy that, world.array(x)"
)


class CudaWindow(CudaDevice):
    """The verbs of virtual memory, and what is in use of all memory."""

    _closed: bool

    def __init__(self, local_rank: int, local_size: int):
        super().__init__(local_rank, local_size)
        self._property = cu.CUmemAllocationProp()
        self._property.type = PINNED
        self._property.location.type = DEVICE
        self._property.location.id = self.info.index
        self._property.requestedHandleTypes = _FD
        self._access = cu.CUmemAccessDesc()
        self._access.location.type = DEVICE
        self._access.location.id = self.info.index
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._reserved: set[int] = set()
        self._allocated: dict[int, int] = {}  # local memory: address -> bytes

    def _make_room(self) -> None:
        raise NotImplementedError

    def _last_gone(self) -> None:
        """After `close`, the last memory that somebody still held takes the context with it."""
        if self._closed and not (self._allocated or self._reserved):
            self.bind_thread()
            failures = self._teardown.rollback()
            if failures:
                raise failures[0]

    def granularity(self) -> int:
        option = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(
            call("asking for page sizes", cu.cuMemGetAllocationGranularity, self._property, option)
        )

    def default_stride(self) -> int:
        return max(abi.MIN_STRIDE_BYTES, 2 << (self.info.memory_bytes - 1).bit_length())

    def mem_create(self, nbytes: int) -> int:
        args = (f"allocating {nbytes} bytes for the heap", cu.cuMemCreate, nbytes, self._property)
        try:
            return int(call(*args, 0))
        except HeapExhausted:
            self._make_room()
        try:
            return int(call(*args, 0))
        except HeapExhausted as error:
            remedy = "pass a smaller heap_bytes= to tdx.init"
            raise self._exhausted(f"heap: {nbytes} bytes", remedy) from error

    def _exhausted(self, what: str, remedy: str) -> HeapExhausted:
        free, total = self._call("asking for free memory", cu.cuMemGetInfo)
        return HeapExhausted(
            f"{what}: out of device memory, {free} of {total} bytes are free; {remedy}. "
            f"{memory_remedies()}"
        )

    def mem_export(self, handle: int) -> int:
        return int(call("exporting memory", cu.cuMemExportToShareableHandle, handle, _FD, 0))

    def mem_import(self, fd: int, nbytes: int) -> int:
        return int(call("importing a rank's memory", cu.cuMemImportFromShareableHandle, fd, _FD))

    def mem_release(self, handle: int) -> None:
        call("releasing memory", cu.cuMemRelease, handle)

    def addr_reserve(self, nbytes: int) -> int:
        what = f"reserving {nbytes} bytes of addresses"
        address = int(call(what, cu.cuMemAddressReserve, nbytes, self.granularity(), 0, 0))
        self._reserved.add(address)
        return address

    def addr_free(self, address: int, nbytes: int) -> None:
        if self._forked():
            return
        self._reserved.discard(address)
        with self._borrowed():
            try:
                call("giving addresses back", cu.cuMemAddressFree, address, nbytes)
            finally:
                self._last_gone()

    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        call("mapping memory", cu.cuMemMap, address, nbytes, 0, handle, 0)
        try:
            # a peer's memory needs access rights for the own device just as the own does
            what = (
                "gaining access to a rank's memory (GPUs that cannot reach each other? see "
                "`nvidia-smi topo -p2p r`)"
            )
            call(what, cu.cuMemSetAccess, address, nbytes, [self._access], 1)
        except BaseException:
            with contextlib.suppress(TdxError):
                self.mem_unmap(address, nbytes)
            raise

    def mem_unmap(self, address: int, nbytes: int) -> None:
        if not self._forked():
            call("unmapping memory", cu.cuMemUnmap, address, nbytes)

    def mem_find(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        pieces = []
        at = address
        while at < address + nbytes:
            what = f"looking up the memory at {at:#x}"
            start, size = self._foreign(what, cu.cuMemGetAddressRange, at)
            pieces.append((int(start), int(size)))
            at = int(start) + int(size)
        self.mem_release(self.mem_retain(address))
        return pieces

    def mem_retain(self, address: int) -> int:
        what = f"exporting the memory at {address:#x}"
        handle = int(self._foreign(what, cu.cuMemRetainAllocationHandle, address))
        try:
            found = self._call(what, cu.cuMemGetAllocationPropertiesFromHandle, handle)
            # as plain numbers: the binding has no name for a combination of kinds
            numbers = (ctypes.c_int * 4).from_address(int(found.getPtr()))
            _, kinds, place, device = numbers
            if place != _DEVICE_KIND or device != self.info.index:
                where = f"on GPU {device}" if place == _DEVICE_KIND else "not on a GPU"
                raise Unsupported(
                    f"{what}: it is {where}, and this rank's world on GPU {self.info.index}"
                )
            if not kinds & _FD_KIND:
                raise Unsupported(f"{what}: it was allocated without descriptors; {_EXPORTABLE}")
        except BaseException:
            self.mem_release(handle)
            raise
        return handle

    def _foreign(self, what: str, verb: Callable[[int], tuple[Any, ...]], address: int) -> Any:
        """As `_call`; Unsupported where no exportable memory is mapped at the address."""
        with self.using():
            result = verb(address)
        if int(result[0]) in _NOT_MAPPED:
            raise Unsupported(f"{what}: it cannot be exported; {_EXPORTABLE}")
        return call(what, lambda: result)
