"""The call board: shared memory in which every rank of a host shows which calls it has made.

Calls of existing plans exchange nothing. But when a rank has waited in vain, the board tells
whether a peer is late, or has gone another way: each operation has an entry with the number of
calls made, and with the place of the latest one among all calls of that rank. One more entry of
each rank holds the latest call that it refused, and why.
"""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, permutations
from typing import NamedTuple

from tdx.runtime.errors import CollectiveMismatch, TdxError

__all__ = ["PLAN_KEY", "CallBoard", "Entry", "board_bytes", "explained"]

_ENTRIES = 512  # for each rank; operations beyond that are not shown
_KEY, _STATE = 0, 1  # 64-bit words of an entry: the operation; place << 32 | calls
_TEXT = 16  # bytes before the text
_ENTRY_BYTES = 512
_RANK_BYTES = (_ENTRIES + 1) * _ENTRY_BYTES  # the last one: the refused call
_LOW = 0xFFFFFFFF
PLAN_KEY = 1 << 63  # in the keys of plans' entries
_MADE, _CALLED = (
    re.compile(r"a meeting on the host for (\w+)\("),
    re.compile(r"call \d+ of (\w+)\("),
)
_CONFIRM_S = 0.02  # a peer that is late but at work may make its calls while it is looked at


def board_bytes(ranks: int) -> int:
    """Size of the memory for this many ranks."""
    return ranks * _RANK_BYTES


class Entry:
    """Counts the calls of one operation; without a board only this process sees it.

    Attributes
    ----------
    calls : int
        How many were made.
    """

    __slots__ = ("_board", "_index", "_state", "calls")

    def __init__(self, board: CallBoard | None = None, key: int = 0, text: str = ""):
        """`key`, not 0, is the same on all ranks for the same operation."""
        self.calls = 0
        self._board: CallBoard | None = None
        if board is not None and (index := board.claim(key, text)) is not None:
            self._board, self._index, self._state = board, index, board.word(index, _STATE)

    def add(self, calls: int = 1) -> None:
        """Note that calls were made."""
        self.calls += calls
        board = self._board
        if board is not None:
            board.words[self._state] = (next(board.places) & _LOW) << 32 | self.calls & _LOW

    def write(self, text: str) -> None:
        """Say which operation it is, as far as there is room."""
        if self._board is not None:
            self._board.write(self._index, text)

    def refuse(self, reason: str) -> None:
        """Say that this rank does not make the next call."""
        if self._board is not None:
            self._board.refuse(self._index, self.calls + 1, reason)

    def __del__(self) -> None:
        board = self._board
        if board is not None:
            board.release(self._index)


class _Seen(NamedTuple):
    calls: int
    place: int
    text: str


