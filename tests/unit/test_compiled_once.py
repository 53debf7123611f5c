"""One process of a host compiles a kernel while the others wait."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.commands import tdx_environment

_PROGRAM = """
import sys, time
from types import SimpleNamespace
from tdx.runtime.triton_driver import compiled_once

name, hold = sys.argv[1], float(sys.argv[2])
with compiled_once(SimpleNamespace(cache_key=name), {}):
    sys.stdout.write(f"{time.monotonic()}\\n")
    sys.stdout.flush()
    time.sleep(hold)
sys.stdout.write(f"{time.monotonic()}\\n")
"""


def start(cache: Path, name: str, hold: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, name, str(hold)],
        env=tdx_environment(TRITON_CACHE_DIR=str(cache)),
        stdout=subprocess.PIPE,
        text=True,
    )


def line(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


@pytest.fixture
def first(tmp_path: Path):
    """A process that compiles kernel "a" for long."""
    process = start(tmp_path, "a", 30)
    line(process)
    yield process
    process.kill()
    process.communicate()


def test_others_wait_and_go_on_together(tmp_path: Path):
    compiler = start(tmp_path, "a", 3)
    line(compiler)
    others = [start(tmp_path, "a", 1) for _ in range(2)]
    done = line(compiler)
    entered, left = zip(*((line(other), line(other)) for other in others), strict=True)
    assert min(entered) >= done
    assert max(entered) < min(left)
    for process in (compiler, *others):
        process.communicate()


def test_a_process_that_dies_lets_the_others_go_on(tmp_path: Path, first: subprocess.Popen[str]):
    other = start(tmp_path, "a", 0)
    time.sleep(1)
    killed = time.monotonic()
    first.kill()
    assert line(other) >= killed
    other.communicate()


def test_another_kernel_does_not_wait(tmp_path: Path, first: subprocess.Popen[str]):
    other = start(tmp_path, "b", 0)
    line(other)
    other.communicate()
    assert first.poll() is None


def test_a_cache_that_cannot_be_written_to(tmp_path: Path):
    (tmp_path / "file").write_text("")
    other = start(tmp_path / "file", "a", 0)
    line(other)
    assert not other.wait()
    other.communicate()
