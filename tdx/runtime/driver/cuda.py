"""NVIDIA GPUs: the verbs of driver/base.py on the CUDA driver API, through cuda.bindings.

The only importer of cuda.bindings. One process drives one GPU, in its primary context, so that
CuPy, JAX and PyTorch in the same process share memory and streams with us.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

from tdx.runtime.config import config
from tdx.runtime.driver.base import DeviceInfo
from tdx.runtime.errors import DriverError, HeapExhausted

try:
    from cuda.bindings import driver as cu
except ImportError as error:  # pragma: no cover - depends on the installation
    raise DriverError(
        "this machine shows an NVIDIA GPU, but the package cuda-bindings is not installed: "
        'pip install "tdx-kernels[cuda13]" (driver 580 or later) or "tdx-kernels[cuda12]"; or '
        'use backend="host"'
    ) from error

__all__ = ["CudaDriver"]

_FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_Attribute = cu.CUdevice_attribute
_OUT_OF_MEMORY = 2
_HINTS = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible; check CUDA_VISIBLE_DEVICES and the container",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver and the binding differ; update the driver",
    "CUDA_ERROR_INSUFFICIENT_DRIVER": "the driver is older than the binding; update the driver or "
    "install an older cuda-bindings",
    "CUDA_ERROR_NOT_PERMITTED": "no permission on the device; check /dev/nvidia* and the container",
    "CUDA_ERROR_OPERATING_SYSTEM": "the system refused; check /dev/nvidia* and `ulimit -n`",
}


def _check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, or its error with what was tried and what to do."""
    code = int(result[0])
    if code:
        name = _name(result[0])
        if code == _OUT_OF_MEMORY:
            raise HeapExhausted(f"{what}: out of device memory ({name})")
        hint = _HINTS.get(name)
        raise DriverError(f"{what}: {name}" + (f"; {hint}" if hint else ""))
    if len(result) == 2:
        return result[1]
    return result[1:] if len(result) > 2 else None


def _name(code: Any) -> str:
    found = cu.cuGetErrorName(code)
    return found[1].decode() if not int(found[0]) and found[1] else str(code)


