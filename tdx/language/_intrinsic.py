"""Functions with one name and several lowerings, and calls into the device library.

An intrinsic is a plain function that Triton's code generator calls with `_semantic`, the object
that builds the program, and the host tier calls without it. So `_semantic is None` tells host
from compiler, at every call and whatever was imported first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.language import core

from tdx import abi

_TYPES = {"i32": core.int32, "i64": core.int64}
_HOST_TYPES = {"b1": core.int1, "i4": core.int32, "i8": core.int64, "f4": core.float32}


def intrinsic(fn):
    """Make `fn(*args, _semantic=None)` callable from Triton programs on every tier."""
    fn.__triton_builtin__ = True
    return fn


def unwrap(value: Any) -> Any:
    """The Python value of a constexpr, else `value` itself."""
    return value.value if isinstance(value, core.constexpr) else value


@intrinsic
def is_host(_semantic=None):
    """Constexpr: does this program run on the host tier?"""
    return True if _semantic is None else core.constexpr(False)


@intrinsic
def is_nvidia(_semantic=None):
    """Constexpr: is this program compiled for an NVIDIA GPU?"""
    return False if _semantic is None else core.constexpr(_backend(_semantic) == "cuda")


@intrinsic
def has_async_proxy(_semantic=None):
    """Constexpr: do tensor-descriptor loads go through NVIDIA's async proxy (sm_90 and later)?"""
    if _semantic is None:
        return False
    arch = str(_semantic.builder.options.arch)
    return core.constexpr(_backend(_semantic) == "cuda" and int(arch.removeprefix("sm")) >= 90)


@intrinsic
def program_threads(_semantic=None):
    """Constexpr: threads of one program. On the host tier 1024, so that loops stay short."""
    if _semantic is None:
        return 1024
    options = _semantic.builder.options
    return core.constexpr(options.num_warps * getattr(options, "warp_size", 32))


