"""`tdx demo`: the run, its files, its exit codes, and the check that decides them.

Ranks run on the backend of the rank cases, on GPUs with as many ranks as there are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tdx.runtime import backends
from tdx.runtime.errors import InvalidArgument
from tdx.tools import demo
from tdx.tools.demo import Settings
from tdx.tools.demo_rank import TOLERANCE, Report, _conclude, error_of, reference
from tests.helpers.commands import ROOT, run_tdx

_SMALL = ("--tokens", "12", "--hidden", "20", "--intermediate", "36")


@pytest.fixture
def backend(request, monkeypatch):
    """Where ranks run; `tdx demo` is told by the environment."""
    name = request.config.getoption("--tdx-backend")
    monkeypatch.setenv("TDX_BACKEND", name)
    return name


def arrays(tokens: int = 12, hidden: int = 20, intermediate: int = 36) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    wide = (hidden, intermediate)
    shapes = {"x": (tokens, hidden), "w_gate": wide, "w_up": wide, "w_down": wide[::-1]}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def expected(x, w_gate, w_up, w_down) -> np.ndarray:
    gate = x @ w_gate
    return (gate / (1 + np.exp(-gate)) * (x @ w_up)) @ w_down


@pytest.mark.smoke
def test_default_run_is_right(backend, most_ranks):
    ranks = min(4, most_ranks)
    words, sizes, dtype = ["demo"], (256, 256, 896), "float32"
    if backend != "host":  # of which more may be there than the tests are to use
        words += ["-n", str(ranks)]
        sizes, dtype = (-(-8192 // ranks) * ranks, 4096, -(-14336 // ranks) * ranks), "bfloat16"
    if "TDX_SHARE_GPU" in os.environ:  # a thousand times slower
        words += [*_SMALL]
        sizes = (12, 20, 36)
    done = run_tdx(*words, timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The result is right." in done.stdout
    assert "{} tokens, hidden {}, intermediate {}, {}".format(*sizes, dtype) in done.stdout
    table = done.stdout[done.stdout.index("rank  device") :].splitlines()[1 : ranks + 1]
    assert [line.split()[0] for line in table] == [str(rank) for rank in range(ranks)]
    assert all(" ok " in line and " ms " in line for line in table)
    chunks, tiles = (6, 24) if backend == "host" else (r"\d+", r"\d+")
    hidden = rf"\d+ of {chunks} chunks +\d+ of {tiles} tiles"
    assert all(re.search(hidden, line) for line in table)
    for step in ("compiling", "first run", "run 1 of", "checking"):
        assert step in done.stdout
    assert done.stderr == ""


def test_ranks_load_no_framework(backend, most_ranks, tmp_path):
    """Importing one would end the rank."""
    for name in ("torch", "jax", "cupy"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = [sys.executable, "-c", "import torch"]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert b"torch was imported" in done.stderr  # instead of an installed one
    ranks = str(min(2, most_ranks))
    done = run_tdx("demo", "-n", ranks, *_SMALL, timeout_s=120, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_input_and_output(backend, most_ranks, tmp_path, ranks, dtype):
    ranks = min(ranks, most_ranks)
    given = {name: array.astype(dtype) for name, array in arrays().items()}
    np.savez(tmp_path / "in.npz", **given)
    words = ("-n", str(ranks), "--input", "in.npz", "--output", "out")
    done = run_tdx("demo", *words, cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    y = np.load(tmp_path / "out")["y"]
    right = expected(*(array.astype(np.float64) for array in given.values()))
    assert y.dtype == np.float32
    tolerance = TOLERANCE["float32" if backend == "host" else "bfloat16"]
    np.testing.assert_allclose(y, right, atol=tolerance * np.abs(right).max(), rtol=0)


def test_seed_and_sizes(backend, most_ranks, tmp_path):
    results = []
    for seed in ("1", "1", "2"):
        words = ("-n", str(min(2, most_ranks)), "--seed", seed, "--output", "y.npz", *_SMALL)
        done = run_tdx("demo", *words, cwd=tmp_path, timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(np.load(tmp_path / "y.npz")["y"])
    assert results[0].shape == (12, 20)
    assert np.array_equal(results[0], results[1])
    assert not np.allclose(results[0], results[2])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--input", "no_such_file.npz"), "no_such_file.npz"),
        (("--input", "text.npz"), "NPZ"),
        (("--input", "single.npy"), "NPZ"),
        (("--input", "cut.npz"), "cut.npz"),
        (("--input", "."), "Is a directory"),
        (("--input", "lacks.npz"), "lacks w_down; it holds x, w_gate, w_up"),
        (("--input", "shape.npz"), "(20, 36), (20, 36), (36, 20)"),
        (("--input", "integers.npz"), "x must be a floating-point matrix"),
        (("--input", "nan.npz"), "w_up holds values not finite"),
        (("--input", "objects.npz"), "objects.npz"),
        (("--input", "good.npz", "-n", "5"), "pass -n 4"),
        (("--input", "good.npz", "--tokens", "12"), "--input file"),
        (("--tokens", "10"), "4 ranks must divide tokens=10"),
        (("--intermediate", "9", "-n", "2"), "intermediate=9"),
        (("--hidden", "0"), "--hidden 0: must be 1 or more"),
        (("-n", "0"), "1..64"),
        (("-n", "65"), "1..64"),
        (("--seed", "-1"), "--seed -1"),
        (("--output", "no/such/folder/y.npz"), "cannot write"),
        (("--backend", "hip"), "hip"),
    ],
)
def test_wrong_calls(tmp_path, words, said):
    good = arrays()
    np.savez(tmp_path / "good.npz", **good)
    (tmp_path / "text.npz").write_text("not an archive")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:-100])
    np.save(tmp_path / "single.npy", good["x"])
    np.savez(tmp_path / "lacks.npz", **{k: good[k] for k in ("x", "w_gate", "w_up")})
    np.savez(tmp_path / "shape.npz", **good | {"w_down": good["w_down"][:-1]})
    np.savez(tmp_path / "integers.npz", **good | {"x": good["x"].astype(int)})
    np.savez(tmp_path / "nan.npz", **good | {"w_up": good["w_up"] * np.nan})
    np.savez(tmp_path / "objects.npz", **good | {"x": good["x"].astype(object)})
    done = run_tdx("demo", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert done.stderr.startswith("tdx demo: ")
    assert "Traceback" not in done.stderr
    assert "starting" not in done.stdout


def test_zero_input_is_right(backend, most_ranks, tmp_path):
    ranks = str(min(2, most_ranks))
    np.savez(tmp_path / "in.npz", **arrays() | {"x": np.zeros((12, 20))})
    done = run_tdx("demo", "-n", ranks, "--input", "in.npz", cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the check
def test_reference():
    given = arrays()
    np.testing.assert_allclose(reference(**given), expected(**given), rtol=1e-12)
    assert np.isfinite(reference(given["x"] * 1e4, *list(given.values())[1:])).all()


def test_error_finds_one_wrong_value():
    right = expected(**arrays())
    assert error_of(right.astype(np.float32), right) < TOLERANCE["float32"]
    for wrong in (right.max(), np.nan, np.inf):
        result = right.copy()
        result[3, 4] -= wrong
        assert not error_of(result, right) <= TOLERANCE["float32"]


@pytest.mark.parametrize("error", [1e-3, float("nan"), float("inf")])
def test_verdict(capsys, error):
    settings = Settings(8, 4, 4, "float32", 0, "", "")
    good = Report("device", 1e-6, 1.0, 2.0, 1, 2, 3, 4)
    bad = Report("device", error, 1.0, 2.0, 1, 2, 3, 4)
    assert _conclude([good, good], settings, 4)
    assert not _conclude([good, bad], settings, 4)
    out = capsys.readouterr().out
    assert out.count("WRONG") == 2
    assert "1 of 2 chunks" in out
    assert "3 of 4 tiles" in out


def test_wrong_result_gives_exit_code_1(backend, most_ranks, tmp_path):
    """A rank program with a corrupted reference, started as `tdx demo` starts its own."""
    script = tmp_path / "corrupted.py"
    script.write_text(
        "import sys\n"
        "from tdx.tools import demo, demo_rank\n"
        "right = demo_rank.reference\n"
        "demo_rank.reference = lambda *given: right(*given) + 1.0\n"
        "sys.exit(demo_rank.main(demo.Settings(8, 8, 8, 'float32', 0, '', '')))\n"
    )
    ranks = str(min(2, most_ranks))
    done = run_tdx("run", "-n", ranks, "--no-prefix", str(script), timeout_s=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The result is WRONG." in done.stdout


# ---- where it runs
@pytest.fixture
def machine(monkeypatch):
    """Pretends that GPUs are there, of which a process can open `opened`."""

    def pretend(nvidia: int, amd: int = 0, opened: int = 0) -> None:
        for module in (demo, backends):
            monkeypatch.setattr(module, "nvidia_gpus", lambda: nvidia)
            monkeypatch.setattr(module, "amd_gpus", lambda: amd)
        trouble = "DriverError: install the binding"
        monkeypatch.setattr(demo, "_trouble_with_gpu", lambda n: trouble if n > opened else "")

    return pretend


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ({"nvidia": 0}, "No NVIDIA GPU was found"),
        ({"nvidia": 1, "opened": 1}, "needs two GPUs or more, 1 was found"),
        ({"nvidia": 8, "opened": 0}, "8 NVIDIA GPU(s) found, but tdx cannot use 1: DriverError"),
        ({"nvidia": 8, "opened": 1}, "cannot use 2: DriverError: install the binding"),
        ({"nvidia": 0, "amd": 2}, "HIP driver is not there yet"),
    ],
)
def test_without_usable_gpus_it_says_why(machine, capsys, gpus, said):
    machine(**gpus)
    assert demo._place(None, None) == ("host", 4)
    assert demo._place(None, 3) == ("host", 3)
    out = capsys.readouterr().out
    assert said in out
    assert "Running on the host tier" in out


def test_usable_gpus_are_used(machine, capsys):
    machine(nvidia=8, opened=8)
    assert demo._place(None, None) == ("cuda", 4)
    assert demo._place(None, 8) == ("cuda", 8)
    assert demo._place(None, 1) == ("cuda", 1)
    assert demo._place("cuda", None) == ("cuda", 4)
    assert demo._place("host", None) == ("host", 4)
    with pytest.raises(InvalidArgument, match="-n 8 or --backend host"):
        demo._place(None, 9)
    assert capsys.readouterr().out == ""
    machine(nvidia=8, opened=3)
    assert demo._place(None, None) == ("cuda", 3)


def test_a_gpu_that_cannot_be_opened_says_why(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # hides those that are there
    trouble = demo._trouble_with_gpu(1)
    assert "Error: " in trouble  # no binding, no driver library or no GPU to be seen


def test_what_init_chooses_when_nobody_did(machine, monkeypatch, capsys):
    """Here only: all other tests name the backend, see tests/helpers/commands.py."""
    monkeypatch.setattr(backends, "_said", False)
    machine(nvidia=1)
    assert backends.choose(None) == "cuda"
    machine(nvidia=0, amd=1)
    assert backends.choose(None) == "host"
    for rank in (1, 0, 0):
        backends.announce(None, "host", rank)
    said = capsys.readouterr().err
    assert said.startswith("tdx: found no GPU that tdx can drive (there is no driver for the AMD")
    assert said.count("\n") == 1
