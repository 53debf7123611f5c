"""Which call a signal belongs to."""

from __future__ import annotations

import pytest

from tdx.runtime.signals import Usage


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
