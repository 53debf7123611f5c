"""cuBLASLt through its C interface, for products that it makes faster than the kernels here.

It comes with the extra cublas12 or cublas13, with PyTorch or JAX for CUDA, or is where the loader
looks. Enumerators and structures are those of cublasLt.h, which does not change their values.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdx.runtime.errors import DriverError

__all__ = ["ALIGNMENT", "Cublas", "Gemm", "Layout", "Unfit", "load", "start"]

_WHEELS = {12: "nvidia-cublas-cu12", 13: "nvidia-cublas"}  # by release of CUDA
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14, "float8_e4m3fn": 28}  # cudaDataType_t
_COMPUTE_32F, _COMPUTE_TF32 = 68, 77
_REFUSALS = (7, 8, 15)  # CUBLAS_STATUS_INVALID_VALUE, ARCH_MISMATCH, NOT_SUPPORTED
_WITH_BIAS = 4  # cublasLtEpilogue_t
_EACH = 3  # cublasLtMatmulMatrixScale_t: a scale for each row of A and column of B
_EACH_SINCE = 120900  # the release that has them
_SUM_IN_FLOAT32 = 2  # cublasLtReductionScheme_t, of parts of K
_NUMBER, _PARTS_OF_K = 0, 2  # cublasLtMatmulAlgoConfigAttributes_t
_SAME_BITS = ("float16", "bfloat16")  # whose sums do not depend on the tile
# cublasLtMatmulDescAttributes_t
_TRANS_A, _TRANS_B, _EPILOGUE, _BIAS = 3, 4, 7, 8
_SCALE_A, _SCALE_B, _FAST_ACCUM, _BIAS_TYPE, _MODE_A, _MODE_B = 17, 18, 25, 26, 31, 32
# cublasLtMatmulPreferenceAttributes_t
_MOST_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_WORKSPACE = 32 << 20  # what it wants on sm_90, and all others have enough of
ALIGNMENT = 16  # bytes at which its operands begin
_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class Unfit(Exception):
    """cuBLAS has no product of this layout."""


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", _Algorithm), ("workspace", _SIZE), ("state", _INT),
        ("waves", ctypes.c_float), ("reserved", _INT * 4),
    )  # fmt: skip


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (_POINTER,),
    "cublasLtDestroy": (_POINTER,),
    "cublasLtMatmulDescCreate": (_POINTER, _INT, _INT),
    "cublasLtMatmulDescDestroy": (_POINTER,),
    "cublasLtMatmulDescSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatrixLayoutCreate": (_POINTER, _INT, ctypes.c_uint64, ctypes.c_uint64,
                                   ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_POINTER,),
    "cublasLtMatmulPreferenceCreate": (_POINTER,),
    "cublasLtMatmulPreferenceDestroy": (_POINTER,),
    "cublasLtMatmulPreferenceSetAttribute": (_POINTER, _INT, _POINTER, _SIZE),
    "cublasLtMatmulAlgoGetHeuristic": (_POINTER,) * 7 + (_INT, _POINTER, _POINTER),
    "cublasLtMatmulAlgoConfigGetAttribute": (_POINTER, _INT, _POINTER, _SIZE, _POINTER),
    "cublasLtMatmul": (_POINTER,) * 14 + (_SIZE, _POINTER),
}  # fmt: skip


def load(release: int, folders: Sequence[str] | None = None) -> Any:
    """The library of a release of CUDA, as 13: that of a wheel, else what the loader finds.

    `folders`: where wheels of NVIDIA lie; None: in those of the package `nvidia`. Raises
    DriverError if there is none, or one that cannot be loaded.
    """
    name = f"libcublasLt.so.{release}"
    found = [str(path) for path in _in_wheels(name, folders)]
    try:
        library = ctypes.CDLL((found or [name])[0])
    except OSError as error:
        wheel = _WHEELS.get(release, "nvidia-cublas")
        raise DriverError(
            f"no {name}: install the extra cublas{release}, or "
            f'pip install "{wheel}=={release}.*" ({error})'
        ) from error
    try:
        for verb, types in _ARGUMENTS.items():
            getattr(library, verb).argtypes = types
        library.cublasLtGetVersion.restype = _SIZE
        library.cublasLtGetStatusName.argtypes = (_INT,)
        library.cublasLtGetStatusName.restype = ctypes.c_char_p
    except AttributeError as error:
        raise DriverError(f"{name} is none that tdx can use: {error}") from error
    return library


def _in_wheels(name: str, folders: Sequence[str] | None) -> Iterator[Path]:
    """The files of that name: of CUDA 13 in nvidia/cu13/lib, of 12 in nvidia/cublas/lib."""
    if folders is None:
        package = importlib.util.find_spec("nvidia")
        folders = list(package.submodule_search_locations or ()) if package else []
    for folder in folders:
        yield from sorted(Path(folder).glob(f"*/lib/{name}"))


@dataclass(frozen=True)
class Layout:
    """A product a (rows, depth) . b (depth, columns) to contiguous c (rows, columns).

    Attributes
    ----------
    rows, columns, depth : int
    dtype, out_dtype : str
        Of a and b, and of c.
    strides : tuple
        Two of a and two of b, of which one of each is 1.
    bias : str or None
        The type of a vector of `columns` elements that is added before the one rounding.
    scales : {None, "one", "each"}
        One float32 for a and one for b, or one for each row of a and column of b.
    fast_accum, tf32 : bool
        Sum float8 less precisely; round float32 operands to tf32.
    """

    rows: int
    columns: int
    depth: int
    dtype: str
    out_dtype: str
    strides: tuple[int, ...]
    bias: str | None = None
    scales: str | None = None
    fast_accum: bool = False
    tf32: bool = False


class Cublas:
    """The library in a context.

    Attributes
    ----------
    name : str
        With the version.
    multiply : callable
        cublasLtMatmul, which gives a status.
    """

    def __init__(self, library: Any):
        """Raises DriverError, with cuBLAS's name and number of what failed, as all of it does."""
        self.library, self.multiply = library, library.cublasLtMatmul
        self.handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self.version = number = int(library.cublasLtGetVersion())
        self.name = f"cuBLAS {number // 10000}.{number // 100 % 100}.{number % 100}"

    def close(self) -> None:
        """End it, when nothing of it runs."""
        if self.handle:
            self.call("cublasLtDestroy", self.handle)
            self.handle = ctypes.c_void_p()

    def call(self, verb: str, *args: Any) -> None:
        """Call a verb of the library."""
        number = getattr(self.library, verb)(*args)
        if number:
            raise self.error(verb, number)

    def error(self, verb: str, number: int) -> DriverError:
        """What is to be raised when a verb gives `number`."""
        name = (self.library.cublasLtGetStatusName(number) or b"an unknown status").decode()
        return DriverError(f"cuBLAS: {verb} gives {name} ({number})")

    def set(self, what: str, thing: ctypes.c_void_p, which: int, value: Any) -> None:
        """Set an attribute of a description."""
        size = ctypes.sizeof(value)
        self.call(f"cublasLt{what}SetAttribute", thing, which, ctypes.byref(value), size)


