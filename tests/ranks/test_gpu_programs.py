"""Programs of tests/gpu that check their own results run on the host tier, too."""

from __future__ import annotations

from tests.helpers.commands import run_tdx


def test_every_operation_once():
    done = run_tdx("run", "-n", "2", "--backend", "host", "-m", "tests.gpu.one_pass")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("calls are right") == 2
