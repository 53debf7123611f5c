"""What every plan does: checks, agreement between ranks, workspaces, launches.

A plan is an operation with all checks, workspace and compilation done. Making one is collective:
ranks compare what they are about to make, and a rank that refuses its arguments makes the others
raise CollectiveMismatch instead of waiting. Calling one allocates nothing, exchanges nothing on
the host and does not synchronise, so it may be recorded in a graph.
"""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from tdx.interop import owner_of
from tdx.kernels.operand import Operand, check_operand, check_output, operand
from tdx.runtime import dtypes
from tdx.runtime.array import Array
from tdx.runtime.errors import Closed, InvalidArgument, TdxError
from tdx.runtime.group import Group
from tdx.runtime.init import current_world
from tdx.runtime.signals import Channel, Site, make_channel
from tdx.runtime.stream import order, stream_handle
from tdx.runtime.world import World

__all__ = ["Call", "Plan", "cached", "caller", "launch", "world_of"]

_CACHED_PLANS = 64  # one-line functions keep this many plans for each group of ranks

P = TypeVar("P", bound="Plan")


def launch(
    world: World, kernel: Any, grid: int, stream: Any, *args: Any,
    uses: Sequence[Operand] = (), **constants: Any,
) -> None:  # fmt: skip
    """Run a kernel of `grid` blocks on `stream`, after the last use of the operands elsewhere."""
    driver = world.driver
    handle = driver.current_stream() if stream is None else stream_handle(stream)
    for op in uses:
        op.enter(handle)
    driver.launch(kernel, grid, handle, args, constants)


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
        try:
            check()
        except TdxError as error:
            refused(world, self.group, self._record(call), error)
            raise
        world.channels.agree(self._record(call), members=self.group.ranks)
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
        array = self.world.allocate_runtime(
            self.group, tuple(shape), dtypes.resolve(dtype), site
        )
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
        handle = self.begin_stream(stream)
        for op in operands:
            op.enter(handle)
        location = caller()
        for site in self._sites:
            site.calls += 1
            site.location = location
        if world.recording is not None:
            world.recording.keep(self, *(op.array for op in operands))
        return handle

    def begin_stream(self, stream: Any) -> int:
        """The handle of `stream`, ordered after the plan's last call elsewhere."""
        driver = self.world.driver
        handle = driver.current_stream() if stream is None else stream_handle(stream)
        if self._stream != handle:
            if self._stream and not driver.capturing(handle):
                order(driver, self._stream, handle)
            self._stream = handle
        return handle

    def input(self, x: Any, shape: tuple[int, ...], dtype: np.dtype, what: str = "x") -> Operand:
        """Check an input against the plan: same shape and dtype, contiguous."""
        return check_operand(operand(self.world, x, what), shape, dtype, what)

    def output(
        self, out: Any, buffer: Array | None, shape: tuple[int, ...], dtype: np.dtype
    ) -> Operand:
        """Check `out`, or take the plan's own buffer when it is None."""
        return check_output(self.world, buffer if out is None else out, shape, dtype)

    def launch(self, kernel: Any, grid: int, stream: int, *args: Any, **constants: Any) -> None:
        """Run a kernel of `grid` blocks on the stream that `begin` returned."""
        launch(self.world, kernel, grid, stream, *args, **constants)


def refused(world: World, group: Group, call: str, error: TdxError) -> None:
    """Post a refusal to the group, once, so that peers raise instead of waiting."""
    error.posted = True  # type: ignore[attr-defined]
    with contextlib.suppress(TdxError):
        world.channels.agree(call, error, members=group.ranks)


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

    def __init__(self, world: World, group: Group, like: Any, operation: str):
        self.world = world
        self.group = group
        self.like = like
        self.operation = operation
        self.framework = None if isinstance(like, Array) else owner_of(like)

    @contextlib.contextmanager
    def posting_refusals(self) -> Iterator[None]:
        """Tell the peers when this rank refuses the call before it reached a plan."""
        try:
            if self.framework is None and not isinstance(self.like, Array):
                raise InvalidArgument(
                    f"{self.operation}: expected a tdx array, a NumPy array or a DLPack producer, "
                    f"got {type(self.like).__name__}"
                )
            yield
        except TdxError as error:
            if not getattr(error, "posted", False) and not self.world.closed:
                refused(self.world, self.group, self.operation, error)
            raise

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

    def copy(self, source: Array, target: Any, stream: Any) -> None:
        """Copy a plan's contiguous buffer to memory of `result`, in stream order."""
        driver = self.world.driver
        handle = driver.current_stream() if stream is None else stream_handle(stream)
        to = operand(self.world, target, "out")
        for op in (operand(self.world, source, "buffer"), to):
            op.enter(handle)
        driver.copy(to.pointer.data_ptr(), source._address, source.nbytes, handle)

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
