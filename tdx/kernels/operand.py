"""Operands: what a plan needs to know of a tensor, whoever owns it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.interop import owner_of
from tdx.runtime.array import Array
from tdx.runtime.block import Block
from tdx.runtime.copies import span
from tdx.runtime.dlpack import Imported, row_major
from tdx.runtime.errors import Closed, DtypeError, InvalidArgument, Unsupported
from tdx.runtime.graph import hold
from tdx.runtime.stream import NOWHERE, before_which, follow_recorded
from tdx.runtime.world import World

if TYPE_CHECKING:
    from tdx.runtime.driver.base import Driver

__all__ = [
    "Operand",
    "begin_aligned",
    "byte_units",
    "check_apart",
    "check_array",
    "check_operand",
    "check_output",
    "elements",
    "enter",
    "flattened",
    "for_each",
    "operand",
    "overlap",
]


class Producer:
    """GPU memory of a producer whose stream cannot be asked for: it orders its work before ours.

    Stands where a block of ours would, so that a call enters it with the stream that it uses.
    """

    __slots__ = ("_array", "_describe", "_driver", "last", "recorded_at")
    symmetric = False
    shows_stream = False

    def __init__(self, driver: Driver, describe: Callable[..., Imported], array: Any, stream: int):
        """`describe` is that of the framework, asked for `stream` before; 0: for none."""
        self._driver = driver
        self._describe = describe
        self._array = array
        self.last = [stream]
        self.recorded_at = (0, NOWHERE)

    def enter(self, stream: int) -> None:
        """Work on `stream` is about to use the memory."""
        if self.last[0] != stream and not self._driver.capturing(stream):
            with self._driver.using():
                self._describe(self._array, stream)
            self.last[0] = stream


_NOT_CHECKED: tuple[int, Callable[[], Operand | None]] = (0, lambda: None)


class Operand:
    """A tensor as a kernel takes it.

    Attributes
    ----------
    address : int
        Of the first element.
    dtype : np.dtype
    shape, strides : tuple[int, ...]
        Strides in elements.
    contiguous : bool
        Whether the elements lie in row-major order without gaps.
    owner : object
        Keeps the memory alive.
    block : Block, Producer or None
        What orders the memory's uses, if it is tdx's own, or its framework shows no stream.
    home : int or None
        The current stream of the framework that it is from, where that shows one.
    writable : bool
    checked : tuple[int, Callable[[], Operand | None]]
        By which plan, as the result, and with which x; see Repeating.again.
    noted : tuple
        The last calls with others that were checked; see Repeating.again_with.
    extent : tuple[int, int] or None
        Where its memory begins and ends, once that was asked for; see overlap.
    """

    __slots__ = (
        "__weakref__", "address", "block", "checked", "contiguous", "dtype", "extent", "home",
        "noted", "owner", "shape", "strides", "writable",
    )  # fmt: skip

    def __init__(
        self,
        address: int,
        dtype: np.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        owner: Any,
        block: Block | Producer | None = None,
        writable: bool = True,
        home: int | None = None,
    ):
        self.address = address
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.owner = owner
        self.block = block
        self.writable = writable
        self.home = home
        self.contiguous = _no_gaps(shape, strides)
        self.checked = _NOT_CHECKED
        self.noted: tuple[tuple[int, tuple[Any, ...], Any], ...] = ()
        self.extent: tuple[int, int] | None = None

    def enter(self, stream: int) -> None:
        """Work on `stream` is about to use the memory."""
        if self.block is not None:
            self.block.enter(stream)


def operand(world: World, x: Any, what: str) -> Operand:
    """`x` (a tdx array of `world`, or foreign memory of the same device) as an operand."""
    if type(x) is Operand:
        return x
    if isinstance(x, Array):
        known = x.operand
        if known is not None and x.world is world and not known.block.freed:
            return known
        if x.world is not world:
            if x.world.closed:
                raise Closed(
                    f"{what} belongs to a world that was closed, or given up by recover(); make an "
                    f"array of {world!r}"
                )
            raise InvalidArgument(f"{what} belongs to another world; pass an array of {world!r}")
        if x.owner_rank != world.rank:
            raise InvalidArgument(f"{what} is a peer's array; pass the own one")
        block, dtype = x._block, x.dtype
        block.check()
        # not the array as owner: it would hold itself
        strides = _in_elements(x.strides, dtype.itemsize)
        assert strides is not None
        x.operand = made = Operand(x._address, dtype, x.shape, strides, block, block)
        return made
    home, block = None, None
    if isinstance(x, Imported):
        memory = x
    else:
        framework = owner_of(x)
        if framework is None:
            raise InvalidArgument(
                f"{what} must be a tdx array, a NumPy array or a DLPack producer, got "
                f"{type(x).__name__}"
            )
        # what is recorded does not run now: the replay enters
        stream = 0 if world.recording else before_which(world, world.driver.current_stream())
        home = framework.stream_of(x)
        if home is not None or world.backend == "host":
            memory = framework.describe(x, stream)
        else:
            with world.driver.using():  # the producer may take the default stream of another GPU
                memory = framework.describe(x, stream)
            block = Producer(world.driver, framework.describe, x, stream)
    check_device(world, memory, what)
    size = memory.dtype.itemsize
    strides = _in_elements(memory.strides, size)
    if strides is None:
        raise InvalidArgument(f"{what}: strides {memory.strides} are no multiples of {size} bytes")
    address: int = memory.address
    owner: Any = (x, memory)
    if world.registry and (found := world.registry.find(address)):  # not by two addresses
        address, owner = found
        block = block or owner
    return Operand(
        address, memory.dtype, memory.shape, strides, owner, block,
        not (memory.readonly or memory.copied), home,
    )  # fmt: skip


def check_device(world: World, memory: Imported, what: str) -> None:
    """Raise Unsupported for memory that this rank's kernels do not reach, or only from afar."""
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


