"""Results of products and norms have the same bits in every run, on GPUs or the host tier."""

from __future__ import annotations

import pytest

from tests.helpers.commands import run_tdx


@pytest.mark.timeout(800)
def test_two_runs_print_the_same(request, most_ranks):
    backend = request.config.getoption("--tdx-backend")
    words = ["run", "-n", str(min(2, most_ranks)), "-m", "tests.helpers.product_bits"]
    for cublas in "0" if backend == "host" else "01":
        printed = []
        for _ in range(2):
            done = run_tdx(*words, timeout_s=180.0, TDX_BACKEND=backend, TDX_CUBLAS=cublas)
            assert done.returncode == 0, done.stdout + done.stderr
            printed.append(sorted(done.stdout.splitlines()))
        assert len(printed[0]) >= 60
        assert printed[0] == printed[1]
