"""NumPy: host memory, no streams. Arrays of ml_dtypes' types are ordinary arrays here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runtime import dlpack

name = "numpy"


def matches(x: Any) -> bool:
    """Whether `x` is an `np.ndarray` (scalars are not: they have no memory to write to)."""
    return isinstance(x, np.ndarray)


def stream_of(x: Any) -> int | None:
    """None: NumPy reads and writes when it is called."""
    return None


def describe(x: Any, stream: int | None = None) -> dlpack.Imported:
    """Memory of the array; DtypeError for types tdx does not take."""
    return dlpack.import_array(x)


def empty(shape: Sequence[int], dtype: np.dtype[Any], like: Any) -> Any:
    """An uninitialised array."""
    return np.empty(shape, dtype)


def adopt(producer: Any, like: Any) -> Any:
    """An array over a producer's host memory, writable unless the producer says otherwise.

    Unlike `np.from_dlpack` it takes bfloat16 and fp8. Raises BufferError for device memory.
    """
    memory = dlpack.import_array(producer)
    if memory.device[0] not in (dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST):
        raise BufferError(
            f"NumPy cannot use memory of DLPack device {memory.device}: copy it with .numpy()"
        )
    return dlpack.numpy_view(
        memory,
        memory.address,
        memory.shape,
        memory.strides,
        memory.dtype,
        readonly=memory.readonly,
    )
