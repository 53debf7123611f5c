"""Launching tdx's own kernels: arguments are laid out once, a call fills in the addresses.

Triton's own launcher looks at every argument again, which costs several times what the driver
takes for the launch itself. Calls are those of launch.c.
"""

from __future__ import annotations

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
from tdx.runtime.triton_driver_cuda import (
    MAP_BYTES,
    compile_kernel,
    launch_extension,
    tensor_map,
)

if TYPE_CHECKING:
    from tdx.runtime.driver.cuda import CudaDriver

__all__ = ["BoundKernel"]

_INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
_SCRATCH = 2  # pointers that Triton adds to the parameters: unused scratch memory
_KEPT_MAPS = 1024
_VECTOR = 16  # bytes: Triton compiles other code for pointers that are not aligned to this
_launch = launch_extension()
LAUNCH_ADDRESS = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p).value


class BoundKernel(_launch.Launcher):  # type: ignore[name-defined]
    """A kernel with its grid and arguments; see Driver.bind."""

    def __init__(
        self, driver: CudaDriver, kernel: Any, grid: int, pointers: Sequence[Any],
        args: Sequence[Any], named: dict[str, Any],
    ):  # fmt: skip
        super().__init__(LAUNCH_ADDRESS, driver._lasting)
        self._driver = driver
        self._make = (kernel, grid, pointers, args, named)
        self._layouts: dict[int, _Layout] = {}  # by which operands are not aligned
        self._making = threading.Lock()
        self.mark = driver.mark
        self._layout(0)

    def find(self, odd: int) -> Any:
        """The parameters, for launch.c; bit i of `odd`: operand i is not aligned."""
        return self._layout(odd).laid

    def failed(self, code: int, args: tuple[Any, ...]) -> None:
        """After a launch that failed, for launch.c: once more if the thread had another GPU."""
        again = lambda: (cu.CUresult(self.launch(*args)),)  # noqa: E731
        self._driver.again("launching a kernel", cu.CUresult(code), again)

    def prepare(self, *operands: Any) -> None:
        """Compile and load for operands aligned like these, unless that was done."""
        self._layout_for(operands)

    def bare(self, stream: int, *operands: Any) -> Callable[[], Any]:
        """The driver call alone, which repeats one launch: what there is to measure against."""
        layout = self._layout_for(operands)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.blockDimX = layout.grid, layout.threads
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes, config.hStream = layout.shared, cu.CUstream(stream)
        held = [ctypes.create_string_buffer(each, len(each)) for each in layout.filled(operands)]
        table = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        function, start = cu.CUfunction(layout.function), ctypes.addressof(table)
        repeat = functools.partial(cu.cuLaunchKernelEx, config, function, start, 0)
        repeat.held = self, operands, held, table  # type: ignore[attr-defined]  # their memory
        return repeat

    def _layout_for(self, operands: Sequence[Any]) -> _Layout:
        return self._layout(sum((op.address % _VECTOR > 0) << i for i, op in enumerate(operands)))

    def _layout(self, odd: int) -> _Layout:
        """Made at first use."""
        layout = self._layouts.get(odd)
        if layout is None:
            with self._making:
                layout = self._layouts.get(odd) or self._make_layout(odd)
                self._layouts[odd] = layout
        return layout

    def _make_layout(self, odd: int) -> _Layout:
        kernel, grid, pointers, args, named = self._make
        # any addresses do that are aligned like the real ones
        places = [odd >> i & 1 for i in range(len(pointers))]
        leading = [
            kind.at(at) if isinstance(kind, Described) else Pointer(at, kind)
            for at, kind in zip(places, pointers, strict=True)
        ]
        return _Layout(kernel, grid, pointers, [*leading, *args], named, odd)


