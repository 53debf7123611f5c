"""The call board: who is late, and who has gone another way."""

from __future__ import annotations

import gc
import os

import pytest

from tdx.runtime.board import PLAN_KEY, CallBoard, Entry, board_bytes, explained
from tdx.runtime.errors import PeerTimeout

A, B = PLAN_KEY | 1, PLAN_KEY


@pytest.fixture
def boards():
    fd = os.memfd_create("board")
    os.ftruncate(fd, board_bytes(3))
    made = [CallBoard(fd, 0, rank, 3) for rank in range(3)]
    os.close(fd)
    return made


@pytest.fixture
def entries(boards):
    """By rank: the entries of two operations that all ranks have."""
    return [(Entry(board, A, "all_reduce(4)"), Entry(board, B, "barrier")) for board in boards]


def calls(entries, *orders):
    for rank, order in enumerate(orders):
        for letter in order:
            entries[rank]["ab".index(letter)].add()


@pytest.mark.parametrize(
    "orders",
    [
        ("", "", ""),
        ("abab", "abab", "abab"),
        ("abab", "aba", ""),  # late
        ("aabb", "aab", "aa"),
    ],
)
def test_late(boards, entries, orders):
    calls(entries, *orders)
    assert [board.divergence((0, 1, 2)) for board in boards] == [None] * 3


@pytest.mark.parametrize(
    ("orders", "rows"),
    [
        (
            ("aab", "ab", "aab"),  # rank 1 skipped one
            (
                "call 2 of all_reduce(4)",
                "call 1 of barrier, after call 1 of all_reduce(4)",
                "call 2 of all_reduce(4)",
            ),
        ),
        (
            ("a", "b", ""),  # the other one first
            (
                "call 1 of all_reduce(4)",
                "call 1 of barrier, after call 0 of all_reduce(4)",
                "call 0 of all_reduce(4)",
            ),
        ),
        (
            ("ab", "aa", "ab"),  # rank 1 doubled one
            (
                "call 1 of barrier",
                "call 2 of all_reduce(4), after call 0 of barrier",
                "call 1 of barrier",
            ),
        ),
    ],
)
def test_another_way(boards, entries, orders, rows):
    calls(entries, *orders)
    for board in boards:
        table = board.divergence((0, 1, 2))
        assert table is not None
        assert tuple(table.values()) == rows


def test_refused(boards, entries):
    calls(entries, "a", "a", "a")
    entries[1][0].refuse("InvalidArgument: no")
    entries[2][0].refuse("InvalidArgument: nor here")
    assert boards[0].divergence((0, 1, 2)) is None  # by nobody who waits
    calls(entries, "a", "", "")
    for board in boards:
        assert board.divergence((0, 1, 2)) == {
            0: "call 2 of all_reduce(4)",
            1: "refused call 2: InvalidArgument: no",
            2: "refused call 2: InvalidArgument: nor here",
        }
    calls(entries, "", "a", "a")  # made after all
    assert boards[0].divergence((0, 1, 2)) is None
    calls(entries, "a", "", "a")
    assert boards[0].divergence((0, 1, 2)) is None  # late


def test_a_plan_is_made_where_another_rank_has_one(boards, entries):
    meetings = [Entry(board, 1, "all_reduce(4) is ready") for board in boards]
    for meeting in meetings:
        meeting.add()
    calls(entries, "a", "a", "a")
    meetings[0].write("all_reduce(4)")
    meetings[0].add()
    calls(entries, "", "a", "a")
    error = explained(boards[1], (0, 1, 2), PeerTimeout("waited", rank=1))
    assert error.calls == {
        0: "a meeting on the host for all_reduce(4)",
        1: "call 2 of all_reduce(4), after a meeting on the host for all_reduce(4) is ready",
        2: "call 2 of all_reduce(4), after a meeting on the host for all_reduce(4) is ready",
    }
    assert "goes with one of every other rank" in str(error)
    calls(entries, "", "b", "b")
    error = explained(boards[1], (0, 1, 2), PeerTimeout("waited", rank=1))
    assert "goes with one" not in str(error)  # another operation


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_who_refused_goes_on(boards, entries, guilty):
    """The reason is told, not only what that rank did next."""
    entries[guilty][0].refuse("InvalidArgument: no")
    calls(entries, *("b" if rank == guilty else "a" for rank in range(3)))
    for board in boards:
        assert board.divergence((0, 1, 2)) == {
            rank: "refused call 1: InvalidArgument: no"
            if rank == guilty
            else "call 1 of all_reduce(4)"
            for rank in range(3)
        }


def test_all_refused_and_one_is_late(boards, entries):
    for own in entries:
        own[0].refuse("InvalidArgument: no")
    calls(entries, "a", "", "a")
    assert boards[0].divergence((0, 1, 2)) is None


def test_refused_and_left(boards, entries):
    calls(entries, "aa", "a", "aa")
    entries[1][0].refuse("InvalidArgument: no")
    entries[1] = None
    gc.collect()
    boards[1].close()
    assert boards[2].divergence((0, 1, 2)) == {
        0: "call 2 of all_reduce(4)",
        1: "refused call 2: InvalidArgument: no",
        2: "call 2 of all_reduce(4)",
    }


def test_evidence_stays(boards, entries):
    calls(entries, "a", "b", "a")
    boards[1].kept = True
    entries[1] = None
    gc.collect()
    assert boards[2].divergence((0, 1)) is not None


def test_ranks_that_are_not_asked_about(boards, entries):
    calls(entries, "a", "b", "a")
    assert boards[2].divergence((0, 2)) is None
    assert boards[2].divergence((0, 1)) is not None


def test_counters_wrap(boards):
    first = Entry(boards[0], A, "a"), Entry(boards[0], B, "b")
    second = Entry(boards[1], A, "a"), Entry(boards[1], B, "b")
    for entry in (*first, *second):
        entry.add((1 << 32) - 1)
    first[0].add()
    assert boards[0].divergence((0, 1)) is None
    second[1].add()
    assert boards[0].divergence((0, 1)) is not None


def test_entries_are_used_again(boards, entries):
    held = [Entry(boards[0], PLAN_KEY | 10 + i, "x" * 1000) for i in range(510)]
    held[-1].refuse("x" * 1000)
    beyond = Entry(boards[0], 9, "beyond")
    beyond.add()
    assert beyond.calls == 1
    calls(entries, "a", "", "")
    assert boards[1].divergence((0, 1)) is None
    del held
    gc.collect()
    again = Entry(boards[0], PLAN_KEY | 11, "again")
    other = Entry(boards[1], PLAN_KEY | 11, "again")
    other.add()
    assert boards[2].divergence((0, 1))[1].startswith("call 1 of again, after call 0 of all")
    again.write("changed")


def test_close(boards, entries):
    calls(entries, "a", "", "")
    boards[0].close()
    boards[0].close()
    entries[0][1].add()
    entries[0][1].write("unseen")
    Entry(boards[0], 5, "unseen").add()
    assert boards[1].divergence((0, 1)) is None
    assert entries[0][1].calls == 1
