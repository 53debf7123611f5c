"""What the runtime asks of a device: one protocol of same-named verbs, one file per vendor.

Addresses, stream, event and graph handles are plain ints. A verb that fails raises DriverError
(or HeapExhausted when memory ran out) and leaves nothing behind. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from triton.tools.tensor_descriptor import TensorDescriptor

from tdx.runtime.errors import InvalidArgument
from tdx.runtime.faults import Pointer

if TYPE_CHECKING:
    from tdx.runtime.stream import Here

__all__ = [
    "COPYING_IN", "COPYING_OUT", "WAITING", "Bound", "Described", "DeviceInfo", "Driver",
    "not_recorded",
]  # fmt: skip

# what waits and so cannot be recorded, with the calls that do it
WAITING = "waiting for the device, as world.synchronize() and world.barrier() do,"
COPYING_IN = "copying from the host, as x.copy_from(a) with a NumPy array does,"
COPYING_OUT = "copying to the host, as x.numpy() does,"


def not_recorded(what: str) -> InvalidArgument:
    """What is raised where `what`, which waits for the device, comes while a graph is recorded."""
    return InvalidArgument(
        f"{what} is not possible while a graph is recorded: do it before or after the "
        "`with tdx.graph(...)` block, or the recording of another library; only kernels, plans, "
        "functions, and copies between tdx arrays are recorded"
    )


class Bound(Protocol):
    """A kernel with its grid and all arguments but the operands (`address`, `owner`)."""

    def __call__(self, stream: int, *operands: Any) -> None:
        """Launch it. One thread at a time may."""

    def prepare(self, *operands: Any) -> None:
        """Load its code for operands aligned like these; else the first launch does.

        Needed before others wait for it: loading may wait for kernels that are running.
        """


@dataclass(frozen=True)
class Described:
    """A leading parameter that a kernel takes as a tensor descriptor.

    Attributes
    ----------
    dtype : np.dtype
    shape, strides : tuple[int, ...]
        Of the memory, in elements; the last stride is 1.
    block : tuple[int, ...]
        What a load of the kernel reads.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def at(self, address: int, owner: object = None) -> TensorDescriptor:
        """The argument for memory at `address`, a multiple of 16."""
        return self.of(Pointer(address, self.dtype, owner))

    def of(self, base: Any) -> TensorDescriptor:
        """The argument for an array."""
        return TensorDescriptor(base, list(self.shape), list(self.strides), list(self.block))


@dataclass(frozen=True)
class DeviceInfo:
    """The device of this rank.

    Attributes
    ----------
    backend : str
        "host", "cuda" or "hip".
    index : int
        Ordinal of the device in its driver.
    name, arch : str
        What the vendor calls it, and the target Triton compiles for ("sm_90", "gfx942", "host").
    multiprocessors : int
        Blocks of a one-block-per-multiprocessor kernel that are resident at once; in a world the
        fewest of all ranks' devices.
    memory_bytes : int
        Device memory; on the host tier this rank's share of the machine's.
    dlpack_type : int
        DLPack device type: 1 CPU, 2 CUDA, 10 ROCm.
    identity : str
        Tells devices of a host apart; empty where ranks may share one.
    """

    backend: str
    index: int
    name: str
    arch: str
    multiprocessors: int
    memory_bytes: int
    dlpack_type: int
    identity: str = ""