class CudaDriver:
    """One GPU. Streams, events and graphs are kept as objects of the binding, known by address."""

    def __init__(self, local_rank: int, local_size: int):
        try:
            _check(cu.cuInit(0), "starting the CUDA driver")
        except RuntimeError as error:
            if isinstance(error, DriverError):
                raise
            raise DriverError(f"the CUDA driver library cannot be loaded: {error}") from error
        count = _check(cu.cuDeviceGetCount(), "counting GPUs")
        shared = config.share_gpu
        if count < local_size and not (count and shared):
            raise DriverError(
                f"{local_size} ranks on this host, {count} GPU(s) visible: start at most {count} "
                "ranks, widen CUDA_VISIBLE_DEVICES, or set TDX_SHARE_GPU=1 to share it"
            )
        index = local_rank % count
        self._device = _check(cu.cuDeviceGet(index), f"opening GPU {index}")
        self._context = _check(
            cu.cuDevicePrimaryCtxRetain(self._device), f"opening the context of GPU {index}"
        )
        _check(cu.cuCtxSetCurrent(self._context), "using the context")
        self.info = self._describe(index)
        self._require(index)
        self._property = self._allocation(index)
        self._access = cu.CUmemAccessDesc()
        self._access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = index
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._pool = _check(cu.cuDeviceGetDefaultMemPool(self._device), "finding the memory pool")
        threshold = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        _check(
            cu.cuMemPoolSetAttribute(self._pool, threshold, cu.cuuint64_t(2**63)),
            "setting the memory pool",
        )
        self._handles: dict[int, Any] = {}  # physical memory
        self._next = iter(range(1, 1 << 62))
        self._streams: dict[int, Any] = {}
        self._events: dict[int, Any] = {}
        self._graphs: dict[int, tuple[Any, Any]] = {}
        self._current = threading.local()
        self._default_stream = 0
        self._closed = False
        # memory that is freed while a graph is recorded must not become part of the graph
        self._captures = 0
        self._freed_in_capture: list[tuple[int, int]] = []
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._poke_stream = _check(cu.cuStreamCreate(flags), "making a stream")
        self._shim: Any = None

    def _attribute(self, which: Any) -> int:
        return int(_check(cu.cuDeviceGetAttribute(which, self._device), "asking the GPU"))

    def _describe(self, index: int) -> DeviceInfo:
        major = self._attribute(_Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(_Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        name = _check(cu.cuDeviceGetName(128, self._device), "asking the GPU's name")
        uuid = _check(cu.cuDeviceGetUuid(self._device), "asking the GPU's identity")
        return DeviceInfo(
            backend="cuda",
            index=index,
            name=name.split(b"\0")[0].decode(),
            arch=f"sm_{major}{minor}",
            multiprocessors=self._attribute(_Attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            memory_bytes=int(_check(cu.cuDeviceTotalMem(self._device), "asking its memory")),
            dlpack_type=2,
            identity=bytes(uuid.bytes).hex(),
        )

    def _require(self, index: int) -> None:
        for which, what in (
            (
                _Attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                "virtual memory management",
            ),
            (
                _Attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                "memory export by file descriptor",
            ),
        ):
            if not self._attribute(which):
                raise DriverError(f"GPU {index} ({self.info.name}) has no {what}, which tdx needs")

    def _allocation(self, index: int) -> Any:
        prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = index
        prop.requestedHandleTypes = _FD
        return prop

    def close(self) -> None:
        cu.cuCtxSetCurrent(self._context)
        cu.cuCtxSynchronize()
        for graph, executable in self._graphs.values():
            cu.cuGraphExecDestroy(executable)
            cu.cuGraphDestroy(graph)
        self._graphs.clear()
        for event in self._events.values():
            cu.cuEventDestroy(event)
        self._events.clear()
        for stream in self._streams.values():
            cu.cuStreamDestroy(stream)
        self._streams.clear()
        cu.cuStreamDestroy(self._poke_stream)
        self._closed = True
        _check(cu.cuDevicePrimaryCtxRelease(self._device), "closing the context")

    def synchronize(self) -> None:
        _check(cu.cuCtxSynchronize(), "waiting for the GPU")

    def poke(self, address: int, value: int) -> None:
        self.bind_thread()
        word = ctypes.c_int64(value)
        _check(
            cu.cuMemcpyHtoDAsync(address, ctypes.addressof(word), 8, self._poke_stream), "poking"
        )
        _check(cu.cuStreamSynchronize(self._poke_stream), "poking")

    def set_timeout(self, seconds: float) -> None:
        """Kernels read the deadline from the control block: nothing to do here."""

    def bind_thread(self) -> None:
        """Make the GPU current in the calling thread."""
        _check(cu.cuCtxSetCurrent(self._context), "using the context")

    # ---- virtual memory: the symmetric window
    def granularity(self) -> int:
        option = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(
            _check(cu.cuMemGetAllocationGranularity(self._property, option), "asking granularity")
        )

    def default_stride(self) -> int:
        return max(1 << 33, 2 << (self.info.memory_bytes - 1).bit_length())

    def mem_create(self, nbytes: int) -> int:
        try:
            memory = _check(cu.cuMemCreate(nbytes, self._property, 0), f"allocating {nbytes} bytes")
        except HeapExhausted as error:
            free, total = _check(cu.cuMemGetInfo(), "asking free memory")
            raise HeapExhausted(
                f"heap: {nbytes} bytes of device memory cannot be had, {free} of {total} are "
                "free; pass a smaller heap_bytes= to tdx.init, or keep other users of the GPU "
                "from taking all of it (XLA_PYTHON_CLIENT_PREALLOCATE=false for JAX)"
            ) from error
        handle = next(self._next)
        self._handles[handle] = memory
        return handle

    def mem_export(self, handle: int) -> int:
        exported = cu.cuMemExportToShareableHandle(self._handles[handle], _FD, 0)
        return int(_check(exported, "exporting memory"))

    def mem_import(self, fd: int, nbytes: int) -> int:
        memory = _check(cu.cuMemImportFromShareableHandle(fd, _FD), "importing a peer's memory")
        handle = next(self._next)
        self._handles[handle] = memory
        return handle

    def mem_release(self, handle: int) -> None:
        _check(cu.cuMemRelease(self._handles.pop(handle)), "releasing memory")

    def addr_reserve(self, nbytes: int) -> int:
        reserved = cu.cuMemAddressReserve(nbytes, self.granularity(), 0, 0)
        return int(_check(reserved, f"reserving {nbytes} bytes of addresses"))

    def addr_free(self, address: int, nbytes: int) -> None:
        _check(cu.cuMemAddressFree(address, nbytes), "giving addresses back")

    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        _check(cu.cuMemMap(address, nbytes, 0, self._handles[handle], 0), "mapping memory")
        try:
            # a peer's memory needs access rights for the own device just as the own does
            _check(cu.cuMemSetAccess(address, nbytes, [self._access], 1), "gaining access")
        except DriverError as error:
            cu.cuMemUnmap(address, nbytes)
            raise DriverError(
                f"{error}: the GPUs of this host cannot reach each other's memory directly; check "
                "`nvidia-smi topo -p2p r`"
            ) from error

    def mem_unmap(self, address: int, nbytes: int) -> None:
        _check(cu.cuMemUnmap(address, nbytes), "unmapping memory")

    # ---- local memory and copies
    def alloc(self, nbytes: int, stream: int) -> int:
        return int(_check(cu.cuMemAllocAsync(nbytes, stream), f"allocating {nbytes} bytes"))

    def free(self, address: int, stream: int) -> None:
        if self._closed:
            return  # the context was given up, and its memory with it
        if self._captures:
            self._freed_in_capture.append((address, stream))
            return
        # the stream may be gone with its world: the legacy stream then orders after everything
        _check(cu.cuMemFreeAsync(address, stream if stream in self._streams else 0), "freeing")

    def host_alloc(self, nbytes: int) -> int:
        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(_check(cu.cuMemHostAlloc(nbytes, flags), f"pinning {nbytes} bytes"))
        ctypes.memset(address, 0, nbytes)
        return address

    def host_free(self, address: int) -> None:
        _check(cu.cuMemFreeHost(address), "freeing pinned memory")

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        _check(cu.cuMemcpyAsync(dst, src, nbytes, stream), "copying")

    def copy_in(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        _check(cu.cuMemcpyHtoDAsync(dst, src, nbytes, stream), "copying to the GPU")
        self.stream_synchronize(stream)

    def copy_out(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        _check(cu.cuMemcpyDtoHAsync(dst, src, nbytes, stream), "copying from the GPU")
        self.stream_synchronize(stream)

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
        _check(cu.cuMemcpy2DAsync(piece, stream), "copying rows")

    def fill(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        _check(cu.cuMemsetD8Async(dst, value, nbytes, stream), "filling memory")

    # ---- streams and events
    def stream_create(self, priority: int) -> int:
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = _check(cu.cuStreamCreateWithPriority(flags, priority), "making a stream")
        self._streams[int(stream)] = stream
        return int(stream)

    def stream_destroy(self, stream: int) -> None:
        known = self._streams.pop(stream, None)
        if known is not None:
            _check(cu.cuStreamDestroy(known), "destroying a stream")

    def stream_synchronize(self, stream: int) -> None:
        _check(cu.cuStreamSynchronize(stream), "waiting for a stream")

    def stream_query(self, stream: int) -> bool:
        code = cu.cuStreamQuery(stream)
        if int(code[0]) == int(cu.CUresult.CUDA_ERROR_NOT_READY):
            return False
        _check(code, "asking a stream")
        return True

    def stream_wait(self, stream: int, event: int) -> None:
        _check(cu.cuStreamWaitEvent(stream, event, 0), "waiting for an event")

    def event_create(self, timing: bool) -> int:
        flags = cu.CUevent_flags
        kind = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        event = _check(cu.cuEventCreate(kind), "making an event")
        self._events[int(event)] = event
        return int(event)

    def event_destroy(self, event: int) -> None:
        known = self._events.pop(event, None)
        if known is not None:
            _check(cu.cuEventDestroy(known), "destroying an event")

    def event_record(self, event: int, stream: int) -> None:
        _check(cu.cuEventRecord(event, stream), "recording an event")

    def event_query(self, event: int) -> bool:
        code = cu.cuEventQuery(event)
        if int(code[0]) == int(cu.CUresult.CUDA_ERROR_NOT_READY):
            return False
        _check(code, "asking an event")
        return True

    def event_synchronize(self, event: int) -> None:
        _check(cu.cuEventSynchronize(event), "waiting for an event")

    def event_elapsed(self, start: int, end: int) -> float:
        return float(_check(cu.cuEventElapsedTime(start, end), "measuring between events"))

    # ---- graphs
    def capture_begin(self, stream: int) -> None:
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _check(cu.cuStreamBeginCapture(stream, mode), "starting to record a graph")
        self._captures += 1

    def capture_end(self, stream: int) -> int:
        self._captures -= 1
        try:
            graph = _check(cu.cuStreamEndCapture(stream), "ending the recording of a graph")
        finally:
            freed, self._freed_in_capture = self._freed_in_capture, []
            for address, last in freed:
                self.free(address, last)
        executable = _check(cu.cuGraphInstantiate(graph, 0), "making a graph")
        handle = next(self._next)
        self._graphs[handle] = (graph, executable)
        return handle

    def capturing(self, stream: int) -> bool:
        status = _check(cu.cuStreamIsCapturing(stream), "asking a stream")
        return status != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

    def graph_launch(self, graph: int, stream: int) -> None:
        _check(cu.cuGraphLaunch(self._graphs[graph][1], stream), "launching a graph")

    def graph_destroy(self, graph: int) -> None:
        known = self._graphs.pop(graph, None)
        if known is not None:
            cu.cuGraphExecDestroy(known[1])
            cu.cuGraphDestroy(known[0])

    # ---- kernels
    def install(self) -> None:
        from tdx.runtime import triton_driver_cuda

        self._shim = triton_driver_cuda.install(self)
        self._launches = triton_driver_cuda.Launches()

    def uninstall(self) -> None:
        if self._shim is not None:
            self._shim.restore()
            self._shim = None

    def current_stream(self) -> int:
        return getattr(self._current, "stream", self._default_stream)

    def set_current_stream(self, stream: int) -> None:
        if not self._default_stream:
            self._default_stream = stream
        self._current.stream = stream

    def launch_stream(self) -> int:
        """Where a plain launch goes: as current_stream, but to PyTorch's stream if it is in use.

        A program that has PyTorch on the GPU launches kernels on its tensors too; those keep
        PyTorch's stream unless the caller chose one with `world.on`.
        """
        stream = self.current_stream()
        plain = stream == self._default_stream and not self._captures
        torch = sys.modules.get("torch") if plain else None
        if torch is not None and torch.cuda.is_initialized():
            return int(torch._C._cuda_getCurrentRawStream(self.info.index))
        return stream

    def launch(
        self, kernel: Any, grid: int, stream: int, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Run one of our own kernels on `stream`, through the cache of compiled kernels."""
        outer = self.current_stream()
        self._current.stream = stream
        try:
            self._launches.launch(kernel, grid, stream, args, named)
        finally:
            self._current.stream = outer

    def resident_blocks(self) -> int:
        return self.info.multiprocessors
