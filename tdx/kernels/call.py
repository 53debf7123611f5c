"""One-line functions: cached plans, operands of any framework, results in the caller's own.

A tdx array gives a tdx array. Other inputs are read where they are, and the result is written
into an array of the caller's framework, on the caller's current stream; for a consumer without a
stream the call returns when the result is there. On a GPU backend, arrays in host memory are
copied to the device first and results copied back: convenient, and as slow as that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from tdx.interop import owner_of
from tdx.kernels.operand import (
    Operand,
    check_array,
    check_device,
    check_output,
    enter,
    operand,
)
from tdx.kernels.plan import Plan, group_of, post_refusal
from tdx.kernels.plan_cache import are_arrays, cached, known_by, plan_for
from tdx.runtime import dlpack
from tdx.runtime.array import Array
from tdx.runtime.errors import Closed, InvalidArgument, TdxError
from tdx.runtime.group import Group
from tdx.runtime.init import current_world, no_world
from tdx.runtime.stream import DEFAULT_STREAM, after, before_which, stream_handle
from tdx.runtime.world import World

__all__ = ["Call", "one_line", "world_of"]

_NONE: Mapping[str, Any] = MappingProxyType({})
_HOST_MEMORY = (dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST)

P = TypeVar("P", bound=Plan)


def world_of(*arrays: Any) -> World:
    """The world of the tdx arrays among the arguments, else the one that is open."""
    closed = None
    for x in arrays:
        if type(x) is Array:
            if not x.world.closed:
                return x.world
            closed = x.world  # that array is refused
    world = current_world() or closed
    if world is None:
        raise Closed(no_world())
    return world


def one_line(
    kind: type[P], x: Any, out: Any, team: Group | None, stream: Any, options: dict[str, Any],
    operands: Mapping[str, Any] = _NONE,
) -> Any:  # fmt: skip
    """A one-line function whose plan is `kind(world, shape, dtype, **options)`, called with `x`.

    `operands` are further ones, or None, which the plan takes by these names. A call that is like
    an earlier one goes straight to its plan, on tdx arrays and those of frameworks with streams.
    """
    if type(x) is Array:
        plan, op = None, x.operand
        fit = (out is None or type(out) is Array) and (
            not operands or are_arrays(operands.values())
        )
        if fit and op is not None and not op.block.freed:
            plan = plan_for(x.world, team, known_by(kind, (x.shape, x.dtype), options, False))
        if plan is not None:
            out = plan.fresh_result() if out is None else out
            return plan(x, out, stream, **operands) if operands else plan(x, out, stream)
    else:
        result = _straight(kind, x, out, team, stream, options, operands)
        if result is not None:
            return result
    call = Call(kind.operation, x, out, team=team, stream=stream)
    with call:
        source = call.operand(x, "x")
        others = {what: call.optional(y, what) for what, y in operands.items()}
        plan = call.plan(kind, source.shape, source.dtype, **options)
        target = call.target(out, *plan.result)
        plan(source, target, call.stream, **others)
    return call.finish(target)


def _straight(
    kind: type[P], x: Any, out: Any, team: Group | None, stream: Any, options: dict[str, Any],
    operands: Mapping[str, Any],
) -> Any:  # fmt: skip
    """The result of the plan for memory like that of `x`; None if anything is unlike earlier calls.

    What is wrong with arguments is found out by a Call, which tells the peers.
    """
    world, framework = current_world(), owner_of(x)
    if world is None or framework is None or (out is not None and owner_of(out) is not framework):
        return None
    home, plan = framework.stream_of(x), None
    if home is None:
        return None
    try:
        source = operand(world, framework.describe(x), "x")
        if are_arrays(operands.values()):
            key = known_by(kind, (source.shape, source.dtype), options, False)
            plan = plan_for(world, team, key)
        if plan is None or not source.contiguous:
            return None
        result = framework.empty(*plan.result, x) if out is None else out
        if result is None:
            return None
        to = check_output(world, framework.describe(result), *plan.result)
    except TdxError:
        return None
    except Exception as error:  # of the framework's own
        if plan is None:
            return None
        plan.refuse(error)
        raise
    if stream is None and world.recording is None:
        stream = home
    plan(source, to, stream, **operands)
    return result


class Call:
    """One call of a one-line function.

    Parameters
    ----------
    operation : str
        Its name, for messages.
    like : array
        The operand whose framework the results belong to.
    others : arrays
        Further operands, of which tdx arrays tell the world.
    team, stream
        As the function got them.
    """

    def __init__(
        self, operation: str, like: Any, *others: Any, team: Group | None = None, stream: Any = None
    ):
        self.world = world_of(like, *others)
        self.group = group_of(self.world, team, operation)
        self.operation = operation
        self._like = like
        self._framework = None if isinstance(like, Array) else owner_of(like)
        current = None if self._framework is None else self._framework.stream_of(like)
        self._waits = self._framework is not None and current is None
        recording = self.world.recording is not None  # of what has no stream of its own
        self.stream = current if stream is None and not recording else stream
        self._is_named = stream is not None
        self._plan: Plan | None = None  # once all ranks have that of this call
        self._made = 0  # calls of the plan before this one
        self._staged = False  # are the operands in host memory, and the world on a GPU?
        self._given: set[int] = set()  # tdx arrays passed as `out`: returned as they are
        self._copies: dict[int, np.ndarray[Any, Any]] = {}  # results to be copied to `out` arrays

    def __enter__(self) -> Call:
        """The body of the function: peers are told when this rank refuses its arguments."""
        try:
            if self._framework is None and not isinstance(self._like, Array):
                raise InvalidArgument(
                    f"{self.operation}: expected a tdx array, a NumPy array or a DLPack producer, "
                    f"got {type(self._like).__name__}; for numbers and sequences pass np.asarray(x)"
                )
            self.check_recording()
        except InvalidArgument as error:
            post_refusal(self.world, self.group, self.operation, error)
            raise
        return self

    def check_recording(self) -> None:
        """Raise InvalidArgument if a graph is recorded, and the call would wait for its result."""
        if self._waits and self.world.recording is not None:
            raise InvalidArgument(
                f"{self.operation}: with an array of {self._framework.name} the call would wait "
                "for its result, which a graph cannot; make a tdx array before, by world.array(x)"
            )

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        if self._plan is None:
            post_refusal(self.world, self.group, self.operation, error)
        elif isinstance(error, Exception) and self._plan.calls == self._made:
            self._plan.refuse(error)  # the peers wait in its kernels, not for words

    def handle(self) -> int:
        """The stream on which the call's work is queued."""
        if self.stream is None:
            return self.world.driver.current_stream()
        return stream_handle(self.stream)

    def plan(self, kind: type[P], *args: Any, **options: Any) -> P:
        """The cached plan of this call; it has no buffers for results."""
        options["buffer"] = False
        plan = cached(self.world, self.group, kind, *args, stream=self.stream, **options)
        self._plan, self._made = plan, plan.calls
        return plan

    def operand(self, x: Any, what: str, strided: bool = False) -> Operand:
        """`x` as an operand; a copy where the device cannot read it, or it must be contiguous."""
        framework = None if isinstance(x, Array) else owner_of(x)
        if framework is None:
            return operand(self.world, x, what)
        self._meet(framework, x)
        asked = None if self.world.recording else before_which(self.world, self.handle())
        with self.world.driver.using():  # producers may take the default stream of another GPU
            memory = framework.describe(x, asked)
        staged = self.world.backend != "host" and memory.device[0] in _HOST_MEMORY
        self._staged |= staged
        if not staged and (strided or memory.contiguous):
            if framework.stream_of(x) is None and not self._is_recorded():
                self._waits = True  # its owner does not see that it is in use
            return operand(self.world, memory, what)
        if staged:  # where work runs now, although the call may be recorded
            return operand(self.world, self.world.array(x, symmetric=False), what)
        check_device(self.world, memory, what)
        with self.world.driver.using(), self.world.on(self.handle()):
            return operand(self.world, self.world.array(x, symmetric=False), what)

    def optional(self, x: Any, what: str) -> Operand | None:
        """`operand`, or None for None."""
        return None if x is None else self.operand(x, what)

    def target(self, out: Any, shape: Sequence[int], dtype: np.dtype, what: str = "out") -> Any:
        """Where a plan writes a result: `out`, or fresh memory."""
        shape = tuple(shape)
        if out is None:
            made = None
            if self._framework is not None and not self._staged:
                made = self._framework.empty(shape, dtype, self._like)
            return self.world.local(shape, dtype, self.operation) if made is None else made
        if isinstance(out, Array):
            self._given.add(id(out))
            return out
        if self.world.backend != "host" and isinstance(out, np.ndarray):
            if not out.flags.writeable:
                raise InvalidArgument(f"{what} is read-only; pass a writable array")
            check_array(out.shape, out.dtype, out.flags.c_contiguous, shape, dtype, what)
            staging = self.world.local(shape, dtype, self.operation)
            self._copies[id(staging)] = out
            return staging
        framework = owner_of(out)
        if framework is not None:
            self._meet(framework, out)
            self._waits |= framework.stream_of(out) is None
        return out

    def _is_recorded(self) -> bool:
        world = self.world
        return world.recording is not None or world.driver.recorded_elsewhere(self.handle())

    def _meet(self, framework: Any, x: Any) -> None:
        """Use the stream of the framework, if none is known so far; else come after it."""
        if self._is_named or self.world.recording is not None:
            return
        home = framework.stream_of(x)
        if home is None:
            return
        there = home or DEFAULT_STREAM
        if self.stream is not None:
            after(self.world.driver, there, self.handle())
            return
        if self._waits:  # an owner who shows none has ordered its work before the current stream
            after(self.world.driver, self.handle(), there)
        self.stream = home

    def finish(self, result: Any) -> Any:
        """Hand a target (or a tuple of them) over to the caller, complete if it has no stream."""
        if self._waits:
            with self.world.surfacing():
                self.world.driver.stream_synchronize(self.handle())
            self.world.in_flight.release(self.handle())
            self.world.check()
        if isinstance(result, tuple):
            return tuple(self._adopt(each) for each in result)
        return self._adopt(result)

    def _adopt(self, result: Any) -> Any:
        if id(result) in self._copies:
            out = self._copies[id(result)]
            np.copyto(out, result.numpy())
            return out
        if self._framework is None or not isinstance(result, Array) or id(result) in self._given:
            return result
        return self._framework.adopt(result.numpy() if self._staged else result, self._like)

    def copy(self, source: Array, target: Any) -> None:
        """Copy a plan's contiguous buffer to a target, in stream order."""
        handle = self.handle()
        to = operand(self.world, target, "out")
        enter(self.world, handle, operand(self.world, source, "buffer"), to)
        keep = (source, to.owner)
        self.world.driver.copy(to.address, source._address, source.nbytes, handle, keep)
