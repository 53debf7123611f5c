"""DLPack without a framework: memory of ours as capsules, tensors of others as addresses.

A capsule's destructor can run while an exception is pending, and its deleter in any thread, so
neither may be written in Python. NumPy's C code makes the capsule for an array over the address,
which it never reads, and the device and the type are then put in; the address may therefore be
one of a GPU, and the type one NumPy cannot export.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import dtypes
from .errors import InvalidArgument, TdxError, Unsupported

__all__ = [
    "CPU",
    "CUDA",
    "CUDA_HOST",
    "ROCM",
    "ROCM_HOST",
    "Imported",
    "capsule",
    "check_request",
    "described",
    "import_array",
    "numpy_view",
    "row_major",
]

CPU, CUDA, CUDA_HOST, ROCM, ROCM_HOST = 1, 2, 3, 10, 11  # device types
_MAX_VERSION = (1, 3)  # newest version the consumer knows; the layout is that of every 1.x
_READ_ONLY, _COPIED = 1, 2  # flags

_NUMPY_VERSIONED = tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 1)
_TYPESTR = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}  # by size: any type will do


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_UNVERSIONED_NAME, _VERSIONED_NAME = b"dltensor", b"dltensor_versioned"


class _Memory:
    """Base object of a NumPy array over foreign memory: lives until the last user is done."""

    __slots__ = ("__array_interface__", "owner", "released")

    def __init__(self, interface: dict[str, Any], owner: object):
        self.__array_interface__ = interface
        self.owner = owner
        self.released: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.released is not None:
            self.released()


def _carrier(
    owner: object,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    readonly: bool,
) -> np.ndarray[Any, Any]:
    """A NumPy array over the address, of some type of the right size."""
    interface = {
        "data": (address or 1, readonly),  # NumPy takes no null pointer, not even for 0 elements
        "shape": tuple(shape),
        "strides": tuple(strides),
        "typestr": _TYPESTR[itemsize],
        "version": 3,
    }
    return np.asarray(_Memory(interface, owner))


def numpy_view(
    owner: object,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: Any,
    released: Callable[[], None] | None = None,
    readonly: bool = False,
) -> np.ndarray[Any, Any]:
    """A NumPy array over host memory that belongs to `owner`; arguments as for `capsule`."""
    dtype = dtypes.resolve(dtype)
    carrier = _carrier(owner, address, shape, strides, dtype.itemsize, readonly)
    carrier.base.released = released  # type: ignore[union-attr]
    return carrier.view(dtype)


def capsule(
    owner: object,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: Any,
    device: tuple[int, int],
    max_version: tuple[int, int] | None = None,
    readonly: bool = False,
    released: Callable[[], None] | None = None,
) -> Any:
    """A DLPack capsule of memory that belongs to `owner`.

    Parameters
    ----------
    owner
        Kept alive until the consumer has dropped the tensor (or the capsule, if nobody took it).
    address, shape, strides
        The memory; strides in bytes, multiples of the item size, one per dimension.
    dtype, device
        Anything `dtypes.resolve` takes, and DLPack's (device type, device id).
    max_version
        As the consumer passed it to `__dlpack__`. From (1, 0) on the capsule is versioned.
    readonly
        Only a versioned capsule can say so: BufferError otherwise.
    released
        Called once when the consumer is done, in whatever thread that happens, possibly during
        garbage collection: it must not block, allocate from a heap, or raise. Not called if this
        call raises.

    Synchronisation with the consumer's stream is the caller's. Raises DtypeError.
    """
    dtype = dtypes.resolve(dtype)
    versioned = _NUMPY_VERSIONED and max_version is not None and max_version[0] >= 1
    if readonly and not versioned:
        raise BufferError(
            "the array is read-only, which only DLPack 1.0 can express and the consumer asked "
            "for an older version: pass it a copy, or use a newer release of the consumer"
        )
    carrier = _carrier(owner, address, shape, strides, dtype.itemsize, readonly)
    if versioned:
        result = carrier.__dlpack__(max_version=(1, 0))
        pointer = _get_pointer(result, _VERSIONED_NAME)
        tensor = _ManagedVersioned.from_address(pointer).tensor
    else:
        result = carrier.__dlpack__()
        tensor = _Managed.from_address(_get_pointer(result, _UNVERSIONED_NAME)).tensor
    tensor.data = address
    tensor.device = _Device(*device)
    tensor.dtype = _Type(*dtypes.dlpack_type(dtype), 1)
    carrier.base.released = released  # type: ignore[union-attr]
    return result


def check_request(
    device: tuple[int, int], dl_device: tuple[int, int] | None, copy: bool | None
) -> None:
    """Raise BufferError if a consumer's `__dlpack__` arguments ask for a copy or another device."""
    if dl_device is not None and (int(dl_device[0]), int(dl_device[1])) != device:
        raise BufferError(
            f"the array is on DLPack device {device} and cannot be exported to "
            f"{(int(dl_device[0]), int(dl_device[1]))}: copy it there with .numpy() first"
        )
    if copy:
        raise BufferError("export is zero-copy: import with copy=None and copy the result")


