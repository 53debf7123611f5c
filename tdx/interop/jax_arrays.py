"""JAX: immutable arrays, no streams that a caller could see.

JAX has no current stream: a result must be complete when it is handed over, and so it is
reported as a consumer without a stream on GPUs too. Its arrays are immutable by contract, also
where the memory could be written: they are reported as read-only, and results are adopted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runtime import dlpack
from ..runtime.errors import DtypeError, InvalidArgument

name = "jax"


def matches(x: Any) -> bool:
    """Whether `x` is an array, or a tracer that stands for one."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def stream_of(x: Any) -> int | None:
    """None: see the module."""
    return None


def describe(x: Any, stream: int | None = None) -> dlpack.Imported:
    """Memory of the array, read-only; waits for host arrays that are still being computed.

    Raises InvalidArgument for tracers and for arrays spread over several devices.
    """
    import jax

    if isinstance(x, jax.core.Tracer):
        raise InvalidArgument(
            "tdx functions work on arrays with values and cannot be called inside jax.jit, "
            "jax.grad or jax.vmap: call them outside"
        )
    if len(x.devices()) > 1:
        raise InvalidArgument(
            f"the array is spread over {len(x.devices())} devices: pass one of "
            "x.addressable_shards[i].data"
        )
    return dlpack.import_array(x, stream)._replace(readonly=True)


def empty(shape: Sequence[int], dtype: np.dtype[Any], like: Any) -> None:
    """None: results are adopted. Raises DtypeError for types that JAX would narrow."""
    import jax

    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise DtypeError(
            f"JAX would narrow the {dtype} result to {jax.dtypes.canonicalize_dtype(dtype)}: "
            'call jax.config.update("jax_enable_x64", True) first, or pass another out_dtype'
        )


def adopt(producer: Any, like: Any) -> Any:
    """An array over the producer's memory, which nobody may write from now on.

    Zero-copy from addresses that are multiples of 64 bytes, as those of tdx arrays are; JAX
    copies others. Raises DtypeError for types that JAX would narrow.
    """
    import jax

    result = jax.dlpack.from_dlpack(producer)
    expected = getattr(producer, "dtype", None)
    if isinstance(expected, np.dtype):
        empty(result.shape, expected, like)
    return result
