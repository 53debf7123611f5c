"""Launching tdx's own kernels: arguments are laid out once, a call fills in the addresses.

Triton's own launcher looks at every argument again, which costs several times what the driver
takes for the launch itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from triton.tools.tensor_descriptor import TensorDescriptor

from tdx.runtime.driver.base import Described
from tdx.runtime.driver.cuda_device import call, cu
from tdx.runtime.errors import DriverError
from tdx.runtime.faults import Pointer
from tdx.runtime.stream import NOWHERE
from tdx.runtime.triton_driver_cuda import TensorMap, compile_kernel

if TYPE_CHECKING:
    from tdx.runtime.driver.cuda import CudaDriver

__all__ = ["BoundKernel"]

cuLaunchKernelEx = cu.cuLaunchKernelEx
_INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
_SCRATCH = 2  # pointers that Triton adds to the parameters: unused scratch memory
_KEPT_MAPS = 1024
_VECTOR = 16  # bytes: Triton compiles other code for pointers that are not aligned to this


class BoundKernel:
    """A kernel with its grid and arguments; see Driver.bind."""

    def __init__(
        self, driver: CudaDriver, kernel: Any, grid: int, pointers: Sequence[Any],
        args: Sequence[Any], named: dict[str, Any],
    ):  # fmt: skip
        self._driver = driver
        self._lasting = driver._lasting  # which grows and shrinks
        self._make = (kernel, grid, pointers, args, named)
        aligned = (0,) * len(pointers)
        self._layout = self._usual = self._make_layout(aligned)
        self._layouts = {aligned: self._usual}
        self._addresses: list[int] | None = None  # that are filled in in `_layout`
        self._filling = threading.Lock()  # until the driver has taken what was filled in

    def __call__(self, stream: int, *operands: Any) -> None:
        addresses = [op.address for op in operands]
        filling = self._filling
        filling.acquire()  # in half the time of `with`
        try:
            if addresses == self._addresses:
                layout = self._layout
            else:
                low = 0
                for address in addresses:
                    low |= address
                layout = self._layout_for(addresses) if low % _VECTOR else self._usual
                self._addresses = None
                if layout.described:
                    layout.fill(addresses)
                else:
                    layout.values[: len(addresses)] = addresses
                self._layout, self._addresses = layout, addresses
            if stream != layout.stream:
                layout.stream = stream
                layout.config.hStream = cu.CUstream(stream)
            code = cuLaunchKernelEx(*layout.launch)[0]
            if code:
                self._driver.again("launching a kernel", code, cuLaunchKernelEx, *layout.launch)
            if stream not in self._lasting:
                self._driver.mark(stream)
        finally:
            filling.release()

    def prepare(self, *operands: Any) -> None:
        """Compile and load for operands aligned like these, unless that was done."""
        with self._filling:
            self._layout_for([op.address for op in operands])

    def bare(self, stream: int, *operands: Any) -> Callable[[], Any]:
        """The driver call alone, which repeats one launch: what there is to measure against."""
        self(stream, *operands)
        repeat = functools.partial(cuLaunchKernelEx, *self._layout.launch)
        repeat.kernel = self  # type: ignore[attr-defined]  # the launch has addresses in it
        return repeat

    def _layout_for(self, addresses: Sequence[int]) -> _Layout:
        """The layout for operands aligned like these; made at first use."""
        offsets = tuple(1 if address % _VECTOR else 0 for address in addresses)
        layout = self._layouts.get(offsets)
        if layout is None:
            layout = self._layouts[offsets] = self._make_layout(offsets)
        return layout

    def _make_layout(self, offsets: tuple[int, ...]) -> _Layout:
        kernel, grid, pointers, args, named = self._make
        # any addresses do that are aligned like the real ones
        leading = [
            kind.at(at) if isinstance(kind, Described) else Pointer(at, kind)
            for at, kind in zip(offsets, pointers, strict=True)
        ]
        return _Layout(kernel, grid, pointers, [*leading, *args], named)


class _Layout:
    """The compiled kernel for operands of one alignment, and its parameters in memory."""

    def __init__(
        self, kernel: Any, grid: int, pointers: Sequence[Any], args: list[Any],
        named: dict[str, Any],
    ):  # fmt: skip
        compiled = compile_kernel(kernel, args, named)
        self._args = args  # the memory of what is an array among them
        self._function = cu.CUfunction(compiled.function)
        kinds = compiled.kinds[: len(args)]  # the rest are constexprs
        expected = iter(compiled.maps)
        words: list[int] = []
        places = []  # of the arguments among the words
        maps: list[_Maps | None] = []
        for kind, value in zip(kinds, args, strict=True):
            places.append(len(words))
            if isinstance(value, TensorDescriptor):
                maps.append(_Maps(next(expected)))
                words += (0, *value.shape, *value.strides)  # the map, filled in later
            else:
                maps.append(None)
                words += _words(kind, value)
        words += [0] * _SCRATCH
        self._check(compiled.name, len(words))
        self.values = (ctypes.c_int64 * len(words))(*words)
        start = ctypes.addressof(self.values)
        self._table = (ctypes.c_void_p * len(words))(*(start + 8 * i for i in range(len(words))))
        self._maps = maps
        count = len(pointers)
        for place, value, held in zip(places[count:], args[count:], maps[count:], strict=True):
            if held is not None:
                self._table[place] = held.encoded(value.base.data_ptr(), value)
        self.described = any(held is not None for held in maps[:count])
        self._leading = tuple(zip(places[:count], pointers, maps[:count], strict=True))
        self.stream = NOWHERE
        self.config = cu.CUlaunchConfig()
        self.config.gridDimX = grid
        self.config.gridDimY = self.config.gridDimZ = 1
        self.config.blockDimX = compiled.threads
        self.config.blockDimY = self.config.blockDimZ = 1
        self.config.sharedMemBytes = compiled.shared_bytes
        self.launch = (self.config, self._function, ctypes.addressof(self._table), 0)

    def fill(self, addresses: Sequence[int]) -> None:
        """Fill in the leading arguments, some of which are tensor descriptors."""
        for (place, kind, held), address in zip(self._leading, addresses, strict=True):
            if held is None:
                self.values[place] = address
            else:
                self._table[place] = held.encoded(address, kind)

    def _check(self, name: str, count: int) -> None:
        """The driver knows how many parameters the code has, and finishes loading it."""
        found = 0
        with contextlib.suppress(RuntimeError):  # a driver before 12.4 cannot be asked
            while not int(cu.cuFuncGetParamInfo(self._function, found)[0]):
                found += 1
            if found != count:
                raise DriverError(
                    f"kernel {name} has {found} parameters where {count} were laid out: this "
                    "version of Triton passes arguments in another way"
                )
            call("loading a kernel", cu.cuFuncLoad, self._function)


class _Maps:
    """Tensor descriptors of one parameter, encoded: the last few are kept."""

    def __init__(self, expected: dict[str, Any]):
        self._expected = expected
        self._known: dict[int, TensorMap] = {}

    def encoded(self, address: int, kind: Described | TensorDescriptor) -> int:
        """Where the encoded descriptor of memory at `address` is."""
        known = self._known.get(address)
        if known is None:
            if len(self._known) == _KEPT_MAPS:
                del self._known[next(iter(self._known))]
            descriptor = kind.at(address) if isinstance(kind, Described) else kind
            known = self._known[address] = TensorMap(descriptor, self._expected)
        return known.address


def _words(kind: Any, value: Any) -> Iterator[int]:
    """An argument as the 8-byte words in which its parameters are kept, none if compiled in."""
    if isinstance(kind, tuple):
        for pair in zip(kind, value, strict=True):
            yield from _words(*pair)
    elif kind == "constexpr":
        return
    elif kind.startswith("*"):
        yield value.data_ptr()
    elif kind in _INTEGERS:
        yield int(value)
    elif kind == "fp32":
        yield struct.unpack("<I", struct.pack("<f", value))[0]
    else:
        raise DriverError(f"no layout for kernel arguments of type {kind}")
