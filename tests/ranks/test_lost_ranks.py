"""Jobs that lose ranks or are ended: exit codes, MPI's end, and what is left on the machine."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.commands import tdx_environment

_HEAD = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
import tdx
world = tdx.init(backend="host", timeout_s=10)
rank = world.rank
x = world.array(np.full(3, rank, np.float32))
world.barrier()
"""
_LOSE = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        world.check()
        time.sleep(0.01)
except tdx.errors.PeerLost:
    pass
"""
# As docs/architecture.md tells for MPICH: its launcher must not see how a rank ended.
_SHIELD = ["sh", "-c", 'trap "" USR1; "$0" "$@"; true']
# What a rank's launcher runs: the rank's own exit code and how long its end took, in a file.
_WAITER = """
import os, signal, sys, time
pid = os.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # of MPICH, which tells of lost ranks
status = os.waitpid(pid, 0)[1]
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
with open(os.path.join(sys.argv[1], f"code{rank}"), "w") as file:
    file.write(f"{os.waitstatus_to_exitcode(status)} {time.time()}")
"""


@pytest.fixture
def script(tmp_path):
    def write(body: str) -> str:
        path = tmp_path / "lost_ranks_test_script.py"
        path.write_text(_HEAD + textwrap.dedent(body))
        return str(path)

    return write


class Machine:
    """What jobs started with `environment` leave behind; other jobs may run at the same time.

    A socket without a file ends with the last process that holds it.
    """

    def __init__(self, directory: Path):
        self.directory = directory / "temporary"
        self.directory.mkdir()
        mark = secrets.token_hex(16)
        self.mark = f"TDX_TEST_MARK={mark}".encode()
        self.environment = tdx_environment(TMPDIR=str(self.directory), TDX_TEST_MARK=mark)
        self.shared: set[str] = set()  # files in /dev/shm that processes of the jobs had mapped
        self.done = threading.Event()
        self.sampler = threading.Thread(target=self._sample)
        self.sampler.start()

    def processes(self) -> Iterator[Path]:
        """Directories in /proc of the living processes of the jobs."""
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if self.mark in Path("/proc", process, "environ").read_bytes():
                    yield Path("/proc", process)

    def _sample(self) -> None:
        while not self.done.wait(0.1):
            for process in self.processes():
                with contextlib.suppress(OSError):
                    self.shared |= set(re.findall(r"/dev/shm/\S+", (process / "maps").read_text()))

    def assert_clean(self, shared_memory: bool = True) -> None:
        """No process, no file of a socket, nothing in /dev/shm."""
        deadline = time.monotonic() + 5
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if shared_memory:
            left += filter(os.path.exists, self.shared)
        assert left == []

    def _left(self) -> list[str]:
        found = [name for name in os.listdir(self.directory) if name.startswith("tdx")]
        for process in self.processes():
            with contextlib.suppress(OSError):
                found.append((process / "cmdline").read_text())
        return found


def run_tdx(machine: Machine, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tdx", "run", *words]
    environment = machine.environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    yield machine
    machine.done.set()
    machine.sampler.join()


@pytest.mark.parametrize("ending", ["world.close()", "world = world.recover()", ""])
@pytest.mark.parametrize(
    ("statement", "code"),
    [("", 0), ("raise SystemExit(5)", 5), ("raise ValueError('mine')", 1), ("sys.exit(3)", 3)],
)
def test_survivors_end_by_themselves_under_a_bare_launcher(
    script, machine, tmp_path, ending, statement, code
):
    """MPI_Finalize would wait for the lost rank; exit handlers still run."""
    from tdx.tools.launcher import find_launcher

    path = script(f"""
