"""The CUDA driver on a stand-in libcuda, with failures at every call; see fakecuda/fakecuda.h."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cases import skip
from tests.helpers.commands import tdx_environment
from tests.standin import job  # noqa: F401  # declares all scenarios
from tests.standin.fake import build
from tests.standin.ranks import SIZES

# in a process of their own: they need one that is set up badly, or leave one in ruins
_ALONE = {
    "old_driver", "no_library", "no_binding", "no_compiler", "no_compiler_on_one", "one_compiles",
    "every_verb_of_close", "a_device_breaks", "no_framework_is_loaded",
    "torch_is_imported_first", "torch_is_imported_later",
}  # fmt: skip
_LIMIT_S = 240.0  # of a job, which compiles what no job before it has
_SIZES = sorted({size for sizes in SIZES.values() for size in sizes})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in."""
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        skip("cuda-bindings is not installed")
    try:
        return build(tmp_path_factory.mktemp("fakecuda"))
    except FileNotFoundError as error:
        skip(str(error))


def start(folder: Path, size: int, names: list[str], **environment: str) -> dict[str, str]:
    """Run the scenarios in one job: name -> what failed, "" if nothing did.

    The first failure ends the job; later scenarios are not in the result.
    """
    words = [sys.executable, "-m", "tests.standin.job", *names]
    if size > 1:
        from tdx.tools.launcher import find_launcher

        words = [*find_launcher().command(size), *words]
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    try:
        done = subprocess.run(
            words,
            env=tdx_environment(LD_LIBRARY_PATH=os.pathsep.join(paths), **environment),
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
        output, code = done.stdout, str(done.returncode)
    except subprocess.TimeoutExpired as expired:
        output, code = (expired.stdout or b"").decode(), "none, the time was up"
    said: dict[str, list[str]] = {}
    for line in output.splitlines():
        if line.startswith('{"scenario"'):
            entry = json.loads(line)
            said.setdefault(entry["scenario"], []).append(entry["failure"] and line)
    results = {}
    for name in names:
        failed = list(filter(None, said.get(name, [])))
        if failed or len(said.get(name, [])) < size:  # where a job ends
            ended = f"exit code {code}\n{output[-4000:]}"
            return results | {name: "\n".join(failed) or ended}
        results[name] = ""
    return results


@pytest.fixture(scope="module")
def outcomes(library: Path) -> dict[int, dict[str, str]]:
    """What the jobs of all scenarios that can share one said, by world size; filled as needed."""
    return {}


@pytest.mark.parametrize(
    ("size", "name"),
    [(n, s) for n in _SIZES for s in SIZES if n in SIZES[s] and s not in _ALONE],
)
def test_scenario(library: Path, outcomes: dict[int, dict[str, str]], size: int, name: str):
    known = outcomes.setdefault(size, {})
    if name not in known:
        names = [s for s in SIZES if size in SIZES[s] and s not in _ALONE]
        known |= start(library, size, names[names.index(name) :])
    assert not known[name], known[name].replace("\\n", "\n")


@pytest.mark.parametrize(
    ("size", "name"),
    [(n, s) for s in ("every_verb_of_close", "a_device_breaks") for n in SIZES[s]],
)
def test_close_fails(library: Path, size: int, name: str):
    run_alone(library, size, name)


@pytest.mark.parametrize(
    ("size", "name"),
    [(n, s) for s in ("no_compiler", "no_compiler_on_one", "one_compiles") for n in SIZES[s]],
)
def test_compiling(library: Path, tmp_path: Path, size: int, name: str):
    run_alone(library, size, name, TRITON_CACHE_DIR=str(tmp_path))


@pytest.mark.parametrize(
    ("size", "name"), [(n, s) for s in ("old_driver", "no_binding") for n in SIZES[s]]
)
def test_wrong_installation(library: Path, size: int, name: str):
    run_alone(library, size, name)


@pytest.mark.parametrize("size", SIZES["no_library"])
def test_no_library(tmp_path: Path, library: Path, size: int):
    (tmp_path / "libcuda.so.1").write_bytes(b"")  # hides that of the machine, if there is one
    run_alone(tmp_path, size, "no_library", TDX_STANDIN=str(library))


@pytest.mark.parametrize(
    ("size", "name"),
    [(n, s) for s in ("no_framework_is_loaded", "kernels_are_timed") for n in SIZES[s]],
)
def test_without_frameworks(library: Path, size: int, name: str):
    run_alone(library, size, name)


@pytest.mark.parametrize(
    ("size", "name"),
    [(n, s) for s in ("torch_is_imported_first", "torch_is_imported_later") for n in SIZES[s]],
)
def test_torch(library: Path, size: int, name: str):
    if importlib.util.find_spec("torch") is None:
        skip("torch is not installed")
    run_alone(library, size, name)


def run_alone(folder: Path, size: int, name: str, **environment: str) -> None:
    failure = start(folder, size, [name], **environment)[name]
    assert not failure, failure.replace("\\n", "\n")