class CallBoard:
    """The mapped memory: each rank writes its own part and reads the others'."""

    def __init__(self, fd: int, offset: int, rank: int, ranks: int):
        """`board_bytes(ranks)` bytes of the file from `offset` on; `fd` stays the caller's."""
        self._map: mmap.mmap | None = mmap.mmap(fd, board_bytes(ranks), offset=offset)
        self._bytes = memoryview(self._map)
        self.words = self._bytes.cast("Q")
        self._rank = rank
        self._free = list(range(_ENTRIES - 1, -1, -1))
        self.places = count(1)
        self.kept = False  # peers will look for what led to a mismatch: entries stay as they are

    def claim(self, key: int, text: str) -> int | None:
        """The index of a new entry of this rank; None if all are taken."""
        try:
            index = self._free.pop()
        except IndexError:
            return None
        self.words[self.word(index, _STATE)] = 0
        self.write(index, text)
        self.words[self.word(index, _KEY)] = key  # last: who sees it sees the rest
        return index

    def word(self, index: int, number: int) -> int:
        """Which of `words` is a word of an own entry."""
        return (self._rank * _RANK_BYTES + index * _ENTRY_BYTES) // 8 + number

    def write(self, index: int, text: str) -> None:
        """Fill in the text of an own entry."""
        start = self._rank * _RANK_BYTES + index * _ENTRY_BYTES + _TEXT
        data = text.encode(errors="replace")[: _ENTRY_BYTES - _TEXT - 1] + b"\0"
        self._bytes[start : start + len(data)] = data

    def refuse(self, index: int, call: int, reason: str) -> None:
        """This rank does not make call number `call` of an own entry's operation."""
        key, state = self.word(_ENTRIES, _KEY), self.word(_ENTRIES, _STATE)
        self.words[key] = 0
        self.write(_ENTRIES, reason)
        self.words[state] = call & _LOW
        self.words[key] = self.words[self.word(index, _KEY)]

    def release(self, index: int) -> None:
        """The own entry may be used for another operation."""
        if not self.kept:
            self.words[self.word(index, _KEY)] = 0
            self._free.append(index)

    def close(self) -> None:
        """Unmap; what is counted from now on, only this process sees."""
        if self._map is not None:
            shared, self._bytes = self._bytes, memoryview(bytearray(self._bytes))
            words, self.words = self.words, self._bytes.cast("Q")
            words.release()
            shared.release()
            self._map.close()
            self._map = None

    def divergence(self, ranks: Sequence[int]) -> dict[int, str] | None:
        """What each of the ranks called, if one of them cannot just be late.

        Rank q is not late but went another way if it lacks a call that rank r has made, and has
        refused it, or made one that r has not, or has only made later.
        """
        seen = {rank: dict(self._read(rank)) for rank in ranks}
        refused = {rank: self._entry(rank, _ENTRIES) for rank in ranks}
        for r, q in permutations(ranks, 2):  # first, since it says why they went other ways
            mine = refused[r]
            if (said := refused[q]) and _stands(said, seen[r], seen[q]) and not _same(said, mine):
                key, table = said[0], {}
                for rank, entries in seen.items():
                    if (own := refused[rank]) and own[0] == key and _stands(own, seen[r], entries):
                        table[rank] = f"refused call {own[1].calls}: {own[1].text}"
                    elif key in entries:
                        table[rank] = _call(key, entries[key])
                return table
        for r, q in permutations(ranks, 2):
            shared = seen[r].keys() & seen[q].keys()
            lacking = [key for key in shared if _ahead(seen[r][key].calls, seen[q][key].calls)]
            for key in sorted(lacking, key=lambda key: seen[r][key].place):
                others = shared - {key}
                if any(_went_on(seen[r][key], seen[r][o], seen[q][o]) for o in others):
                    calls = seen[r][key].calls
                    return {k: _describe(v, key, calls) for k, v in seen.items() if key in v}
        return None

    def _read(self, rank: int) -> Iterable[tuple[int, _Seen]]:
        return filter(None, (self._entry(rank, index) for index in range(_ENTRIES)))

    def _entry(self, rank: int, index: int) -> tuple[int, _Seen] | None:
        """The key of a rank's entry, and what it shows; None for one that is not used."""
        start = rank * _RANK_BYTES + index * _ENTRY_BYTES
        key, state = self.words[start // 8], self.words[start // 8 + 1]
        if not key:
            return None
        data = bytes(self._bytes[start + _TEXT : start + _ENTRY_BYTES])
        text = data.split(b"\0")[0].decode(errors="replace")
        return key, _Seen(state & _LOW, state >> 32, text)


def _ahead(a: int, b: int) -> bool:
    """a > b for counters of 32 bits that wrap around."""
    return 0 < (a - b) & _LOW < 1 << 31


def _went_on(lacking: _Seen, mine: _Seen, theirs: _Seen) -> bool:
    """Did a rank that lacks a call make this other one, which comes after it on the own rank?"""
    if _ahead(theirs.calls, mine.calls):
        return True
    return theirs.calls == mine.calls > 0 and _ahead(mine.place, lacking.place)


def _stands(refused: tuple[int, _Seen], mine: dict[int, _Seen], theirs: dict[int, _Seen]) -> bool:
    """Did a rank refuse a call that the own rank has made, and not make it later?"""
    key, call = refused[0], refused[1].calls
    if key not in mine or _ahead(call, mine[key].calls):
        return False
    return key not in theirs or _ahead(call, theirs[key].calls)


def _same(refused: tuple[int, _Seen], mine: tuple[int, _Seen] | None) -> bool:
    """Did the own rank refuse the same call? It has made it since, and so may the other."""
    return mine is not None and (mine[0], mine[1].calls) == (refused[0], refused[1].calls)


def _describe(entries: dict[int, _Seen], key: int, calls: int) -> str:
    """What a rank called, around call number `calls` of `key`."""
    entry = entries[key]
    last, latest = max(entries.items(), key=lambda item: item[1].place)
    if not _ahead(calls, entry.calls) or latest.place <= entry.place:
        return _call(key, entry)
    return f"{_call(last, latest)}, after {_call(key, entry)}"


def _call(key: int, entry: _Seen) -> str:
    """Plans count their calls; an entry of host operations has the text of the latest one."""
    if key & PLAN_KEY:
        return f"call {entry.calls} of {entry.text}"
    return f"a meeting on the host for {entry.text}"


def explained(board: CallBoard, ranks: Sequence[int], error: TdxError) -> TdxError:
    """CollectiveMismatch with the table rank -> call if that is why `error` came, else `error`."""
    if board.divergence(ranks) is None:
        return error
    time.sleep(_CONFIRM_S)
    calls = board.divergence(ranks)
    if calls is None:
        return error
    table = "".join(f"\n  rank {rank}: {call}" for rank, call in calls.items())
    return CollectiveMismatch(f"ranks made different calls:{table}\n({error}){_hint(calls)}", calls)


def _hint(calls: Mapping[int, str]) -> str:
    """What to do where a rank makes or calls another plan of an operation than its peer calls."""
    made = {found[1] for call in calls.values() if (found := _MADE.match(call))}
    called = [found[1] for call in calls.values() if (found := _CALLED.match(call))]
    products = {name for name in called if called.count(name) > 1 and "matmul" in name}
    if made.intersection(called):
        begin = "A rank makes a plan where another has one"
    elif products:
        begin = "Ranks call different plans of the same operation"
    else:
        return ""
    return (
        f"\n{begin}: what may differ between ranks, N of products that are gathered and K of those "
        "that are summed, goes with one of every other rank in all calls of a function. Else make "
        "a plan for each combination, as tdx.MatmulAllReduce(world, ...)"
    )
