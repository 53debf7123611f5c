"""A rank that comes late to `tdx.init`: the others say what they wait for, and go on."""

from __future__ import annotations

import pytest

from tests.helpers.commands import run_tdx

_SCRIPT = """
import sys, threading, time
from mpi4py import MPI
import tdx

comm = MPI.COMM_WORLD
if comm.Get_rank() == 1:
    time.sleep(1.5)
with tdx.init({comm}backend="host", timeout_s=0.5) as world:
    print(world.size, [t.name for t in threading.enumerate() if "notice" in t.name])
"""


@pytest.mark.parametrize("comm", ["", "comm, "], ids=["default", "given"])
def test_those_who_wait_say_so_once(tmp_path, comm):
    path = tmp_path / "late.py"
    path.write_text(_SCRIPT.format(comm=comm))
    done = run_tdx("run", "-n", "2", str(path))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 2 []", "[1] 2 []"]
    said = [line for line in done.stderr.splitlines() if line.startswith("[0]")]
    assert said == ["[0] tdx: rank 0 is still in tdx.init after 0.5 s: every rank must call it"]
