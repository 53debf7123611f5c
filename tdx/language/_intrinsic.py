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
_ORDERS = {
    "barrier": "(channel, world)",
    "broadcast": "(dst, src, numel, root, world)",
    "get": "(dst, src, numel, peer, world)",
    "notify": "(ptr, peer, world, value)",
    "put": "(dst, src, numel, peer, world)",
    "store_ll": "(ptr, value, flag, peer, world)",
    "put_signal": "(dst, src, numel, signal, value, peer, world)",
    "symm_at": "(ptr, peer, world)",
    "wait": "(ptr, world, value)",
    "wait_all": "(ptr, count, world, value)",
    "wait_any": "(ptr, count, world, value, done)",
}
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
def check_signal(verb, ptr, value=0, peer=0, name="ptr", when=True, _semantic=None):
    """Reject pointers to anything but 32-bit integers, and values and peers that are none.

    `name` is what the function `verb` calls the pointer; `when`: where the value counts.
    """
    verb, name = unwrap(verb), unwrap(name)
    _check_pointer(verb, name, ptr)
    element = ptr.type.scalar.element_ty
    if not (element.is_int() and element.primitive_bitwidth == 32):
        given = "" if _semantic is not None else f", {abi.host_executor.name_of(_address(ptr))}"
        raise TypeError(
            f"{verb}: {name} must point to int32 or uint32 words, got a pointer to {element}{given}"
        )
    _check_integer(verb, "value", value)
    _check_word(verb, value, unwrap(when), _semantic)
    _check_integer(verb, "peer", peer)


def _check_word(verb: str, value: Any, when: Any, semantic: Any) -> None:
    """Reject a value that 32 bits cannot hold, where it is known."""
    value = unwrap(value)
    if not isinstance(value, core.tensor):
        values = np.asarray([int(value)], object)
    elif semantic is None and value.dtype.primitive_bitwidth == 64:
        counts = when.handle.data if isinstance(when, core.tensor) else when
        values, counts = np.broadcast_arrays(value.handle.data, np.asarray(counts, bool))
        values = values[counts]
    else:
        return
    wrong = [int(x) for x in values.flat if not -(1 << 31) <= x < 1 << 32]
    if wrong:
        raise ValueError(f"{verb}: value {wrong[0]} does not fit a signal, which has 32 bits")


@intrinsic
def check_copy(verb, dst, src, numel, peer, who="peer", _semantic=None):
    """On the host tier, reject arguments of a copy that are of another kind, by their names."""
    check_pointers(verb, dst=dst, src=src, _semantic=_semantic)
    check_integers(verb, numel=numel, **{unwrap(who): peer}, _semantic=_semantic)


@intrinsic
def check_pointers(verb, _semantic=None, **values):
    """On the host tier, reject arguments that are no pointers, by their names."""
    if _semantic is None:
        for name, value in values.items():
            _check_pointer(verb, name, value)


@intrinsic
def check_integers(verb, _semantic=None, **values):
    """On the host tier, reject arguments that are no integers, by their names."""
    if _semantic is None:
        for name, value in values.items():
            _check_integer(verb, name, value)


def _check_pointer(verb: str, name: str, value: Any) -> None:
    value = unwrap(value)
    if not (isinstance(value, core.tensor) and value.type.scalar.is_ptr()):
        raise TypeError(
            f"{verb}: {name} must be a pointer or a block of pointers, got {_described(value)}"
            f"{_order(verb)}"
        )


def _check_integer(verb: str, name: str, value: Any) -> None:
    value = unwrap(value)
    if isinstance(value, core.tensor):
        whole, floating = value.dtype.is_int(), value.dtype.is_floating()
    else:
        whole, floating = hasattr(value, "__index__"), isinstance(value, (float, np.floating))
    if not whole:
        remedy = _order(verb)
        if floating:
            remedy = ": divide by //, or launch the kernel with int(...)"
        raise TypeError(f"{verb}: {name} must be an integer, got {_described(value)}{remedy}")


def _address(pointer: core.tensor) -> int:
    """Of the first of the pointers, on the host tier."""
    return int(pointer.handle.data.flat[0])


@intrinsic
def check_handle(world, verb=None, _semantic=None):
    """Reject what is no handle of a world or team, in its place among the arguments of `verb`."""
    if not (hasattr(world, "packed") and hasattr(world, "stride")):
        raise TypeError(
            f"expected the handle of a world or team, got {_described(world)}: launch the kernel "
            f"with `world.handle` (or `team.handle`) and pass that argument on{_order(verb)}"
        )


@intrinsic
def check_channel(channel, verb=None, _semantic=None):
    """Reject what is no channel, in its place among the arguments of `verb`."""
    if not (hasattr(channel, "packed") and hasattr(channel, "words")):
        raise TypeError(
            f"expected a channel, got {_described(channel)}: launch the kernel with what "
            f"`world.channel(blocks)` returns and pass that argument on{_order(verb)}"
        )


def _order(verb: Any) -> str:
    verb = unwrap(verb)
    return "" if verb is None else f"; the order of the arguments is {verb}{_ORDERS[verb]}"


def _described(value: Any) -> str:
    if hasattr(value, "packed"):
        return "a channel" if hasattr(value, "words") else "the handle of a world or team"
    kind = getattr(value, "type", None)
    return f"{kind}" if isinstance(value, core.tensor) else f"{value!r}"


@intrinsic
def check_choice(what, value, first, second, _semantic=None):
    """Reject a constexpr that is neither `first` nor `second`; `what` is its name in messages."""
    value, first, second = unwrap(value), unwrap(first), unwrap(second)
    if value not in (first, second):
        raise ValueError(f"{unwrap(what)} must be {first!r} or {second!r}, got {value!r}")


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
        raise TypeError(f"expected a pointer or a block of pointers, got {_described(pointer)}")
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
