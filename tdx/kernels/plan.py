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
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from triton.tools.tensor_descriptor import TensorDescriptor

from tdx.kernels.operand import Operand, check_operand, check_output, hold_producers, operand
from tdx.kernels.repeating import Repeating
from tdx.kernels.results import Results
from tdx.kernels.select import LOW_LATENCY_BYTES, LOW_LATENCY_RANKS, takes_low_latency
from tdx.runtime import dtypes
from tdx.runtime.agreement import agree
from tdx.runtime.array import Array
from tdx.runtime.block import Block
from tdx.runtime.checks import check_bool
from tdx.runtime.config import config
from tdx.runtime.driver.base import Bound, Described
from tdx.runtime.errors import (
    Closed,
    DriverError,
    DtypeError,
    HeapExhausted,
    InvalidArgument,
    TdxError,
    Unsupported,
)
from tdx.runtime.graph import hold
from tdx.runtime.group import Group, Outsider
from tdx.runtime.pickling import refuse_pickling
from tdx.runtime.signals import Channel, Site, make_channel
from tdx.runtime.stream import (
    DEFAULT_STREAM,
    NOWHERE,
    after,
    follow,
    follow_recorded,
    stream_handle,
)  # fmt: skip
from tdx.runtime.world import World

if TYPE_CHECKING:
    from tdx.runtime.graph import Graph

__all__ = [
    "Plan", "check_algorithm", "check_low_latency", "group_of", "plain_shape", "post_refusal",
]  # fmt: skip

# raised by one rank on its own, as are errors that are not tdx's
_REFUSALS = (InvalidArgument, DtypeError, Unsupported, Closed, DriverError, HeapExhausted)
_numbers = itertools.count(1)


