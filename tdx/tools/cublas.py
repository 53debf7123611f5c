"""cuBLAS through its C interface: the library's product where there is no PyTorch.

It comes with the extra cublas12 or cublas13, or is where the loader looks.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tdx.runtime.errors import DriverError, InvalidArgument

if TYPE_CHECKING:
    from tdx.runtime.array import Array
    from tdx.runtime.world import World

__all__ = ["Cublas", "load"]

_WHEELS = {12: "nvidia-cublas-cu12", 13: "nvidia-cublas"}  # by release of CUDA
# Of cudaDataType_t and cublas_api.h.
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_COMPUTE_32F = 68
_GEMM_DEFAULT = -1
_OP_N = 0
_WORKSPACE = 32 << 20  # what it wants on sm_90, and all others have enough of
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_OPERAND = (_POINTER, _INT, _INT)  # address, type, elements between columns
_ARGUMENTS = {
    "cublasCreate_v2": (_POINTER,),
    "cublasDestroy_v2": (_POINTER,),
    "cublasGetVersion_v2": (_POINTER, _POINTER),
    "cublasSetStream_v2": (_POINTER, _POINTER),
    "cublasSetWorkspace_v2": (_POINTER, _POINTER, ctypes.c_size_t),
    "cublasGemmEx": (
        _POINTER, _INT, _INT, _INT, _INT, _INT, _POINTER, *_OPERAND, *_OPERAND, _POINTER, *_OPERAND,
        _INT, _INT,
    ),
}  # fmt: skip


def load(release: int, folders: Sequence[str] | None = None) -> Any:
    """The library of a release of CUDA, as 13: that of a wheel, else what the loader finds.

    `folders`: where wheels of NVIDIA lie; None: in those of the package `nvidia`. Raises
    DriverError if there is none, or one that cannot be loaded.
    """
    name = f"libcublas.so.{release}"
    found = [str(path) for path in _in_wheels(name, folders)]
    try:
        library = ctypes.CDLL((found or [name])[0])
    except OSError as error:
        wheel = _WHEELS.get(release, "nvidia-cublas")
        raise DriverError(
            f"no {name}: install the extra cublas{release}, or "
            f'pip install "{wheel}=={release}.*" ({error})'
        ) from error
    for verb, types in _ARGUMENTS.items():
        getattr(library, verb).argtypes = types
    library.cublasGetStatusName.argtypes = (_INT,)
    library.cublasGetStatusName.restype = ctypes.c_char_p
    return library


def _in_wheels(name: str, folders: Sequence[str] | None) -> Iterator[Path]:
    """The files of that name: of CUDA 13 in nvidia/cu13/lib, of 12 in nvidia/cublas/lib."""
    if folders is None:
        package = importlib.util.find_spec("nvidia")
        folders = list(package.submodule_search_locations or ()) if package else []
    for folder in folders:
        yield from sorted(Path(folder).glob(f"*/lib/{name}"))


class Cublas:
    """Products on the world's current stream, with float32 sums.

    Attributes
    ----------
    name : str
        With the version.
    """

    def __init__(self, world: World, library: Any):
        """Raises DriverError, with cuBLAS's name and number of what failed, as all of it does."""
        self._world, self._library = world, library
        # of its own it would allocate some in each graph that it is recorded into
        self._workspace = world.empty(_WORKSPACE, "int8", symmetric=False)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._handle = ctypes.c_void_p()
        self._call("starting cuBLAS", "cublasCreate_v2", ctypes.byref(self._handle))
        version = ctypes.c_int()
        self._call("its version", "cublasGetVersion_v2", self._handle, ctypes.byref(version))
        number = version.value
        self.name = f"cuBLAS {number // 10000}.{number // 100 % 100}.{number % 100}"

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """Queue a (M, K) . b (K, N) to out (M, N), all contiguous and of one type.

        Raises InvalidArgument for others, and for a type that cublasGemmEx does not take.
        """
        (m, k), n = a.shape, b.shape[1]
        kinds = {x.dtype.name for x in (a, b, out)}
        if len(kinds) > 1 or not kinds <= _TYPES.keys():
            raise InvalidArgument(
                f"cublasGemmEx is called with one type of {', '.join(_TYPES)} for all, not with "
                f"{', '.join(sorted(kinds))}"
            )
        if not all(x.is_contiguous for x in (a, b, out)):
            raise InvalidArgument("cublasGemmEx is called with contiguous arrays only")
        kind = _TYPES[a.dtype.name]
        self._follow()
        # Its matrices lie column by column: it sees the transposes, and out^T = b^T . a^T.
        self._call(
            f"the product of {a.shape} and {b.shape}", "cublasGemmEx",
            self._handle, _OP_N, _OP_N, n, m, k,
            ctypes.byref(self._one), b.data_ptr(), kind, n, a.data_ptr(), kind, k,
            ctypes.byref(self._zero), out.data_ptr(), kind, n, _COMPUTE_32F, _GEMM_DEFAULT,
        )  # fmt: skip

    def close(self) -> None:
        """End it. The library waits for the GPU."""
        if self._handle:
            self._call("ending cuBLAS", "cublasDestroy_v2", self._handle)
            self._handle = ctypes.c_void_p()

    def _follow(self) -> None:
        """Work on the world's current stream; another stream takes the workspace away."""
        handle, memory = self._handle, self._workspace
        self._call("its stream", "cublasSetStream_v2", handle, self._world.stream.handle)
        self._call(
            "its workspace", "cublasSetWorkspace_v2", handle, memory.data_ptr(), memory.nbytes
        )

    def _call(self, what: str, verb: str, *args: Any) -> None:
        number = getattr(self._library, verb)(*args)
        if number:
            name = (self._library.cublasGetStatusName(number) or b"an unknown status").decode()
            raise DriverError(f"cuBLAS: {what}: {verb} gives {name} ({number})")
