"""The case runner reports every way in which a case can fail, and goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from tests.helpers.commands import ROOT
from tests.helpers.jobs import CaseFailure, Jobs, Request, Skipped


@pytest.fixture
def jobs():
    jobs = Jobs("host")
    yield jobs
    jobs.kill()


def request_for(name: str, size: int = 2, limit_s: float = 30.0, dies: tuple[int, ...] = ()):
    return Request(
        id=name,
        module="tests.helpers.failing_cases",
        name=name,
        parameters="",
        size=size,
        limit_s=limit_s,
        isolated=False,
        dies=frozenset(dies),
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("case_raises_on_one", ["rank 1 of 2", "AssertionError", "answer = 42", "[1] said before"]),
        ("case_others_wait", ["first cause", "rank 1 of 2 still ran", "in case_others_wait"]),
        ("case_crashes", ["rank 1 of 2 ended", "was killed by SIGSEGV", "in case_crashes"]),
        ("case_exits", ["rank 1 of 2", "SystemExit: 3"]),
        ("case_ends_at_once", ["rank 1 of 2 ended"]),
        ("case_skips_on_one", ["rank 1 skipped"]),
    ],
)
def test_failures_name_rank_and_cause(jobs, name, words):
    with pytest.raises(CaseFailure) as failure:
        jobs.run(request_for(name))
    for word in words:
        assert word in str(failure.value)
    jobs.run(request_for("case_passes"))  # in a fresh job
    jobs.close()


def test_hang_ends_at_the_limit_with_stacks(jobs):
    started = time.monotonic()
    with pytest.raises(CaseFailure, match="rank 1 of 2 still ran after 2 s") as failure:
        jobs.run(request_for("case_hangs", limit_s=2.0))
    assert time.monotonic() - started < 10
    assert "in case_hangs" in str(failure.value)


def test_rank_that_was_to_die_must(jobs):
    with pytest.raises(CaseFailure, match="rank 1 was to end"):
        jobs.run(request_for("case_passes", dies=(1,)))


def test_skip(jobs, monkeypatch):
    with pytest.raises(Skipped, match="not here"):
        jobs.run(request_for("case_skips"))
    jobs.close()
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(Skipped, match="no compiler"):
        jobs.run(request_for("case_lacks"))
    jobs.close()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(CaseFailure, match="nothing may be missing: no compiler"):
        jobs.run(request_for("case_lacks"))


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_backend_without_a_gpu_is_wrong_usage(backend, tmp_path):
    for tool in ("nvidia-smi", "rocm-smi"):  # as where the driver is not loaded
        (tmp_path / tool).write_text("#!/bin/sh\nexit 9\n")
        (tmp_path / tool).chmod(0o755)
    words = ["-p", "no:cacheprovider", "--tdx-backend", backend, __file__]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: --tdx-backend {backend}: " in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "sizes"),
    [([], {"w1", "w3", "w5"}), (["--tdx-ranks", "2"], {"w1", "w2"})],
    ids=["default", "up to 2"],
)
def test_a_case_of_three_ranks_spares_that_of_two(options, sizes):
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", *options]
    words += ["-k", "case_work_before_is_seen_after", "tests/ranks/cases/barrier.py"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(re.findall(r"w\d(?=\]$)", done.stdout, re.MULTILINE)) == sizes
