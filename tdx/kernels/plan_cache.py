"""Plans that one-line functions keep: each is made once, alike on every rank, and found again."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tdx.kernels.plan import Plan, post_refusal
from tdx.runtime import dtypes
from tdx.runtime.array import Array
from tdx.runtime.errors import DtypeError, InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.stream import stream_handle
from tdx.runtime.world import World

__all__ = [
    "are_arrays", "cached", "check_key", "check_recording", "known_by", "known_plan", "plan_for",
    "remembered",
]  # fmt: skip

_REMEMBERED = 64  # plans kept for each group of ranks

P = TypeVar("P", bound=Plan)
T = TypeVar("T")


def remembered(world: World, group: Any, key: Any, make: Callable[[], T]) -> T:
    """What `make` made for `key` before, or makes now; the last few of each group are kept."""
    known: OrderedDict[Any, Any] = world.plans.setdefault(group, OrderedDict())
    made = known.get(key)
    if made is None:
        del known  # making room for a plan gives up all others of the group
        made = make()
        known = world.plans.setdefault(group, OrderedDict())
        known[key] = made
        if len(known) > _REMEMBERED:
            known.popitem(last=False)
    else:
        known.move_to_end(key)
    return made


def check_key(operation: str, key: Any, options: Callable[[], Mapping[str, Any]]) -> None:
    """Raise InvalidArgument if an option in `key` cannot be part of one, such as a list."""
    try:
        hash(key)
    except TypeError:
        for name, value in options().items():
            try:
                hash(value)
            except TypeError:
                raise InvalidArgument(
                    f"{operation}: {name}={value!r} is a {type(value).__name__}, which no option "
                    f"takes; help(tdx.{operation}) says what it takes"
                ) from None
        raise


def check_recording(world: World, operation: str, stream: Any) -> None:
    """Raise InvalidArgument if another library records `stream`: nothing can be loaded then.

    None: the current stream. Raises a pending fault, or Closed, first: then the stream may be gone.
    """
    world.check()
    handle = world.driver.current_stream() if stream is None else stream_handle(stream)
    if world.driver.recorded_elsewhere(handle):
        raise InvalidArgument(
            f"{operation} would load a kernel while another library records a graph of the "
            "stream; call it once before, with the same shapes and layouts"
        )


def cached(
    world: World, group: Group, kind: type[P], *args: Any, stream: Any = None, **options: Any
) -> P:
    """The plan `kind(world, *args, **options)`, made on first use, alike on every rank.

    `stream`: where it will be called. None is made while another library records that.
    """
    key = known_by(kind, args, options)

    def named() -> dict[str, Any]:
        names = kind.__init__.__code__.co_varnames[2:]  # behind self and world
        return dict(zip(names, args, strict=False)) | options

    check_key(kind.operation, key, named)

    def make() -> P:
        try:
            check_recording(world, kind.operation, stream)
        except InvalidArgument as error:
            post_refusal(world, group, kind.operation, error)
            raise
        return kind(world, *args, team=group, **options)

    return remembered(world, group.index, key, make)


def known_by(
    kind: type[Plan], args: tuple[Any, ...], options: Mapping[str, Any], *more: Any
) -> tuple[Any, ...]:
    """What a plan is kept under: the same however a dtype is spelled."""
    for name in ("partial_dtype", "out_dtype"):  # usually that of the output, and that of the input
        given = options.get(name)
        if given is not None:
            with contextlib.suppress(DtypeError):  # the plan raises it
                dtype, other = dtypes.resolve(given), None
                if name == "partial_dtype":
                    other = options.get("out_dtype")
                usual = kind.usual_result(args[-1]) if other is None else dtypes.resolve(other)
                options = {**options, name: None if dtype == usual else dtype}
    return (kind, *args, *options.values(), *more)


def known_plan(
    kind: type[P], team: Group | None, args: tuple[Any, ...], options: Mapping[str, Any], x: Array,
    *others: Any,
) -> P | None:  # fmt: skip
    """The plan `kind(world, *args, **options)` that there is for tdx arrays, or None.

    None also if `others`, where there are any, are anything else: a Call finds out what is wrong.
    """
    op = x.operand
    if op is None or op.block.freed or not are_arrays(others):
        return None
    return plan_for(x.world, team, known_by(kind, args, options, False))


def are_arrays(given: Iterable[Any]) -> bool:
    """Whether all that there is are tdx arrays."""
    for x in given:  # noqa: SIM110  # all() takes twice as long
        if x is not None and type(x) is not Array:
            return False
    return True


def plan_for(world: World, team: Group | None, key: tuple[Any, ...]) -> Any:
    """The plan of this key, see cached; None: there is none yet."""
    try:
        plans = world.plans.get(0 if team is None else world.group(team).index)
        plan = plans[key]
    except (KeyError, TypeError, InvalidArgument):  # also without any: the other way finds out
        return None
    plans.move_to_end(key)
    return plan
