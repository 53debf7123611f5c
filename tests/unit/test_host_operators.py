"""Operators of the host tier's tensors, which do not go through all of Triton's layers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from tests.helpers.commands import ROOT, tdx_environment
from tests.helpers.operator_results import OPERATORS


def results(*words: str) -> list[list]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.helpers.operator_results", *words],
        cwd=ROOT,
        env=tdx_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.smoke
def test_operators_give_what_triton_gives():
    """The same bits, types and shapes for all pairs of operands, and the same errors."""
    ours, stock = results(), results("stock")
    assert len(ours) == len(stock) > 5000
    different = [pair for pair in zip(ours, stock, strict=True) if pair[0] != pair[1]]
    assert not different, different[:5]
    computed = Counter(name for name, *_, outcome in ours if len(outcome) > 1)
    assert set(computed) == set(OPERATORS)
    assert min(computed.values()) > 50, computed
