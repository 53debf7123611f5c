"""The runner of everything on several GPUs: what it plans, and what it tells of streams."""

from __future__ import annotations

import contextlib
import re
import textwrap
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import suite
from tests.helpers.commands import ROOT

# file -> cases of a world size that share a job, and that have one each
_FILES = {
    "all_reduce": (30, 0), "heap": (1, 6), "leaks": (2, 3), "movement": (84, 1),
    "recovery": (0, 13), "reductions": (28, 1), "teams": (7, 5),
}  # fmt: skip
_SIZES = (1, 2, 3, 4, 5, 8)
_REST = ["tests/ranks/test_examples.py::test_example[01_hello-w3]", "tests/gpu/test_x.py::test_y"]


def ids() -> list[str]:
    """In pytest's order: jobs that are shared first, by world size."""
    return _REST + [
        f"tests/ranks/cases/{file}.py::case_{'own' if own else 'shared'}[{number}-float32-w{size}]"
        for own in (0, 1)
        for size in _SIZES
        for file, counts in _FILES.items()
        for number in range(counts[own])
    ]


def file_of(case: str) -> str:
    return case.split("::")[0]


# ---- planning


@pytest.mark.parametrize("gpus", range(1, 10))
def test_nothing_is_lost_and_gpus_are_not_shared(gpus):
    phases, too_large = suite.plan(ids(), gpus)
    streams = [stream for phase in phases for stream in phase]
    assert len({stream.name for stream in streams}) == len(streams)
    planned = [case for stream in streams for case in stream.ids]
    assert sorted(planned + too_large) == sorted(ids())
    assert {suite.world_of(case) for case in too_large} == {n for n in _SIZES if n > gpus}
    for phase in phases:
        used = [gpu for stream in phase for gpu in stream.gpus]
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(gpus))
    place = {case: i for i, case in enumerate(ids())}
    for stream in streams:
        assert all(place[a] < place[b] for a, b in pairwise(stream.ids))
    assert [[stream.name for stream in phase] for phase in phases[-2:]] == [["quiet"], ["rest"]]
    quiet, rest = phases[-2][0], phases[-1][0]
    assert rest.ids == _REST
    assert quiet.gpus == rest.gpus == tuple(range(gpus))
    for stream in streams:
        if stream is not rest:
            assert {"/leaks.py" in case for case in stream.ids} == {stream is quiet}
        if stream not in (quiet, rest):
            assert {suite.world_of(case) for case in stream.ids} == {len(stream.gpus)}


@pytest.mark.parametrize("gpus", range(1, 10))
def test_streams_of_a_size_are_equal(gpus):
    phases, _ = suite.plan(ids(), gpus)
    by_size: dict[str, list[suite.Stream]] = {}
    for stream in (stream for phase in phases[:-2] for stream in phase):
        by_size.setdefault(stream.name.split("-")[0], []).append(stream)
    for streams in by_size.values():
        for kind in ("case_shared", "case_own", "case_"):
            counts = [sum(kind in case for case in stream.ids) for stream in streams]
            assert max(counts) - min(counts) <= max(1, sum(counts) // len(counts) // 10)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, [{"w1": "0"}]),
        (2, [{"w1-1": "0", "w1-2": "1"}, {"w2": "01"}]),
        (3, [{"w2": "01", "w1": "2"}, {"w3": "012"}]),
        (4, [{"w2-1": "01", "w2-2": "23"}, {"w3": "012", "w1": "3"}, {"w4": "0123"}]),
    ],
)
def test_phases(gpus, expected):
    listed = [f"tests/ranks/cases/a.py::case_x[{n}-w{w}]" for w in (1, 2, 3, 4) for n in range(9)]
    listed += [case for case in listed if "w2" in case or "w3" in case]  # w1 and w4 are shorter
    phases, _ = suite.plan(dict.fromkeys(listed), gpus)
    assert expected == [
        {stream.name: "".join(map(str, stream.gpus)) for stream in phase} for phase in phases
    ]


def test_a_size_waits_for_a_phase_in_which_it_is_not_the_longest():
    cases = ["tests/ranks/cases/a.py::case_x[w3]"]
    cases = [f"tests/ranks/cases/a.py::case_x[{n}-w1]" for n in range(8)] + cases
    phases, _ = suite.plan(cases, 4)
    assert [[stream.name for stream in phase] for phase in phases] == [
        ["w1-1", "w1-2", "w1-3", "w1-4"],
        ["w3"],
    ]


