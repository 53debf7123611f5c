"""CuPy: described through its attributes; its current stream is that of the current thread."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..runtime import dlpack, dtypes
from ..runtime.errors import DtypeError

name = "cupy"

_resolve = lru_cache(maxsize=64)(dtypes.resolve)


def matches(x: Any) -> bool:
    """Whether `x` is a `cupy.ndarray`."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def stream_of(x: Any) -> int | None:
    """CuPy's current stream on the array's device."""
    import cupy

    with x.device:
        return int(cupy.cuda.get_current_stream().ptr)


def describe(x: Any, stream: int | None = None) -> dlpack.Imported:
    """Memory of the array. It is used on CuPy's current stream, so nothing waits here."""
    return dlpack.Imported(
        x.data.ptr, x.shape, x.strides, _resolve(x.dtype), (_device_type(), x.data.device_id),
        False, x,
    )  # fmt: skip


def empty(shape: Sequence[int], dtype: np.dtype[Any], like: Any) -> Any:
    """An uninitialised array on the device of `like`.

    Raises DtypeError for types CuPy does not have (bfloat16 in older releases, fp8).
    """
    import cupy

    try:
        with like.device:
            return cupy.empty(tuple(shape), dtype)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise DtypeError(
            f"CuPy {cupy.__version__} cannot hold a {dtype} result: pass out= with a tdx array"
        ) from error


def adopt(producer: Any, like: Any) -> Any:
    """An array over the producer's memory."""
    import cupy

    return cupy.from_dlpack(producer)


@lru_cache(maxsize=1)
def _device_type() -> int:
    import cupy

    return dlpack.ROCM if cupy.cuda.runtime.is_hip else dlpack.CUDA