@lru_cache(maxsize=1024)
def _in_elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """None if they are no multiples of the item size."""
    return None if any(s % itemsize for s in strides) else tuple(s // itemsize for s in strides)


@lru_cache(maxsize=1024)
def _no_gaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements lie in row-major order, though axes of one element have any stride."""
    dims = zip(shape, strides, row_major(shape, 1), strict=True)
    return 0 in shape or all(n == 1 or s == expected for n, s, expected in dims)


def check_operand(op: Operand, shape: tuple[int, ...], dtype: np.dtype, what: str) -> Operand:
    """`op` if it is contiguous and of the given shape and dtype, else an error that says so."""
    check_array(op.shape, op.dtype, op.contiguous, shape, dtype, what, is_read=True)
    return op


def copy_of(what: str) -> str:
    """The remedy for an input that is a view with gaps."""
    return f"pass a contiguous array: world.array({what}, symmetric=False) makes a copy that is"


def check_array(
    given: tuple[int, ...], kind: np.dtype, contiguous: bool, shape: tuple[int, ...],
    dtype: np.dtype, what: str, is_read: bool = False,
) -> None:  # fmt: skip
    """Raise unless an array `given` so is contiguous and of that shape and dtype.

    `is_read`: and not written to, so that a copy would do.
    """
    if kind is not dtype and kind != dtype:
        raise DtypeError(f"{what} has dtype {kind}, expected {dtype}")
    if given != shape:
        raise InvalidArgument(f"{what} has shape {given}, expected {shape}")
    if not contiguous:
        remedy = copy_of(what) if is_read else "pass a contiguous array"
        raise InvalidArgument(f"{what} of shape {shape} must be contiguous; {remedy}")


def check_output(
    world: World, out: Any, shape: tuple[int, ...], dtype: np.dtype, what: str = "out"
) -> Operand:
    """`out` as an operand that can be written to."""
    op = operand(world, out, what)
    if op.shape != shape or op.dtype is not dtype or not op.contiguous:
        check_array(op.shape, op.dtype, op.contiguous, shape, dtype, what)
    if not op.writable:
        raise InvalidArgument(f"{what} is read-only; pass a writable array")
    return op


def overlap(x: Operand, y: Operand) -> bool:
    """Whether the memory from the first to the last element of one touches that of the other."""
    begin, end = x.extent or _extent(x)
    first, last = y.extent or _extent(y)
    return begin < last and first < end


def check_apart(operation: str, out: Operand, *read: Operand) -> None:
    """Raise InvalidArgument if `out` shares memory with what is read while it is written."""
    for op in read:
        if overlap(op, out):
            raise InvalidArgument(
                f"{operation}: out (shape {out.shape}) overlaps an operand of shape {op.shape}, "
                "read while it is written: pass another"
            )


def _extent(op: Operand) -> tuple[int, int]:
    """Where its memory begins and ends; of no elements an end before everything."""
    low, nbytes = _span(op.shape, op.strides, op.dtype.itemsize)
    op.extent = (op.address + low, op.address + low + nbytes if nbytes else -1)
    return op.extent


@lru_cache(maxsize=1024)
def _span(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> tuple[int, int]:
    return span(shape, tuple(size * stride for stride in strides), size)


def enter(world: World, stream: int, *operands: Operand) -> None:
    """Work on `stream` is about to use the operands; what records a graph of it holds them."""
    recording = world.recording
    elsewhere = recording is None and world.driver.recorded_elsewhere(stream)
    if elsewhere:
        hold(world, *(op.block for op in operands))
    if elsewhere or recording is not None:
        blocks = [op.block for op in operands if op.block is not None]
        follow_recorded(world.driver, stream, blocks)
    for op in operands:
        op.enter(stream)
        if recording is not None:
            recording.keep(op.owner)
            if op.block is not None:
                recording.before_replay(op.block.enter)
    if recording is None and not elsewhere:
        hold_producers(world, stream, operands)


def hold_producers(world: World, stream: int, operands: Sequence[Operand]) -> None:
    """Hold the memory of those who show no stream until the call on `stream` is done."""
    owners = [op.owner for op in operands if op.block is not None and not op.block.shows_stream]
    if owners:
        world.in_flight.hold(owners, stream)


def byte_units(*multiples: int) -> tuple[np.dtype, int]:
    """How to move bytes whose sizes and addresses are all multiples of the given numbers.

    Data movement does not care for the element type. Returns the widest integer dtype, of 8 bytes
    at most, and how many of them (16 at most) make a unit that divides all numbers: kernels get
    sizes in units, and with the constant they know how everything is aligned.
    """
    unit = math.gcd(128, *multiples)
    width = min(unit, 8)
    return np.dtype(f"i{width}"), unit // width


def begin_aligned(*operands: Operand) -> bool:
    """Whether all begin at multiples of 16 bytes, as descriptors and cuBLAS want them."""
    return not any(op.address % 16 for op in operands)


def elements(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)


def flattened(a: Operand) -> tuple[int, int, int]:
    """(rows, row stride, column stride) of `a` with its leading axes taken together.

    Raises InvalidArgument when they cannot be walked with one stride.
    """
    *lead, _ = a.shape
    if not lead:
        raise InvalidArgument(f"a must have 2 or more axes (..., K), got shape {a.shape}")
    # an axis of one element is not walked along: its stride says nothing
    axes = [(n, s) for n, s in zip(lead, a.strides, strict=False) if n != 1]
    for (_, outer), (n, inner) in itertools.pairwise(axes):
        if outer != inner * n:
            raise InvalidArgument(
                f"a of shape {a.shape} and strides {a.strides} (elements) has leading axes that "
                f"do not lie behind one another; {copy_of('a')}"
            )
    return elements(lead), axes[-1][1] if axes else a.shape[-1], a.strides[-1]


def for_each(value: Any, count: int, single: bool, what: str) -> list[Any]:
    """One value of an operation for each of `count` b; `single`: not in a sequence."""
    if value is None:
        return [None] * count
    if single:
        return [value]
    shape = None if isinstance(value, Real) else getattr(value, "shape", None)
    try:
        values = list(value)
    except TypeError:  # a number, or an array without axes
        values = []
    if len(values) == count and (shape is None or len(shape) > 1):
        return values
    if shape is not None:
        given = f"one array of shape {tuple(shape)}"
    else:
        given = f"{len(values)}" if hasattr(value, "__len__") else repr(value)
    raise InvalidArgument(f"{what}: expected a sequence of {count}, one for each b, got {given}")
