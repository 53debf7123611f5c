"""The line that `tdx.init` writes while it waits: when, about whom, and that it does no harm."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from tdx.runtime.waiting import Notice
from tests.helpers.fake_comm import run_python


class _Comm:
    """As `open_comm` returns it."""

    def __init__(self, size):
        self._size = size

    def Get_rank(self):
        return 0

    def Get_size(self):
        return self._size

    def allgather(self, payload):
        return [payload] * self._size


def _wait_for_the_line():
    deadline = time.monotonic() + 10
    while any(t.name == "tdx init notice" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("opened", "said"),
    [
        (_Comm(2), "tdx: rank 0 is still in tdx.init after 0.01 s: every rank must call it\n"),
        (_Comm(1), ""),
    ],
    ids=["two", "alone"],
)
def test_what_is_said(capsys, opened, said):
    notice = Notice(None, 0.01)
    notice.opened = opened
    with notice:
        _wait_for_the_line()
    assert capsys.readouterr().err == said


def test_a_rank_that_does_not_know_its_number(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with Notice(None, 0.01):
        _wait_for_the_line()
    assert capsys.readouterr().err.startswith("tdx: a rank is still in tdx.init")


@pytest.mark.parametrize(
    "timeout_s", [0, -1, None, "10", True, float("nan"), float("inf"), 10**999]
)
def test_other_deadlines_mean_30_seconds(timeout_s):
    assert Notice(None, timeout_s)._after_s == 30


def test_no_thread_is_left():
    with pytest.raises(ValueError, match="as init may"), Notice(None, 30):
        raise ValueError("as init may")
    assert not any(t.name == "tdx init notice" for t in threading.enumerate())


def test_an_end_of_the_process_is_not_held_up():
    code = "from tdx.runtime.waiting import Notice; Notice(None, 1000).__enter__()"
    assert run_python(code).returncode == 0


def test_stderr_may_be_missing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    notice = Notice(None, 0.01)
    notice.opened = _Comm(2)
    with notice:
        _wait_for_the_line()
