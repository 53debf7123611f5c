"""Errors as bytes: how a step that failed on one rank raises the same class on all of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from tdx.runtime import errors
from tdx.runtime.errors import CollectiveMismatch, TdxError

__all__ = [
    "describe_ranks",
    "is_consequence",
    "pack_error",
    "raise_for_peers",
    "require_same_calls",
    "table_of",
]

_ARGUMENT = re.compile(r"(\w+)=(?!\w+\()(\([^()]*\)|\[[^\]]*\]|[^,()]+)")  # also of a Config
# Where ranks wait for each other, a failure of one is one of these on the others.
_CONSEQUENCES = ("PeerLost", "PeerTimeout", "CollectiveMismatch")


def pack_error(error: BaseException | None) -> bytes:
    """The outcome of a local step as bytes: empty for success, else "Class: message".

    Marks the error as one that the peers are told of.
    """
    if error is None:
        return b""
    _known_to_all(error)
    return f"{type(error).__name__}: {error}".encode("utf-8", "replace")


def _known_to_all(error: BaseException) -> BaseException:
    """Mark an error of which the peers know, so that no refusal is posted for it as well."""
    error.posted = True  # type: ignore[attr-defined]
    return error


def is_consequence(outcome: bytes) -> bool:
    """Whether a failure, from `pack_error`, may only follow from that of another rank."""
    return outcome.decode("utf-8", "replace").partition(":")[0] in _CONSEQUENCES


def raise_for_peers(outcomes: Mapping[int, bytes], what: str) -> None:
    """Raise if the step failed on any rank; return otherwise.

    `outcomes` maps world rank -> `pack_error` of that rank. The class raised is that of the
    lowest failing rank where it is one of tdx, else TdxError; the message names every failing
    rank. A rank whose own step failed raises its own error instead of calling this.
    """
    failed = {rank: data.decode("utf-8", "replace") for rank, data in outcomes.items() if data}
    if not failed:
        return
    kind = getattr(errors, failed[min(failed)].partition(":")[0], TdxError)
    if not (isinstance(kind, type) and issubclass(kind, TdxError)):
        kind = TdxError
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items()))
    raise _known_to_all(kind(f"{what} failed: {reasons}"))


def require_same_calls(calls: Mapping[int, str]) -> None:
    """Raise CollectiveMismatch unless all texts of `calls` (world rank -> call) are equal."""
    by_call = _by_call(calls)
    if len(by_call) > 1:
        mismatch = CollectiveMismatch(
            f"ranks made different calls where all must make the same one: {table_of(calls)}"
            f"{_differences(by_call)}",
            dict(sorted(calls.items())),
        )
        raise _known_to_all(mismatch)


def table_of(calls: Mapping[int, str]) -> str:
    """World rank -> call as text: "rank 0: this; ranks 1-3: that"."""
    return "; ".join(f"{describe_ranks(ranks)}: {call}" for call, ranks in _by_call(calls).items())


def _by_call(calls: Mapping[int, str]) -> dict[str, list[int]]:
    by_call: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_call.setdefault(call, []).append(rank)
    return by_call


def _differences(by_call: Mapping[str, list[int]]) -> str:
    """What differs between calls of one operation, "name(argument=value, ...)"; else nothing."""
    named = [call.partition("(") for call in by_call]
    if len({name for name, *_ in named}) > 1 or not named[0][0].isidentifier():
        return ""
    arguments = [dict(_ARGUMENT.findall(text)) for _, _, text in named]
    differing = []
    names = list(dict.fromkeys(name for each in arguments for name in each))
    told = [name for name in names if all(name in each for each in arguments)]
    if any(len({each[name] for each in arguments}) > 1 for name in told):
        names = told  # what some lack follows from what differs, or comes later
    for name in names:
        ranks: dict[str, list[int]] = {}
        for given, whose in zip(arguments, by_call.values(), strict=True):
            ranks.setdefault(given.get(name, "nothing"), []).extend(whose)
        if len(ranks) > 1:
            values = ", ".join(f"{v} on {describe_ranks(r)}" for v, r in ranks.items())
            differing.append(f"{name}: {values}")
    return f". They differ in {'; in '.join(differing)}" if differing else ""


def describe_ranks(ranks: Collection[int]) -> str:
    """Ranks as text: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return ("rank " if len(ranks) == 1 else "ranks ") + text
