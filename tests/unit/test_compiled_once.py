"""One process of a host compiles a kernel while the others wait."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.commands import tdx_environment

# What each does is in order, whenever the machine runs it: a process holds until it is told.
_PROGRAM = """
import sys, time
from types import SimpleNamespace
from tdx.runtime.triton_driver import compiled_once

def say():
    sys.stdout.write(f"{time.monotonic()}\\n")
    sys.stdout.flush()

say()
with compiled_once(SimpleNamespace(cache_key=sys.argv[1]), {}):
    say()
    sys.stdin.readline()
    say()
"""


def start(cache: Path, name: str) -> subprocess.Popen[str]:
    """A process that is about to compile kernel `name`."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, name],
        env=tdx_environment(TRITON_CACHE_DIR=str(cache)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    line(process)
    return process


def line(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


def end(process: subprocess.Popen[str]) -> float:
    """When the process that holds was about to leave."""
    out, _ = process.communicate("\n")
    assert process.returncode == 0
    return float(out)


@pytest.fixture
def first(tmp_path: Path):
    """A process that compiles kernel "a" until it is told."""
    process = start(tmp_path, "a")
    line(process)
    yield process
    process.kill()
    process.communicate()


def test_others_wait_and_go_on_together(tmp_path: Path, first: subprocess.Popen[str]):
    others = [start(tmp_path, "a") for _ in range(2)]
    time.sleep(1)  # they wait by now; were they not to, they would have entered
    done = end(first)
    # Each enters while the other still holds: one after the other would wait here for ever.
    entered = [line(other) for other in others]
    assert min(entered) >= done
    for other in others:
        end(other)


def test_a_process_that_dies_lets_the_others_go_on(tmp_path: Path, first: subprocess.Popen[str]):
    other = start(tmp_path, "a")
    time.sleep(1)
    killed = time.monotonic()
    first.kill()
    assert line(other) >= killed
    end(other)


def test_another_kernel_does_not_wait(tmp_path: Path, first: subprocess.Popen[str]):
    other = start(tmp_path, "b")
    line(other)
    end(other)
    assert first.poll() is None


def test_a_cache_that_cannot_be_written_to(tmp_path: Path):
    (tmp_path / "file").write_text("")
    other = start(tmp_path / "file", "a")
    line(other)
    end(other)
