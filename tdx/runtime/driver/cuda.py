"""NVIDIA GPUs: the verbs of driver/base.py on the CUDA driver API, through cuda.bindings."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tdx.runtime import triton_driver_cuda
from tdx.runtime.driver.base import WAITING
from tdx.runtime.driver.cuda_device import (
    DEFAULT_STREAMS,
    LEGACY_STREAMS,
    NO_CONTEXT,
    call,
    cu,
)
from tdx.runtime.driver.cuda_memory import CudaMemory
from tdx.runtime.driver.cuda_torch import TorchStream
from tdx.runtime.errors import InvalidArgument, TdxError
from tdx.runtime.stream import NOWHERE, Here, follow, order

if TYPE_CHECKING:
    from tdx.runtime.driver.cuda_kernel import BoundKernel

__all__ = ["CudaDriver"]

_NOT_READY = int(cu.CUresult.CUDA_ERROR_NOT_READY)
_MARKS = 64  # events for streams of others; more while so many have work
_NON_BLOCKING = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
# bindings of CUDA 12 keep the usual name for the function that fails on edges with data
_CAPTURE_INFO = getattr(cu, "cuStreamGetCaptureInfo_v3", cu.cuStreamGetCaptureInfo)


class CudaDriver(CudaMemory):
    """One GPU. Any thread may call; streams of other libraries are fine as `stream`."""

    gap = 0

    def __init__(self, local_rank: int, local_size: int):
        self._streams: set[int] = set()
        self._lasting = set(DEFAULT_STREAMS)  # streams that are there until the driver is closed
        # other streams -> the event after their last work
        self._marks: OrderedDict[int, int] = OrderedDict()
        self._marking = threading.RLock()
        self._events: set[int] = set()
        self._graphs: set[int] = set()
        self._recording = 0
        self._closed = False
        self.here = Here()
        self._default_stream = 0
        self._entered: Counter[int] = Counter()  # streams that threads work on
        self._entering = threading.Lock()
        self._followed: set[int] = set()  # streams of PyTorch on which work has begun
        self._shim: Any = None
        try:
            super().__init__(local_rank, local_size)
            self._torch = TorchStream(self.info.index)
            self._open_pool()
            # for what must pass by the work of all other streams
            self._side = int(call("making a stream", cu.cuStreamCreate, _NON_BLOCKING))
            self._teardown.add(call, "destroying a stream", cu.cuStreamDestroy, self._side)
        except BaseException:
            if hasattr(self, "_teardown"):
                self._teardown.rollback()
            raise

    def close(self) -> None:
        if self._closed or self._forked():
            return
        self.bind_thread()
        failures: list[BaseException] = []

        def attempt(step: Any, *args: Any) -> None:
            try:
                step(*args)
            except TdxError as error:
                failures.append(error)

        self.abandon()
        for graph in list(self._graphs):
            attempt(self.graph_destroy, graph)
        attempt(self._staging.close)
        for event in list(self._events):
            attempt(self.event_destroy, event)
        attempt(self._free_spare)
        for stream in list(self._streams):
            attempt(self._end_stream, stream)
        attempt(self._return_idle)
        self._closed = True
        self._leave()
        attempt(self._last_gone)
        if failures:
            raise failures[0]

    def synchronize(self) -> None:
        if self._recording:
            self._refuse_recorded(WAITING, self._recording)
        self._return_idle()

    def abandon(self) -> None:
        """Kernels end by themselves once the fault word stands; here they are waited for."""
        if self._recording:
            with contextlib.suppress(TdxError):
                self.graph_destroy(self.capture_end(self._recording))
        with contextlib.suppress(TdxError):
            self.wait_for_all()

    def poke(self, address: int, value: int) -> None:
        word = ctypes.c_int64(value)
        source = ctypes.addressof(word)
        self._call("poking", cu.cuMemcpyHtoDAsync, address, source, 8, self._side)
        self._call("poking", cu.cuStreamSynchronize, self._side)

    def set_timeout(self, seconds: float) -> None:
        """Kernels read the deadline from the control block: nothing to do here."""

    # ---- streams and events
    def stream_create(self, priority: int) -> int:
        with self.using():
            made = self._call(
                "making a stream", cu.cuStreamCreateWithPriority, _NON_BLOCKING, priority
            )
        self._streams.add(int(made))
        self._lasting.add(int(made))
        return int(made)

    def stream_destroy(self, stream: int) -> None:
        if stream in self._streams and not self._forked():
            self._lasting.discard(stream)
            try:
                self.mark(stream)  # its work goes on, and others may have to wait for it
            finally:
                self._end_stream(stream)

    def _end_stream(self, stream: int) -> None:
        self._streams.discard(stream)
        self._lasting.discard(stream)
        self._free_spare(stream)
        self._call("destroying a stream", cu.cuStreamDestroy, stream)

    def stream_synchronize(self, stream: int) -> None:
        self._refuse_recorded("waiting for a stream", stream)
        with self.at(stream):
            self._call("waiting for a stream", cu.cuStreamSynchronize, stream)

    def stream_query(self, stream: int) -> bool:
        self._refuse_recorded("asking a stream", stream)
        with self.at(stream):
            return self._ready("asking a stream", cu.cuStreamQuery, stream)

    def stream_wait(self, stream: int, event: int) -> None:
        with self.at(stream):
            self._call("waiting for an event", cu.cuStreamWaitEvent, stream, event, 0)

    def event_create(self, timing: bool) -> int:
        flags = cu.CUevent_flags
        kind = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        with self.using():
            event = int(self._call("making an event", cu.cuEventCreate, kind))
        self._events.add(event)
        return event

    def event_destroy(self, event: int) -> None:
        if event in self._events and not self._forked():
            self._events.discard(event)
            self._call("destroying an event", cu.cuEventDestroy, event)

    def event_record(self, event: int, stream: int) -> None:
        self._call("recording an event", cu.cuEventRecord, event, stream)

    def event_query(self, event: int) -> bool:
        return self._ready("asking an event", cu.cuEventQuery, event)

    def event_synchronize(self, event: int) -> None:
        self._call("waiting for an event", cu.cuEventSynchronize, event)

    def event_elapsed(self, start: int, end: int) -> float:
        return float(self._call("measuring between events", cu.cuEventElapsedTime, start, end))

    def _ready(self, what: str, verb: Any, handle: int) -> bool:
        code = int(verb(handle)[0])
        if code not in (0, _NOT_READY) and (code in NO_CONTEXT or not self.is_current()):
            with self.using():
                code = int(verb(handle)[0])
        if code not in (0, _NOT_READY):
            self.again(what, code, verb, handle)
        return code != _NOT_READY

    # ---- streams of other libraries
    def owns(self, stream: int) -> bool:
        return stream in self._streams

    def mark(self, stream: int, at: int | None = None) -> None:
        at = stream if at is None else at
        if stream in self._lasting or (not self.owns(at) and self.capturing(at)):
            return
        with self._marking:
            event = self._marks.get(stream) or self._new_mark()
            self.event_record(event, at)
            self._marks[stream] = event
            self._marks.move_to_end(stream)

    def is_busy(self) -> bool:
        if self._recording or self._closed:
            return False
        with contextlib.suppress(TdxError):  # what another thread destroys meanwhile
            for stream in [*self._streams, *self._followed]:
                if not self.capturing(stream) and not self.stream_query(stream):
                    return True
            return any(not self.event_query(event) for event in [*self._marks.values()])
        return False

    def left_at(self, stream: int) -> int | None:
        # CUDA gives the handle of a destroyed stream to a new one when its work is done
        if stream in self._lasting or stream in self._entered:
            return None
        return self._marks.get(stream, 0)

    def _following(self, stream: int, others: Sequence[int]) -> int:
        """The stream, once it waits for the others; NOWHERE if it cannot now."""
        if self._recording or stream not in self._lasting:
            return NOWHERE
        lasting = self._lasting.intersection((stream, *others))
        if any(self.recorded_elsewhere(other) for other in lasting):
            return NOWHERE
        for other in others:
            follow(self, other, stream)
        return stream

    def _new_mark(self) -> int:
        """An event; marks that have been reached go, those of the least recent streams first."""
        for stream, event in list(self._marks.items()):
            if len(self._marks) < _MARKS or not self.event_query(event):
                break
            self.event_destroy(self._marks.pop(stream))
        return self.event_create(timing=False)

    def recorded_elsewhere(self, stream: int) -> bool:
        if stream in self._streams or stream in LEGACY_STREAMS or self._recording:
            return False
        return self.capturing(stream)

    # ---- graphs
    def capture_begin(self, stream: int) -> None:
        if self._recording:
            raise InvalidArgument("a graph is being recorded already; end that recording first")
        if stream in DEFAULT_STREAMS:
            raise InvalidArgument(
                "the default stream cannot be recorded: use `with world.on(world.new_stream()):`"
            )
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call("starting to record a graph", cu.cuStreamBeginCapture, stream, mode)
        self._recording = stream
        self.here.launching = None

    def capture_end(self, stream: int) -> int:
        if self._recording != stream:
            raise InvalidArgument("no graph is being recorded on this stream")
        try:
            graph = self._call("ending the recording of a graph", cu.cuStreamEndCapture, stream)
        finally:
            self._recording = 0
            self._return_late(self._take_late(), idle=False)
        try:
            made = int(self._call("making a graph", cu.cuGraphInstantiate, graph, 0))
        finally:
            self._call("ending the recording of a graph", cu.cuGraphDestroy, graph)
        self._graphs.add(made)
        return made

    def capturing(self, stream: int) -> bool:
        status = self._call("asking a stream", cu.cuStreamIsCapturing, stream)
        return status != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

    def recording_of(self, stream: int) -> int:
        if stream in LEGACY_STREAMS or not self.capturing(stream):
            return 0
        return int(self._call("asking a stream", _CAPTURE_INFO, stream)[1])

    def graph_launch(self, graph: int, stream: int) -> None:
        with self.at(stream):
            self._call("launching a graph", cu.cuGraphLaunch, graph, stream)
        self.mark(stream)

    def graph_destroy(self, graph: int) -> None:
        if graph in self._graphs and not self._forked():
            self._graphs.discard(graph)
            self._call("destroying a graph", cu.cuGraphExecDestroy, graph)

    # ---- kernels
    def install(self) -> None:
        self._shim = triton_driver_cuda.install(self)

    def uninstall(self) -> None:
        if self._shim is not None:
            self._shim.restore()
            self._shim = None

    def current_stream(self) -> int:
        try:
            stream = self.here.stream
        except AttributeError:
            stream = self.chosen()
        if stream:
            return stream
        stream = self._default_stream
        return self.instead_of(stream) if "torch" in sys.modules else stream

    def set_default_stream(self, stream: int) -> None:
        self._default_stream = stream

    @contextlib.contextmanager
    def working_on(self, stream: int) -> Iterator[None]:
        here, outer = self.here, self.chosen()
        self.bind_thread()
        here.stream, here.launching = stream, None
        with self._entering:
            self._entered[stream] += 1
        try:
            yield
        finally:
            here.stream, here.launching = outer, None
            with self._entering:
                self._entered[stream] -= 1
                if not self._entered[stream]:
                    del self._entered[stream]
            if not self._closed:
                self.mark(stream)

    def chosen(self) -> int:
        try:
            return self.here.stream
        except AttributeError:  # this thread's first work, which needs the context
            self.bind_thread()
            if self._shim is not None:
                self._shim.enter_thread()
            self.here.stream = 0
            return 0

    def launch_stream(self, device: int = 0) -> int:
        stream = self.current_stream()
        elsewhere = self._recording or self.recorded_elsewhere(stream)
        self.here.launching = None if elsewhere else stream
        return stream

    def instead_of(self, stream: int) -> int:
        if stream != self._default_stream or stream == self._recording:
            return stream
        if stream not in self._streams:  # which is after the end
            return stream
        theirs = self._torch.current()
        if theirs and theirs not in self._followed:
            self._begin_on(theirs)
        return theirs or stream

    def _begin_on(self, stream: int) -> None:
        """From now on work goes to a stream of PyTorch, behind what is on the own one."""
        self._lasting.add(stream)  # PyTorch never destroys its streams
        if not self.recorded_elsewhere(stream):
            order(self, self._default_stream, stream)
            self._followed.add(stream)

    def bind(
        self, kernel: Any, grid: int, pointers: Sequence[Any], args: Any, named: dict[str, Any]
    ) -> BoundKernel:
        from tdx.runtime.driver.cuda_kernel import BoundKernel  # which `install` has compiled

        with self.using():
            return BoundKernel(self, kernel, grid, pointers, args, named)

    def resident_blocks(self) -> int:
        return self.info.multiprocessors