class Plan(Repeating):
    """Base of all plans.

    Attributes
    ----------
    world : World
    group : World or Team
        The ranks that take part.
    call : str
        What the ranks agreed on.
    result : tuple
        Shape and dtype of the result, where there is one.
    """

    operation = "plan"
    recorded_at = (0, NOWHERE)  # see follow_recorded
    _out: Array | None = None  # the result of calls without `out`

    world: World
    group: Group
    call: str
    result: tuple[tuple[int, ...], np.dtype]

    @contextlib.contextmanager
    def agreement(self, world: World, team: Group | None) -> Iterator[dict[str, Any]]:
        """Check arguments in the block, then agree with all ranks on what it puts into the dict.

        The block changes nothing but attributes of the plan, and runs locally, but for votes by
        `unanimous`, before which it may `agree_on` what leads to them. If it raises, the other
        ranks raise CollectiveMismatch at once.
        """
        if not isinstance(world, World):
            raise InvalidArgument(f"{self.operation}: {world!r} is no world; pass a team as team=")
        world.check()
        self.world, self.group = world, group_of(world, team, self.operation)
        self._memory: list[Block] = []  # what its kernels use besides operands
        self._shown: list[Operand] = []  # buffers that users see and every call overwrites
        self._stream = NOWHERE  # of the last call
        self._number = next(_numbers)
        self._results = Results()
        shared: dict[str, Any] = {}
        with posting_refusals(world, self.group, self.operation):
            if world.recording is not None:
                raise InvalidArgument(
                    f"{self.operation} would make a plan while a graph is being recorded; call it "
                    "once before, with the same shapes, or make the plan before recording"
                )
            yield shared
        self.agree_on(shared)
        self._usage = world.usage_of_plan(self.group, self.call)

    def agree_on(self, shared: dict[str, Any]) -> None:
        """Agree on what is in the dict, also before votes on what else follows from it."""
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

    @staticmethod
    def usual_result(dtype: np.dtype) -> np.dtype:
        """The type of results for inputs of `dtype`, unless another is asked for."""
        return dtype

    def __reduce__(self) -> Any:
        return refuse_pickling(self)

    # ---- for the preparation
    def workspace(
        self, name: str, shape: Sequence[int], dtype: Any, words_per_rank: int = 0, steps: int = 1,
        bits: int = 32,
    ) -> Array:  # fmt: skip
        """A zeroed symmetric array outside the user's heap.

        Signals in it, of so many `bits`, count the plan's calls, or the `steps` of each.
        `words_per_rank` tells to which rank each belongs, for kernels that cannot: see Site.
        """
        site = Site(self.operation, name, self._usage, words_per_rank, steps, bits)
        array = self.world.allocate_runtime(self.group, tuple(shape), dtypes.resolve(dtype), site)
        self._memory.append(array._block)
        return array

    def packed_slots(self, words: int, steps: int = 1) -> Array:
        """The same for packed words of data and flag (see packed.py), of 64 bits."""
        return self.workspace("slots", (words,), np.int64, steps=steps, bits=8)

    def channel(self, blocks: int) -> Channel:
        """Signals for `blocks` blocks."""
        site = Site(self.operation, "channel", self._usage)
        return make_channel(self.world, self.group, blocks, site)

    def bind(
        self, kernel: Any, grid: int, pointers: Sequence[Any], *args: Any, **constants: Any
    ) -> Bound:
        """A kernel of `grid` blocks, compiled and loaded for operands at multiples of 16 bytes.

        A first launch with others does so again, and so does whoever binds within a call.
        `pointers` are the dtypes of its leading parameters, or Described; `args` are all other
        run-time ones. It is called with a stream and an operand for each leading parameter.
        """
        self._memory.extend(block for block in _blocks_of(args) if block not in self._memory)
        kinds = tuple(k if isinstance(k, Described) else dtypes.resolve(k) for k in pointers)
        return self.world.driver.bind(kernel, grid, kinds, args, constants)

    def use(self, arrays: Sequence[Array]) -> None:
        """Memory of what is bound, which the caller keeps; also within a call."""
        for array in arrays:
            self._memory.append(array._block)
            if self._stream != NOWHERE:
                array._block.enter(self._stream)

    def result_buffer(self, shape: Sequence[int], dtype: Any, wanted: bool) -> Array | None:
        """What calls without `out` return, if the plan is to have it."""
        if not check_bool(f"{self.operation}: buffer", wanted):
            return None
        return self.world.empty(tuple(shape), dtype, symmetric=False, name=self.operation)

    def fresh_result(self, results: Results | None = None) -> Array:
        """A result for a caller of a one-line function; peers are told if there is none."""
        try:
            return (results or self._results).take(self.world, *self.result, self.operation)
        except Exception as error:
            self.refuse(error)
            raise

    def blocks_for(self, tasks: int, most: int | None = None) -> int:
        """How many blocks, `most` at most, share `tasks` tasks: all are resident and may wait."""
        resident = self.world.driver.resident_blocks()
        usual = resident // 32 * 32 or resident  # arrays of usual sizes divide evenly
        return max(1, min(tasks, resident, usual if most is None else most))

    # ---- for calls
    @property
    def calls(self) -> int:
        """How many were made."""
        return self._usage.calls

    def refuse(self, error: Exception) -> None:
        """This rank does not make a call, because of `error`: peers that time out in it say so.

        They have no word from the host to wait for. The rank may still make the call, rightly.
        """
        if _is_own(error) and not self.world.closed:
            self._usage.refuse(f"{type(error).__name__}: {error}")

    def begin(self, stream: Any, *operands: Operand) -> int:
        """Start a call: pending faults, stream order, bookkeeping. Returns the stream's handle.

        Without a stream it is that of the first operand whose framework shows one; it comes after
        what others show.
        """
        world = self.world
        if world.closed or world.faults.stands():
            world.check()
        if world.recording is not None:
            world.recording.check_thread()
        elif stream is None:
            for op in operands:
                home = op.home
                if stream is None:
                    stream = home
                elif home is not None and home != stream:  # what its framework made comes before
                    after(world.driver, home or DEFAULT_STREAM, stream or DEFAULT_STREAM)
        operands = (*operands, *self._shown)
        handle = world.driver.current_stream() if stream is None else stream_handle(stream)
        if handle != self._stream:
            self.begin_stream(handle)
        here, unseen = [handle], False
        for op in operands:
            block = op.block
            if block is not None:
                if block.last != here:
                    block.enter(handle)
                unseen |= not block.shows_stream
        self.note_caller(3)
        if world.recording is not None:
            self._record(world.recording, operands)
            self.follow_recorded(handle, *operands)
            return handle
        if world.driver.recorded_elsewhere(handle):
            hold(world, self, *(op.block for op in operands))
            self.follow_recorded(handle, *operands)
        elif unseen:
            hold_producers(world, handle, operands)
        self._usage.add()
        if config.debug:
            agree(self.group, self.call)
        return handle

    def _record(self, recording: Graph, operands: Sequence[Operand]) -> None:
        recording.keep(self, *(op.owner for op in operands))
        recording.counts(self._usage)
        recording.before_replay(self.begin_stream)
        for op in operands:
            if op.block is not None:
                recording.before_replay(op.block.enter)

    def follow_recorded(self, stream: int, *operands: Operand) -> None:
        """In a recording: `stream` comes after what that does elsewhere with the same."""
        blocks = (op.block for op in operands if op.block is not None)
        follow_recorded(self.world.driver, stream, (self, *blocks))

    def begin_stream(self, stream: Any) -> int:
        """The handle of `stream`, ordered after the plan's last call elsewhere."""
        driver = self.world.driver
        handle = driver.current_stream() if stream is None else stream_handle(stream)
        if self._stream != handle:
            if self._stream != NOWHERE:
                if driver.capturing(handle):
                    return handle  # what is recorded does not run now: the replay comes here again
                follow(driver, self._stream, handle)
            before, self._stream = [self._stream], handle
            for block in self._memory:  # so that it is not reused before the plan's last call
                if block.last == before:
                    block.stream = handle
                else:  # users see it, and have used it elsewhere
                    block.enter(handle)
        return handle

    def input(self, x: Any, shape: tuple[int, ...], dtype: np.dtype, what: str = "x") -> Operand:
        """Check an input against the plan: same shape and dtype, contiguous."""
        op = x if type(x) is Operand else operand(self.world, x, what)
        if op.shape == shape and op.dtype is dtype and op.contiguous:
            return op
        return check_operand(op, shape, dtype, what)

    def output(
        self, out: Any, buffer: Array | None, shape: tuple[int, ...], dtype: np.dtype
    ) -> Operand:
        """Check `out`, or take the plan's own buffer when it is None."""
        if out is None:
            out = buffer
            if buffer is None:
                raise InvalidArgument(f"{self.operation}: the plan has no buffer; pass out=")
        return check_output(self.world, out, shape, dtype)


