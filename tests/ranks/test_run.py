"""`tdx run`: output, exit codes, and the end of every process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT, run_tdx, tdx_environment

# a marker in the command line, by which leftovers are found
_SCRIPT = "tdx_run_test_script.py"

_HEAD = """
import os, signal, sys, time
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank = comm.Get_rank()
comm.Barrier()
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script, which gets the imports, `comm` and `rank`."""

    def write(body: str, head: str = _HEAD) -> str:
        path = tmp_path / _SCRIPT
        path.write_text(head + textwrap.dedent(body))
        return str(path)

    return write


def leftovers(path: str) -> list[str]:
    """Command lines of processes that still run the script."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if path in line and int(name) != os.getpid():
            found.append(line)
    return found


def wait_for_end(path: str, limit_s: float = 3.0) -> None:
    deadline = time.monotonic() + limit_s
    while leftovers(path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(path) == []


@pytest.mark.smoke
def test_output_has_whole_marked_lines(script, tmp_path):
    path = script("""
        print("size", comm.Get_size(), sys.argv[1:])
        print("to stderr", file=sys.stderr)
        os.write(1, b"no newline")
    """)
    done = run_tdx("run", "-n", "3", path, "-n", "--keep-going", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = [f"[{r}] size 3 ['-n', '--keep-going', 'x']" for r in range(3)]
    expected += [f"[{r}] no newline" for r in range(3)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
    assert sorted(done.stderr.splitlines()) == [f"[{r}] to stderr" for r in range(3)]


def test_lines_of_ranks_do_not_mix(script):
    path = script("""
        for i in range(3000):
            print(str(rank) * 40, end="")
            print(i)
        os._exit(0)   # what was written is not lost
    """)
    done = run_tdx("run", "-n", "4", "--no-prefix", path, timeout_s=90)
    lines = done.stdout.splitlines()
    assert len(lines) > 4 * 2900  # what Python itself had not flushed is lost by os._exit
    full = [line for line in lines if len(line) > 40]
    assert all(re.fullmatch(r"(0{40}|1{40}|2{40}|3{40})\d+", line) for line in full)
    assert len(full) >= len(lines) - 4


def test_one_rank_needs_no_launcher(script, tmp_path):
    path = script("print('alone', 'PMI_RANK' in os.environ)", head="import os\n")
    done = run_tdx("run", "-n", "1", path, PATH="/nonexistent")
    assert (done.returncode, done.stdout) == (0, "[0] alone False\n")


def test_module(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys; print(__package__, sys.argv[1:], __name__)"
    )
    done = run_tdx("run", "-n", "1", "-m", "package", "--x", cwd=tmp_path)
    assert done.stdout == "[0] package ['--x'] __main__\n", done.stderr


def test_script_sees_what_python_gives_it(script, tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 5\n")
    body = """
    import sys, os, neighbour
    print(neighbour.value, __name__, os.path.isabs(__file__), sys.path[0])
    """
    path = script(body, head="")
    done = run_tdx("run", "-n", "1", path)
    assert done.stdout == f"[0] 5 __main__ True {tmp_path}\n", done.stderr


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
    done = run_tdx("run", "-n", "2", "--timeout", "1.5", path)
    assert done.returncode == 124
    assert done.stderr.count("in stuck") == 2
    assert leftovers(path) == []


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
    process = subprocess.Popen(
        [sys.executable, "-m", "tdx", "run", "-n", "3", path],
        env=tdx_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    for _ in range(3):
        assert b"up" in process.stdout.readline()
    process.send_signal(number)
    process.stdout.close()
    code = process.wait(5)
    if number != signal.SIGKILL:
        said = f"tdx run: {number.name}; ending the job\n".encode()
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


def test_job_within_a_job(script):
    path = script(f"""
        import subprocess
        if rank == 0:
            words = [sys.executable, "-m", "tdx", "run", "-n", "2", "-m", "platform"]
            done = subprocess.run(words, capture_output=True, text=True, cwd={str(ROOT)!r})
            print(done.returncode, len(done.stdout.splitlines()))
    """)
    done = run_tdx("run", "-n", "2", path)
    assert done.stdout == "[0] 0 2\n", done.stderr


def test_bare_launcher_works_too(script):
    from tdx.tools.launcher import find_launcher

    # one write a line: the bare launcher mixes the ranks' output
    path = script("import os; os.write(1, b'bare %d\\n' % comm.Get_size())")
    command = [*find_launcher().command(3), sys.executable, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.count("bare 3") == 3


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-n", "0", "x.py"], "1..64"),
        (["-n", "65", "x.py"], "1..64"),
        (["-n", "2", "no_such_script.py"], "no_such_script.py"),
        (["-n", "2"], "no script"),
        (["-n", "2", "--timeout", "-1", "x.py"], "above 0"),
    ],
)
def test_wrong_calls(words, said):
    done = run_tdx("run", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_backend_and_threads_reach_the_ranks(script):
    path = script(
        "print(os.environ.get('TDX_BACKEND'), os.environ['OMP_NUM_THREADS'],"
        " os.environ['OPENBLAS_NUM_THREADS'], 'TDX_RUN_CHANNEL' in os.environ)",
        head="import os\n",
    )
    done = run_tdx("run", "-n", "1", "--backend", "host", path, OMP_NUM_THREADS="3")
    assert done.stdout.split(" ", 1)[1].startswith("host 3 "), done.stdout
    assert done.stdout.endswith(" False\n")
