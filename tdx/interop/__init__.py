"""Arrays of other frameworks: which one an array is from, its stream, and memory for results.

A framework is a module of this package with the functions of `Framework`; it imports what it
serves inside its functions only, and only ever meets arrays whose framework is loaded already.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from ..runtime import foreign
from ..runtime.dlpack import Imported
from . import cuda_interface, cupy_arrays, generic, jax_arrays, numpy_arrays, torch_tensors

__all__ = ["Framework", "owner_of"]


class Framework(Protocol):
    """What tdx needs of a framework in order to take its arrays and to return them."""

    name: str

    def matches(self, x: Any) -> bool:
        """Whether `x` is an array of this framework; imports nothing."""
        ...

    def stream_of(self, x: Any) -> int | None:
        """Native handle of the stream on which the caller will use `x` and its results.

        None: the caller has no stream, so that work must be complete when a call returns.
        """
        ...

    def describe(self, x: Any, stream: int | None = None) -> Imported:
        """Memory of `x`, without a copy.

        Where `stream_of(x)` is a stream, the memory is ready in that stream's order and `stream`
        is not looked at: work elsewhere must be ordered after it. Where it is None, the memory
        is ready for work on `stream` (None: the default stream).

        Raises InvalidArgument for arrays that have no plain memory, DtypeError for their dtype.
        """
        ...

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any], like: Any) -> Any | None:
        """A new row-major array on the device of `like`, to be written through `describe`.

        None: arrays of this framework are immutable; make the result elsewhere and `adopt` it.
        Raises DtypeError if the framework cannot hold `dtype`, also when it would return None.
        """
        ...

    def adopt(self, producer: Any, like: Any) -> Any:
        """An array of this framework over the memory of a DLPack producer, which it keeps alive."""
        ...


_FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (numpy_arrays, torch_tensors, jax_arrays, cupy_arrays)
}
_ROOTS = {"jaxlib": "jax"}  # top-level package of a class -> framework, where they differ


def owner_of(x: Any) -> Framework | None:
    """The framework `x` is an array of: NumPy, PyTorch, JAX, CuPy, else one of the generic ones.

    None if `x` is no array that tdx could take (no DLPack producer, no `__cuda_array_interface__`).
    """
    kind: Any = type(x)
    framework = _FRAMEWORKS.get(_framework_name(kind))
    if framework is not None and framework.matches(x):
        return framework
    if generic.matches(x):
        return generic
    return cuda_interface if cuda_interface.matches(x) else None


@lru_cache(maxsize=256)
def _framework_name(kind: type) -> str:
    # A class derived by the user lies elsewhere than its framework's base class.
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        root = _ROOTS.get(root, root)
        if root in _FRAMEWORKS:
            return root
    return ""


foreign.ask(owner_of)
