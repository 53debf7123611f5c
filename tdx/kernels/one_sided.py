"""Put and get: one rank copies to, or from, a peer's memory; the peer does nothing.

Addresses are the caller's own, as in OpenSHMEM: `dst` of a put, `src` of a get and `signal` are the
own symmetric arrays, and stand for the peer's copy of them.

Algorithm: one copy by a copy engine, S bytes and one hop, at any size and alignment; with a signal
one kernel of a single block behind it on the stream, which sets the peer's word.

Ordering: in stream order. With a signal: whoever sees the signal's value (tdl.wait) sees the data;
release, system scope. Without: the data is at the peer when the stream's work is done. A get reads
what is there; what the peer has stored must be ordered before it, by a barrier or a signal.
Nothing is signalled while a fault stands. May be recorded in a graph; a put with a signal must have
been called once before, which loads its kernel.
"""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
import triton

import tdx.language as tdl
from tdx.kernels.call import Call
from tdx.kernels.operand import (
    Operand,
    check_array,
    check_operand,
    check_output,
    enter,
    operand,
    overlap,
)
from tdx.runtime.array import Array
from tdx.runtime.checks import as_int
from tdx.runtime.errors import DtypeError, InvalidArgument
from tdx.runtime.world import World

__all__ = ["get", "put"]


@triton.jit(do_not_specialize=["peer", "value"])
def signal_kernel(signal, world, peer, value):
    """Set the peer's word after all work before it on the stream."""
    tdl.notify(signal, peer, world, value)


def put(
    dst: Any, src: Any, peer: int, signal: Any = None, value: int = 1, stream: Any = None
) -> None:
    """Copy `src` to rank `peer`'s copy of `dst`, then set its copy of `signal` to `value`.

    Not collective: only the caller acts, and errors are its own.

    Parameters
    ----------
    dst : tdx array
        The caller's own symmetric array (or a contiguous view), any dtype.
    src : tdx array, or any array of NumPy or a DLPack producer
        Shape and dtype of `dst`.
    peer : int
        A rank of the world; the own one is legal.
    signal : tdx array, optional
        The caller's own symmetric int32 array, or view, of one element.
    value : int
        32-bit; should grow from call to call, see tdl.wait.
    stream : optional
        None: the current stream, of the framework of `src` if it is not a tdx array.

    Returns at once; `src` may be reused in stream order. For a `src` without a stream, such as a
    NumPy array, it returns when the copy is done.

    Raises InvalidArgument (also for a view made by `peer()`), DtypeError, and a pending fault.
    """
    call = Call("put", src, dst, signal, stream=stream)
    call.check_recording()
    world = call.world
    world.check()
    to = _own(world, dst, "dst")
    peer = world.check_rank(peer, f"{call.operation}: peer")
    word, value = (None, 0) if signal is None else _signal(world, signal, value)
    source = check_operand(call.operand(src, "src"), to.shape, to.dtype, "src")
    _check_apart(call, peer, to, source)
    _copy(call, _address(dst, peer), source.address, dst.nbytes, source, to)
    if word is not None:
        with world.on(_begin(call, word)):
            signal_kernel[(1,)](signal, world.handle, peer, value, num_warps=1)
    call.finish(None)


def get(dst: Any, src: Any, peer: int, stream: Any = None) -> None:
    """Copy rank `peer`'s copy of `src` to `dst`.

    Not collective: only the caller acts, and errors are its own.

    Parameters
    ----------
    dst : tdx array, or any writable array of NumPy or a DLPack producer
        Shape and dtype of `src`.
    src : tdx array
        The caller's own symmetric array (or a contiguous view), any dtype.
    peer : int
        A rank of the world; the own one is legal.
    stream : optional
        None: the current stream, of the framework of `dst` if it is not a tdx array.

    Returns at once; for a `dst` without a stream, such as a NumPy array, when the data is there.

    Raises InvalidArgument (also for a view made by `peer()`), DtypeError, and a pending fault.
    """
    call = Call("get", dst, src, stream=stream)
    call.check_recording()
    world = call.world
    world.check()
    source = _own(world, src, "src")
    peer = world.check_rank(peer, f"{call.operation}: peer")
    target = call.target(dst, source.shape, source.dtype, "dst")
    to = check_output(world, target, source.shape, source.dtype, "dst")
    _check_apart(call, peer, to, source)
    _copy(call, to.address, _address(src, peer), src.nbytes, to, source)
    call.finish(target)


def _own(world: World, x: Any, what: str) -> Operand:
    """A contiguous symmetric array of the caller's own."""
    if not isinstance(x, Array) or not x.symmetric:
        got = repr(x) if isinstance(x, Array) else reprlib.repr(x)
        raise InvalidArgument(
            f"{what} must be a symmetric tdx array (world.empty), which has a copy on the peer, "
            f"got {got}"
        )
    if x.world is world and x.owner_rank != world.rank:
        raise InvalidArgument(
            f"{what} is the view that peer({x.owner_rank}) made; pass the own array, and the rank "
            "as peer="
        )
    op = operand(world, x, what)
    check_array(op.shape, op.dtype, op.contiguous, x.shape, x.dtype, what)
    return op


def _address(x: Array, peer: int) -> int:
    return x.peer(peer)._address


def _check_apart(call: Call, peer: int, to: Operand, source: Operand) -> None:
    if peer == call.world.rank and to.address != source.address and overlap(to, source):
        raise InvalidArgument(
            f"{call.operation}: dst and src of the own rank overlap; pass a copy of src"
        )


def _signal(world: World, signal: Any, value: Any) -> tuple[Operand, int]:
    """The signal's word and the value as an int, once they are checked."""
    word = _own(world, signal, "signal")
    if word.dtype != np.int32:
        raise DtypeError(f"signal must be int32, got {word.dtype}")
    if signal.size != 1:
        raise InvalidArgument(f"signal must be one element, got shape {word.shape}; pass a view")
    whole = as_int(value)
    if whole is None or not -(1 << 31) <= whole < 1 << 31:
        raise InvalidArgument(f"value must be an int of 32 bits, got {value!r}")
    return word, whole


def _begin(call: Call, *ops: Operand) -> int:
    """The handle of the call's stream, ordered after the operands' last uses elsewhere."""
    handle = call.handle()
    enter(call.world, handle, *ops)
    return handle


def _copy(call: Call, to: int, source: int, nbytes: int, *ops: Operand) -> None:
    """Queue the copy; `ops` are the operands it touches, of which the first may be foreign."""
    handle = _begin(call, *ops)
    if nbytes and to != source:
        call.world.driver.copy(to, source, nbytes, handle, ops[0].owner)
