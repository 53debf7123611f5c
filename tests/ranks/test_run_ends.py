"""`tdx run`: how a job ends, whatever ends it, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from tests.helpers.commands import run_tdx, tdx_environment
from tests.helpers.scripts import leftovers, wait_for_end, write_script


@pytest.fixture
def script(tmp_path):
    return partial(write_script, tmp_path)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("sys.exit(3)", 3, "exited with code 3"),
        ("sys.exit('bye')", 1, "bye"),
        ("os._exit(7)", 7, "exited with code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", 139, "was killed by SIGSEGV"),
        ("comm.Abort(5)", 5, ""),
    ],
)
def test_failure_of_one_rank_ends_the_job(script, ranks, statement, code, said):
    path = script(f"""
        print("started")
        if rank == comm.Get_size() - 1:
            print(f"failing at {{time.time()}}", flush=True)
            {statement}
        time.sleep(1000)
    """)
    done = run_tdx("run", "-n", str(ranks), path)
    ended = time.time()
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    failed = float(re.search(r"failing at ([0-9.]+)", done.stdout)[1])
    assert ended - failed < 2.0
    assert leftovers(path) == []


def test_traceback_of_the_first_comes_first_and_is_short(script):
    path = script("""
        def fail():
            raise ValueError("the cause")

        if rank == 1:
            fail()
        time.sleep(0.1)
        raise RuntimeError("a consequence")
    """)
    done = run_tdx("run", "-n", "3", path)
    assert done.returncode == 1
    first, *_ = done.stderr.splitlines()
    assert first == "[1] Traceback (most recent call last):"
    assert "the cause" in done.stderr
    assert "a consequence" not in done.stderr
    assert "runpy" not in done.stderr
    assert "rank.py" not in done.stderr
    assert "tdx run: rank 1 raised ValueError; ending the job" in done.stderr


@pytest.mark.parametrize(
    ("statement", "code", "said"),
    [
        ("raise ValueError('the cause')", 1, "rank 1 raised ValueError"),
        ("sys.exit(3)", 3, "rank 1 exited with code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
        ("os._exit(0)", 1, "rank 1 ended with code 0; rank 2 raised PeerLost"),
        ("sys.exit(0)", 1, "rank 1 ended with code 0; rank 2 raised PeerLost"),
        ("time.sleep(1000)", 1, "rank 2 raised PeerLost"),
    ],
)
def test_the_cause_is_named_though_its_consequence_is_told_first(script, statement, code, said):
    path = script(f"""
        class PeerLost(Exception):
            pass

        if rank == 2:
            raise PeerLost("a consequence")
        if rank == 1:
            time.sleep(0.2)
            {statement}
        time.sleep(1000)
    """)
    done = run_tdx("run", "-n", "3", path)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == f"tdx run: {said}; ending the job"
    assert ("a consequence" in done.stderr) == ("rank 2" in said)
    assert ("the cause" in done.stderr) == ("ValueError" in said)
    assert leftovers(path) == []


@pytest.mark.parametrize(
    ("statement", "code"),
    [("raise ValueError", 1), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("sys.exit(4)", 4)],
)
def test_keep_going(script, statement, code):
    path = script(f"""
        if rank == 1:
            {statement}
        time.sleep(0.7)
        print("survived")
    """)
    done = run_tdx("run", "-n", "4", "--keep-going", path)
    assert done.returncode == code
    assert sorted(done.stdout.splitlines()) == [f"[{r}] survived" for r in (0, 2, 3)]
    assert "the other ranks go on" in done.stderr
    assert leftovers(path) == []


def test_timeout_shows_stacks(script):
    path = script("""
        def stuck():
            time.sleep(1000)

        stuck()
    """)
    done = run_tdx("run", "-n", "2", "--timeout", "3", path)
    assert done.returncode == 124
    assert done.stderr.count("in stuck") == 2
    assert done.stderr.count("KeyboardInterrupt") == 2
    assert leftovers(path) == []


_STUCK = """
def in_python():
    print("up", flush=True)
    while True:
        time.sleep(0.1)

def in_mpi():
    print("up", flush=True)
    comm.recv(source=0)

def deaf():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    in_python()

(in_python, in_mpi, deaf)[rank]()
"""


def started(path: str, ranks: int) -> subprocess.Popen[str]:
    """A job whose ranks have all said that they are up."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tdx", "run", "-n", str(ranks), path],
        env=tdx_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(ranks):
        assert "up" in process.stdout.readline()
    return process


def test_interrupt_shows_where_every_rank_is(script):
    path = script(_STUCK)
    process = started(path, 3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    first, *lines = said.splitlines()
    assert first == "tdx run: SIGINT; ending the job, stacks of the ranks:"
    assert not [line for line in lines if not line.startswith("[")]
    stacks = ["\n".join(line for line in lines if line.startswith(f"[{r}]")) for r in range(3)]
    assert "in in_python" in stacks[0]
    assert "[0] KeyboardInterrupt" in stacks[0]
    assert "in in_mpi" in stacks[1]
    assert "in deaf" in stacks[2]
    assert "Aborted" in stacks[2]
    assert leftovers(path) == []


def test_second_interrupt_ends_at_once(script):
    path = script("signal.signal(signal.SIGINT, signal.SIG_IGN)" + _STUCK)
    process = started(path, 3)
    process.send_signal(signal.SIGINT)
    assert "stacks of the ranks" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "tdx run: SIGINT; ending the job\n")
    assert leftovers(path) == []


def test_interrupt_of_a_job_in_the_background(script):
    """A shell without job control lets it ignore SIGINT, which its ranks inherit."""
    path = script(_STUCK)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = started(path, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "[0] KeyboardInterrupt" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_leave_nothing(script, number):
    path = script("""
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", __file__])
        print("up", flush=True)
        time.sleep(1000)
    """)
    if number == signal.SIGKILL:  # then only the ranks and the launcher can be ended
        path = script("print('up', flush=True); time.sleep(1000)")
    before = set(os.listdir("/tmp"))
    process = started(path, 3)
    process.send_signal(number)
    process.stdout.close()
    code = process.wait(30)
    if number != signal.SIGKILL:
        stacks = ", stacks of the ranks:" if number == signal.SIGINT else ""
        said = f"tdx run: {number.name}; ending the job{stacks}\n"
        assert process.stderr.readline() == said
    process.stderr.close()
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGKILL:
        wait_for_end(path)
    assert leftovers(path) == []
    new = set(os.listdir("/tmp")) - before
    assert not [name for name in new if name.startswith("tdx")]


def test_reader_that_leaves_ends_the_job(script):
    path = script("""
        while True:
            print("x" * 1000, flush=True)
    """)
    process = subprocess.Popen(
        [sys.executable, "-m", "tdx", "run", "-n", "2", path],
        env=tdx_environment(),
        stdout=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(10) == 128 + signal.SIGPIPE
    assert leftovers(path) == []


def test_code_of_abort_comes_from_a_launcher_that_ends_after_the_ranks(script, tmp_path):
    path = script("comm.Abort(5) if rank == 1 else time.sleep(1000)")
    late = tmp_path / "late_launcher"
    late.write_text('#!/bin/sh\n"$@"\ncode=$?\nsleep 1\nexit $code\n')
    late.chmod(0o755)
    program = f"""
import os
from tdx.tools.job import Job
from tdx.tools.launcher import find_launcher
launcher = [{str(late)!r}, *find_launcher().command(2)]
raise SystemExit(Job(2, launcher, ["-f", {path!r}], environment=dict(os.environ)).run())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=tdx_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 5, done.stderr
    assert leftovers(path) == []
