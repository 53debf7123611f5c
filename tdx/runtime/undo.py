"""Transactions: every step registers how to take it back; what is not committed is undone."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["Undo"]


class Undo:
    """A list of undo steps, run last first when the block is left without `commit`.

    >>> with Undo() as undo:
    ...     handle = create()
    ...     undo.add(destroy, handle)
    ...     undo.commit()
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def add(self, step: Callable[..., Any], *args: Any) -> None:
        """Register `step(*args)` as the way to take the last action back."""
        self._steps.append((step, args))

    def commit(self) -> None:
        """Keep everything done so far."""
        self._steps.clear()

    def forget(self, step: Callable[..., Any]) -> None:
        """Keep what `step` would have taken back; the other steps stay registered."""
        self._steps = [entry for entry in self._steps if entry[0] != step]

    def rollback(self) -> list[BaseException]:
        """Run all steps, last first; a failing step does not stop the others.

        Returns the exceptions of the steps that failed.
        """
        failures: list[BaseException] = []
        while self._steps:
            step, args = self._steps.pop()
            try:
                step(*args)
            except Exception as error:
                failures.append(error)
        return failures

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        failures = self.rollback()
        if failures and error is not None:
            for failure in failures:
                error.add_note(f"while undoing: {failure!r}")
        elif failures:
            raise failures[0]
