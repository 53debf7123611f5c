"""Local memory of the CUDA driver, in stream order, and copies."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Sequence

from tdx.runtime.driver.base import COPYING_IN, COPYING_OUT, not_recorded
from tdx.runtime.driver.cuda_device import PER_THREAD_STREAM, call, cu
from tdx.runtime.driver.cuda_staging import LARGE, Staging
from tdx.runtime.driver.cuda_window import DEVICE, PINNED, CudaWindow
from tdx.runtime.errors import HeapExhausted
from tdx.runtime.stream import DEFAULT_STREAM

__all__ = ["CudaMemory"]

_UNIT = 512  # bytes: sizes are rounded up, so that freed memory fits the next allocation
_SPARE_BYTES = 64 << 20  # freed memory that is kept at hand
# memory that only an idle GPU shows to be free; where there is more of it that is waited for
_LATE_BYTES, _LATE_PIECES = 256 << 20, 4096
_KEEP_ALL = 2**63  # bytes a pool keeps for its next allocations


class CudaMemory(CudaWindow):
    """The verbs of local memory. The driver, which is derived from it, has the streams."""

    _streams: set[int]  # our own
    _lasting: set[int]  # those and others that stay
    _side: int  # a stream that no graph records
    _recording: int  # the stream that a graph of ours records; 0: none

    def __init__(self, local_rank: int, local_size: int):
        super().__init__(local_rank, local_size)
        self._staging = Staging(self)
        # freed memory for the next allocation of its size on its stream, without the driver
        self._spare: dict[tuple[int, int], list[int]] = {}
        self._spare_bytes = 0
        # memory that cannot be returned yet, with the stream of its last use
        self._late: deque[tuple[int, int]] = deque()
        self._late_bytes = 0  # about, where threads race

    def _open_pool(self) -> None:
        """A pool of our own: how much it keeps is no other library's business."""
        properties = cu.CUmemPoolProps()
        properties.allocType = PINNED
        properties.location.type = DEVICE
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
            raise not_recorded(what)

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
        if not recorded and (self._late_bytes > _LATE_BYTES or len(self._late) > _LATE_PIECES):
            self._return_idle()
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
                    self._put_late(address, stream)
                self._last_gone()
        elif not self._try_free(address, stream, False):
            self._put_late(address, stream)

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
                addresses = self._spare.get((nbytes, stream), [])
                with contextlib.suppress(IndexError):  # other threads take from it and add to it
                    while True:
                        address = addresses.pop()
                        self._spare_bytes -= nbytes
                        self._free_on(address, stream)
                if of_stream is not None:
                    self._spare.pop((nbytes, stream), None)

    def _put_late(self, address: int, stream: int) -> None:
        self._late_bytes += self._allocated.get(address, 0)
        self._late.append((address, stream))

    def _take_late(self) -> list[tuple[int, int]]:
        """What waits to be returned, no longer in the list: threads must not return it twice."""
        taken = []
        self._late_bytes = 0
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._late.popleft())
        return taken

    def _return_late(self, late: list[tuple[int, int]], idle: bool) -> None:
        while late:
            address, stream = late.pop()
            try:
                returned = self._try_free(address, stream, idle)
            except BaseException:
                for each in (*late, (address, stream)):
                    self._put_late(*each)
                raise
            if not returned:
                self._put_late(address, stream)

    def _return_idle(self) -> None:
        """Wait for the GPU and return what has waited for that; not what came meanwhile."""
        late = self._take_late()
        try:
            self.wait_for_all()
        except BaseException:
            for each in late:
                self._put_late(*each)
            raise
        self._return_late(late, idle=True)

    def _make_room(self) -> None:
        """Return to the device all memory that is not in use."""
        if not self._recording:
            self._return_idle()
            self._free_spare()
            self.wait_for_all()  # the pool trims what it has seen freed
            self._call("trimming the memory pool", cu.cuMemPoolTrimTo, self._pool, 0)

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

    def copy_in(self, dst: int, src: int, nbytes: int, stream: int, keep: object = None) -> None:
        self._refuse_recorded(COPYING_IN, stream)
        if nbytes >= LARGE:
            self._staging.copy_in(dst, src, nbytes, stream, self._copy_in)
        else:
            self._copy_in(dst, src, nbytes, stream)
        self.stream_synchronize(stream)

    def copy_out(self, dst: int, src: int, nbytes: int, stream: int, keep: object = None) -> None:
        self._refuse_recorded(COPYING_OUT, stream)
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