def test_files_stay_whole_unless_parts_would_differ():
    several = [f"{file}.py::case_x[{n}-w2]" for file in "abcdef" for n in range(7)]
    for parts in (2, 3):
        shares = suite.split([several], parts)
        files = [file for share in shares for file in {file_of(case) for case in share}]
        assert sorted(files) == ["a.py", "b.py", "c.py", "d.py", "e.py", "f.py"]
    one = [f"a.py::case_x[{n}-w2]" for n in range(30)] + ["b.py::case_x[w2]"]
    assert sorted(map(len, suite.split([one], 3))) in ([10, 10, 11], [9, 11, 11])
    assert sorted(map(len, suite.split([one[:2]], 3))) == [1, 1]


def test_only():
    phases, too_large = suite.plan(ids(), 4, ["w2", "w5"])
    streams = [stream for phase in phases for stream in phase]
    assert [stream.name for stream in streams] == ["w2-1", "w2-2", "quiet"]
    assert {suite.world_of(case) for stream in streams for case in stream.ids} == {2}
    assert {suite.world_of(case) for case in too_large} == {5}
    own = [sum("case_own" in case for case in stream.ids) for stream in streams[:2]]
    assert own == [13, 13]  # as without: the two runs of the size are told apart
    assert [[s.name for s in phase] for phase in suite.plan(ids(), 4, ["rest"])[0]] == [["rest"]]


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("tests/ranks/cases/a.py::case_x[w2]", 2),
        ("tests/ranks/cases/a.py::case_x[low_latency-w3-w12]", 12),
        ("tests/ranks/test_examples.py::test_x[w2]", None),
        ("tests/ranks/cases/a.py::case_w2", None),
    ],
)
def test_world_of(case, size):
    assert suite.world_of(case) == size


def test_cases_of_all_sizes_are_collected(monkeypatch):
    """Of worlds of any size, whatever GPUs there are; and cases are where they were."""
    monkeypatch.setattr(suite, "TARGETS", suite.TARGETS[:1])
    collected, code = suite.collect("leaks or case_ranks_meet or case_eight_ranks")
    assert code == 0
    assert Counter(map(suite.world_of, collected)).keys() == {1, 2, 3, 4, 5, 8}
    assert any(suite.QUIET.search(case) for case in collected)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, "0 1 2 3"),
        ("2, 0", "2 0"),
        ("", ""),
        ("1,9,2", "1"),
        ("3,-1,2", "3"),
        ("GPU-a1,MIG-b2", "GPU-a1 MIG-b2"),
    ],
)
def test_visible_gpus(monkeypatch, tmp_path, variable, expected):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo \"GPU $i: X\"; echo '  MIG 1g'; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert suite.visible_gpus() == expected.split()
    tool.unlink()
    assert suite.visible_gpus() == []


# ---- running

_CONFTEST = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--tdx-backend")
    parser.addoption("--tdx-ranks")

def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.name[-3:])
"""
_CASES = """
import os, signal, subprocess, sys, time
import pytest

def sizes(*names):
    return pytest.mark.parametrize("size", names)

@sizes("w1", "w2", "w3")
def case_good(size):
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    assert len(gpus) == int(size[1:]) and set(gpus) <= {"4", "7"}

@sizes("w1", "w2", "w4")
def case_shares(size):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == {"w1": "4", "w2": "4,7", "w4": "4,7"}[size]
    assert os.environ.get("TDX_SHARE_GPU") == ("1" if size == "w4" else None)

@pytest.fixture
def broken():
    raise ValueError

@pytest.fixture
def unclean():
    yield
    raise ValueError

@sizes("w1")
def case_bad(size):
    raise ValueError

@sizes("w1")
def case_not_set_up(size, broken):
    pass

@sizes("w1")
def case_not_torn_down(size, unclean):
    pass

@sizes("w1")
def case_skips(size):
    pytest.skip("of itself")

@sizes("w2")
def case_that_crashes(size):
    os._exit(7)

@sizes("w2")
def case_thereafter(size):
    pass

@sizes("w1")
def case_slow_0(size):
    pass

@sizes("w1")
def case_slow_1(size):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open("child.new", "w") as file:
        file.write(str(child.pid))
    os.rename("child.new", "child")
    time.sleep(1000)