@contextlib.contextmanager
def posting_refusals(world: World, group: Group, operation: str) -> Iterator[None]:
    """When this rank refuses what it was given in the block, make its peers raise, not wait."""
    try:
        yield
    except Exception as error:
        post_refusal(world, group, operation, error)
        raise


def group_of(world: World, team: Group | None, operation: str) -> Group:
    """The group for a `team=` argument; the world's ranks are told of one that is none."""
    try:
        return world.group(team)
    except InvalidArgument as error:
        if not isinstance(team, Outsider):  # which none of the members waits for
            post_refusal(world, world, operation, error)
        raise


def post_refusal(world: World, group: Group, operation: str, error: BaseException) -> None:
    """Tell the peers, once, that this rank refuses a call: not of errors that all ranks raise."""
    if _is_own(error) and not world.closed and not getattr(error, "posted", False):
        error.posted = True  # type: ignore[attr-defined]
        with contextlib.suppress(TdxError):
            world.channels.agree(operation, error, members=group.ranks)


def _is_own(error: BaseException) -> bool:
    """Whether one rank raises this on its own."""
    return isinstance(error, _REFUSALS if isinstance(error, TdxError) else Exception)


def plain_shape(shape: Any) -> tuple[int, ...]:
    """A shape argument, an int or a sequence of ints >= 0, as a tuple of ints."""
    try:
        is_one = hasattr(shape, "__index__") and not getattr(shape, "ndim", 0)
        extents = (shape,) if is_one else tuple(shape)
        plain = tuple(operator.index(n) for n in extents)
    except TypeError:
        raise InvalidArgument(f"shape {shape!r} must be an int or a sequence of ints") from None
    if any(n < 0 for n in plain):
        raise InvalidArgument(f"shape {shape!r}: extents must be >= 0")
    return plain


def check_algorithm(operation: str, algorithm: Any, known: Sequence[str]) -> None:
    """Raise InvalidArgument unless `algorithm` is None or one of `known`."""
    if algorithm is not None and not (isinstance(algorithm, str) and algorithm in known):
        raise InvalidArgument(
            f"{operation}: algorithm={algorithm!r} is not one of {', '.join(known)}, or None"
        )


def check_low_latency(
    operation: str, nbytes: int, ranks: int, kinds: tuple[np.dtype, ...] = (),
    algorithm: str = "low_latency", most: int = LOW_LATENCY_BYTES, unit: str = "bytes",
) -> None:  # fmt: skip
    """Raise unless `takes_low_latency`; `unit` says what `nbytes` counts."""
    if takes_low_latency(nbytes, ranks, kinds, most):
        return
    for kind in kinds:
        if kind.itemsize not in (2, 4):
            raise Unsupported(
                f"{operation}: {algorithm} takes types of 2 and 4 bytes, not {kind}; use another "
                "algorithm"
            )
    raise InvalidArgument(
        f"{operation}: {algorithm} takes up to {most} {unit} and {LOW_LATENCY_RANKS} "
        f"ranks, not {nbytes} on {ranks} ranks; use another algorithm"
    )


def _blocks_of(args: Iterable[Any]) -> Iterator[Block]:
    """The blocks of the arrays among a kernel's arguments."""
    for arg in args:
        if isinstance(arg, Array):
            yield arg._block
        elif isinstance(arg, TensorDescriptor):
            yield from _blocks_of((arg.base,))
        elif isinstance(arg, tuple):
            yield from _blocks_of(arg)
