"""The steps of the tutorial on overlap, whose times GPUs tell: here that they are right."""

from __future__ import annotations

import pytest

from tests.helpers.commands import run_tdx

_WORDS = ("--no-prefix", "--backend", "host", "-m", "tests.gpu.overlap_steps")
_STEPS = ("1 gather", "2 a signal", "3 order", "4 persistent", "5 tensor", "AllGatherMatmul")


@pytest.mark.parametrize(("ranks", "rows"), [(2, 128), (3, 96)])
def test_steps_of_overlap(ranks, rows):
    """Two chunks a rank, of two tiles and of one tile of rows."""
    done = run_tdx("run", "-n", str(ranks), *_WORDS, f"{rows},32,32", timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(" us  " in line for line in lines), done.stdout  # others tell what is wrong
    for step in _STEPS:
        assert sum(f"  {step}" in line for line in lines) == 1, done.stdout


def test_shape_is_refused():
    done = run_tdx("run", "-n", "2", *_WORDS, "72,48,32", timeout_s=120)
    assert done.returncode != 0
    assert "M must be a multiple of 64, N of 32, K of 16" in done.stderr
