"""Cases that fail in every way, for the tests of the case runner."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import pytest

from tests.helpers.cases import skip


def case_passes(comm):
    comm.Barrier()


def case_raises_on_one(comm):
    answer = 41 + comm.Get_rank()
    sys.stdout.write("said before the failure\n")
    comm.Barrier()
    assert answer == 41


def case_others_wait(comm):
    if comm.Get_rank() == 0:
        raise ValueError("first cause")
    comm.Barrier()


def case_hangs(comm):
    if comm.Get_rank() == 1:
        time.sleep(1000)


def case_crashes(comm):
    if comm.Get_rank() == 1:
        ctypes.string_at(0)


def case_exits(comm):
    if comm.Get_rank() == 1:
        sys.exit(3)


def case_ends_at_once(comm):
    if comm.Get_rank() == 1:
        os._exit(0)


def case_skips(comm):
    pytest.skip("not here")


def case_lacks(comm):
    skip("no compiler")


def case_skips_on_one(comm):
    if comm.Get_rank() == 1:
        pytest.skip("not on this rank")
