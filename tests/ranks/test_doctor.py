"""`tdx doctor` on the host tier: facts, links between ranks, and the exit code."""

from __future__ import annotations

import json

import pytest

from tests.helpers.commands import ROOT, run_tdx


@pytest.mark.smoke
def test_report_as_json():
    done = run_tdx("doctor", "-n", "3", "--backend", "host", "--json", timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    assert found["versions"]["triton"]
    assert found["mpi"]["launcher"]
    assert found["frameworks"]["numpy"] == found["versions"]["numpy"]
    assert found["limits"]["descriptors"] != 0
    job = found["job"]
    assert job["ranks"] == len(job["devices"]) == 3
    for name in ("bandwidth", "latency"):
        assert all((job[name][i][j] is None) == (i == j) for i in range(3) for j in range(3))
        assert all(cell > 0 for row in job[name] for cell in row if cell is not None)
    capabilities = {one["name"]: one for one in found["capabilities"]}
    assert capabilities["ranks"]["available"]
    assert capabilities["ranks"]["required"]
    assert all(one["detail"] for one in found["capabilities"] if not one["available"])


def test_text_fits_80_columns():
    done = run_tdx("doctor", "-n", "2", "--backend", "host", timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "can run here: host, 2 ranks" in lines[0]
    assert "links: GB/s of puts from rank (row) to rank (column)" in lines
    long = [line for line in lines if len(line) > 80 and "/" not in line.split()[-1]]
    assert not long  # but paths are not broken


def test_one_rank_has_no_links():
    done = run_tdx("doctor", "-n", "1", "--backend", "host", timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "links:" not in done.stdout


def test_backend_that_is_not_there():
    done = run_tdx("doctor", "--backend", "hip", "--json", timeout_s=120)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["ok"] is False
    failing = [one for one in found["capabilities"] if one["required"] and not one["available"]]
    assert [one["name"] for one in failing] == ["backend", "ranks"]
    assert "HIP driver" in failing[0]["detail"]
    assert failing[0]["remedy"]


def test_ranks_that_run_out_of_time():
    words = ["doctor", "-n", "2", "--backend", "host", "--timeout", "0.01"]
    done = run_tdx(*words, timeout_s=120)
    assert done.returncode == 1, done.stdout
    said = " ".join(done.stdout.split())
    assert "ran out of time (0.01 s), whether it can run is not known: host, 2 ranks" in said
    assert "not finished after 0.01 s remedy: give them longer than --timeout 0.01" in said
    assert "CANNOT" not in said


def test_ranks_that_cannot_start(tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py today')")
    words = ["doctor", "-n", "2", "--backend", "host"]
    done = run_tdx(*words, timeout_s=120, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1, done.stdout
    assert "CANNOT run here" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [(["-n", "0"], "1..16"), (["-n", "17"], "1..16"), (["--timeout", "0"], "must be above 0")],
)
def test_wrong_words(words, said):
    done = run_tdx("doctor", *words)
    assert done.returncode == 2
    assert said in done.stderr
