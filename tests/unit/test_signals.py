"""Which call a signal belongs to."""

from __future__ import annotations

import pytest

from tdx.runtime.signals import Site, Sites, Usage


@pytest.mark.parametrize("steps", [1, 3, 9])
@pytest.mark.parametrize("calls", [1, 7, (1 << 31) - 1, 1 << 31, 477_218_590, (1 << 32) + 5])
@pytest.mark.parametrize("queued", [0, 2])
def test_call_of_a_signal_that_counts_steps(steps, calls, queued):
    """Words have 32 bits, and the host may have queued later calls."""
    usage = Usage()
    usage.calls = calls + queued
    for step in range(1, steps + 1):
        expected = ((calls - 1) * steps + step) & 0xFFFFFFFF
        for seen in (expected, expected - (1 << 32) if expected >> 31 else expected):
            assert usage.call_of(seen, steps) == calls


@pytest.mark.parametrize("calls", [1, 255, 256, 999, (1 << 32) + 5])
def test_call_of_a_flag_of_few_bits(calls):
    usage = Usage()
    usage.calls = calls + 2
    assert usage.call_of(calls & 0xFF, bits=8) == calls


@pytest.mark.parametrize("blocks", [1, 2, 4, 5])
@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_how_many_programs_came_to_a_grid_barrier(blocks, rounds):
    """From the word itself, in whatever order they came, also once it has wrapped around."""
    site = Site("kernel", "channel", channel=(blocks, 2))
    for first_of_all in (False, True):
        for others in range(blocks - (not first_of_all)):
            count = rounds << 31
            count += first_of_all * ((1 << 31) - (blocks - 1)) + min(others, blocks - 1)
            if first_of_all and others == blocks - 1:
                continue  # all are there
            seen = (count + (1 << 31)) % (1 << 32) - (1 << 31)
            assert site.arrived(0, seen).startswith(f"{first_of_all + others} of {blocks} ")
    assert site.arrived(1, 0) == ""


def test_names_of_the_words_of_a_channel():
    site = Site("kernel", "channel(2)", channel=(2, 3))
    names = [site.name(word) for word in (0, 1, 8, 15, 16, 18, 19, 21)]
    assert names == [
        "channel(2)[grid_barrier]", "channel(2)[1]", "channel(2)[8]", "channel(2)[15]",
        "channel(2)[block 0, rank 0]", "channel(2)[block 0, rank 2]",
        "channel(2)[block 1, rank 0]", "channel(2)[block 1, rank 2]",
    ]  # fmt: skip
    assert Site("kernel", "x").name(7) == "x[7]"


def test_what_was_dropped_is_named_until_its_place_is_taken():
    sites, first, second = Sites(), Site("kernel", "first"), Site("kernel", "second")
    sites.add(256, 64, first)
    sites.remove(256, first)
    assert sites.find(256 + 8) == (first, 2)
    sites.add(256, 16, second)
    assert sites.find(256 + 8) == (second, 2)
    assert sites.find(512) is None
