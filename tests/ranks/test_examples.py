"""The examples and the tutorial's programs do what they say.

Examples run on the backend of the rank cases, on GPUs with as many ranks as there are.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tdx.tools.launcher import find_launcher
from tests.aot.harness import Job
from tests.helpers.commands import ROOT, run_tdx, tdx_environment
from tests.helpers.frameworks import needs

_EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
_TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
_FRAMEWORKS = ROOT / "examples" / "frameworks"
_KINDS = ("*_layer.py", "engine_*.py", "*_distributed.py")
_SCRIPTS = sorted(path for kind in _KINDS for path in _FRAMEWORKS.glob(kind))


@pytest.fixture(autouse=True)
def backend(request, monkeypatch):
    """Where examples run; their processes are told by the environment."""
    name = request.config.getoption("--tdx-backend")
    monkeypatch.setenv("TDX_BACKEND", name)
    return name


def checked(done: subprocess.CompletedProcess[str], ranks: int) -> None:
    """Success, one line for each rank, and nothing else.

    A launcher other than `tdx run` may mix the lines of ranks up, so their ends are not looked for.
    """
    assert done.returncode == 0, done.stdout + done.stderr
    spoke = [int(rank) for rank in re.findall(r"rank (\d+)(?=:| of)", done.stdout)]
    assert sorted(spoke) == list(range(ranks)), done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == ranks, done.stdout
    assert done.stderr == ""


def test_there_are_examples():
    assert [path.name[:3] for path in _EXAMPLES] == ["01_", "02_", "03_", "04_", "05_", "06_"]
    assert _TUTORIALS


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path):
    assert len(path.read_text().splitlines()) < 80


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_example_under_tdx_run(path, ranks, most_ranks):
    ranks = min(ranks, most_ranks)
    checked(run_tdx("run", "-n", str(ranks), "--no-prefix", str(path), timeout_s=120), ranks)


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
def test_example_under_bare_mpirun(path, most_ranks):
    ranks = min(2, most_ranks)
    checked(mpirun(ranks, str(path)), ranks)


@pytest.mark.parametrize("path", _SCRIPTS, ids=lambda path: path.stem)
def test_script_for_a_framework_is_short(path):
    """Under 25 lines of code: docstring, comments and empty lines do not count."""
    text = path.read_text()
    start = ast.parse(text).body[0].end_lineno
    lines = [line.strip() for line in text.splitlines()[start:]]
    assert len([line for line in lines if line and not line.startswith("#")]) < 25


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("module", ["numpy", "jax", "torch"])
def test_layer_of_a_framework(module, ranks, backend, most_ranks):
    needs(module, backend)
    ranks = min(ranks, most_ranks)
    checked(run_layer(module, ranks), ranks)


def test_layer_under_bare_mpirun(most_ranks):
    ranks = min(2, most_ranks)
    checked(mpirun(ranks, str(_FRAMEWORKS / "numpy_layer.py")), ranks)


def test_layer_of_cupy(backend, most_ranks):
    """CuPy has no arrays without a GPU."""
    if backend != "cuda" or not importlib.util.find_spec("cupy"):
        pytest.skip("needs CuPy and --tdx-backend cuda")
    ranks = min(4, most_ranks)
    checked(run_layer("cupy", ranks), ranks)


def run_layer(module: str, ranks: int) -> subprocess.CompletedProcess[str]:
    words = ("run", "-n", str(ranks), "--no-prefix", str(_FRAMEWORKS / f"{module}_layer.py"))
    # for JAX, which would take most of a GPU
    return run_tdx(*words, timeout_s=120, XLA_PYTHON_CLIENT_PREALLOCATE="false")


@pytest.mark.parametrize("ranks", [1, 2])
def test_jax_distributed(ranks, backend, most_ranks, monkeypatch):
    """JAX's service is kept from logging to stderr: also that there are proxies."""
    needs("jax", backend)
    if backend != "host" and os.environ.get("TDX_SHARE_GPU") == "1":
        pytest.skip("JAX wants a GPU for each process")
    ranks = min(ranks, most_ranks)
    for name in [name for name in os.environ if "_proxy" in name.lower()]:
        monkeypatch.delenv(name)
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend == "host":
        settings["JAX_PLATFORMS"] = "cpu"  # each process wants a GPU of its own, if there are any
    words = ("run", "-n", str(ranks), "--no-prefix", str(_FRAMEWORKS / "jax_distributed.py"))
    checked(run_tdx(*words, timeout_s=120, **settings), ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_engine_with_sockets(ranks, most_ranks):
    ranks = min(ranks, most_ranks)
    checked(python(str(_FRAMEWORKS / "engine_sockets.py"), str(ranks)), ranks)


def test_engine_with_a_torch_store(backend, most_ranks):
    needs("torch", backend)
    ranks = min(2, most_ranks)
    script = str(_FRAMEWORKS / "engine_torch_store.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    checked(python(*torchrun, script, OMP_NUM_THREADS="1"), ranks)


def test_kernels_of_examples_compile_for_gpus(compiler):
    """They run on the host tier above; here for GPUs that need not be there."""
    data = dict.fromkeys(("x", "out", "gathered", "sums", "rows", "received", "u", "v"), "*fp32")
    words = dict.fromkeys(("arrived", "value", "counts", "received_counts", "signals"), "*i32")
    words |= dict.fromkeys(("from_left", "from_right"), "*i32") | {"numel": "i32", "cells": "i32"}
    known = {**data, **words, "world": "world", "channel": "channel"}
    kernels = (
        ("02_own_kernel", "all_reduce_kernel", {"BLOCK": 1024}),
        ("03_gather_with_progress", "push_kernel", {"CHUNKS": 4, "SIZE": 2048}),
        ("03_gather_with_progress", "row_sums", {"CHUNKS": 4, "R": 8, "C": 256}),
        ("05_low_latency_all_to_all", "all_to_all_kernel", {"MOST_ROWS": 16, "HIDDEN": 128}),
        ("06_halo_exchange", "step_kernel", {"BLOCK": 256}),
    )
    jobs = [
        Job(f"examples.{file}", kernel, known | dict.fromkeys(constants, "constexpr"), constants, t)
        for file, kernel, constants in kernels
        for t in ("sm_90", "gfx942")
    ]
    compiler.start(jobs)
    for job in jobs:
        assert not compiler[job].error, f"{job.kernel} for {job.target}: {compiler[job].error}"


def mpirun(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python on `ranks` ranks with the MPI launcher itself."""
    return started([*find_launcher().command(ranks), sys.executable, *words])


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python without a launcher."""
    return started([sys.executable, *words], **environment)


def started(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=tdx_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("path", _TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(path, tmp_path):
    """Programs of a tutorial, started as the text says: `tdx run -n N`, or with --keep-going.

    One that is followed by an `output` block is meant to fail so; a `printed` block shows lines
    that it prints, where numbers are chance. One that begins with `# name.py` is a module for the
    programs after it. Always on the host tier: what is shown is what it prints.
    """
    blocks = r"^```(python|output|printed)\n(.*?)^```|^    tdx run (-n \d+(?: --keep-going)?)"
    words, done = "-n 2", None
    for kind, text, given in re.findall(blocks, path.read_text(), re.M | re.S):
        if given:
            words = given
        elif kind == "python":
            assert done is None or done.returncode == 0, done.stderr
            module = re.match(r"# (\w+\.py)\n", text)
            script = tmp_path / (module[1] if module else "shift.py")
            script.write_text(text)
            if not module:
                command = ("run", *words.split(), str(script))
                done = run_tdx(*command, timeout_s=120, TDX_BACKEND="host")
        else:
            assert done is not None
            assert done.returncode == (kind == "output"), done.stderr
            hidden = without_numbers if kind == "output" else without_digits
            said = hidden(done.stdout + done.stderr)
            for line in hidden(text).splitlines():
                assert line in said, f"{line!r} is not in:\n{said}"
            done = done if kind == "printed" else None
    assert done is None or done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", _TUTORIALS, ids=lambda path: path.stem)
def test_excerpts_of_a_tutorial(path):
    """Blocks marked `py` are lines of the example that the text names."""
    excerpts = re.findall(r"^```py\n(.*?)^```", path.read_text(), re.M | re.S)
    sources = [script.read_text() for script in _FRAMEWORKS.glob("*.py")]
    for excerpt in excerpts:
        lines = [line.strip() for line in excerpt.splitlines()]
        found = any(is_part(lines, [s.strip() for s in text.splitlines()]) for text in sources)
        assert found, excerpt


def is_part(lines: list[str], whole: list[str]) -> bool:
    return any(whole[n : n + len(lines)] == lines for n in range(len(whole)))


def without_numbers(text: str) -> str:
    """Ranks, addresses and folders replaced: which rank fails first is chance."""
    for pattern, name in ((r"(rank|peer) \d+", r"\1 N"), ("0x[0-9a-f]+", "A"), (r"\S*/", "")):
        text = re.sub(pattern, name, text)
    return text


def without_digits(text: str) -> str:
    return re.sub(r"\d+", "N", text)
