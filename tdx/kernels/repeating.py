"""Calls like one before, which need not be looked at again: see Repeating."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tdx.kernels.operand import Operand
from tdx.runtime.array import Array
from tdx.runtime.block import Block
from tdx.runtime.config import config
from tdx.runtime.stream import stream_handle

if TYPE_CHECKING:
    from tdx.runtime.signals import Usage
    from tdx.runtime.world import World

__all__ = ["Repeating"]


class Repeating:
    """What a plan remembers of its calls. Part of Plan.

    A call of tdx arrays is noted at one of them, which others do not replace from call to call. One
    that has the same, on the same stream, needs no checks, and nothing to order its work behind.
    """

    world: World
    _number: int
    _out: Array | None
    _shown: list[Operand]
    _stream: int
    _usage: Usage

    def begin(self, stream: Any, *operands: Operand) -> int:
        """As Plan has it."""
        raise NotImplementedError

    def again(self, stream: Any, x: Any, out: Any) -> tuple[int, Operand, Operand] | None:
        """Start a call that is like one before: (handle of the stream, operands of x and out).

        Of arrays with which `begin_checked` began one, and on the same stream: all that begin
        would do has been done. None if anything differs, or may: then all is to be looked at.
        """
        result = self._out if out is None else out
        if type(x) is not Array or type(result) is not Array:
            return None
        op, to = x.operand, result.operand
        if op is None or to is None:
            return None
        plan, other = to.checked
        if plan != self._number or other() is not op:
            return None
        handle = self._undisturbed(stream)
        if handle is None:
            return None
        here = [handle]
        if op.block.last != here or to.block.last != here:  # as that of freed memory never is
            return None
        self._count(3)
        return handle, op, to

    def begin_checked(self, stream: Any, op: Operand, to: Operand) -> tuple[int, Operand, Operand]:
        """As begin, and note that x and out were checked together, which do not change."""
        handle = self.begin(stream, op, to)
        if _are_ordered((op, to)):
            to.checked = (self._number, weakref.ref(op))
        return handle, op, to

    def again_with(
        self, stream: Any, at: Any, *others: Any, above: int = 1
    ) -> tuple[int, list[Operand | None], Any] | None:
        """As again, of arrays noted at the first; None stands for what there is not.

        (handle of the stream, their operands, what else was noted with them). `above`: how many
        frames up the plan is called.
        """
        at = at.operand if type(at) is Array else at
        if type(at) is not Operand:
            return None
        for plan, known, more in at.noted:
            if plan == self._number and (ops := _same(others, known)) is not None:
                handle = self._goes_on(stream, [at, *ops], above)
                return None if handle is None else (handle, [at, *ops], more)
        return None

    def again_adding(
        self, stream: Any, x: Any, out: Any, bias: Any, residual: Any
    ) -> tuple[Any, ...] | None:
        """As again, with what is added to the result: (handle, operands of x, out and of those).

        One of them at least; the operand of x stands in for the other.
        """
        if bias is residual is None:
            return None
        at, rest = (residual, None) if bias is None else (bias, residual)
        known = self.again_with(stream, at, x, self._out if out is None else out, rest, above=2)
        if known is None or known[2] != (bias is None):
            return None
        handle, (added, op, to, whole), _ = known
        return (handle, op, to, op, added) if bias is None else (handle, op, to, added, whole or op)

    def note_adding(
        self, op: Operand, to: Operand, bias: Operand | None, residual: Operand | None
    ) -> None:
        """A call that adds at least one of these was checked and has begun."""
        at, rest = (residual, None) if bias is None else (bias, residual)
        assert at is not None
        self.note(at, (op, to, rest), more=bias is None)

    def _goes_on(self, stream: Any, ops: Sequence[Any], above: int) -> int | None:
        """The handle of `stream`, and the call is counted, if all were last used there."""
        handle = self._undisturbed(stream)
        if handle is None:
            return None
        here = [handle]
        for op in ops:
            if op is not None and op.block.last != here:
                return None
        self._count(3 + above)
        return handle

    def note(self, at: Operand, others: tuple[Operand | None, ...], more: Any = None) -> None:
        """A call with these was checked and has begun; `more`: what else such calls need."""
        if not _are_ordered((at, *others)):
            return
        refs = tuple(None if op is None else weakref.ref(op) for op in others)
        # two of them: who has a fresh result while asking for the next gets two in turn
        at.noted = ((self._number, refs, more), *at.noted[:1])

    def _undisturbed(self, stream: Any) -> int | None:
        """The handle of `stream`, if it is that of the last call and nothing is out of the way."""
        world = self.world
        if world.closed or world.recording is not None or world.faults.stands() or config.debug:
            return None
        driver = world.driver
        try:
            handle = driver.current_stream() if stream is None else stream_handle(stream)
        except Exception:  # begin raises it where peers are told
            return None
        if handle != self._stream or driver.recorded_elsewhere(handle):
            return None
        for each in self._shown:
            if each.block.last != [handle]:  # type: ignore[union-attr]
                return None
        return handle

    def _count(self, above: int) -> None:
        """A call is made by the frame so far up."""
        usage = self._usage
        try:
            frame = sys._getframe(above)
            direct = frame.f_code is usage.code  # as note_caller finds out
        except ValueError:  # a thread that begins with the call
            direct = False
        if direct:
            usage.instruction = frame.f_lasti
        else:
            self.note_caller(above + 1)
        usage.add()

    def note_caller(self, above: int) -> None:
        """From the frame so far up: the first outside of tdx is where messages say it was made."""
        usage, depth = self._usage, self._usage.depth
        try:
            frame = sys._getframe(above + depth)
            found = frame.f_code is usage.code and (
                not depth or sys._getframe(above + depth - 1).f_code is usage.entry
            )
        except ValueError:  # the stack is not that deep
            found = False
        if not found:
            frame, up = sys._getframe(), 0
            while frame.f_globals["__name__"][:4] == "tdx." and frame.f_back is not None:
                usage.entry, frame, up = frame.f_code, frame.f_back, up + 1
            usage.code, usage.depth = frame.f_code, up - above
        usage.instruction = frame.f_lasti


def _same(given: Sequence[Any], known: Sequence[Any]) -> list[Any] | None:
    """The operands of what is given if it is what is known, of which there are references."""
    ops: list[Any] = []
    for x, ref in zip(given, known, strict=True):
        if x is None or ref is None:
            if x is not ref:
                return None
            ops.append(None)
        else:
            op = x.operand if type(x) is Array else x
            if op is None or ref() is not op:
                return None
            ops.append(op)
    return ops


def _are_ordered(ops: Iterable[Operand | None]) -> bool:
    """Whether blocks of tdx tell where each was used last."""
    return all(op is None or (isinstance(op.block, Block) and op.block.shows_stream) for op in ops)