import atexit
atexit.register(print, "handlers ran", flush=True)
{_LOSE}
{ending}
with open({str(tmp_path)!r} + f"/end{{rank}}", "w") as file:
    file.write(str(time.time()))
{statement}
""")
    codes = tmp_path / "codes"
    codes.mkdir()
    waiter = [sys.executable, "-c", _WAITER, str(codes), path]
    command = [*find_launcher().command(3, keep_going=True), *waiter]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=machine.environment
    )
    for rank in (0, 2):
        got, ended = (codes / f"code{rank}").read_text().split()
        assert int(got) == code, done.stderr
        assert float(ended) - float((tmp_path / f"end{rank}").read_text()) < 3
    assert done.stdout.count("handlers ran") == 2
    machine.assert_clean()
    assert "os._exit" not in done.stderr


def test_survivors_recover_under_a_bare_launcher(script, machine):
    from tdx.tools.launcher import find_launcher

    path = script(f"""
{_LOSE}
world = world.recover()
time.sleep(0.5)
total = tdx.all_reduce(world.array(np.full(3, rank, np.float32))).numpy()
os.write(1, b"rank %d of %d has %d\\n" % (world.rank, world.size, total[0]))
world.close()
""")
    command = [*find_launcher().command(4, keep_going=True), *_SHIELD, sys.executable, path]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=machine.environment
    )
    said = sorted(re.findall(r"rank \d of 3 has \d", done.stdout))
    assert said == [f"rank {rank} of 3 has 5" for rank in range(3)], done.stderr
    machine.assert_clean()


def test_mpi_is_finalized_when_nobody_was_lost(script, machine):
    """A closed world, also one that was recovered, leaves MPI's end alone."""
    path = script("""
world = world.recover()
world.close()
from tdx.runtime import mpi_end
mpi_end._replace = None  # would be called in vain
print("finalizing", flush=True)
""")
    done = run_tdx(machine, "-n", "2", path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("raise ValueError", 1),
        ("sys.exit(4)", 4),
        ("os._exit(6)", 6),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_keep_going_and_recover(script, machine, statement, code):
    """However a rank ends, the others go on in a new world."""
    path = script(f"""
if rank == 1:
    {statement}
try:
    world.barrier()
except tdx.errors.PeerLost as lost:
    assert lost.ranks == (1,)
world = world.recover()
total = tdx.all_reduce(world.array(np.full(3, rank, np.float32))).numpy()
print(rank, "is", world.rank, "of", world.size, "sum", total[0])
world.close()
""")
    done = run_tdx(machine, "-n", "4", "--keep-going", path)
    assert done.returncode == code, done.stderr
    expected = [f"[{r}] {r} is {i} of 3 sum 5.0" for i, r in enumerate((0, 2, 3))]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    machine.assert_clean()


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ('raise KeyError("of one rank")', "KeyError: 'of one rank'"),
        ("sys.exit(0)", "the program ended while its world was open"),
    ],
)
def test_the_end_of_a_program_with_an_open_world(script, machine, ending, said):
    """The others are told what ended it, as where it left a `with` block."""
    from tdx.tools.launcher import find_launcher

    path = script(f"""
if rank == 1:
    {ending}
try:
    world.barrier()
except tdx.errors.PeerLost as lost:
    print(lost)
""")
    command = [*find_launcher().command(2, keep_going=True), *_SHIELD, sys.executable, path]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=machine.environment
    )
    assert f"lost rank 1 (closed its world; rank 1 has given up: {said})" in done.stdout, (
        done.stderr
    )


@pytest.mark.parametrize("launcher", ["tdx run", "shielded", "bare"])
def test_abort_names_the_lost_rank_once(script, machine, launcher):
    from tdx.tools.launcher import find_launcher

    path = script("""
world.close()
world = tdx.init(backend="host", on_peer_failure="abort")
world.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
""")
    command = {
        "tdx run": [sys.executable, "-m", "tdx", "run", "-n", "4", "--keep-going", path],
        "shielded": [*find_launcher().command(4, keep_going=True), *_SHIELD, sys.executable, path],
        "bare": [*find_launcher().command(4), sys.executable, path],
    }[launcher]
    start = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=machine.environment
    )
    assert time.monotonic() - start < 30
    said = re.findall(r"lost rank (\d): the process has ended: ending the job", done.stderr)
    if launcher == "bare":  # it may end all ranks before one of them can say a word
        assert said in ([], ["1"])
    else:
        assert said == ["1"], done.stderr
    if launcher != "shielded":
        assert done.returncode != 0
    # ranks that a launcher kills at once cannot remove what MPI shares
    machine.assert_clean(shared_memory=launcher != "bare")


@pytest.mark.parametrize("keep_going", [[], ["--keep-going"]], ids=["", "keep-going"])
@pytest.mark.parametrize("ending", ["exception", signal.SIGINT, signal.SIGTERM])
def test_no_end_leaves_anything(script, machine, ending, keep_going):
    """Neither process, socket nor shared memory, while kernels of the ranks wait."""
    path = script("""
print("up", flush=True)
if sys.argv[1] == "exception" and rank == 1:
    time.sleep(0.5)
    raise ValueError("of one rank")
try:
    world.team([0, 1, 2]) if rank != 1 else time.sleep(100)
    world.barrier()
finally:
    if sys.argv[1] == "exception":
        world.close()
""")
    process = subprocess.Popen(
        [sys.executable, "-m", "tdx", "run", "-n", "3", *keep_going, path, str(ending)],
        env=machine.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(3):
        assert b"up" in process.stdout.readline()
    if ending != "exception":
        time.sleep(0.3)
        process.send_signal(ending)
    process.stdout.close()
    assert process.wait(30) == (1 if ending == "exception" else 128 + ending)
    machine.assert_clean()


def test_close_of_a_damaged_world_is_quick(script, machine):
    path = script(f"""
{_LOSE}
start = time.monotonic()
world.close()
print("closed after", time.monotonic() - start, world.closed)
""")
    done = run_tdx(machine, "-n", "3", "--keep-going", path)
    times = [float(text) for text in re.findall(r"closed after ([0-9.]+) True", done.stdout)]
    assert len(times) == 2, done.stderr
    assert max(times) < 2
