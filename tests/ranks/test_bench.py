"""`tdx bench` on the host tier: it runs, checks, and writes what it prints."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os

import pytest

from tests.helpers.commands import run_tdx

EVERY = "--all-algorithms"


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
    assert not any("limit" in row for row in document["rows"])  # nothing is launched by a driver
    assert done.stdout.splitlines()[1].split() == ["what", "us", "limit"]
    assert all(text in done.stdout for text in what)


def check_collective(rows, sizes, algorithms):
    """Two rows for each size; these algorithms ran, and the gap is to the fastest of them."""
    assert [row["bytes"] for row in rows] == [nbytes for nbytes in sizes for _ in range(2)]
    assert [row["memory"] for row in rows] == ["symmetric", "foreign"] * len(sizes)
    for row in rows:
        assert "error" not in row
        assert row["chosen"] > 0
        assert row["algorithm"] in algorithms
        assert row["gap"] == row["chosen"] / min(row[name] for name in algorithms)
        assert all(row[f"{name}_host"] > 0 for name in (*algorithms, "chosen"))


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("all_gather", ["--sizes", "64"]),
        ("all_reduce", ["--sizes", "64"]),
        ("matmul_reduce_scatter", ["--shapes", "6,8,40"]),
        ("all_reduce_rms_norm", ["--shapes", "2,40"]),
    ],
)
def test_only_what_is_chosen(tmp_path, operation, words):
    """Unless all algorithms are asked for, neither their times nor their columns are there."""
    module = importlib.import_module(f"tdx.bench.{operation}")
    done = run_tdx("bench", operation, "-n", "2", *words, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    for row in json.loads((tmp_path / "rows.json").read_text())["rows"]:
        assert row["chosen"] > 0
        assert row["algorithm"] in module.ALGORITHMS
        assert not row.keys() & {"gap", *module.ALGORITHMS}
    heading = done.stdout.splitlines()[1].split()
    assert heading == " ".join(
        name for name in module.COLUMNS if name not in ("gap", *module.ALGORITHMS)
    ).split()  # fmt: skip


def test_all_reduce(tmp_path):
    words = ["bench", "all_reduce", "-n", "2", "--sizes", "64,1K", "--dtype", "float32", EVERY]
    done = run_tdx(*words, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    algorithms = ["low_latency", "low_latency_two_shot", "one_shot", "two_shot", "copy_engine"]
    check_collective(rows, [64, 1024], algorithms)
    heading, *lines = [line.split() for line in done.stdout.splitlines()[1:6]]
    assert heading[:2] == ["bytes", "memory"]
    assert set(algorithms) < set(heading)
    empty = ("nccl", "torch_one_shot", "torch_two_shot", "floor", "ratio", "%", "of")
    at = [name for name in heading if name not in empty].index("gap")
    assert [line[at] for line in lines] == [f"{row['gap']:.2f}" for row in rows]


def test_reduce_scatter(tmp_path):
    words = ["bench", "reduce_scatter", "-n", "2", "--sizes", "64:128,1K", EVERY]
    words += ["--dtype", "float32"]
    done = run_tdx(*words, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    check_collective(rows, [64, 128, 1024], ["low_latency", "push"])


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_an_algorithm_that_does_not_take_the_type(tmp_path, operation):
    """Its column stays empty, with the reason; sums that need rounding are right all the same."""
    words = ["bench", operation, "-n", "3", "--sizes", "96", "--dtype", "float8_e4m3fn", EVERY]
    done = run_tdx(*words, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "rows.json").read_text())
    for row in document["rows"]:
        assert row["chosen"] > 0
        assert "error" not in row
        assert "low_latency" not in row
        assert "not float8_e4m3fn" in row["failed"]["low_latency"]
        assert row["gap"] > 0
    (note,) = [note for note in document["notes"] if note.startswith("* low_latency at")]
    assert note.startswith("* low_latency at 96: ")
    assert "low_latency takes types of 2 and 4 bytes" in note
    assert "two_shot" in document["rows"][0] or "push" in document["rows"][0]


@pytest.mark.parametrize(
    ("operation", "algorithms"),
    [
        ("all_gather", ["low_latency", "push", "copy_engine", "pull"]),
        ("all_to_all", ["low_latency", "push"]),
        ("broadcast", ["low_latency", "low_latency_scatter", "scatter", "chain"]),
    ],
)
def test_movement(tmp_path, operation, algorithms):
    words = ["bench", operation, "-n", "2", "--sizes", "62,1K", "--dtype", "int8", EVERY]
    done = run_tdx(*words, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    check_collective(rows, [62, 1024], algorithms)


def test_products_by_default(tmp_path):
    path = tmp_path / "rows.json"
    done = run_tdx("bench", "all_gather_matmul", "-n", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    assert document["rows"]
    for row in document["rows"]:
        assert all(row[name] > 0 for name in ("matmul", "tdx+matmul", "chosen", "ratio"))
    assert document["notes"] == done.stdout.splitlines()[-1:]
    assert document["notes"][0].startswith("nothing to compare with (the host backend has none)")


@pytest.mark.parametrize(
    ("operation", "fused", "shapes"),
    [
        ("all_gather_matmul", "fused", ["6,8,40", "3,1,33"]),
        ("matmul_reduce_scatter", "fused", ["6,8,40", "3,1,33"]),
        ("matmul_all_reduce", "two_shot", ["6,8,40", "1,1,33"]),
        ("all_reduce_rms_norm", "two_shot", ["2,40", "1,1"]),
    ],
)
def test_products(tmp_path, operation, fused, shapes):
    words = ["bench", operation, "-n", "3", "--dtype", "float32", "--markdown", EVERY]
    path = tmp_path / "rows.json"
    done = run_tdx(*words, "--json", str(path), "--shapes", *shapes)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [",".join(str(row[axis]) for axis in "MNK" if axis in row) for row in rows] == shapes
    assert all(row[fused] > 0 for row in rows)
    named = importlib.import_module(f"tdx.bench.{operation}").ALGORITHMS
    for row in rows:
        assert row["gap"] == row["chosen"] / min(row[name] for name in named if name in row)
    assert f"\n| {' | '.join(shapes[0].split(','))} | " in done.stdout
    assert "ERROR" not in done.stdout


@pytest.mark.parametrize(
    "operation", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
)
def test_products_of_float8(tmp_path, operation):
    """With scales, by every algorithm, and by ours after one another; all are checked."""
    words = ["bench", operation, "-n", "2", "--dtype", "float8_e4m3fn", EVERY]
    path = tmp_path / "rows.json"
    done = run_tdx(*words, "--json", str(path), "--shapes", "16,48,64", "2,3,33")
    assert done.returncode == 0, done.stdout + done.stderr
    named = importlib.import_module(f"tdx.bench.{operation}").ALGORITHMS
    for row in json.loads(path.read_text())["rows"]:
        assert all(row[name] > 0 for name in ("matmul", "tdx+matmul", "chosen", *named))
        assert "failed" not in row


def test_picture_of_products(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "rows.png"
    done = run_tdx("bench", "all_gather_matmul", "-n", "2", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.stat().st_size > 0


def test_tables_and_pictures(tmp_path):
    words = ["bench", "broadcast", "-n", "2", "--sizes", "64", "--markdown"]
    picture = tmp_path / "rows.png"
    if importlib.util.find_spec("matplotlib") is None:
        done = run_tdx(*words, "--plot", str(picture))
        assert done.returncode == 2
        assert "pip install matplotlib" in done.stderr
    else:
        words += ["--plot", str(picture)]
    done = run_tdx(*words)
    assert done.returncode == 0, done.stderr
    assert "\n| 64 | " in done.stdout
    assert picture.exists() == ("--plot" in words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "nothing"),
        (["latency", "-n", "0"], "-n 0"),
        (["latency", "--dtype", "x"], "x"),
        (["latency", EVERY], "latency has none to choose from"),
        (["latency", "--sizes", "1K"], "latency does not take it"),
        (["latency", "--plot", "rows.png"], "--plot rows.png: latency measures no sizes"),
        (
            ["latency", "--dtype", "int8,int16"],
            "--dtype int8,int16: latency measures no element types",
        ),
        (["broadcast", "--sizes", "1K:3K"], "two powers of two"),
        (["broadcast", "--sizes", ""], "--sizes: '' is no size"),
        (["broadcast", "--dtype", "int8,"], "'' is not a dtype"),
        (["broadcast", "--sizes", "6", "--dtype", "int8,float32"], "6 bytes are no whole number"),
        (
            ["broadcast", "--sizes", "8,1000000G"],
            "--sizes: 976.6 TiB takes 1220.7 TiB of each of 4",
        ),
        (
            ["all_reduce", "--dtype", "float32,bool"],
            "--dtype bool: all_reduce takes int32, int64, ",
        ),
        (
            ["reduce_scatter", "--dtype", "complex64"],
            "--dtype complex64: reduce_scatter takes int32",
        ),
        (["matmul_all_reduce", "--sizes", "1K"], "matmul_all_reduce does not take it"),
        (["all_gather", "--preset", "amd"], "all_gather does not take it"),
        (["all_gather_matmul", "--shapes", "8,8"], "takes M,N,K"),
        (["all_gather_matmul", "--shapes", "8,8,0"], "each 1 or more"),
        (["all_reduce_rms_norm", "--shapes", "8,8,8"], "takes M,N"),
        (["matmul_reduce_scatter", "-n", "4", "--shapes", "6,8,8"], "take 8"),
        (["matmul_reduce_scatter", "-n", "0", "--shapes", "6,8,8"], "-n 0"),
        (
            ["matmul_reduce_scatter", "--shapes", "8,8,999999999999"],
            "8,8,999999999999 takes 29.1 TiB",
        ),
        (["matmul_all_reduce", "--shapes", "6,8,8", "--preset", "amd"], "give one"),
        (
            ["matmul_all_reduce", "-n", "1", "--dtype", "int32"],
            "--dtype int32: matmul_all_reduce takes bfloat16, float16, float32, float8_e4m3fn",
        ),
        (
            ["all_reduce_rms_norm", "-n", "1", "--dtype", "float8_e4m3fn"],
            "takes bfloat16, float16, float32",
        ),
    ],
)
def test_bad_words(words, said):
    """They are refused before a rank is started."""
    done = run_tdx("bench", *words)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--json", "", "--json '': give the name of a file"),
        ("--plot", "", "--plot '': give the name of a file"),
        ("--json", "folder.png", "that is no regular file"),
        ("--plot", "folder.png", "that is no regular file"),
        ("--json", "pipe.png", "that is no regular file"),
        ("--json", "nowhere/rows.json", "there is no such folder"),
        ("--json", "x" * 253, "cannot be written (File name too long)"),
        ("--plot", "x" * 253 + ".png", "cannot be written (File name too long)"),
        ("--plot", "rows.xyz", "--plot rows.xyz: matplotlib writes no such pictures; take a name"),
        ("--plot", "rows", "--plot rows: matplotlib writes no such pictures; take a name"),
    ],
)
def test_where_nothing_can_be_written(tmp_path, option, name, said):
    """Known before a rank is started, and nothing is left behind."""
    if option == "--plot" and name:
        pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    done = run_tdx("bench", "broadcast", "-n", "2", "--sizes", "64", option, name, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line
    assert done.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {"folder.png", "pipe.png"}


def test_a_file_that_is_there_stays_until_there_are_rows(tmp_path):
    (tmp_path / "rows.json").write_text("earlier")
    done = run_tdx("bench", "broadcast", "--json", str(tmp_path / "rows.json"), "--plot", "")
    assert done.returncode == 2
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]


@pytest.mark.parametrize(
    ("operation", "asked", "measured"),
    [
        ("all_gather", "1000", [996, 4092]),
        ("all_to_all", "1000", [996, 4092]),
        ("reduce_scatter", "2", [6, 4092]),
    ],
)
def test_sizes_that_the_ranks_do_not_divide(tmp_path, operation, asked, measured):
    """What is printed is what is measured: whole elements of each rank, one at least."""
    path = tmp_path / "rows.json"
    words = ["bench", operation, "-n", "3", "--sizes", f"{asked},4K", "--json", str(path)]
    done = run_tdx(*words)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["bytes"] for row in rows] == [nbytes for nbytes in measured for _ in range(2)]
    assert [line.split()[0] for line in done.stdout.splitlines()[2:6]] == [
        str(row["bytes"]) for row in rows
    ]


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("reduce_scatter", ["--sizes", "64,1K"]),
        ("all_reduce_rms_norm", ["--shapes", "2,40", "1,8"]),
    ],
)
def test_several_types(tmp_path, operation, words):
    """Rows for each, which name it."""
    path = tmp_path / "rows.json"
    words = ["bench", operation, "-n", "2", "--dtype", "float32, bf16,fp32", *words]
    done = run_tdx(*words, "--json", str(path))
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    named = [row["dtype"] for row in document["rows"]]
    assert list(dict.fromkeys(named)) == ["float32", "bfloat16"]
    assert named.count("float32") == named.count("bfloat16") >= 2
    assert ", float32, bfloat16" in document["setting"]
    heading, *lines = [line.split() for line in done.stdout.splitlines()[1:]][: len(named) + 1]
    assert heading[0] == "dtype"
    assert [line[0] for line in lines] == named


def test_whose_matmul_the_ratio_is_with(tmp_path):
    """The host tier has no floor, and does not say that it had one."""
    done = run_tdx("bench", "matmul_all_reduce", "-n", "2", "--shapes", "2,3,4")
    assert done.returncode == 0, done.stderr
    note = done.stdout.splitlines()[-1]
    assert note.endswith("those columns are empty; ratio is with tdx's own matmul")
