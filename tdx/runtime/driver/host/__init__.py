"""The host tier: a device made of this process's own memory and one thread.

A backend like the GPUs', with the same verbs. Real shared memory, real atomics, the same
kernels; programs of a grid are fibres (kernel.py) on one device thread (device.py) that run
Triton's interpreter semantics (interpreter.py, builder.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import triton

from tdx import abi
from tdx.runtime.config import config
from tdx.runtime.driver.base import COPYING_IN, COPYING_OUT, Bound, Described, DeviceInfo
from tdx.runtime.driver.host import interpreter
from tdx.runtime.driver.host.addresses import Addresses
from tdx.runtime.driver.host.bounds import Bounds
from tdx.runtime.driver.host.device import Call, Device
from tdx.runtime.driver.host.executor import HostExecutor
from tdx.runtime.driver.host.kernel import KernelRun, PreparedKernel
from tdx.runtime.driver.host.memory import HostMemory, available_bytes
from tdx.runtime.errors import HeapExhausted, InvalidArgument
from tdx.runtime.faults import Pointer
from tdx.runtime.stream import Here

__all__ = ["HostDriver"]

_STRIDE = 1 << 40  # 1 TiB of addresses a rank: far above any heap, far below the address space
_ALIGNMENT = 256


class HostDriver(HostMemory):
    """The verbs of driver/base.py on the host tier. One is open at a time in a process."""

    gap = 256  # an access that runs over the end of an array meets no other

    def __init__(self, local_rank: int, local_size: int):
        self.info = DeviceInfo(
            backend="host",
            index=local_rank,
            name="CPU (host tier)",
            arch="host",
            multiprocessors=config.host_multiprocessors,
            memory_bytes=available_bytes() // 2 // max(1, local_size),
            dlpack_type=1,
        )
        self._local: dict[int, Any] = {}
        self.here = Here()
        self._default_stream = 0
        self._previous: Any = None
        self.device = Device()
        self.addresses = Addresses()
        self.executor = HostExecutor(self.device, self.addresses)
        self.executor.report = self.device.report = self.waiting
        interpreter.take_over()
        self.device.start()

    def close(self) -> None:
        self.device.stop()

    def synchronize(self) -> None:
        self.device.synchronize()

    def abandon(self) -> None:
        self.device.abandon()

    def default_stride(self) -> int:
        return _STRIDE

    def poke(self, address: int, value: int) -> None:
        ctypes.c_int64.from_address(address).value = value

    def set_timeout(self, seconds: float) -> None:
        """Deadline of programs that spin without `wait`; 0: none."""
        self.device.timeout_s = seconds

    # ---- shared memory, see HostMemory
    def addr_reserve(self, nbytes: int) -> int:
        base = super().addr_reserve(nbytes)
        self.addresses.reserved(base, nbytes)
        return base

    def addr_free(self, address: int, nbytes: int) -> None:
        self.addresses.released(address)
        super().addr_free(address, nbytes)

    # ---- local memory and copies
    def alloc(self, nbytes: int, stream: int) -> int:
        limit = self.info.memory_bytes
        try:
            if nbytes > limit:
                raise MemoryError
            block = (ctypes.c_char * (nbytes + _ALIGNMENT))()
        except MemoryError:
            raise HeapExhausted(
                f"{nbytes} bytes of local memory cannot be had; this rank may use {limit}: free "
                "arrays, or split the work"
            ) from None
        address = -(-ctypes.addressof(block) // _ALIGNMENT) * _ALIGNMENT
        self._local[address] = block
        self.addresses.local.add(address, nbytes, block)
        return address

    def free(self, address: int, stream: int, others: Sequence[int] = ()) -> None:
        block = self._local.pop(address, None)
        if self.device.forked:
            return
        for number in (stream, *others):
            handle = self.device.streams.get(number)
            if block is not None and handle is not None and handle.queue:
                self.device.enqueue(number, lambda: Call(partial(_keep, block)))

    def host_alloc(self, nbytes: int) -> int:
        return self.alloc(nbytes, 0)

    def host_free(self, address: int) -> None:
        self._local.pop(address, None)

    def copy(self, dst: int, src: int, nbytes: int, stream: int, keep: Any = None) -> None:
        self.device.enqueue(stream, lambda: Call(partial(_copy, dst, src, nbytes, keep)))

    def copy_in(self, dst: int, src: int, nbytes: int, stream: int, keep: Any = None) -> None:
        self.device.refuse_recorded(COPYING_IN, stream)
        self._copy_now(dst, src, nbytes, stream, keep)

    def copy_out(self, dst: int, src: int, nbytes: int, stream: int, keep: Any = None) -> None:
        self.device.refuse_recorded(COPYING_OUT, stream)
        self._copy_now(dst, src, nbytes, stream, keep)

    def _copy_now(self, dst: int, src: int, nbytes: int, stream: int, keep: Any) -> None:
        self.copy(dst, src, nbytes, stream, keep)
        self.device.synchronize_stream(stream)

    def read(self, dst: int, src: int, nbytes: int) -> None:
        ctypes.memmove(dst, src, nbytes)

    def copy_2d(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        def rows_of(address: int, pitch: int) -> np.ndarray[Any, Any]:
            low = min(0, pitch * (rows - 1))
            span = abs(pitch) * (rows - 1) + width
            memory = (ctypes.c_char * span).from_address(address + low)
            return np.ndarray((rows, width), np.uint8, memoryview(memory), -low, (pitch, 1))

        def copy() -> None:
            np.copyto(rows_of(dst, dst_pitch), rows_of(src, src_pitch))

        if rows and width:
            self.device.enqueue(stream, lambda: Call(copy))

    def fill(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        self.device.enqueue(stream, lambda: Call(partial(_fill, dst, value, nbytes)))

    # ---- streams and events
    def stream_create(self, priority: int) -> int:
        return self.device.create_stream(priority)

    def stream_destroy(self, stream: int) -> None:
        self.device.destroy_stream(stream)

    def stream_synchronize(self, stream: int) -> None:
        self.device.synchronize_stream(stream)

    def stream_query(self, stream: int) -> bool:
        handle = self.device.streams.get(stream)
        return handle is None or not handle.queue

    def stream_wait(self, stream: int, event: int) -> None:
        self.device.wait_event(stream, event)

    def event_create(self, timing: bool) -> int:
        return self.device.create_event()

    def event_destroy(self, event: int) -> None:
        self.device.events.pop(event, None)

    def event_record(self, event: int, stream: int) -> None:
        self.device.record(event, stream)

    def event_query(self, event: int) -> bool:
        state = self.device.events[event]
        return state.reached >= state.wanted

    def event_synchronize(self, event: int) -> None:
        self.device.wait(lambda: self.event_query(event))

    def event_elapsed(self, start: int, end: int) -> float:
        first, last = self.device.events[start], self.device.events[end]
        if not (first.reached and last.reached):
            raise InvalidArgument("both events must have been recorded and reached")
        return (last.seconds - first.seconds) * 1e3

    # ---- graphs
    def capture_begin(self, stream: int) -> None:
        self.device.capture_begin(stream)

    def capture_end(self, stream: int) -> int:
        return self.device.capture_end(stream)

    def using(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait_elsewhere(self, index: int, stream: int) -> None:
        raise NotImplementedError  # memory of a GPU is refused before

    def owns(self, stream: int) -> bool:
        return stream in self.device.streams

    def mark(self, stream: int, at: int | None = None) -> None:
        """All streams are the driver's own."""

    def is_busy(self) -> bool:
        return any(stream.queue for stream in [*self.device.streams.values()])

    def left_at(self, stream: int) -> int | None:
        return None if stream in self.device.streams else 0

    def recorded_elsewhere(self, stream: int) -> bool:
        return False

    def capturing(self, stream: int) -> bool:
        graph = self.device.capture
        return graph is not None and stream in graph.streams

    def recording_of(self, stream: int) -> int:
        graph = self.device.capture
        return graph.number if graph is not None and stream in graph.streams else 0

    def graph_launch(self, graph: int, stream: int) -> None:
        self.device.launch_graph(graph, stream)

    def graph_destroy(self, graph: int) -> None:
        self.device.graphs.pop(graph, None)

    # ---- kernels
    def install(self) -> None:
        interpreter.set_launcher(self.device, self._launch)
        abi.host_executor = self.executor  # type: ignore[assignment]
        active = triton.runtime.driver
        self._previous = getattr(active, "_active", None)
        active.set_active(interpreter.HostTritonDriver(self.synchronize))

    def uninstall(self) -> None:
        interpreter.set_launcher(None, None)
        abi.host_executor = None
        # what was there before may be nothing at all: Triton then looks for a driver itself
        triton.runtime.driver._active = self._previous

    def current_stream(self) -> int:
        return self.chosen() or self._default_stream

    def chosen(self) -> int:
        return getattr(self.here, "stream", 0)

    def set_default_stream(self, stream: int) -> None:
        self._default_stream = stream

    @contextmanager
    def working_on(self, stream: int) -> Iterator[None]:
        outer, self.here.stream = self.chosen(), stream
        try:
            yield
        finally:
            self.here.stream = outer

    def launch_stream(self, device: int = 0) -> int:
        return self.current_stream()

    def instead_of(self, stream: int) -> int:
        return stream

    def bind(
        self, kernel: Any, grid: int, pointers: Sequence[Any], args: Any, named: dict[str, Any]
    ) -> Bound:
        return _BoundKernel(self, kernel, grid, pointers, args, named)

    def resident_blocks(self) -> int:
        return self.info.multiprocessors

    def waiting(self) -> list[str]:
        """Who waits for what, over all streams."""
        return [
            text
            for stream in list(self.device.streams.values())
            if stream.queue and isinstance(stream.queue[0], KernelRun)
            for text in stream.queue[0].waiting()
        ]

    def _launch(self, prepared: PreparedKernel, options: dict[str, Any]) -> None:
        resident = self.resident_blocks()
        if options.get("launch_cooperative_grid") and prepared.programs > resident:
            raise InvalidArgument(
                f"{prepared.name}: a cooperative grid of {prepared.programs} programs was asked"
                f" for, {resident} are resident at once; launch at most that many"
            )
        device = self.device
        executor, addresses = self.executor, self.addresses

        def run() -> KernelRun:
            bounds = Bounds(addresses, executor.heaps, prepared.given)
            return KernelRun(device, prepared, resident, bounds)

        device.enqueue(self.current_stream(), run)