class Driver(Protocol):
    """The verbs. `stream` is always the handle of a stream of the same driver."""

    info: DeviceInfo
    here: Here
    gap: int  # bytes to leave unused behind each array of a heap

    def close(self) -> None:
        """Wait for the device, then release everything the driver itself holds."""

    def synchronize(self) -> None:
        """Wait for all streams; raises the error of a kernel that failed."""

    def abandon(self) -> None:
        """Give up queued work where the device can; returns when nothing runs any more."""

    def poke(self, address: int, value: int) -> None:
        """Store a 64-bit word in device memory at once, whatever the streams do; any thread."""

    def set_timeout(self, seconds: float) -> None:
        """Deadline of kernels; 0: none."""

    # ---- virtual memory: the symmetric window
    def granularity(self) -> int:
        """Sizes and offsets of mappings are multiples of this."""

    def default_stride(self) -> int:
        """Distance between the heaps of neighbouring ranks."""

    def mem_create(self, nbytes: int) -> int:
        """Allocate physical memory that can be exported."""

    def mem_export(self, handle: int) -> int:
        """A file descriptor of the memory; the caller closes it."""

    def mem_import(self, fd: int, nbytes: int) -> int:
        """A handle of memory a peer exported; `fd` stays the caller's."""

    def mem_release(self, handle: int) -> None:
        """Drop the handle; mappings keep the memory alive."""

    def addr_reserve(self, nbytes: int) -> int:
        """Reserve addresses without memory behind them."""

    def addr_free(self, address: int, nbytes: int) -> None:
        """Give a reservation back; nothing may be mapped in it any more."""

    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        """Map the memory into a reservation, readable and writable by the own device."""

    def mem_unmap(self, address: int, nbytes: int) -> None:
        """Undo mem_map; the reservation stays."""

    def mem_find(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        """(start, bytes) of the pieces of memory that somebody has mapped behind a range.

        They lie behind one another; the first may begin before the range and the last end after
        it. Unsupported for memory that cannot be exported: says which can.
        """

    def mem_retain(self, address: int) -> int:
        """A handle of the piece at `address`, as mem_create gives one; otherwise as mem_find."""

    # ---- local memory and copies
    def alloc(self, nbytes: int, stream: int) -> int:
        """Local device memory, 256-byte aligned, usable in stream order."""

    def free(self, address: int, stream: int, others: Sequence[int] = ()) -> None:
        """Return local memory once the work queued on `stream` and the others is done."""

    def host_alloc(self, nbytes: int) -> int:
        """Zeroed host memory that kernels can write and the host reads without a call."""

    def host_free(self, address: int) -> None:
        """Return memory of host_alloc."""

    def copy(self, dst: int, src: int, nbytes: int, stream: int, keep: Any = None) -> None:
        """Device to device, own or a peer's memory, by a copy engine; asynchronous.

        `keep` is held until the copy is done, where memory is not freed in stream order.
        """

    def copy_in(self, dst: int, src: int, nbytes: int, stream: int, keep: object = None) -> None:
        """Host memory to the device in stream order; returns when `src` may be reused.

        `keep`: its owner, held until the copy is done where an interrupted call leaves it queued.
        """

    def copy_out(self, dst: int, src: int, nbytes: int, stream: int, keep: object = None) -> None:
        """Device to host memory in stream order; returns when `dst` holds the data.

        `keep`: as for `copy_in`.
        """

    def read(self, dst: int, src: int, nbytes: int) -> None:
        """Device to host memory when no work is queued any more; also after `close`."""

    def copy_2d(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """`rows` pieces of `width` bytes, `pitch` bytes apart; otherwise as copy."""

    def fill(self, dst: int, value: int, nbytes: int, stream: int) -> None:
        """Set bytes; asynchronous."""

    # ---- streams and events
    def stream_create(self, priority: int) -> int:
        """A stream; a lower number is a higher priority."""

    def stream_destroy(self, stream: int) -> None:
        """Destroy it once its work is done."""

    def stream_synchronize(self, stream: int) -> None:
        """Wait for the work of one stream; raises the error of a kernel that failed."""

    def stream_query(self, stream: int) -> bool:
        """Whether all its work is done."""

    def stream_wait(self, stream: int, event: int) -> None:
        """Later work of the stream waits for the event's last record."""

    def event_create(self, timing: bool) -> int: ...

    def event_destroy(self, event: int) -> None: ...

    def event_record(self, event: int, stream: int) -> None: ...

    def event_query(self, event: int) -> bool: ...

    def event_synchronize(self, event: int) -> None: ...

    def event_elapsed(self, start: int, end: int) -> float:
        """Milliseconds between two records of timing events that are done."""

    # ---- other libraries in the process, and their GPUs
    def using(self) -> AbstractContextManager[None]:
        """This GPU is the thread's current one in the block; another one comes back after it."""

    def wait_elsewhere(self, index: int, stream: int) -> None:
        """Wait for the work on a stream of another GPU of this process."""

    # ---- streams of other libraries, which may destroy them and record graphs of their own
    def owns(self, stream: int) -> bool:
        """Whether the driver made the stream, so that nobody else records or destroys it."""

    def mark(self, stream: int, at: int | None = None) -> None:
        """Remember this point, after work on a stream that may be gone when it matters.

        `at`: the stream on which that work is done, if it is another one.
        """

    def is_busy(self) -> bool:
        """Whether work is queued that is not done, as far as can be told; never waits."""

    def left_at(self, stream: int) -> int | None:
        """The event at the last mark, 0 if there is nothing to wait for.

        None: the stream lives as long as the driver; ask the stream.
        """

    def recorded_elsewhere(self, stream: int) -> bool:
        """Whether another library is recording what is queued on the stream."""

    # ---- graphs
    def capture_begin(self, stream: int) -> None:
        """Record what is queued on `stream`, and on streams that join it by events."""

    def capture_end(self, stream: int) -> int:
        """End the recording: a graph."""

    def capturing(self, stream: int) -> bool:
        """Whether work queued on the stream is being recorded."""

    def recording_of(self, stream: int) -> int:
        """The number of the recording that takes what is queued on the stream; 0: none does."""

    def graph_launch(self, graph: int, stream: int) -> None:
        """Queue the recorded work again, in order with `stream`."""

    def graph_destroy(self, graph: int) -> None: ...

    # ---- kernels
    def install(self) -> None:
        """Make `kernel[grid](...)` run here, on the current stream."""

    def uninstall(self) -> None:
        """Restore what Triton had before."""

    def current_stream(self) -> int:
        """Where work of this thread goes that names no stream."""

    def chosen(self) -> int:
        """The stream of the innermost `working_on` of this thread; 0: none."""

    def set_default_stream(self, stream: int) -> None:
        """The world's own stream."""

    def working_on(self, stream: int) -> AbstractContextManager[None]:
        """Makes it this thread's current stream in the block, in which it must be there."""

    def launch_stream(self) -> int:
        """current_stream, for a plain `kernel[grid](...)` that is about to be launched."""

    def instead_of(self, stream: int) -> int:
        """For the world's own stream PyTorch's current one, where PyTorch uses this GPU."""

    def bind(
        self, kernel: Any, grid: int, pointers: Sequence[np.dtype | Described],
        args: Sequence[Any], named: dict[str, Any],
    ) -> Bound:  # fmt: skip
        """One of tdx's own kernels with `grid` blocks, compiled and loaded where there is a GPU.

        `pointers` are the element types of its leading parameters, the operands, or how these are
        described; `args` all other run-time ones, `named` constexprs and options. Its code is that
        for operands at multiples of 16 bytes.
        """

    def resident_blocks(self) -> int:
        """Most blocks of a kernel that may wait for each other."""