class Imported(NamedTuple):
    """A tensor of somebody else, valid while this object (or `owner`) lives.

    Attributes
    ----------
    address : int
        Of the first element (0 is possible for an empty tensor).
    shape, strides : tuple[int, ...]
        Strides in bytes.
    dtype : np.dtype
        In canonical form.
    device : tuple[int, int]
        DLPack's (device type, device id).
    readonly : bool
        The producer says that the memory must not be written.
    owner : object
        Keeps the memory alive; dropping the last reference gives it back to the producer.
    copied : bool
        The producer made a copy for this call: writing into it does not reach the original.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: tuple[int, int]
    readonly: bool
    owner: object
    copied: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps between them not counted."""
        return self.size * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        if 0 in self.shape:
            return True
        expected = row_major(self.shape, self.dtype.itemsize)
        dims = zip(self.shape, self.strides, expected, strict=True)
        return all(extent == 1 or stride == right for extent, stride, right in dims)


def import_array(obj: Any, stream: int | None = None) -> Imported:
    """Take a NumPy array or any DLPack producer, without copying.

    Parameters
    ----------
    obj
        An `np.ndarray`, or an object with `__dlpack__` and `__dlpack_device__`.
    stream
        For tensors on a GPU: native handle of the stream on which the tensor will be used, which
        the producer makes wait for its pending work (0 is the default stream, -1 asks for no
        synchronisation). None: the default stream. Not passed on for tensors in host memory,
        whose producers finish their work first.

    Raises
    ------
    InvalidArgument
        `obj` is not a producer, or one that refuses, whose own error is the cause.
    DtypeError
        An element type tdx does not take.
    """
    if isinstance(obj, np.ndarray):
        return _import_numpy(obj)
    if not hasattr(obj, "__dlpack__") or not hasattr(obj, "__dlpack_device__"):
        raise InvalidArgument(
            f"expected a tdx array, a NumPy array or a DLPack producer, got {described(obj)}; "
            "numpy.asarray converts sequences"
        )
    try:
        device_type, device_id = (int(part) for part in obj.__dlpack_device__())
        arguments = (
            {}
            if device_type in (CPU, CUDA_HOST, ROCM_HOST)
            else {"stream": _protocol_stream(device_type, stream)}
        )
        held = _request(obj, arguments)
    except (TdxError, MemoryError):
        raise
    except Exception as error:  # producers raise what they like
        raise InvalidArgument(
            f"{described(obj)} cannot be read: {type(error).__name__}: {error}; pass a plain copy "
            "of it, or a NumPy array"
        ) from error
    return _parse(held, (device_type, device_id))


@lru_cache(maxsize=1024)
def row_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a contiguous row-major array."""
    strides = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _import_numpy(array: np.ndarray[Any, Any]) -> Imported:
    if type(array) is not np.ndarray and hasattr(array, "mask"):
        raise InvalidArgument(
            f"{described(array)} has a mask, which tdx does not heed; pass x.filled(value), or "
            "x.data without the mask"
        )
    return Imported(
        address=array.__array_interface__["data"][0],
        shape=array.shape,
        strides=array.strides,
        dtype=dtypes.resolve(array.dtype),
        device=(CPU, 0),
        readonly=not array.flags.writeable,
        owner=array,
    )


def _protocol_stream(device_type: int, stream: int | None) -> int:
    """DLPack spells CUDA's default stream 1, because 0 is ambiguous; ROCm's is 0."""
    if stream:
        return stream
    return 1 if device_type == CUDA else 0


def described(obj: Any) -> str:
    """Class and shape, for errors."""
    shape = getattr(obj, "shape", None)
    extents = f" of shape {tuple(shape)}" if isinstance(shape, Sequence) else ""
    return f"{type(obj).__module__}.{type(obj).__qualname__}{extents}"


def _request(obj: Any, arguments: dict[str, Any]) -> Any:
    try:
        return obj.__dlpack__(max_version=_MAX_VERSION, **arguments)
    except TypeError as first:
        # A producer older than DLPack 1.0 does not know the argument. If it fails again without
        # it, the cause was another one, told better by the first error.
        try:
            return obj.__dlpack__(**arguments)
        except TypeError:
            raise first from None


def _parse(held: Any, device: tuple[int, int]) -> Imported:
    # The capsule stays unconsumed, under its first name, and serves as owner: when the last
    # reference goes, its own destructor calls the producer's deleter.
    flags = 0
    if _is_valid(held, _VERSIONED_NAME):
        versioned = _ManagedVersioned.from_address(_get_pointer(held, _VERSIONED_NAME))
        if versioned.major != _MAX_VERSION[0]:
            raise Unsupported(
                f"the producer speaks DLPack {versioned.major}.{versioned.minor}, "
                f"tdx {_MAX_VERSION[0]}.x"
            )
        flags, tensor = versioned.flags, versioned.tensor
    elif _is_valid(held, _UNVERSIONED_NAME):
        tensor = _Managed.from_address(_get_pointer(held, _UNVERSIONED_NAME)).tensor
    else:
        raise InvalidArgument(f"__dlpack__ returned {held!r}, not a fresh DLPack capsule")
    kind = tensor.dtype
    dtype = dtypes.from_dlpack_type(kind.code, kind.bits, kind.lanes)
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides[: tensor.ndim])
    else:
        strides = row_major(shape, dtype.itemsize)
    address = (tensor.data or 0) + tensor.byte_offset
    if not address and 0 not in shape:
        raise InvalidArgument(
            f"the array of shape {shape} has no memory, as lazy, fake and meta arrays have none: "
            "pass one whose elements are there"
        )
    return Imported(
        address=address,
        shape=shape,
        strides=strides,
        dtype=dtype,
        device=(tensor.device.type, tensor.device.id) if address else device,
        readonly=bool(flags & _READ_ONLY),
        owner=held,
        copied=bool(flags & _COPIED),
    )
