"""Undo: the order of the steps, failures, commit."""

from __future__ import annotations

import pytest

from tdx.runtime.undo import Undo


def test_steps_run_last_first():
    done = []
    with Undo() as undo:
        undo.add(done.append, 1)
        undo.add(done.append, 2)
    assert done == [2, 1]


def test_commit_keeps_everything():
    done = []
    with Undo() as undo:
        undo.add(done.append, 1)
        undo.commit()
        undo.add(done.append, 2)
    assert done == [2]


def test_forget_one_step():
    done, other = [], []
    with Undo() as undo:
        undo.add(done.append, 1)
        undo.add(other.append, 2)
        undo.add(done.append, 3)
        undo.forget(done.append)
    assert (done, other) == ([], [2])


def _fail(text):
    raise KeyError(text)


def test_a_failing_step_does_not_stop_the_others():
    done = []
    undo = Undo()
    undo.add(done.append, 1)
    undo.add(_fail, "step")
    undo.add(done.append, 2)
    assert [str(e) for e in undo.rollback()] == ["'step'"]
    assert done == [2, 1]
    assert undo.rollback() == []


def test_failures_are_noted_on_the_error_that_led_there():
    def body():
        with Undo() as undo:
            undo.add(_fail, "step")
            raise ValueError("first")

    with pytest.raises(ValueError, match="first") as caught:
        body()
    assert caught.value.__notes__ == ["while undoing: KeyError('step')"]


def test_a_failure_of_a_step_alone_is_raised():
    with pytest.raises(KeyError, match="step"), Undo() as undo:
        undo.add(_fail, "step")
