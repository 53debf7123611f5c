"""How rank cases are written: functions `case_<name>` in tests/ranks/cases/*.py.

A case runs on every rank of a world. By name it may ask for: `world` (made once per job),
`rng` (a numpy Generator with the same seed on all ranks), `comm` (MPI.COMM_WORLD), `backend`
("host", "cuda", "hip") and the names of `pytest.mark.parametrize`. Other marks work as on tests.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest

__all__ = ["Options", "expand", "host_only", "isolated", "limit", "options_of", "skip", "worlds"]

_GIVEN = {"world", "rng", "comm", "backend"}


@dataclass
class Options:
    """How a case is run."""

    worlds: tuple[int, ...] = (1, 2, 3, 4)
    limit_s: float = 60.0
    isolated: bool = False
    dies: frozenset[int] = field(default_factory=frozenset)


def options_of(case: Callable[..., Any]) -> Options:
    return case.__dict__.setdefault("case_options", Options())


def worlds(*sizes: int) -> Callable[..., Any]:
    """World sizes the case runs on; default 1, 2, 3, 4."""

    def decorate(case: Callable[..., Any]) -> Callable[..., Any]:
        options_of(case).worlds = sizes
        return case

    return decorate


def limit(seconds: float) -> Callable[..., Any]:
    """Time limit of the case; default 60 s."""

    def decorate(case: Callable[..., Any]) -> Callable[..., Any]:
        options_of(case).limit_s = seconds
        return case

    return decorate


def isolated(case: Callable[..., Any] | None = None, *, dies: Iterable[int] = ()) -> Any:
    """The case has a job of its own, in which no world was made.

    dies: ranks that end without a result, as the case means them to.
    """

    def decorate(case: Callable[..., Any]) -> Callable[..., Any]:
        if "world" in inspect.signature(case).parameters:
            raise TypeError(f"{case.__name__} is isolated: no world is made for it")
        options_of(case).isolated = True
        options_of(case).dies = frozenset(dies)
        return case

    return decorate if case is None else decorate(case)


def host_only(backend: str) -> None:
    """Skip on GPUs what they cannot show, or would run into."""
    if backend != "host":
        pytest.skip("on the host tier only")


def skip(reason: str) -> NoReturn:
    """Skip because something is not installed; with CI=true in the environment, fail."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"in CI nothing may be missing: {reason}")
    pytest.skip(reason)


def expand(case: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parameter sets of the case's parametrize marks, each with its id ("" for none)."""
    axes = []
    for mark in getattr(case, "pytestmark", []):
        if mark.name != "parametrize":
            continue
        names = mark.args[0]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        ids = mark.kwargs.get("ids")
        axis = []
        for index, values in enumerate(mark.args[1]):
            row = (values,) if len(names) == 1 else tuple(values)
            given = ids(values) if callable(ids) else ids[index] if ids else None
            axis.append((given or "-".join(map(_text, row)), dict(zip(names, row, strict=True))))
        axes.append(axis)
    unknown = set(inspect.signature(case).parameters) - _GIVEN
    for chosen in itertools.product(*reversed(axes)):
        arguments = {name: value for _, part in chosen for name, value in part.items()}
        if set(arguments) != unknown:
            raise TypeError(f"{case.__name__}: arguments {unknown}, parametrized {set(arguments)}")
        yield "-".join(text for text, _ in chosen), arguments


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "x".join(map(_text, value)) or "()"
    return getattr(value, "__name__", str(value))
