"""Stock Triton on our GPU and stream, without PyTorch: the driver shim and cached launches.

With triton_driver.py the only place that touches Triton's semi-private hooks. Serves Triton 3.6
to 3.9. `install` makes the shim Triton's active driver; `restore` puts back what was there.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver as StockDriver
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import _allocation

from tdx.runtime.errors import DriverError
from tdx.runtime.triton_driver import install_device_library, remove_device_library

if TYPE_CHECKING:
    from tdx.runtime.driver.cuda import CudaDriver

__all__ = ["Launches", "Shim", "install"]

_CACHE_BYTES = 256 << 20  # what do_bench overwrites to empty the L2 cache


class _Utils:
    """Triton's driver utilities; the first kernel that is loaded keeps the context for good.

    Triton never unloads a kernel and looks them up by source, not by context: a later world would
    launch what had gone with the context of an earlier one.
    """

    def __init__(self, utils: Any, driver: CudaDriver):
        self._utils = utils
        self._driver = driver

    def load_binary(self, *args: Any) -> Any:
        self._driver.keep_context()
        return self._utils.load_binary(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._utils, name)


class _TritonDriver(StockDriver):
    """Triton's CUDA driver with our device and our streams."""

    def __init__(self, driver: CudaDriver):
        # not super().__init__(): that asks PyTorch for device and stream
        try:
            self.utils = _Utils(CudaUtils(), driver)
        except Exception as error:
            raise DriverError(
                f"Triton could not build its launcher ({type(error).__name__}: {error}); it needs "
                "a C compiler and Python's headers: apt-get install gcc python3-dev"
            ) from error
        self.launcher_cls = CudaLauncher
        self._tdx = driver
        arch = int(driver.info.arch.removeprefix("sm_"))
        self._target = GPUTarget("cuda", arch, 32)
        self.get_device_capability = lambda device=0: divmod(arch, 10)
        self.get_current_device = lambda: driver.info.index
        self.get_current_stream = lambda device=0: driver.launch_stream()
        self.set_current_device = lambda device: driver.bind_thread()

    def get_current_target(self) -> GPUTarget:
        return self._target

    @staticmethod
    def is_active() -> bool:
        return True

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", self._tdx.info.index)

    def get_device_interface(self) -> Any:
        driver = self._tdx

        class Event:
            """As torch.cuda.Event, as far as do_bench uses it."""

            def __init__(self, enable_timing: bool = True):
                self.handle = driver.event_create(enable_timing)

            def record(self, stream: Any = None) -> None:
                driver.event_record(self.handle, driver.launch_stream())

            def elapsed_time(self, end: Event) -> float:
                return driver.event_elapsed(self.handle, end.handle)

            def __del__(self) -> None:
                driver.event_destroy(self.handle)

        class Interface:
            pass

        Interface.Event = Event  # type: ignore[attr-defined]
        Interface.synchronize = staticmethod(driver.synchronize)  # type: ignore[attr-defined]
        return Interface

    def get_empty_cache_for_benchmark(self) -> Any:
        stream = self._tdx.launch_stream()
        return self._tdx.alloc(_CACHE_BYTES, stream)

    def clear_cache(self, cache: int) -> None:
        self._tdx.fill(cache, 0, _CACHE_BYTES, self._tdx.launch_stream())


class Shim:
    """What `install` changed in Triton."""

    def __init__(self, driver: CudaDriver):
        self._driver = driver
        active = triton.runtime.driver
        self._previous = getattr(active, "_active", None)
        with _torch_hidden():
            shim = _TritonDriver(driver)
        active.set_active(shim)
        install_device_library()
        self._scratch: dict[int, tuple[int, int]] = {}  # stream -> (address, bytes)
        self._allocator = _allocation._allocator.get()
        triton.set_allocator(self._allocate)

    def _allocate(self, nbytes: int, alignment: int, stream: int | None) -> int:
        """Scratch memory for descriptors a kernel makes; one piece a stream, kept."""
        stream = stream or 0
        address, size = self._scratch.get(stream, (0, 0))
        if size < nbytes:
            if address:
                self._driver.free(address, stream)
            size = max(nbytes, 1 << 20)
            address = self._driver.alloc(size, stream)
            self._scratch[stream] = (address, size)
        return address

    def restore(self) -> None:
        """Undo `install`."""
        for stream, (address, _) in self._scratch.items():
            self._driver.free(address, stream)
        self._scratch.clear()
        remove_device_library()
        triton.set_allocator(self._allocator)
        triton.runtime.driver._active = self._previous


def install(driver: CudaDriver) -> Shim:
    """Make `kernel[grid](...)` run on the driver's GPU and current stream."""
    return Shim(driver)


@contextlib.contextmanager
def _torch_hidden() -> Iterator[None]:
    """Triton 3.6 and 3.7 import an installed torch at the first launch: let them find none."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version >= (3, 8) or "torch" in sys.modules:
        yield
        return
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        native_specialize_impl(BaseBackend, 0, False, True, True)
        yield
    finally:
        if sys.modules.get("torch", 0) is None:
            del sys.modules["torch"]


class Launches:
    """Compiled kernels by what they were specialised on, launched without Triton's binder.

    The binder costs several times the launch itself. Pointers go in as addresses, which also
    spares the launcher a driver call each; what the binder would look at again is in the key.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def launch(
        self, kernel: Any, grid: int, stream: int, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Run `kernel` of `grid` blocks; the current stream must be `stream`."""
        values = [_plain(a) for a in args]
        kinds = tuple(_kind(a, v) for a, v in zip(args, values, strict=True))
        key = (kernel, kinds, *named.items())
        found = self._compiled.get(key)
        if found is None:
            compiled = kernel[(grid,)](*args, **named)
            names = kernel.arg_names[len(args) :]
            constants = tuple(named[n] if n in named else _default(kernel, n) for n in names)
            self._compiled[key] = (
                compiled.run, compiled.function, compiled.packed_metadata, constants,
            )  # fmt: skip
            return
        run, function, metadata, constants = found
        run(grid, 1, 1, stream, function, metadata, None, None, None, *values, *constants)


def _default(kernel: Any, name: str) -> Any:
    return next(p.default for p in kernel.params if p.name == name)


def _plain(value: Any) -> Any:
    pointer = getattr(value, "data_ptr", None)
    if pointer is not None:
        return pointer()
    if type(value) is tuple or hasattr(value, "_fields"):
        return tuple(_plain(item) for item in value)
    return value


def _kind(value: Any, plain: Any) -> Any:
    """What Triton specialises an argument on: pointers by type and alignment, ints by width."""
    if hasattr(value, "data_ptr"):
        return value.dtype, plain % 16 == 0
    if isinstance(value, tuple):
        return tuple(_kind(v, p) for v, p in zip(value, plain, strict=True))
    if isinstance(value, int):
        return -(2**31) <= value < 2**31
    return value
