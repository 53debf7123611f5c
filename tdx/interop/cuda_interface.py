"""Arrays that show `__cuda_array_interface__` but are no DLPack producers, as Numba's.

The interface (version 3) names one stream: work of others has to come after what is queued there.
An array that names none is taken to be used on the legacy default stream.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runtime import dlpack, dtypes
from ..runtime.errors import DtypeError, InvalidArgument
from . import generic

name = "__cuda_array_interface__"

_LEGACY = 1  # its number in the interface, and the driver's


def matches(x: Any) -> bool:
    """Whether `x` is such an array (classes themselves are not)."""
    return not isinstance(x, type) and hasattr(x, name) and not hasattr(x, "__dlpack__")


def stream_of(x: Any) -> int | None:
    """The stream that the array names, else the legacy default stream."""
    return _shown(x).get("stream") or _LEGACY


def describe(x: Any, stream: int | None = None) -> dlpack.Imported:
    """Memory of the array.

    Raises InvalidArgument for one with a mask, DtypeError for its type, DriverError for memory that
    no GPU of this process has.
    """
    from ..runtime.driver.cuda_device import device_of

    shown = _shown(x)
    if shown.get("mask") is not None:
        raise InvalidArgument(
            f"the {type(x).__name__} has a mask, which tdx does not heed: pass its data"
        )
    dtype = dtypes.resolve(np.dtype(shown["typestr"]))
    shape = tuple(shown["shape"])
    address, readonly = shown["data"]
    return dlpack.Imported(
        address=int(address),
        shape=shape,
        strides=tuple(shown.get("strides") or dlpack.row_major(shape, dtype.itemsize)),
        dtype=dtype,
        device=(dlpack.CUDA, device_of(int(address))),
        readonly=bool(readonly),
        owner=x,
    )


def empty(shape: Sequence[int], dtype: np.dtype[Any], like: Any) -> None:
    """None: results are adopted. Raises DtypeError or Unsupported if that is not possible."""
    _importer(like)
    if dtype.isbuiltin != 1:
        raise DtypeError(
            f"{name} cannot express the {dtype} result: pass out= with a tdx array, or another "
            "out_dtype"
        )


def adopt(producer: Any, like: Any) -> Any:
    """An array of the library of `like` over the producer's memory.

    Raises Unsupported if tdx does not know how to make one.
    """
    return _importer(like)(producer)


def _importer(like: Any) -> Any:
    numba = sys.modules.get("numba")
    if numba is not None and type(like).__module__.partition(".")[0] == "numba":
        from numba import cuda

        return cuda.as_cuda_array
    return generic.importer(like)


def _shown(x: Any) -> dict[str, Any]:
    shown: dict[str, Any] = x.__cuda_array_interface__
    return shown
