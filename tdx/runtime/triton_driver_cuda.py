"""Stock Triton on our GPU and stream, without PyTorch: the driver shim, and compiling ahead.

With triton_driver.py the only place that touches Triton's semi-private hooks. Serves Triton 3.6
to 3.9. `install` makes the shim Triton's active driver; `restore` puts back what was there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver as StockDriver
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils, make_tensordesc_arg
from triton.runtime import _allocation
from triton.runtime.build import compile_module_from_src

from tdx.runtime.errors import DriverError, TdxError, Unsupported
from tdx.runtime.triton_driver import (
    compiled_once,
    install_device_library,
    remove_device_library,
)

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from tdx.runtime.driver.cuda import CudaDriver

__all__ = [
    "MAP_BYTES", "Compiled", "Shim", "compile_kernel", "install", "launch_extension", "tensor_map",
]  # fmt: skip

_CACHE_BYTES = 256 << 20  # what do_bench overwrites to empty the L2 cache
MAP_BYTES = 128  # of the driver's CUtensorMap
_MAP_OPTIONS = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)


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
        with self._driver.using():
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
            raise _no_launcher(error) from error
        launch_extension()
        self.launcher_cls = CudaLauncher
        self._tdx = driver
        arch = int(driver.info.arch.removeprefix("sm_"))
        self._target = GPUTarget("cuda", arch, 32)
        self.get_device_capability = lambda device=0: divmod(arch, 10)
        index = driver.info.index
        self.get_current_device = lambda: index
        self.get_current_stream = driver.launch_stream
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

    def get_empty_cache_for_benchmark(self) -> _Cache:
        return _Cache(self._tdx)

    def clear_cache(self, cache: _Cache) -> None:
        self._tdx.fill(cache.address, 0, _CACHE_BYTES, self._tdx.launch_stream())


class _Cache:
    """Memory as large as a GPU's cache, while do_bench holds it."""

    def __init__(self, driver: CudaDriver):
        stream = driver.launch_stream()
        self.address = driver.alloc(_CACHE_BYTES, stream)
        weakref.finalize(self, driver.free, self.address, stream).atexit = False


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
        self._scratch: dict[int, list[tuple[int, int]]] = {}  # stream -> (address, bytes), growing
        self._allocator: Any = _allocation._allocator.get()
        self._open = True
        triton.set_allocator(self._allocate)

    def enter_thread(self) -> None:
        """Triton knows an allocator for each thread: this one may have none yet."""
        if self._open and isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
            triton.set_allocator(self._allocate)

    def _allocate(self, nbytes: int, alignment: int, stream: int | None) -> int:
        """Scratch memory for descriptors a kernel makes; one piece a stream.

        Outgrown pieces are kept as well: a recorded graph may use them in each replay.
        """
        if not self._open:  # another thread has closed the world
            return int(self._allocator(nbytes, alignment, stream))
        stream = stream or 0
        pieces = self._scratch.setdefault(stream, [])
        size = pieces[-1][1] if pieces else 0
        if size < nbytes:
            size = max(nbytes, 2 * size, 1 << 20)
            pieces.append((self._driver.alloc(size, stream), size))
        return pieces[-1][0]

    def restore(self) -> None:
        """Undo `install`."""
        for stream, pieces in self._scratch.items():
            for address, _ in pieces:
                self._driver.free(address, stream)
        self._scratch.clear()
        self._open = False
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


@dataclass(frozen=True)
class Compiled:
    """A kernel that Triton compiled, loaded into the GPU.

    Attributes
    ----------
    function : int
        The driver's handle.
    threads, shared_bytes : int
        Of a block; shared memory beyond what its code declares.
    kinds : tuple
        Triton's types of the parameters in order, "constexpr" for those that were compiled in,
        and tuples of types for tuples.
    maps : tuple
        How the code expects its tensor descriptors to be encoded, in the order of parameters.
    name : str
    """

    function: int
    threads: int
    shared_bytes: int
    kinds: tuple[Any, ...]
    maps: tuple[dict[str, Any], ...]
    name: str


def tensor_map(descriptor: TensorDescriptor, expected: dict[str, Any]) -> bytes:
    """A tensor descriptor as the driver encodes it; shape and strides follow as parameters.

    `expected`: the entry of Compiled.maps.
    """
    try:
        holder, *_ = make_tensordesc_arg(descriptor, expected, *_MAP_OPTIONS)
    except RuntimeError as error:
        raise DriverError(f"the GPU's driver refuses {descriptor}: {error}") from error
    # the last field of Triton's object
    return ctypes.string_at(id(holder) + type(holder).__basicsize__ - MAP_BYTES, MAP_BYTES)


@functools.cache
def launch_extension() -> Any:
    """launch.c as a module, compiled at first use, as Triton does with its own launchers.

    Raises DriverError where that cannot be done.
    """
    source = (Path(__file__).parent / "driver" / "launch.c").read_text()
    headers = Path(triton.backends.nvidia.__file__).parent / "include"
    try:
        return compile_module_from_src(source, "tdx_launch", include_dirs=[str(headers)])
    except Exception as error:
        raise _no_launcher(error) from error


def _no_launcher(error: Exception) -> DriverError:
    return DriverError(
        f"Triton could not build its launcher ({type(error).__name__}: {error}); it needs a C "
        "compiler and Python's headers: apt-get install gcc python3-dev"
    )


_loaded: dict[tuple[int, str], int] = {}  # by GPU and hash; they stay, as in Triton itself


def compile_kernel(kernel: Any, args: Sequence[Any], named: dict[str, Any]) -> Compiled:
    """Compile and load `kernel` for arguments like these; nothing is launched.

    Raises Unsupported where the GPU cannot run it, DriverError for whatever goes wrong in Triton.
    """
    try:
        with compiled_once(kernel, named):
            compiled = kernel.run(*args, grid=(1,), warmup=True, **named)
        metadata = compiled.metadata
        if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
            raise Unsupported(f"{compiled.name}: kernels with clusters or scratch memory")
        warps, _, shared = compiled.packed_metadata
        active = triton.runtime.driver.active
        device = active.get_current_device()  # a later world of the process may have another one
        function = _loaded.get((device, compiled.hash))
        if function is None:
            most = active.utils.get_device_properties(device)["max_shared_mem"]
            if shared > most:
                raise Unsupported(
                    f"{compiled.name}: a block needs {shared} bytes of shared memory, of which "
                    f"this GPU has {most}; take a smaller tile, or fewer num_stages"
                )
            # not compiled.run: that also builds a launcher in C, which we do not use
            _, function, *_ = active.utils.load_binary(
                compiled.name, compiled.kernel, shared, device
            )
            _loaded[device, compiled.hash] = function
    except TdxError:
        raise
    except Exception as error:
        raise DriverError(
            f"kernel {kernel.__name__} could not be compiled or loaded "
            f"({type(error).__name__}: {error})"
        ) from error
    kinds, maps = tuple(compiled.src.signature.values()), metadata.tensordesc_meta or ()
    return Compiled(int(function), 32 * warps, shared, kinds, tuple(maps), compiled.name)
