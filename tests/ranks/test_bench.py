"""`tdx bench` on the host tier: it runs, checks, and writes what it prints."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.helpers.commands import run_tdx


def test_latency(tmp_path):
    done = run_tdx("bench", "latency", "-n", "2", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "rows.json").read_text())
    assert "2 x CPU" in document["setting"]
    assert "Triton" in document["setting"]
    what = [row["what"] for row in document["rows"]]
    assert "barrier in a graph" in what
    assert "signal, one way" in what
    assert all(row["us"] > 0 for row in document["rows"])
    assert all(text in done.stdout for text in what)


def test_all_reduce(tmp_path):
    words = ["bench", "all_reduce", "-n", "2", "--sizes", "64,1K", "--dtype", "float32"]
    done = run_tdx(*words, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["bytes"] for row in rows] == [64, 64, 1024, 1024]
    assert [row["memory"] for row in rows] == ["symmetric", "foreign"] * 2
    for name in ("low_latency", "low_latency_two_shot", "one_shot", "two_shot", "chosen"):
        assert all(row[name] > 0 for row in rows)
    assert "error" not in done.stdout


def test_reduce_scatter(tmp_path):
    words = ["bench", "reduce_scatter", "-n", "2", "--sizes", "64,1K", "--dtype", "float32"]
    done = run_tdx(*words, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["bytes"] for row in rows] == [64, 1024]
    assert all(row["low_latency"] > 0 and row["push"] > 0 and row["chosen"] > 0 for row in rows)
    assert "error" not in done.stdout


@pytest.mark.parametrize("operation", ["all_gather", "all_to_all", "broadcast"])
def test_movement(tmp_path, operation):
    words = ["bench", operation, "-n", "2", "--sizes", "62,1K", "--dtype", "int8"]
    done = run_tdx(*words, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["bytes"] for row in rows] == [62, 1024]
    assert all(row[row["chosen"]] > 0 for row in rows)
    assert "error" not in done.stdout


def test_tables_and_pictures(tmp_path):
    words = ["bench", "broadcast", "-n", "2", "--sizes", "64", "--markdown"]
    picture = tmp_path / "rows.png"
    if importlib.util.find_spec("matplotlib") is None:
        done = run_tdx(*words, "--plot", str(picture))
        assert done.returncode != 0
        assert "pip install matplotlib" in done.stderr
    else:
        words += ["--plot", str(picture)]
    done = run_tdx(*words)
    assert done.returncode == 0, done.stderr
    assert "\n| 64 | " in done.stdout
    assert picture.exists() == ("--plot" in words)


@pytest.mark.parametrize(
    "words", [["nothing"], ["latency", "-n", "0"], ["latency", "--dtype", "x"]]
)
def test_bad_words(words):
    done = run_tdx("bench", *words)
    assert done.returncode != 0
    assert done.stderr
