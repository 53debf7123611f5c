"""Memory of the CUDA driver: the symmetric window's mappings, local memory, copies."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tdx import abi
from tdx.runtime.driver.cuda_device import PER_THREAD_STREAM, CudaDevice, call, cu
from tdx.runtime.driver.cuda_staging import LARGE, Staging
from tdx.runtime.driver.neighbours import memory_remedies
from tdx.runtime.errors import HeapExhausted, InvalidArgument, TdxError, Unsupported
from tdx.runtime.stream import DEFAULT_STREAM

__all__ = ["CudaMemory"]

_FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE_KIND, _FD_KIND = int(_DEVICE), int(_FD)
# what the driver answers for addresses that it does not know, or that cuMemCreate is not behind
_NOT_MAPPED = (1, 500, 800, 801)  # invalid value, not found, not permitted, not supported
_EXPORTABLE = (
    "a GPU can share memory of cuMemCreate with POSIX file descriptors. PyTorch allocates such "
    "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before its first allocation; CuPy "
    "with such an allocator in cupy.cuda.set_allocator; ncclMemAlloc gives it. Not so cudaMalloc "
    "and cudaMallocAsync, and what JAX allocates by default: copy that, world.array(x)"
)
_UNIT = 512  # bytes: sizes are rounded up, so that freed memory fits the next allocation
_SPARE_BYTES = 64 << 20  # freed memory that is kept at hand
_KEEP_ALL = 2**63  # bytes a pool keeps for its next allocations


class CudaMemory(CudaDevice):
    """The verbs of memory. The driver, which is derived from it, has the streams."""

    _closed: bool
    _streams: set[int]  # our own
    _lasting: set[int]  # those and others that stay
    _side: int  # a stream that no graph records
    _recording: int  # the stream that a graph of ours records; 0: none

    def __init__(self, local_rank: int, local_size: int):
        super().__init__(local_rank, local_size)
        self._property = cu.CUmemAllocationProp()
        self._property.type = _PINNED
        self._property.location.type = _DEVICE
        self._property.location.id = self.info.index
        self._property.requestedHandleTypes = _FD
        self._access = cu.CUmemAccessDesc()
        self._access.location.type = _DEVICE
        self._access.location.id = self.info.index
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._staging = Staging(self)
        self._reserved: set[int] = set()
        self._allocated: dict[int, int] = {}  # address -> bytes
        # freed memory for the next allocation of its size on its stream, without the driver
        self._spare: dict[tuple[int, int], list[int]] = {}
        self._spare_bytes = 0
        # memory that cannot be returned yet, with the stream of its last use
        self._late: deque[tuple[int, int]] = deque()

    def _open_pool(self) -> None:
        """A pool of our own: how much it keeps is no other library's business."""
        properties = cu.CUmemPoolProps()
        properties.allocType = _PINNED
        properties.location.type = _DEVICE
        properties.location.id = self.info.index
        self._pool = call("making the memory pool", cu.cuMemPoolCreate, properties)
        self._teardown.add(call, "closing the memory pool", cu.cuMemPoolDestroy, self._pool)
        threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        call(
            "setting up the memory pool",
            cu.cuMemPoolSetAttribute, self._pool, threshold, cu.cuuint64_t(_KEEP_ALL),
        )  # fmt: skip

    def capturing(self, stream: int) -> bool:
        raise NotImplementedError

    def recorded_elsewhere(self, stream: int) -> bool:
        raise NotImplementedError

    def mark(self, stream: int, at: int | None = None) -> None:
        raise NotImplementedError

    def _following(self, stream: int, others: Sequence[int]) -> int:
        raise NotImplementedError

    def stream_synchronize(self, stream: int) -> None:
        raise NotImplementedError

    def _refuse_recorded(self, what: str, stream: int) -> None:
        """What waits for the device cannot be part of a graph."""
        recorded = self.capturing(stream) if self._recording else self.recorded_elsewhere(stream)
        if recorded:
            raise InvalidArgument(
                f"{what} is not possible while a graph is recorded: do it before or after the "
                "`with tdx.graph(...)` block, or the recording of another library"
            )

    # ---- virtual memory: the symmetric window
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
        what = (
            "importing a rank's memory (all ranks must see the GPUs of all: no "
            "CUDA_VISIBLE_DEVICES of one GPU per rank)"
        )
        return int(call(what, cu.cuMemImportFromShareableHandle, fd, _FD))

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
        self.bind_thread()
        result = verb(address)
        if int(result[0]) in _NOT_MAPPED:
            raise Unsupported(f"{what}: it cannot be exported; {_EXPORTABLE}")
        return call(what, lambda: result)

    # ---- local memory
    def alloc(self, nbytes: int, stream: int) -> int:
        nbytes = -(-nbytes // _UNIT) * _UNIT
        spare = self._spare.get((nbytes, stream))
        if spare:
            try:
                address = spare.pop()
            except IndexError:  # another thread got there first
                address = 0
            if address:
                self._spare_bytes -= nbytes
                return address
        # memory must not become part of a graph that is recorded
        recorded = bool(self._recording) or self.recorded_elsewhere(stream)
        taker = self._side if recorded else stream
        try:
            address = self._taken(nbytes, taker)
        except HeapExhausted:
            self._make_room()
            try:
                address = self._taken(nbytes, taker)
            except HeapExhausted as error:
                raise self._exhausted(f"{nbytes} bytes of an array", "free arrays") from error
        self._allocated[address] = nbytes
        if self._recording:
            self._call("waiting for memory", cu.cuStreamSynchronize, self._side)
        return address

    def _taken(self, nbytes: int, stream: int) -> int:
        what, verb = f"allocating {nbytes} bytes", cu.cuMemAllocFromPoolAsync
        with self.at(stream):
            return int(self._call(what, verb, nbytes, self._pool, stream))

    def free(self, address: int, stream: int, others: Sequence[int] = ()) -> None:
        """Return the memory in stream order where the stream lasts, else when all is idle.

        Another one may be gone when a finalizer comes here.
        """
        if self._forked():
            return
        if others and not self._closed:
            stream = self._following(stream, others)
        if self._closed:
            with self._borrowed():
                if not self._try_free(address, stream, True):
                    self._late.append((address, stream))
                self._last_gone()
        elif not self._try_free(address, stream, False):
            self._late.append((address, stream))

    def _try_free(self, address: int, stream: int, idle: bool) -> bool:
        """Give memory back if it can be now; `idle`: no stream of the device has work."""
        if self._recording:
            return False
        if idle:
            self._free_on(address, DEFAULT_STREAM)
            return True
        if stream not in self._streams:
            # threads mean different ones by PER_THREAD_STREAM
            lasts = stream in self._lasting and stream != PER_THREAD_STREAM
            if not lasts or self.recorded_elsewhere(stream):
                return False
        nbytes = self._allocated[address]
        if self._spare_bytes + nbytes <= _SPARE_BYTES:
            self._spare_bytes += nbytes
            key = (nbytes, stream)
            (self._spare.get(key) or self._spare.setdefault(key, [])).append(address)
            return True
        if self.capturing(stream):
            return False
        self._free_on(address, stream)
        return True

    def _free_on(self, address: int, stream: int) -> None:
        with self.at(stream):
            self._call("freeing memory", cu.cuMemFreeAsync, address, stream)
        del self._allocated[address]

    def _free_spare(self, of_stream: int | None = None) -> None:
        """Give spare memory back to the pool, all or that of one stream."""
        for nbytes, stream in list(self._spare):
            if of_stream is None or of_stream == stream:
                for address in self._spare.pop((nbytes, stream)):
                    self._spare_bytes -= nbytes
                    self._free_on(address, stream)

    def _return_late(self, count: int, idle: bool) -> None:
        for _ in range(count):
            with contextlib.suppress(IndexError):  # a finalizer may get there first
                address, stream = self._late.popleft()
                if not self._try_free(address, stream, idle):
                    self._late.append((address, stream))

    def _make_room(self) -> None:
        """Return to the device all memory that is not in use."""
        if not self._recording:
            late = len(self._late)
            self.wait_for_all()
            self._free_spare()
            self._return_late(late, idle=True)
            self.wait_for_all()  # the pool trims what it has seen freed
            self._call("trimming the memory pool", cu.cuMemPoolTrimTo, self._pool, 0)

    def _last_gone(self) -> None:
        """After `close`, the last memory that somebody still held takes the context with it."""
        if self._closed and not (self._allocated or self._reserved):
            self.bind_thread()
            failures = self._teardown.rollback()
            if failures:
                raise failures[0]

    def host_alloc(self, nbytes: int) -> int:
        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        with self.using():
            address = int(self._call(f"pinning {nbytes} bytes", cu.cuMemHostAlloc, nbytes, flags))
        ctypes.memset(address, 0, nbytes)
        return address

    def host_free(self, address: int) -> None:
        self._call("freeing pinned memory", cu.cuMemFreeHost, address)

    # ---- copies
    def copy(self, dst: int, src: int, nbytes: int, stream: int, keep: object = None) -> None:
        with self.at(stream):
            self._call("copying", cu.cuMemcpyAsync, dst, src, nbytes, stream)
        self.mark(stream)

    def copy_in(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._refuse_recorded("copying from the host", stream)
        if nbytes >= LARGE:
            self._staging.copy_in(dst, src, nbytes, stream, self._copy_in)
        else:
            self._copy_in(dst, src, nbytes, stream)
        self.stream_synchronize(stream)

    def copy_out(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._refuse_recorded("copying to the host", stream)
        if nbytes >= LARGE:
            self._staging.copy_out(dst, src, nbytes, stream, self._copy_out)
        else:
            self._copy_out(dst, src, nbytes, stream)
        self.stream_synchronize(stream)

    def read(self, dst: int, src: int, nbytes: int) -> None:
        with self.using():
            self._copy_out(dst, src, nbytes, 0)
            self._call("copying from the GPU", cu.cuStreamSynchronize, 0)

    def _copy_in(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        with self.at(stream):
            self._call("copying to the GPU", cu.cuMemcpyHtoDAsync, dst, src, nbytes, stream)

    def _copy_out(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        with self.at(stream):
            self._call("copying from the GPU", cu.cuMemcpyDtoHAsync, dst, src, nbytes, stream)

    def copy_2d(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        if min(dst_pitch, src_pitch) < width:  # backwards or overlapping rows: one by one
            for row in range(rows):
                self.copy(dst + row * dst_pitch, src + row * src_pitch, width, stream)
            return
        piece = cu.CUDA_MEMCPY2D()
        piece.srcMemoryType = piece.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        piece.srcDevice, piece.srcPitch = src, src_pitch
        piece.dstDevice, piece.dstPitch = dst, dst_pitch
        piece.WidthInBytes, piece.Height = width, rows
        with self.at(stream):
            self._call("copying rows", cu.cuMemcpy2DAsync, piece, stream)
        self.mark(stream)

    def fill(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        with self.at(stream):
            self._call("filling memory", cu.cuMemsetD8Async, dst, value, nbytes, stream)
        self.mark(stream)
