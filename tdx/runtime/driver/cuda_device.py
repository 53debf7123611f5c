"""The GPU of this rank: the driver library, its errors, the device and its primary context.

With its neighbours cuda_*.py the only importer of cuda.bindings (12.9 and 13). One process
drives one GPU, in its primary context, so that CuPy, JAX and PyTorch in the same process share
memory and streams with us.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

from tdx.runtime.driver.base import DeviceInfo
from tdx.runtime.driver.neighbours import memory_remedies
from tdx.runtime.errors import DriverError, HeapExhausted, TdxError
from tdx.runtime.undo import Undo

try:
    from cuda.bindings import driver as cu
except ImportError as error:
    raise DriverError(
        "this machine shows an NVIDIA GPU, but the package cuda-bindings cannot be imported "
        f'({error}): pip install "cuda-bindings==13.*" (driver 580 or later) or '
        '"cuda-bindings==12.*"; or use backend="host"'
    ) from error

__all__ = [
    "DEFAULT_STREAMS", "LEGACY_STREAMS", "NO_CONTEXT", "PER_THREAD_STREAM", "CudaDevice", "call",
    "cu", "probe",
]  # fmt: skip

_Attribute = cu.CUdevice_attribute
_OUT_OF_MEMORY = 2
LEGACY_STREAMS = (0, 1)  # the context's default stream, which nobody can record
PER_THREAD_STREAM = 2
DEFAULT_STREAMS = (*LEGACY_STREAMS, PER_THREAD_STREAM)
_NOTHING = contextlib.nullcontext()
NO_CONTEXT = (201, 709)  # none is current in the thread, or one that was destroyed
_INSTALL = (
    "install the NVIDIA driver, or pass it into the container (docker run --gpus all); or use "
    'backend="host"'
)
_OLDER = (
    "the driver has no such function; update the NVIDIA driver, or install a cuda-bindings of its "
    "own version"
)
_HINTS = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible; check CUDA_VISIBLE_DEVICES and the container",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the driver's library and its kernel module differ; "
    "restart the machine or reload the module",
    "CUDA_ERROR_NOT_PERMITTED": "no permission on the device; check /dev/nvidia* and the container",
    "CUDA_ERROR_OPERATING_SYSTEM": "the system refused; check /dev/nvidia* and `ulimit -n`",
    "CUDA_ERROR_NOT_INITIALIZED": "a forked process cannot use the GPU of its parent; start it "
    "with the multiprocessing method 'spawn'",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "not possible while a graph is recorded",
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": "a stream that joined the recording must be waited for "
    "by the recorded stream before the recording ends",
}


def call(what: str, verb: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
    """The value of a driver call; `what` says in messages what was tried.

    Raises HeapExhausted when memory ran out, DriverError otherwise.
    """
    try:
        result = verb(*args)
    except RuntimeError as error:
        raise DriverError(f"{what}: {error}: {_OLDER}") from error
    if int(result[0]):
        raise _failure(what, result[0])
    return _value(result)


def _value(result: tuple[Any, ...]) -> Any:
    if len(result) == 2:
        return result[1]
    return result[1:] if len(result) > 2 else None


def _failure(what: str, code: Any) -> TdxError:
    found = cu.cuGetErrorName(code)
    name = found[1].decode() if not int(found[0]) and found[1] else f"error {int(code)}"
    if int(code) == _OUT_OF_MEMORY:
        return HeapExhausted(
            f"{what}: out of device memory ({name}); free arrays. {memory_remedies()}"
        )
    hint = _HINTS.get(name)
    return DriverError(f"{what}: {name}" + (f"; {hint}" if hint else ""))


def device_of(address: int) -> int:
    """The GPU whose memory an address is in; the current one of 0, where an empty array is."""
    if not address:
        return int(call("asking for the current GPU", cu.cuCtxGetDevice))
    ordinal = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call(f"asking where {address:#x} is", cu.cuPointerGetAttribute, ordinal, address))


def _current() -> int:
    """The context that is current in this thread, 0 for none and for one that was destroyed."""
    code, current = cu.cuCtxGetCurrent()
    if int(code) in NO_CONTEXT:
        return 0
    if int(code):
        raise _failure("asking for the context", code)
    return int(current)


class _Using:
    """See CudaDevice.using. Every product of cuBLAS enters it: a generator would take longer."""

    __slots__ = ("_context", "_other")

    def __init__(self, context: Any):
        self._context, self._other = context, 0

    def __enter__(self) -> None:
        current = _current()
        if current != int(self._context):
            call("using the context", cu.cuCtxSetCurrent, self._context)
            self._other = current

    def __exit__(self, *exc: object) -> None:
        if self._other:
            with contextlib.suppress(TdxError):  # that one may be gone
                call("leaving the context", cu.cuCtxSetCurrent, self._other)


_kept: set[str] = set()  # GPUs whose primary context outlives the world
_open: Counter[int] = Counter()  # open drivers of each context
_before: dict[int, Any] = {}  # what was current when the first of them was opened
_forks: list[int] = []  # one for each fork between the process that was started and this one
os.register_at_fork(after_in_child=lambda: _forks.append(os.getpid()))


class CudaDevice:
    """Opens the device; base of the driver.

    `_teardown` holds how to give back what was opened, for `close` and for a failing start.
    """

    info: DeviceInfo

    def __init__(self, place: int, local_size: int):
        """Take the GPU of this place on the host, of those that the process sees, in turn."""
        self._forks = len(_forks)
        self._teardown = Undo()
        count = _start()
        index = place % count
        self._device = call(f"opening GPU {index}", cu.cuDeviceGet, index)
        self.info = _describe(index, self._device)
        self._require(index)
        before = _current()
        self._context = call(
            f"opening the context of GPU {index}", cu.cuDevicePrimaryCtxRetain, self._device
        )
        self._teardown.add(call, "closing the context", cu.cuDevicePrimaryCtxRelease, self._device)
        if before != int(self._context) and not _open[int(self._context)]:
            _before[int(self._context)] = before
        _open[int(self._context)] += 1
        self._holds = True
        self._teardown.add(self._unbind)
        self.bind_thread()

    def bind_thread(self) -> None:
        """Make the GPU current in the calling thread."""
        call("using the context", cu.cuCtxSetCurrent, self._context)

    def keep_context(self) -> None:
        """Hold the GPU's primary context until the process ends."""
        if self.info.identity not in _kept:
            _kept.add(self.info.identity)
            call("keeping the context", cu.cuDevicePrimaryCtxRetain, self._device)

    def _leave(self) -> None:
        """This driver is no reason any more to keep the context current."""
        _open[int(self._context)] -= self._holds
        self._holds = False

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[None]:
        """The thread may use this context here, and has afterwards what it had if that is another.

        For memory that is dropped when the world is closed, which may be anywhere.
        """
        current = _current()
        try:
            yield
        finally:
            if current != int(self._context):
                with contextlib.suppress(TdxError):  # that one may be gone
                    call("leaving the context", cu.cuCtxSetCurrent, current)

    def using(self) -> AbstractContextManager[None]:
        """This GPU is the thread's here: for what belongs to the GPU that is current.

        Another one, as frameworks leave it behind, comes back afterwards.
        """
        return _Using(self._context)

    def wait_elsewhere(self, index: int, stream: int) -> None:
        """Wait for the work on a stream of another GPU; its context may be that of the thread."""
        device = call(f"opening GPU {index}", cu.cuDeviceGet, index)
        context = call(f"opening the context of GPU {index}", cu.cuDevicePrimaryCtxRetain, device)
        current = _current()
        try:
            call("using the context", cu.cuCtxSetCurrent, context)
            call(f"waiting for a stream of GPU {index}", cu.cuStreamSynchronize, stream)
        finally:
            call("leaving the context", cu.cuCtxSetCurrent, current)
            call("closing the context", cu.cuDevicePrimaryCtxRelease, device)

    def at(self, stream: int) -> contextlib.AbstractContextManager[None]:
        """For calls on `stream`: the default streams are those of the GPU that is current."""
        return self.using() if stream in DEFAULT_STREAMS else _NOTHING

    def wait_for_all(self) -> None:
        """Wait until the GPU has nothing to do."""
        with self.using():
            self._call("waiting for the GPU", cu.cuCtxSynchronize)

    def is_current(self) -> bool:
        """Whether this GPU is the thread's."""
        return _current() == int(self._context)

    def _unbind(self) -> None:
        """Leave the thread with the context of before, unless another world uses this one."""
        self._leave()
        if _open[int(self._context)]:
            return
        before = _before.pop(int(self._context), self._context)
        if self.is_current():
            with contextlib.suppress(TdxError):  # that one may be gone
                call("leaving the context", cu.cuCtxSetCurrent, before)

    def _call(self, what: str, verb: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
        """As `call`, in a thread that may never have used the GPU: finalizers run anywhere."""
        try:
            result = verb(*args)
        except RuntimeError as error:
            raise DriverError(f"{what}: {error}: {_OLDER}") from error
        if int(result[0]):
            return self.again(what, result[0], verb, *args)
        return _value(result)

    def again(self, what: str, code: Any, verb: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
        """After a call that failed with `code`: once more if the thread had no GPU, or another."""
        if int(code) not in NO_CONTEXT and self.is_current():
            raise _failure(what, code)
        with self.using():
            return call(what, verb, *args)

    def _forked(self) -> bool:
        """Whether this is a forked copy of the process, which cannot use the GPU."""
        return len(_forks) != self._forks

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
            (_Attribute.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, "memory pools"),
        ):
            if not _attribute(self._device, which):
                raise DriverError(f"GPU {index} ({self.info.name}) has no {what}, which tdx needs")

    def check_links(self, identities: Collection[str]) -> None:
        """Raise DriverError unless this GPU reaches the memory of those that the process sees."""
        for other in range(int(call("counting GPUs", cu.cuDeviceGetCount))):
            peer = call(f"opening GPU {other}", cu.cuDeviceGet, other)
            if other == self.info.index or _identity(peer) not in identities:
                continue
            if not call("asking for a link", cu.cuDeviceCanAccessPeer, self._device, peer):
                raise DriverError(
                    f"GPU {self.info.index} cannot reach the memory of GPU {other} "
                    f"({self.info.name}): tdx needs NVLink or peer access over PCIe; see "
                    "`nvidia-smi topo -p2p r`, and choose GPUs that reach each other with "
                    "CUDA_VISIBLE_DEVICES"
                )


def probe() -> dict[str, Any]:
    """The visible GPUs, for `tdx.tools.facts.devices`; opens no context."""
    numbers = range(_start())
    devices = [call(f"opening GPU {n}", cu.cuDeviceGet, n) for n in numbers]
    gpus = []
    for number, device in enumerate(devices):
        info = _describe(number, device)
        reaches = [
            other
            for other in numbers
            if other != number
            and call("asking for a link", cu.cuDeviceCanAccessPeer, device, devices[other])
        ]
        facts = {"name": info.name, "arch": info.arch, "memory_bytes": info.memory_bytes}
        gpus.append(facts | {"reaches": reaches})
    version = int(call("asking the driver's version", cu.cuDriverGetVersion))
    return {"driver": f"CUDA {_release(version)}", "gpus": gpus}


def _attribute(device: Any, which: Any) -> int:
    return int(call("asking the GPU", cu.cuDeviceGetAttribute, which, device))


def _describe(index: int, device: Any) -> DeviceInfo:
    major = _attribute(device, _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = _attribute(device, _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    name = call("asking the GPU's name", cu.cuDeviceGetName, 128, device)
    memory = call("asking the GPU's memory", cu.cuDeviceTotalMem, device)
    return DeviceInfo(
        backend="cuda",
        index=index,
        name=name.split(b"\0")[0].decode(),
        arch=f"sm_{major}{minor}",
        multiprocessors=_attribute(device, _Attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        memory_bytes=int(memory),
        dlpack_type=2,
        identity=_identity(device),
    )


def _identity(device: Any) -> str:
    # the second version, the only one from CUDA 13 on, tells parts of a divided GPU apart
    identify = getattr(cu, "cuDeviceGetUuid_v2", None) or cu.cuDeviceGetUuid
    return bytes(call("asking the GPU's identity", identify, device).bytes).hex()


def _start() -> int:
    """Start the driver library; the number of visible GPUs, at least 1."""
    try:
        code = cu.cuInit(0)
    except RuntimeError as error:
        raise DriverError(
            f"the CUDA driver library (libcuda.so.1) cannot be loaded: {error}; {_INSTALL}"
        ) from error
    if int(code[0]):
        failure = _failure("starting the CUDA driver", code[0])
        closed = _closed_nodes()
        nodes = f"; user {os.getuid()} may not open {', '.join(closed)}" if closed else ""
        raise DriverError(f"{failure}{nodes}")
    version = int(call("asking the driver's version", cu.cuDriverGetVersion))
    needed = int(cu.CUDA_VERSION)
    if version // 1000 < needed // 1000:
        raise DriverError(
            f"the NVIDIA driver is for CUDA {_release(version)}, older than the installed "
            f"cuda-bindings for CUDA {_release(needed)}: update the driver, or "
            f'pip install "cuda-bindings=={version // 1000}.*"'
        )
    count = int(call("counting GPUs", cu.cuDeviceGetCount))
    if not count:
        raise DriverError(f"the CUDA driver shows {_HINTS['CUDA_ERROR_NO_DEVICE']}")
    return count


def _release(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _closed_nodes() -> list[str]:
    """Device nodes that exist, but not for this user."""
    nodes = [*sorted(glob.glob("/dev/nvidia[0-9]*")), "/dev/nvidiactl", "/dev/nvidia-uvm"]
    return [n for n in nodes if os.path.exists(n) and not os.access(n, os.R_OK | os.W_OK)]