@sizes("w1", "w2")
def case_slow_2(size):
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Tests of its own, on a machine of two GPUs."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npython_files = cases.py\npython_functions = case_*\n"
    )
    (tmp_path / "cases.py").write_text(textwrap.dedent(_CASES))
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "TARGETS", ["cases.py"])
    monkeypatch.setattr(suite, "visible_gpus", lambda: ["4", "7"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_failures_are_counted_and_named(folder, capsys):
    assert suite.main(["--out", str(folder / "out"), "-k", "not slow and not shares"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(
        "2 passed, 1 failed, 2 errors, 1 skipped, 2 not run, 1 need more GPUs in "
    )
    assert re.search(r" s \(2 GPUs", said[-1])
    named = {line.split(" (")[0] for line in said if line.startswith(("FAILED", "ERROR"))}
    assert named == {
        "FAILED cases.py::case_bad[w1]",
        "ERROR cases.py::case_not_set_up[w1]",
        "ERROR cases.py::case_not_torn_down[w1]",
    }
    assert any(re.search(r"case_bad.*ValueError$", line) for line in said)
    assert "w2: pytest ended with code 7" in said
    rows = {line.split()[0]: line.split() for line in said}
    assert rows["w2"][1:-1] == ["0,1", "3", "1", "0", "0", "0", "2"]
    assert rows["w3"][1:] == ["-", "1", "0", "0", "0", "0", "1", "-"]
    assert "ValueError" in "".join(log.read_text() for log in (folder / "out").glob("w1-*.log"))
    assert {path.name for path in (folder / "out").glob("*.xml")} == {"w1-1.xml", "w1-2.xml"}


def test_all_is_well(folder, capsys):
    assert suite.main(["--gpus", "1", "-k", "good or skips"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("1 passed, 1 skipped, 2 need more GPUs in ")
    assert "(1 GPU" in said[-1]


def test_ranks_that_share_gpus(folder, capsys, monkeypatch):
    monkeypatch.delenv("TDX_SHARE_GPU", raising=False)
    assert suite.main(["--share", "2", "-k", "shares"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("3 passed in ")
    assert "(2 GPUs, each for 2 ranks" in said[-1]


def test_what_ran_before_the_limit_counts(folder, capsys, monkeypatch):
    """And the processes that a stream had started are gone."""
    child = folder / "child"

    def clock() -> float:  # the limit is over when the second case runs
        return time.monotonic() + (1000 if child.exists() else 0)

    monkeypatch.setattr(suite, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    monkeypatch.setattr(suite, "END_LIMIT_S", 0.2)
    assert suite.main(["--gpus", "1", "--limit", "100", "-k", "slow"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("1 passed, 2 not run, 1 need more GPUs in ")
    assert "w1: ended at the limit" in said
    with contextlib.suppress(FileNotFoundError):
        assert not Path("/proc", child.read_text(), "cmdline").read_bytes()  # a zombie has none


def test_streams_that_were_not_started(folder, capsys):
    phases, _ = suite.plan(["cases.py::case_good[w1]", "cases.py::case_good[w2]"], 2)
    suite.run(phases, ["4", "7"], folder, time.monotonic() - 1)
    streams = [stream for phase in phases for stream in phase]
    assert [stream.trouble for stream in streams] == ["not started"] * 2
    assert suite.report(streams, [], 0.0, "none") == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 passed, 2 not run in ")


@pytest.mark.parametrize(
    ("outcome", "code"), [("passed", 0), ("skipped", 0), ("failed", 1), ("errors", 1), ("", 1)]
)
def test_exit_code(outcome, code):
    outcomes = {"a": "passed"} | ({"b": outcome} if outcome else {})
    stream = suite.Stream("w1", (0,), ["a", "b"], outcomes, trouble="")
    assert suite.report([stream], ["tests/ranks/cases/a.py::case_x[w2]"], 0.0, "none") == code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "3"], "3 GPUs"),
        (["--gpus", "0"], "0 GPUs"),
        (["--only", "w0"], "--only w0"),
        (["--only", "4"], "--only 4"),
        (["--limit", "0"], "--limit 0"),
    ],
)
def test_bad_usage(folder, capsys, words, said):
    with pytest.raises(SystemExit) as caught:
        suite.main(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_nothing_found(folder):
    assert suite.main(["-k", "no_such_case"]) == 2
