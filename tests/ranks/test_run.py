"""`tdx run`: what it starts, and its output. How a job ends is in test_run_ends.py."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial

import pytest

from tests.helpers.commands import ROOT, run_tdx, tdx_environment
from tests.helpers.scripts import write_script


@pytest.fixture
def script(tmp_path):
    return partial(write_script, tmp_path)


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


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("run", "-n", "2", "SCRIPT"), "[0] right\n"),
        (("demo", "-n", "2"), "The result is right."),
        (("doctor", "-n", "2", "--backend", "host"), "can run here: host, 2 ranks"),
    ],
)
def test_files_called_as_modules_of_python(script, tmp_path, words, wanted):
    """In the current folder, where the installed command does not look either."""
    path, folder = script("print('right')"), tmp_path / "folder"
    folder.mkdir()
    for name in ("json", "pickle", "typing"):
        (folder / f"{name}.py").write_text("x = 1\n")
    words = [path if word == "SCRIPT" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tdx", *words], cwd=folder, env=tdx_environment(),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert wanted in done.stdout


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


def test_separator_before_the_script(script):
    path = script("print(sys.argv[1:])", head="import sys\n")
    done = run_tdx("run", "-n", "1", "--", path, "-n", "--", "x")
    assert done.stdout == "[0] ['-n', '--', 'x']\n", done.stderr


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
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "linked.py"
    link.symlink_to(path)  # the folder is that of the file itself
    for given in (path, link):
        done = run_tdx("run", "-n", "1", given)
        assert done.stdout == f"[0] 5 __main__ True {tmp_path}\n", done.stderr


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
