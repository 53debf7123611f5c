"""Agreeing on a call together with the state of the symmetric heap."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tdx.runtime.errors import CollectiveMismatch
from tdx.runtime.heap import HISTORY, Call, first_difference
from tdx.runtime.outcomes import table_of

if TYPE_CHECKING:
    from tdx.runtime.group import Group

__all__ = ["agree", "difference", "unanimous"]


def agree(group: Group, call: str) -> None:
    """Return if all ranks of the group make this call and allocated alike before it.

    Raises CollectiveMismatch with the table rank -> call on every rank; when only the heaps
    differ, it names the first allocation that does.
    """
    if (found := difference(group, call)) is not None:
        group.world.user_region.diverged = True
        raise found


def unanimous(group: Group, call: str, wish: bool) -> bool:
    """Whether all ranks of the group, which make this call, have the wish."""
    wishes = group.world.channels.allgather(bytes([wish]), _named(group, call), group.ranks)
    return all(each[0] for each in wishes)


def difference(group: Group, call: str) -> CollectiveMismatch | None:
    """As agree, but returns what it would raise where only the heaps differ."""
    world = group.world
    digest = world.user_region.heap.digest
    if len(set(world.channels.allgather(digest, _named(group, call), group.ranks))) == 1:
        return None
    return _diverged(group, call)  # every rank sees the same digests and comes here


def _named(group: Group, call: str) -> str:
    return f"{call} team={list(group.ranks)}" if group.index else call


def _diverged(group: Group, call: str) -> CollectiveMismatch:
    payload = json.dumps(group.world.user_region.heap.recent).encode()
    gathered = group.world.channels.allgather(payload, f"heap histories at {call}", group.ranks)
    histories = [[Call(*made) for made in json.loads(data)] for data in gathered]
    found = (first_difference(histories[0], history) for history in histories[1:])
    number = min((each.sequence for each in found if each is not None), default=0)
    calls = {
        rank: _made(history, number) for rank, history in zip(group.ranks, histories, strict=True)
    }
    which = f"the first difference that is still remembered is allocation {number}"
    if not number:
        calls = {}
        which = f"not in the last {HISTORY} allocations, of which more is known"
    return CollectiveMismatch(
        f"{call}: ranks have allocated differently; {which}{calls and ': ' + table_of(calls)}. "
        "Symmetric arrays need the same calls, with the same shapes, dtypes and names, in the "
        "same order on every rank",
        calls,
    )


def _made(history: list[Call], number: int) -> str:
    """The call of that number, and where it was made."""
    for call in history:
        if call.sequence == number:
            return call.text + (call.place and f", made at {call.place}")
    return "no such call"
