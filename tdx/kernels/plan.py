"""What every plan does: checks, agreement between ranks, workspaces, launches.

A plan is an operation with all checks, workspace and compilation done. Making one is collective:
ranks compare what they are about to make, and a rank that refuses its arguments makes the others
raise CollectiveMismatch instead of waiting. Calling one allocates nothing, exchanges nothing on
the host and does not synchronise, so it may be recorded in a graph.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from tdx.interop import owner_of
from tdx.runtime import dtypes
from tdx.runtime.array import Array
from tdx.runtime.dlpack import Imported, row_major
from tdx.runtime.errors import Closed, DtypeError, InvalidArgument, TdxError, Unsupported
from tdx.runtime.faults import Pointer
from tdx.runtime.group import Group
from tdx.runtime.init import current_world
from tdx.runtime.signals import Channel, Site, make_channel
from tdx.runtime.stream import order, stream_handle
from tdx.runtime.world import World

__all__ = ["Call", "Operand", "Plan", "cached", "caller", "elements", "operand", "words_of", "world_of"]

_CACHED_PLANS = 64  # one-line functions keep this many plans for each group of ranks

P = TypeVar("P", bound="Plan")


class Operand:
    """A tensor as a kernel takes it: pointer, shape, strides in elements, dtype."""

    __slots__ = ("array", "dtype", "pointer", "shape", "strides")

    def __init__(
        self, pointer: Any, shape: tuple[int, ...], strides: tuple[int, ...], array: Any
    ):
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


def operand(world: World, x: Any, what: str) -> Operand:
    """`x` (a tdx array of `world`, or foreign memory of the same device) as an operand."""
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
    size = memory.dtype.itemsize
    if any(s % size for s in memory.strides):
        raise InvalidArgument(f"{what}: strides {memory.strides} are no multiples of {size} bytes")
    pointer = Pointer(memory.address, memory.dtype, (x, memory))
    return Operand(pointer, memory.shape, tuple(s // size for s in memory.strides), (x, memory))


class Plan:
    """Base of all plans. Subclasses define `_check`, `_build` and `__call__`."""

    operation = "plan"

    def __init__(self, world: World, call: str, team: Group | None, check: Callable[[], None]):
        """Agree on `call` with all ranks of the team after `check()` accepted the arguments.

        `check` runs locally, must have no effect but on the plan's own attributes, and raises
        for arguments the operation cannot take.
        """
        world.check()
        if world.recording is not None:
            raise InvalidArgument(
                f"{call} would make a plan while a graph is being recorded; call it once before, "
                "with the same shapes, or make the plan before recording"
            )
        self.world = world
        self.group = world.group(team)
        self.site = Site(self.operation, "signal")
        self._stream = 0
        refused = None
        try:
            check()
        except TdxError as error:
            refused = error
        world.channels.agree(self._record(call), refused, members=self.group.ranks)
        with world.channels.busy(call):
            self._build()
        world.meet(f"{call} is ready", self.group)

    def _record(self, call: str) -> str:
        heap = self.world.user_region.heap.digest.hex()[:16]
        return f"{call} team={list(self.group.ranks)} heap={heap}"

    def _build(self) -> None:
        """Allocate workspaces and channels; the same calls on every rank of the group."""

    # ---- for _build
    def workspace(self, name: str, shape: Sequence[int], dtype: Any) -> Array:
        """A zeroed symmetric array outside the user's heap."""
        site = Site(self.operation, name)
        array = self.world.allocate_runtime(tuple(shape), dtypes.resolve(dtype), site)
        self._share(site)
        return array

    def channel(self, blocks: int) -> Channel:
        """Signals for `blocks` blocks."""
        site = Site(self.operation, "channel")
        channel = make_channel(self.world, self.group, blocks, site)
        self._share(site)
        return channel

    def _share(self, site: Site) -> None:
        self._sites = [*getattr(self, "_sites", []), site]

    def local(self, shape: Sequence[int], dtype: Any) -> Array:
        """The plan's own result buffer."""
        return self.world.empty(tuple(shape), dtype, symmetric=False, name=self.operation)

    def blocks_for(self, tasks: int) -> int:
        """How many blocks share `tasks` tasks so that all are resident and may wait."""
        return max(1, min(tasks, self.world.driver.resident_blocks()))

    # ---- for __call__
    def begin(self, stream: Any, *operands: Operand) -> int:
        """Start a call: pending faults, stream order, bookkeeping. Returns the stream's handle."""
        world = self.world
        world.check()
        driver = world.driver
        handle = driver.current_stream() if stream is None else stream_handle(stream)
        if self._stream != handle:
            if self._stream and not driver.capturing(handle):
                order(driver, self._stream, handle)
            self._stream = handle
        for op in operands:
            block = getattr(op.array, "_block", None)
            if block is not None:
                block.enter(handle)
        location = caller()
        for site in self._sites:
            site.calls += 1
            site.location = location
        if world.recording is not None:
            world.recording.keep(self, *(op.array for op in operands))
        return handle

    def input(self, x: Any, shape: tuple[int, ...], dtype: np.dtype, what: str = "x") -> Operand:
        """Check an input against the plan: same shape and dtype, contiguous."""
        op = operand(self.world, x, what)
        self._match(op, shape, dtype, what)
        if not op.contiguous:
            raise InvalidArgument(
                f"{self.operation}: {what} of shape {shape} is not contiguous; pass a contiguous one"
            )
        return op

    def output(
        self, out: Any, buffer: Array | None, shape: tuple[int, ...], dtype: np.dtype
    ) -> Operand:
        """Check `out`, or take the plan's own buffer when it is None."""
        if out is None:
            assert buffer is not None
            return operand(self.world, buffer, "out")
        op = operand(self.world, out, "out")
        self._match(op, shape, dtype, "out")
        memory = op.array[1] if isinstance(op.array, tuple) else None
        if memory is not None and memory.readonly:
            raise InvalidArgument(f"{self.operation}: out is read-only")
        if not op.contiguous:
            raise InvalidArgument(f"{self.operation}: out must be contiguous")
        return op

    def _match(self, op: Operand, shape: tuple[int, ...], dtype: np.dtype, what: str) -> None:
        if op.dtype != dtype:
            raise DtypeError(
                f"{self.operation}: {what} has dtype {op.dtype}, the plan takes {dtype}"
            )
        if op.shape != shape:
            raise InvalidArgument(
                f"{self.operation}: {what} has shape {op.shape}, the plan takes {shape}"
            )

    def launch(self, kernel: Any, grid: int, stream: int, *args: Any, **constants: Any) -> None:
        """Run a kernel of `grid` blocks on the stream."""
        driver = self.world.driver
        outer = driver.current_stream()
        driver.set_current_stream(stream)
        try:
            kernel[(grid,)](*args, **constants)
        finally:
            driver.set_current_stream(outer)


