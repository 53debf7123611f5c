"""A world that is open when its process ends: given back, and said."""

from __future__ import annotations

import os
import sys

import pytest

from tdx.runtime import faults
from tests.helpers.fake_comm import run_python

OPEN = "import tdx; world = tdx.init(backend='host'); x = world.zeros(8, 'int32')\n"


@pytest.mark.parametrize("warnings", ["always", "error"])
def test_a_world_left_open(warnings):
    done = run_python(OPEN + "del world", PYTHONWARNINGS=f"{warnings}::ResourceWarning")
    assert done.returncode == 0
    assert "ResourceWarning: <tdx.World rank 0 of 1, host> was left open at exit" in done.stderr


FORK = """
import os, sys
if (pid := os.fork()) == 0:
    sys.exit(0)  # the copy runs its exit handlers
os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("before", ["", FORK], ids=["closed", "forked"])
def test_nothing_to_say(before):
    """Of a world that was closed; by a forked copy, whose world it is not."""
    code = f"{OPEN}{before}world.close()"
    done = run_python(code, PYTHONWARNINGS="always::ResourceWarning")
    assert done.returncode == 0
    assert "left open" not in done.stderr


def test_a_message_without_a_place_to_go(monkeypatch):
    for place in (None, open(os.devnull)):  # noqa: SIM115
        monkeypatch.setattr(sys, "stderr", place)
        faults._say("nobody reads this")


OWN = """
import os, tdx, numpy as np
class Alone:
    def Get_rank(self): return 0
    def Get_size(self): return 1
    def allgather(self, x): return [x]
with tdx.init(Alone(), backend="host"):
    pass
if (pid := os.fork()) == 0:
    with tdx.init(Alone(), backend="host") as world:
        assert (tdx.all_reduce(world.array(np.ones(4))).numpy() == 1).all()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_copy_has_a_world_without_mpi():
    done = run_python(OWN)
    assert done.stdout == "7\n", done.stdout + done.stderr
