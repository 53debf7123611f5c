"""Plans and channels as if they had been called billions of times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tdx import abi
from tdx.kernels.plan import Plan
from tdx.runtime.array import Array
from tdx.runtime.block import SymmetricBlock
from tdx.runtime.signals import Channel

__all__ = ["STARTS", "age", "assert_age"]

# calls made before: the next ones pass 2**31, where the sign changes, and 2**32, where 0 comes
STARTS = ((1 << 31) - 4, (1 << 32) - 4)


def age(world: Any, calls: int, *things: Any) -> None:
    """Set every epoch, and every signal that counts, as `calls` would. Collective of the world.

    `things` are plans, channels, and arrays of signals. Slots with flags stay as they are: the
    first two calls write both of them, as they have done in all calls before.
    """
    world.barrier()
    found = [array for thing in things for array in _counters(thing)]
    assert found, "nothing that counts"
    for array in found:
        symmetric = isinstance(array._block, SymmetricBlock)
        steps = world._sites.find(array._block.offset)[0].steps if symmetric else 1
        array.copy_from(np.full(array.shape, _number(calls * steps), np.int32))
    world.barrier()


def assert_age(calls: int, *things: Any) -> None:
    """Each of the things has counted `calls` calls."""
    for thing in things:
        seen = [array.numpy() for array in _counters(thing)]
        assert any((array == _number(calls)).any() for array in seen), (calls, seen)


def _number(calls: int) -> np.int32:
    return np.uint32(calls % (1 << 32)).view(np.int32)


def _counters(thing: Any) -> Iterator[Array]:
    if isinstance(thing, Channel):
        yield thing.words[abi.CHANNEL_HEADER_WORDS :]
    elif isinstance(thing, Plan):
        for argument in vars(thing)["bound"]:
            yield from _counters(argument)
    elif isinstance(thing, Array) and thing.dtype == np.int32:
        yield thing


def _bind(self: Plan, kernel: Any, grid: int, pointers: Any, *args: Any, **constants: Any) -> Any:
    """As Plan.bind; remembers what the kernels work with."""
    vars(self).setdefault("bound", []).extend(args)
    return _plain_bind(self, kernel, grid, pointers, *args, **constants)


_plain_bind = Plan.bind
Plan.bind = _bind