class _Layout:
    """The compiled kernel for operands of one alignment, and its parameters."""

    def __init__(
        self, kernel: Any, grid: int, pointers: Sequence[Any], args: list[Any],
        named: dict[str, Any], odd: int,
    ):  # fmt: skip
        compiled = compile_kernel(kernel, args, named)
        self._args = args  # the memory of what is an array among them
        self.function, self.grid = compiled.function, grid
        self.threads, self.shared = compiled.threads, compiled.shared_bytes
        expected = iter(compiled.maps)
        self._parameters: list[bytes] = []
        self._operands: list[tuple[int, _Maps | None]] = []  # places among the parameters
        # kinds beyond the arguments are those of constexprs
        for i, (kind, value) in enumerate(zip(compiled.kinds, args, strict=False)):
            maps = None
            place = len(self._parameters)
            if isinstance(value, TensorDescriptor):
                maps = _Maps(pointers[i] if i < len(pointers) else value, next(expected))
                self._parameters.append(bytes(MAP_BYTES))
                self._parameters += map(_word, (*value.shape, *value.strides))
            else:
                self._parameters += _parameters(kind, value)
            if i < len(pointers):
                self._operands.append((place, maps))
            elif maps is not None:
                self._parameters[place] = maps[value.base.data_ptr()]
        self._parameters += [_word(0)] * _SCRATCH
        self._check(compiled.name)
        places, every = zip(*self._operands, strict=True) if self._operands else ((), ())
        self.laid = _launch.Laid(
            self.function, grid, self.threads, self.shared, tuple(self._parameters), odd, places,
            every,
        )  # fmt: skip

    def filled(self, operands: Sequence[Any]) -> list[bytes]:
        """The parameters with these operands, as launch.c fills them in."""
        parameters = list(self._parameters)
        for (place, maps), op in zip(self._operands, operands, strict=True):
            parameters[place] = _word(op.address) if maps is None else maps[op.address]
        return parameters

    def _check(self, name: str) -> None:
        """The driver knows how many parameters the code has, and finishes loading it."""
        function, found, count = cu.CUfunction(self.function), 0, len(self._parameters)
        try:
            while not int(code := cu.cuFuncGetParamInfo(function, found)[0]):
                found += 1
        except RuntimeError:  # a driver before 12.4 cannot be asked
            return
        if code != cu.CUresult.CUDA_ERROR_INVALID_VALUE:  # there is no such parameter
            call("asking for a kernel's parameters", lambda: (code,))
        if found != count:
            raise DriverError(
                f"kernel {name} has {found} parameters where {count} were laid out: this "
                "version of Triton passes arguments in another way"
            )
        call("loading a kernel", cu.cuFuncLoad, function)


class _Maps(dict[int, bytes]):
    """Tensor maps of one parameter by address, encoded when asked for: the last few are kept."""

    def __init__(self, kind: Described | TensorDescriptor, expected: dict[str, Any]):
        self._kind, self._expected = kind, expected

    def __missing__(self, address: int) -> bytes:
        kind = self._kind
        descriptor = kind.at(address) if isinstance(kind, Described) else kind
        encoded = tensor_map(descriptor, self._expected)
        if len(self) >= _KEPT_MAPS:
            for old in list(self)[: len(self) + 1 - _KEPT_MAPS]:  # made before others change it
                self.pop(old, None)
        self[address] = encoded
        return encoded


def _parameters(kind: Any, value: Any) -> Iterator[bytes]:
    """An argument as the kernel's parameters, none if it was compiled in."""
    if isinstance(kind, tuple):
        for pair in zip(kind, value, strict=True):
            yield from _parameters(*pair)
    elif kind == "constexpr":
        return
    elif kind.startswith("*"):
        yield _word(value.data_ptr())
    elif kind in _INTEGERS:
        yield _word(int(value))
    elif kind == "fp32":
        yield struct.pack("<f4x", value)
    else:
        raise DriverError(f"no layout for kernel arguments of type {kind}")


def _word(value: int) -> bytes:
    """8 bytes, of which the driver reads as many as the parameter has."""
    return (value & (1 << 64) - 1).to_bytes(8, "little")