@intrinsic
def vector_elements(pointer, _semantic=None):
    """Constexpr: elements of a 16-byte vector of what `pointer` points to."""
    count = max(1, 16 // element_bytes(pointer))
    return count if _semantic is None else core.constexpr(count)


@intrinsic
def bytes_per_element(pointer, _semantic=None):
    """Constexpr: size of what `pointer` points to."""
    count = element_bytes(pointer)
    return count if _semantic is None else core.constexpr(count)


@intrinsic
def is_block(value, _semantic=None):
    """Constexpr: is `value` a block of several elements rather than a scalar?"""
    answer = isinstance(value, core.tensor) and value.type.is_block()
    return answer if _semantic is None else core.constexpr(answer)


@intrinsic
def bits(value, _semantic=None):
    """Constexpr: width in bits of one element of `value`, or of the dtype `value`."""
    value = unwrap(value)
    dtype = value if isinstance(value, core.dtype) else value.dtype
    count = dtype.scalar.primitive_bitwidth
    return count if _semantic is None else core.constexpr(count)


@intrinsic
def is_floating(value, _semantic=None):
    """Constexpr: is `value` of a floating-point type?"""
    answer = isinstance(value, core.tensor) and value.dtype.scalar.is_floating()
    return answer if _semantic is None else core.constexpr(answer)


@intrinsic
def as_tensor(value, _semantic=None):
    """`value` as a tensor: constexpr values and Python numbers become scalars."""
    if isinstance(value, core.tensor):
        return value
    if _semantic is not None:
        return _semantic.to_tensor(unwrap(value))
    return host_tensor(np.asarray([unwrap(value)]))


@intrinsic
def multiple_of_16(value, _semantic=None):
    """`value`, of which the compiler is told so, unless it is a block with several dimensions.

    Where all elements are the same number Triton moves the hint to that, and fails at its shape.
    """
    if len(value.shape) > 1:
        return value
    return core.multiple_of(value, [core.constexpr(16)], _semantic=_semantic)


@intrinsic
def check_signal(pointer, value=0, peer=0, _semantic=None):
    """Reject pointers to anything but 32-bit integers, and values and peers that are none."""
    element_bytes(pointer)
    element = pointer.type.scalar.element_ty
    if not (element.is_int() and element.primitive_bitwidth == 32):
        raise TypeError(f"a signal is an int32 or uint32 word, got a pointer to {element}")
    for what, given in (("value", unwrap(value)), ("peer", unwrap(peer))):
        scalar = given.dtype.scalar if isinstance(given, core.tensor) else None
        if isinstance(given, float) or (scalar is not None and scalar.is_floating()):
            found = given if scalar is None else scalar
            raise TypeError(f"the {what} of a signal is an integer, got {found}: divide by //")


@intrinsic
def check_handle(world, _semantic=None):
    """Reject what is no handle of a world or team, in its place."""
    if not (hasattr(world, "packed") and hasattr(world, "stride")):
        raise TypeError(
            f"expected the handle of a world or team, got {_described(world)}: launch the kernel "
            "with `world.handle` (or `team.handle`) and pass that argument on"
        )


@intrinsic
def check_channel(channel, _semantic=None):
    """Reject what is no channel, in its place."""
    if not (hasattr(channel, "packed") and hasattr(channel, "words")):
        raise TypeError(
            f"expected a channel, got {_described(channel)}: launch the kernel with what "
            "`world.channel(blocks)` returns and pass that argument on"
        )


def _described(value: Any) -> str:
    if hasattr(value, "packed"):
        return "a channel" if hasattr(value, "words") else "the handle of a world or team"
    kind = getattr(value, "type", None)
    return f"{kind}" if isinstance(value, core.tensor) else f"{value!r}"


@intrinsic
def check_choice(value, first, second, _semantic=None):
    """Reject a constexpr that is neither `first` nor `second`."""
    if unwrap(value) not in (unwrap(first), unwrap(second)):
        raise ValueError(f"expected {unwrap(first)!r} or {unwrap(second)!r}, got {value!r}")


def host_tensor(data: np.ndarray, like=None) -> core.tensor:
    """A tensor of the host tier holding bool, int32 or int64 `data`; a block where `like` is one.

    Python's own integers and floats arrive as 64-bit arrays and become 32-bit where they fit.
    """
    if like is None and data.dtype == np.int64 and (data == data.astype(np.int32)).all():
        data = data.astype(np.int32)
    elif data.dtype == np.float64:
        data = data.astype(np.float32)
    dtype = _HOST_TYPES[data.dtype.str[1:]]
    block = like is not None and like.type.is_block()
    shape = core.block_type(dtype, list(data.shape)) if block else dtype
    return core.tensor(abi.host_handle(data, dtype), shape)


def element_bytes(pointer) -> int:
    """Bytes of what the pointer, or block of pointers, `pointer` points to."""
    if not (isinstance(pointer, core.tensor) and pointer.type.scalar.is_ptr()):
        raise TypeError(f"expected a pointer or a block of pointers, got {pointer!r}")
    return max(1, pointer.type.scalar.element_ty.primitive_bitwidth // 8)


@intrinsic
def device_call(name, result, types, arguments, _semantic=None):
    """Call the device library's `name`, in every thread, per element where blocks are passed.

    `types` is a comma-separated list of i32 and i64 for `arguments`, `result` one of them.
    Pointers are passed as i64.
    """
    kinds = tuple(_TYPES[kind] for kind in unwrap(types).split(",") if kind)
    values = [_as(value, kind, _semantic) for value, kind in zip(arguments, kinds, strict=True)]
    symbols = {kinds: (unwrap(name), _TYPES[unwrap(result)])}
    return core.extern_elementwise("tdx", "", values, symbols, is_pure=False, _semantic=_semantic)


def _as(value, kind, semantic):
    tensor = semantic.to_tensor(unwrap(value))
    return tensor if tensor.dtype == kind else core.cast(tensor, kind, _semantic=semantic)


def _backend(semantic) -> str:
    return semantic.builder.options.backend_name