class _BoundKernel:
    """A kernel with its grid and arguments; see Driver.bind."""

    def __init__(
        self, driver: HostDriver, kernel: Any, grid: int, pointers: Sequence[Any], args: Any,
        named: dict[str, Any],
    ):  # fmt: skip
        self._driver, self._kernel, self._grid = driver, kernel, grid
        self._pointers, self._args, self._named = pointers, args, named

    def __call__(self, stream: int, *operands: Any) -> None:
        given = [
            kind.at(op.address, op.owner)
            if isinstance(kind, Described)
            else Pointer(op.address, kind, op.owner)
            for op, kind in zip(operands, self._pointers, strict=True)
        ]
        with self._driver.working_on(stream):
            self._kernel[(self._grid,)](*given, *self._args, **self._named)

    def prepare(self, *operands: Any) -> None:
        """There is nothing to load."""


def _keep(block: Any) -> None:
    """Holds `block` until the stream reaches this point."""


def _copy(dst: int, src: int, nbytes: int, keep: Any) -> None:
    if nbytes == 4:  # a flag: one store, never torn
        ctypes.c_int32.from_address(dst).value = ctypes.c_int32.from_address(src).value
    else:
        ctypes.memmove(dst, src, nbytes)


def _fill(dst: int, value: int, nbytes: int) -> None:
    ctypes.memset(dst, value, nbytes)
