"""Any other DLPack producer, reached only through DLPack and the array API standard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runtime import dlpack
from ..runtime.errors import Unsupported

name = "DLPack"


def matches(x: Any) -> bool:
    """Whether `x` is a DLPack producer that holds memory (classes themselves are not)."""
    return hasattr(x, "__dlpack__") and not isinstance(x, (type, np.generic))


def stream_of(x: Any) -> int | None:
    """None: an unknown framework's current stream cannot be asked for."""
    return None


def describe(x: Any, stream: int | None = None) -> dlpack.Imported:
    """Memory of the producer, which orders its pending work before `stream`."""
    return dlpack.import_array(x, stream)


def empty(shape: Sequence[int], dtype: np.dtype[Any], like: Any) -> None:
    """None: results are adopted. Raises Unsupported if that is not possible either."""
    importer(like)


def adopt(producer: Any, like: Any) -> Any:
    """An array of the framework of `like` over the producer's memory.

    Raises Unsupported if the framework has no `from_dlpack`.
    """
    return importer(like)(producer)


def importer(like: Any) -> Any:
    """`from_dlpack` of the library of `like`. Raises Unsupported if it has none."""
    if hasattr(like, "__array_namespace__"):
        space = like.__array_namespace__()
    else:
        space = sys.modules.get(type(like).__module__.partition(".")[0])
    found = getattr(space, "from_dlpack", None)
    if found is None:
        raise Unsupported(
            f"tdx does not know how to make a {type(like).__module__}.{type(like).__qualname__} "
            "for the result: pass out= with a tdx array or another writable array"
        )
    return found
