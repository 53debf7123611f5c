"""Operands: what a plan needs to know of a tensor, whoever owns it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tdx.interop import owner_of
from tdx.runtime.array import Array
from tdx.runtime.dlpack import Imported, row_major
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported
from tdx.runtime.faults import Pointer
from tdx.runtime.world import World

__all__ = ["Operand", "byte_units", "check_operand", "check_output", "elements", "operand"]


class Operand:
    """A tensor as a kernel takes it: pointer, shape, strides in elements, dtype."""

    __slots__ = ("array", "dtype", "pointer", "shape", "strides")

    def __init__(self, pointer: Any, shape: tuple[int, ...], strides: tuple[int, ...], array: Any):
        self.pointer = pointer
        self.dtype: np.dtype = pointer.dtype
        self.shape = shape
        self.strides = strides
        self.array = array  # keeps the memory alive

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        expected = row_major(self.shape, 1)
        pairs = zip(self.shape, self.strides, expected, strict=True)
        return 0 in self.shape or all(n == 1 or s == e for n, s, e in pairs)

    def enter(self, stream: int) -> None:
        """Work on `stream` is about to use the memory."""
        block = getattr(self.array, "_block", None)
        if block is not None:
            block.enter(stream)


def operand(world: World, x: Any, what: str) -> Operand:
    """`x` (a tdx array of `world`, or foreign memory of the same device) as an operand."""
    if isinstance(x, Operand):
        return x
    if isinstance(x, Array):
        if x.world is not world:
            raise InvalidArgument(f"{what} belongs to another world than the plan")
        if x.owner_rank != world.rank:
            raise InvalidArgument(f"{what} is a peer's array; pass the own one")
        x._block.check()
        pointer = Pointer(x._address, x.dtype, x)
        strides = tuple(s // x.itemsize for s in x.strides)
        return Operand(pointer, x.shape, strides, x)
    if isinstance(x, Imported):
        memory = x
    else:
        framework = owner_of(x)
        if framework is None:
            raise InvalidArgument(
                f"{what} must be a tdx array, a NumPy array or a DLPack producer, got "
                f"{type(x).__name__}"
            )
        memory = framework.describe(x)
    if memory.device[0] != world.device.dlpack_type:
        raise Unsupported(
            f"{what} is on DLPack device {memory.device}, the world on {world.backend}; "
            "copy it with world.array(x)"
        )
    if world.backend != "host" and memory.device[1] != world.device.index:
        raise Unsupported(
            f"{what} is on GPU {memory.device[1]}, this rank's world on GPU {world.device.index}; "
            "put it there, or copy it with world.array(x)"
        )
    size = memory.dtype.itemsize
    if any(s % size for s in memory.strides):
        raise InvalidArgument(f"{what}: strides {memory.strides} are no multiples of {size} bytes")
    pointer = Pointer(memory.address, memory.dtype, (x, memory))
    return Operand(pointer, memory.shape, tuple(s // size for s in memory.strides), (x, memory))


def check_operand(op: Operand, shape: tuple[int, ...], dtype: np.dtype, what: str) -> Operand:
    """`op` if it is contiguous and of the given shape and dtype, else an error that says so."""
    if op.dtype != dtype:
        raise DtypeError(f"{what} has dtype {op.dtype}, expected {dtype}")
    if op.shape != shape:
        raise InvalidArgument(f"{what} has shape {op.shape}, expected {shape}")
    if not op.contiguous:
        raise InvalidArgument(f"{what} of shape {shape} must be contiguous; pass a contiguous copy")
    return op


def check_output(world: World, out: Any, shape: tuple[int, ...], dtype: np.dtype) -> Operand:
    """`out` as an operand that can be written to."""
    op = check_operand(operand(world, out, "out"), shape, dtype, "out")
    memory = op.array[1] if isinstance(op.array, tuple) else None
    if memory is not None and (memory.readonly or memory.copied):
        raise InvalidArgument("out is read-only; pass a writable array")
    return op


def byte_units(*multiples: int) -> tuple[str, int]:
    """How to move bytes whose sizes and addresses are all multiples of the given numbers.

    Data movement does not care for the element type. Returns the widest integer dtype, of 8 bytes
    at most, and how many of them (16 at most) make a unit that divides all numbers: kernels get
    sizes in units, and with the constant they know how everything is aligned.
    """
    unit = math.gcd(128, *multiples)
    width = min(unit, 8)
    return f"i{width}", unit // width


def elements(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)