def caller() -> str:
    """"file:line" of the nearest frame outside tdx."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tdx."):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


# ---- one-line functions
def cached(world: World, group: Group, key: tuple[Any, ...], make: Callable[[], P]) -> P:
    """The plan for `key`, made on first use. Every rank of the group must come here alike."""
    plans: OrderedDict[Any, Any] = world.plans.setdefault(group.index, OrderedDict())
    plan = plans.get(key)
    if plan is None:
        plan = make()
        plans[key] = plan
        if len(plans) > _CACHED_PLANS:
            plans.popitem(last=False)
    else:
        plans.move_to_end(key)
    return plan


def world_of(*arrays: Any) -> World:
    """The world of the tdx arrays among the arguments, else the one that is open."""
    for x in arrays:
        if isinstance(x, Array):
            return x.world
    world = current_world()
    if world is None:
        raise Closed("no world is open; call tdx.init() first")
    return world


class Call:
    """One call of a one-line function: results in the caller's own framework.

    A tdx array gives a tdx array. Other inputs are read where they are, and the result is
    written into an array of the caller's framework; for a consumer without a stream the call
    returns when the result is there.
    """

    def __init__(self, world: World, like: Any, stream: Any):
        self.world = world
        self.like = like
        self.stream = stream
        self.foreign = not isinstance(like, Array)
        self.framework = owner_of(like) if self.foreign else None
        if self.foreign and self.framework is None:
            raise InvalidArgument(
                f"expected a tdx array, a NumPy array or a DLPack producer, got "
                f"{type(like).__name__}"
            )

    def result(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """Memory for a fresh result: an array the plan can write to."""
        if self.framework is not None:
            made = self.framework.empty(tuple(shape), dtype, self.like)
            if made is not None:
                return made
        return self.world.empty(tuple(shape), dtype, symmetric=False)

    def finish(self, results: Any) -> Any:
        """Hand results over: wait where the consumer has no stream, adopt what it cannot write."""
        if self.framework is None:
            return results
        if self.framework.stream_of(self.like) is None:
            self.world.synchronize()
        if isinstance(results, tuple):
            return tuple(self._adopt(r) for r in results)
        return self._adopt(results)

    def _adopt(self, result: Any) -> Any:
        if isinstance(result, Array) and self.framework is not None:
            return self.framework.adopt(result, self.like)
        return result

    def readable(self, x: Any) -> Any:
        """`x` itself, or a contiguous copy of a foreign array that is not contiguous."""
        if isinstance(x, Array):
            return x
        memory = operand(self.world, x, "x")
        if memory.contiguous:
            return x
        copy = self.world.empty(memory.shape, memory.dtype, symmetric=False)
        copy.copy_from(x)
        return copy


def words_of(op: Operand, *others: Operand) -> tuple[Any, ...]:
    """Pointers to the memory of operands as the widest integers that fit all, and words a shard.

    Data movement does not care for the element type: the word is the largest of 8, 4, 2, 1 bytes
    that divides the first operand's size and every address.
    """
    nbytes = elements(op.shape) * op.dtype.itemsize
    operands = (op, *others)
    mixed = nbytes
    for each in operands:
        mixed |= each.pointer.data_ptr()
    width = next(w for w in (8, 4, 2, 1) if mixed % w == 0)
    word = np.dtype(f"i{width}")
    pointers = [Pointer(o.pointer.data_ptr(), word, o.pointer) for o in operands]
    return (nbytes // width, *pointers)


def elements(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return math.prod(shape)
