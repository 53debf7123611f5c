"""Agreeing on a call together with the state of the symmetric heap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tdx.runtime.errors import CollectiveMismatch
from tdx.runtime.heap import Call, first_difference

if TYPE_CHECKING:
    from tdx.runtime.group import Group

__all__ = ["agree"]


def agree(group: Group, call: str) -> None:
    """Return if all ranks of the group make this call and allocated alike before it.

    Raises CollectiveMismatch with the table rank -> call on every rank; when only the heaps
    differ, it names the first allocation that does.
    """
    world = group.world
    text = f"{call} team={list(group.ranks)}" if group.index else call
    digest = world.user_region.heap.digest
    if len(set(world.channels.allgather(digest, text, group.ranks))) > 1:
        raise _diverged(group, call)  # every rank sees the same digests and comes here


def _diverged(group: Group, call: str) -> CollectiveMismatch:
    recent = group.world.user_region.heap.recent
    payload = "\n".join(f"{number} {text}" for number, text in recent).encode()
    what = f"heap histories at {call}"
    histories = []
    for data in group.world.channels.allgather(payload, what, group.ranks):
        lines = (line.partition(" ") for line in data.decode().splitlines())
        histories.append([Call(int(number), text) for number, _, text in lines])
    number = 0
    for history in histories[1:]:
        difference = first_difference(histories[0], history)
        if difference is not None and (number == 0 or difference.sequence < number):
            number = difference.sequence
    calls = {
        rank: dict(history).get(number, "no such call")
        for rank, history in zip(group.ranks, histories, strict=True)
    }
    table = "; ".join(f"rank {rank}: {text}" for rank, text in calls.items())
    return CollectiveMismatch(
        f"{call}: ranks allocated differently before it; the first difference that is still "
        f"remembered is allocation {number}: {table}. Symmetric arrays need the same calls in the "
        "same order on every rank",
        calls,
    )