def start() -> Cublas:
    """cuBLAS of the release that cuda-bindings is of, or else of another; the GPU is current.

    Raises DriverError with the reason why the first cannot be started.
    """
    from tdx.runtime.driver.cuda_device import cu

    first: DriverError | None = None
    for release in dict.fromkeys((int(cu.CUDA_VERSION) // 1000, *sorted(_WHEELS, reverse=True))):
        try:
            return Cublas(load(release))
        except DriverError as error:
            first = first or error
    assert first is not None
    raise first


class Gemm:
    """A product of one layout, ready to be queued.

    Attributes
    ----------
    workspace : int
        Bytes of memory that a call needs, which no other call uses at a time.
    """

    def __init__(self, cublas: Cublas, layout: Layout):
        """Raises Unfit if cuBLAS does not take the layout, DriverError for what fails."""
        if layout.scales == "each" and cublas.version < _EACH_SINCE:
            raise Unfit(f"{cublas.name} has no scales of rows and columns")
        self._cublas, self._layout = cublas, layout
        self._lock = threading.Lock()  # pointers of a call are set one by one
        self._pointers: tuple[int, ...] = ()  # those that are set
        self._things: list[tuple[str, ctypes.c_void_p]] = []
        weakref.finalize(self, _destroy, cublas, self._things).atexit = False
        self._one, self._zero = (ctypes.byref(ctypes.c_float(x)) for x in (1.0, 0.0))
        self._describe()
        self._prefer()
        self.take(self._ask(1)[0])

    def __call__(
        self, stream: int, a: int, b: int, c: int, bias: int, scale_a: int, scale_b: int,
        workspace: int,
    ) -> None:  # fmt: skip
        """Queue it on `stream`; the others are addresses, 0 or any of what there is not."""
        cublas, pointers = self._cublas, (bias, scale_a, scale_b)
        with self._lock:
            if pointers != self._pointers:
                self._point(*pointers)
            number = cublas.multiply(
                cublas.handle, self._product, self._one, b, self._left, a, self._right, self._zero,
                c, self._out, c, self._out, self._algorithm, workspace, self.workspace, stream,
            )  # fmt: skip
        if number:
            raise cublas.error("cublasLtMatmul", number)

    def _point(self, bias: int, scale_a: int, scale_b: int) -> None:
        """Set the pointers that calls may change."""
        self._pointers = ()
        if self._layout.bias:
            self._set(_BIAS, ctypes.c_void_p(bias))
        if self._layout.scales:  # its a is b
            self._set(_SCALE_A, ctypes.c_void_p(scale_b))
            self._set(_SCALE_B, ctypes.c_void_p(scale_a))
        self._pointers = (bias, scale_a, scale_b)

    def _describe(self) -> None:
        """Its matrices lie column by column: it sees transposes, and c^T = b^T . a^T."""
        layout = self._layout
        compute = _COMPUTE_TF32 if layout.tf32 else _COMPUTE_32F
        self._product = self._make("MatmulDesc", compute, _TYPES["float32"])
        m, n, k = layout.rows, layout.columns, layout.depth
        a_row, a_unit, b_row, b_unit = layout.strides
        # of a single line the next one's distance says nothing, but is checked
        left = (n, k, max(n, b_row)) if b_unit == 1 else (k, n, max(k, b_unit))
        right = (k, m, max(k, a_row)) if a_unit == 1 else (m, k, max(m, a_unit))
        kind = _TYPES[layout.dtype]
        self._left, self._right = (self._make("MatrixLayout", kind, *x) for x in (left, right))
        self._out = self._make("MatrixLayout", _TYPES[layout.out_dtype], n, m, n)
        self._set(_TRANS_A, ctypes.c_int(b_unit != 1))
        self._set(_TRANS_B, ctypes.c_int(a_unit != 1))
        if layout.bias:
            self._set(_EPILOGUE, ctypes.c_int(_WITH_BIAS))
            self._set(_BIAS_TYPE, ctypes.c_int(_TYPES[layout.bias]))
        if layout.scales:
            self._set(_FAST_ACCUM, ctypes.c_int8(layout.fast_accum))
        if layout.scales == "each":
            self._set(_MODE_A, ctypes.c_int(_EACH))
            self._set(_MODE_B, ctypes.c_int(_EACH))
        self._point(*(ALIGNMENT,) * 3)  # where they are matters to the choice

    def _prefer(self) -> None:
        self._preference = self._make("MatmulPreference")
        wanted: list[tuple[int, Any]] = [(_MOST_WORKSPACE, ctypes.c_uint64(_WORKSPACE))]
        wanted += [(_REDUCTIONS, ctypes.c_uint32(_SUM_IN_FLOAT32))]
        wanted += [(which, ctypes.c_uint32(ALIGNMENT)) for which in _ALIGNMENTS]
        for which, value in wanted:
            self._cublas.set("MatmulPreference", self._preference, which, value)

    def _ask(self, most: int) -> list[_Found]:
        """Up to so many algorithms, the one that cuBLAS thinks the fastest first."""
        cublas, found, count = self._cublas, (_Found * most)(), ctypes.c_int()
        number = cublas.library.cublasLtMatmulAlgoGetHeuristic(
            cublas.handle, self._product, self._left, self._right, self._out, self._out,
            self._preference, most, found, ctypes.byref(count),
        )  # fmt: skip
        usable = [one for one in found[: count.value] if not one.state]
        if number in _REFUSALS or not (number or usable):
            raise Unfit(f"{cublas.name} has no algorithm for {self._layout}")
        if number:
            raise cublas.error("cublasLtMatmulAlgoGetHeuristic", number)
        return usable

    def alternatives(self, most: int) -> list[_Found]:
        """The algorithm that it takes, then others of the first `most` that give the same bits.

        They are of one number and split K into as many parts, but differ in tiles. That was found
        on an H200 with cuBLAS 13.1: of some 1400 algorithms for 210 products all that split K as
        the first one does gave its bits, and no others did.
        """
        layout = self._layout
        if layout.dtype not in _SAME_BITS or layout.out_dtype != layout.dtype or layout.bias:
            return [self._taken]  # not measured
        known = [*self._taken.algorithm.data]
        try:
            wanted = self._kind(self._taken)
            others = [one for one in self._ask(most) if [*one.algorithm.data] != known]
            return [self._taken, *(one for one in others if self._kind(one) == wanted)]
        except (Unfit, DriverError):  # it takes the one, but says nothing of any
            return [self._taken]

    def _kind(self, found: _Found) -> tuple[int, ...]:
        values = []
        for which in (_NUMBER, _PARTS_OF_K):
            value, size = ctypes.c_uint32(), ctypes.c_size_t()
            at = ctypes.byref(found, _Found.algorithm.offset)
            parts = (ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(size))
            self._cublas.call("cublasLtMatmulAlgoConfigGetAttribute", at, which, *parts)
            values.append(value.value)
        return tuple(values)

    def take(self, found: _Found) -> None:
        """Multiply by this algorithm, one of its alternatives, from now on."""
        self._taken = found
        self._algorithm = ctypes.byref(found, _Found.algorithm.offset)
        self.workspace = found.workspace

    def _make(self, what: str, *args: Any) -> ctypes.c_void_p:
        thing = ctypes.c_void_p()
        self._cublas.call(f"cublasLt{what}Create", ctypes.byref(thing), *args)
        self._things.append((f"cublasLt{what}Destroy", thing))
        return thing

    def _set(self, which: int, value: Any) -> None:
        self._cublas.set("MatmulDesc", self._product, which, value)


def _destroy(cublas: Cublas, things: list[tuple[str, ctypes.c_void_p]]) -> None:
    for verb, thing in things:  # memory of the host
        getattr(cublas.library, verb)(thing)
