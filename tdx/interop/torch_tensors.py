"""PyTorch: described through its methods, which is several times cheaper than a capsule."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..runtime import dlpack, dtypes
from ..runtime.errors import DtypeError, InvalidArgument

name = "torch"

_resolve = lru_cache(maxsize=64)(dtypes.resolve)


def matches(x: Any) -> bool:
    """Whether `x` is a tensor, of a subclass too."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def stream_of(x: Any) -> int | None:
    """PyTorch's current stream on the tensor's device; None for CPU tensors."""
    if not x.is_cuda:
        return None
    import torch

    try:  # 40 times cheaper than the public function
        return int(torch._C._cuda_getCurrentRawStream(x.device.index))
    except AttributeError:
        return int(torch.cuda.current_stream(x.device).cuda_stream)


def describe(x: Any, stream: int | None = None) -> dlpack.Imported:
    """Memory of the tensor. It is used on PyTorch's current stream, so nothing waits here.

    Raises InvalidArgument for tensors whose elements are not in plain memory, or whose gradient
    would get lost; DtypeError for types tdx does not take.
    """
    import torch

    _refuse_special(torch, x)
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or not (x.is_cuda or x.is_cpu):
        x = x.detach()
        try:
            with torch.cuda.device_of(x):  # PyTorch exports from the current GPU only
                memory = dlpack.import_array(x, stream_of(x))
        except InvalidArgument:
            _address(x)  # knows better what is wrong, if it is that
            raise
        if memory.address == 0:
            _address(x)
        return memory
    dtype = _resolve(x.dtype)
    size = dtype.itemsize
    try:
        address = x.data_ptr()
    except RuntimeError:
        address = 0
    return dlpack.Imported(
        address or _address(x),
        tuple(x.shape),
        tuple([stride * size for stride in x.stride()]),
        dtype,
        (_device_type(), x.device.index) if x.is_cuda else (dlpack.CPU, 0),
        False,
        x,
    )


def empty(shape: Sequence[int], dtype: np.dtype[Any], like: Any) -> Any:
    """An uninitialised tensor on the device of `like`, which needs no gradient."""
    import torch

    kind = _named(dtype)
    if kind is None:
        raise DtypeError(f"this release of PyTorch ({torch.__version__}) has no {dtype}")
    if type(like) is torch.Tensor:  # cheaper: the device is not looked up again
        return like.new_empty(tuple(shape), dtype=kind)
    return torch.empty(tuple(shape), dtype=kind, device=like.device)


def adopt(producer: Any, like: Any) -> Any:
    """A tensor over the producer's memory."""
    import torch

    return torch.from_dlpack(producer)


def _refuse_special(torch: Any, x: Any) -> None:
    if x.layout != torch.strided:
        raise InvalidArgument(f"{dlpack.described(x)} has the layout {x.layout}: pass x.to_dense()")
    if x.is_conj() or x.is_neg():
        raise InvalidArgument(
            f"{dlpack.described(x)} is a conjugated or negated view, whose memory holds other "
            "values: pass x.resolve_conj().resolve_neg()"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{dlpack.described(x)} requires a gradient, which tdx would not propagate: pass "
            "x.detach(), or call under torch.no_grad()"
        )


def _address(x: Any) -> int:
    """Of the first element; 0 only where there is none. InvalidArgument for what has no memory."""
    reason: Exception | None = None
    try:
        address = int(x.data_ptr())
    except RuntimeError as error:  # of a tensor that stands for others
        address, reason = 0, error
    if address or (reason is None and x.numel() == 0):
        return address
    raise InvalidArgument(
        f"{dlpack.described(x)} has no memory: it is a meta or fake tensor (pass one with values, "
        "or a NumPy array), a zero that was not written yet (pass x.clone()), or stands for values "
        "inside torch.func.vmap, torch.export or the like (call tdx outside)"
    ) from reason


@lru_cache(maxsize=64)
def _named(dtype: np.dtype[Any]) -> Any:
    """PyTorch's type of the same name, or None."""
    import torch

    return getattr(torch, dtype.name, None)


@lru_cache(maxsize=1)
def _device_type() -> int:
    import torch

    return dlpack.ROCM if torch.version.hip else dlpack.CUDA
