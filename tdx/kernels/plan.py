"""What every plan does: checks, agreement between ranks, workspaces, launches.

A plan is an operation with all checks and workspace done. Making one is collective: ranks compare
what they are about to make, and a rank that refuses its arguments makes the others raise
CollectiveMismatch instead of waiting. Calling one allocates nothing, exchanges nothing on the
host and does not synchronise, so it may be recorded in a graph.

    class Operation(Plan):
        def __init__(self, world, shape, dtype, team=None):
            with self.agreement(world, team) as shared:       # checks; a refusal is posted
                self.shape, self.dtype = plain_shape(shape), dtypes.resolve(dtype)
                shared.update(shape=self.shape, dtype=self.dtype)
            with self.preparation():                          # the same steps on every rank
                self._slots = self.workspace("slots", ...)
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tdx.kernels.operand import Operand, check_operand, check_output, operand
from tdx.runtime import dtypes
from tdx.runtime.agreement import agree
from tdx.runtime.array import Array
from tdx.runtime.config import config
from tdx.runtime.errors import (
    Closed,
    DriverError,
    DtypeError,
    HeapExhausted,
    InvalidArgument,
    TdxError,
    Unsupported,
)
from tdx.runtime.group import Group
from tdx.runtime.signals import Channel, Site, make_channel
from tdx.runtime.stream import order, stream_handle
from tdx.runtime.world import World

__all__ = ["Plan", "launch", "plain_shape", "posting_refusals"]

# raised by one rank on its own
_REFUSALS = (InvalidArgument, DtypeError, Unsupported, Closed, DriverError, HeapExhausted)


class Plan:
    """Base of all plans.

    Attributes
    ----------
    world : World
    group : World or Team
        The ranks that take part.
    call : str
        What the ranks agreed on.
    """

    operation = "plan"

    world: World
    group: Group
    call: str

    @contextlib.contextmanager
    def agreement(self, world: World, team: Group | None) -> Iterator[dict[str, Any]]:
        """Check arguments in the block, then agree with all ranks on what it puts into the dict.

        The block runs locally and changes nothing but attributes of the plan. If it raises, the
        other ranks raise CollectiveMismatch at once.
        """
        world.check()
        self.world, self.group = world, world.group(team)
        self._sites: list[Site] = []
        self._stream = 0
        shared: dict[str, Any] = {}
        with posting_refusals(world, self.group, self.operation):
            if world.recording is not None:
                raise InvalidArgument(
                    f"{self.operation} would make a plan while a graph is being recorded; call it "
                    "once before, with the same shapes, or make the plan before recording"
                )
            yield shared
        described = ", ".join(f"{name}={value}" for name, value in shared.items())
        self.call = f"{self.operation}({described})"
        agree(self.group, self.call)

    @contextlib.contextmanager
    def preparation(self) -> Iterator[None]:
        """Allocate workspaces and channels in the block, the same on every rank; then meet."""
        channels = self.world.channels
        with channels.busy(self.call), posting_refusals(self.world, self.group, self.call):
            yield
            self.world.synchronize()
        channels.barrier(f"{self.call} is ready", self.group.ranks)

    # ---- for the preparation
    def workspace(self, name: str, shape: Sequence[int], dtype: Any) -> Array:
        """A zeroed symmetric array outside the user's heap."""
        site = self._site(name)
        return self.world.allocate_runtime(self.group, tuple(shape), dtypes.resolve(dtype), site)

    def channel(self, blocks: int) -> Channel:
        """Signals for `blocks` blocks."""
        return make_channel(self.world, self.group, blocks, self._site("channel"))

    def _site(self, name: str) -> Site:
        site = Site(self.operation, name)
        self._sites.append(site)
        return site

    def result_buffer(self, shape: Sequence[int], dtype: Any, wanted: bool) -> Array | None:
        """What calls without `out` return, if the plan is to have it."""
        if not wanted:
            return None
        return self.world.empty(tuple(shape), dtype, symmetric=False, name=self.operation)

    def blocks_for(self, tasks: int) -> int:
        """How many blocks share `tasks` tasks so that all are resident and may wait."""
        return max(1, min(tasks, self.world.driver.resident_blocks()))

    # ---- for calls
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
            world.recording.before_replay(self.begin_stream)
            for op in operands:
                block = getattr(op.array, "_block", None)
                if block is not None:
                    world.recording.before_replay(block.enter)
        elif config.debug:
            agree(self.group, self.call)
        return handle

    def begin_stream(self, stream: Any) -> int:
        """The handle of `stream`, ordered after the plan's last call elsewhere."""
        driver = self.world.driver
        handle = driver.current_stream() if stream is None else stream_handle(stream)
        if self._stream != handle:
            if self._stream:
                if driver.capturing(handle):
                    return handle  # what is recorded does not run now: the replay comes here again
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
        if out is None and buffer is None:
            raise InvalidArgument(f"{self.operation}: the plan has no buffer of its own; pass out=")
        return check_output(self.world, buffer if out is None else out, shape, dtype)

    def launch(self, kernel: Any, grid: int, stream: int, *args: Any, **constants: Any) -> None:
        """Run a kernel of `grid` blocks on the stream that `begin` returned."""
        self.world.driver.launch(kernel, grid, stream, args, constants)


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


@contextlib.contextmanager
def posting_refusals(world: World, group: Group, operation: str) -> Iterator[None]:
    """When this rank refuses what it was given in the block, make its peers raise, not wait.

    Errors that ranks raise together are not posted, nor is one error twice.
    """
    try:
        yield
    except _REFUSALS as error:
        if not getattr(error, "posted", False) and not world.closed:
            error.posted = True  # type: ignore[union-attr]
            with contextlib.suppress(TdxError):
                world.channels.agree(operation, error, members=group.ranks)
        raise


def plain_shape(shape: Any) -> tuple[int, ...]:
    """A shape argument, an int or a sequence of ints >= 0, as a tuple of ints."""
    try:
        extents = (shape,) if hasattr(shape, "__index__") else tuple(shape)
        plain = tuple(operator.index(n) for n in extents)
    except TypeError:
        raise InvalidArgument(f"shape {shape!r} must be an int or a sequence of ints") from None
    if any(n < 0 for n in plain):
        raise InvalidArgument(f"shape {shape!r}: extents must be >= 0")
    return plain


def caller() -> str:
    """ "file:line" of the nearest frame outside tdx."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("tdx."):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
