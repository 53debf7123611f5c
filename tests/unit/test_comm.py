"""Finding and checking the communicator."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys

import pytest

from tdx.runtime import comm as comm_module
from tdx.runtime.comm import announced_place, announced_size, close_comm, open_comm
from tdx.runtime.errors import InvalidArgument
from tests.helpers.cases import skip
from tests.helpers.fake_comm import LAUNCHER_PREFIXES, results_of, run_python, run_threads


@pytest.fixture
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("env", "size"),
    [
        ({}, None),
        ({"PMI_SIZE": "3", "PMI_RANK": "0", "MPI_LOCALNRANKS": "3"}, 3),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, 2),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}, 2),
        ({"PMIX_RANK": "1"}, 0),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),  # a batch script
        ({"SLURM_STEP_NUM_TASKS": "8"}, None),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0"}, 8),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "4294967290"}, None),  # interactive shell
        ({"PMI_SIZE": "many"}, None),
    ],
)
def test_announced_size(no_launcher, env, size):
    for name, value in env.items():
        no_launcher.setenv(name, value)
    found = announced_size()
    assert (found[0] if found else None) == size


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, None),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 2),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "0"}, 0),
        ({"SLURM_LOCALID": "3"}, 3),
        ({"LOCAL_RANK": "5"}, None),  # not torchrun's
        ({"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", "SLURM_LOCALID": "0"}, 5),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "two", "MPI_LOCALRANKID": "1"}, 1),
        ({"MPI_LOCALRANKID": "-1"}, None),
        ({"MPI_LOCALRANKID": ""}, None),
        ({"MPI_LOCALRANKID": "9" * 5000}, None),
    ],
)
def test_announced_place(no_launcher, env, place):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        no_launcher.delenv(name, raising=False)
    for name, value in env.items():
        no_launcher.setenv(name, value)
    assert announced_place() == place


def test_what_the_launcher_announces():
    """Processes of one host have different places, whatever MPI's launcher this is."""
    code = "import sys; from tdx.runtime.comm import announced_place\n"
    done = run_python(code + "sys.stdout.write(f'{announced_place()}\\n')", launch=3)
    assert sorted(done.stdout.split()) == ["0", "1", "2"], done.stderr


def test_world_of_one_does_not_import_mpi4py():
    code = (
        "import sys; from tdx.runtime.comm import open_comm; c = open_comm();"
        "assert (c.Get_rank(), c.Get_size(), c.allgather(b'x')) == (0, 1, [b'x']);"
        "assert not any(m.startswith('mpi4py') for m in sys.modules)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_foreign_communicator():
    def body(comm):
        opened = open_comm(comm)
        assert opened.Get_size() == 3
        answer = opened.allgather(bytearray([opened.Get_rank()]) * opened.Get_rank())
        close_comm(opened)
        return answer

    assert results_of(run_threads(3, body)) == [[b"", b"\1", b"\2\2"]] * 3


class One:
    """A communicator of one rank with an answer to be checked."""

    def __init__(self, answer=None, rank=0, size=1):
        self.answer = answer
        self.rank = rank
        self.size = size
        self.freed = 0

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def allgather(self, payload):
        assert type(payload) is bytes
        return [payload] if self.answer is None else self.answer


class Splitting(One):
    def Split(self, color, key):
        assert (color, key) == (0, 0)
        self.child = One()
        self.child.Free = lambda: setattr(self.child, "freed", self.child.freed + 1)
        return self.child


def test_split_is_used_and_freed_once():
    comm = Splitting()
    opened = open_comm(comm)
    close_comm(opened)
    close_comm(opened)
    assert comm.child.freed == 1


def test_split_that_is_not_implemented():
    class Plain(One):
        def Split(self, color, key):
            raise NotImplementedError

    assert open_comm(Plain()).allgather(b"a") == [b"a"]


@pytest.mark.parametrize(
    "answer", [None, [], [b"a", b"b"], ["text"], b"a", [None], 3], ids=lambda a: repr(a)
)
def test_answers_are_checked(answer):
    comm = One()
    comm.allgather = lambda payload: answer
    with pytest.raises(InvalidArgument, match=r"comm\.allgather"):
        open_comm(comm).allgather(b"a")


@pytest.mark.parametrize("wrong", [3, "MPI", object(), One, {}], ids=lambda w: repr(w)[:20])
def test_no_communicator(wrong):
    with pytest.raises(InvalidArgument, match="comm is"):
        open_comm(wrong)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0), ("0", 1), (None, 1)])
def test_rank_and_size_are_checked(rank, size):
    with pytest.raises(InvalidArgument, match="Get_rank"):
        open_comm(One(rank=rank, size=size))


def test_numpy_integers_are_taken():
    import numpy as np

    assert open_comm(One(rank=np.int32(0), size=np.int64(1))).Get_size() == 1


MPI_BODY = """
import sys
from tdx.runtime.comm import open_comm, close_comm
from tdx.runtime.errors import InvalidArgument
c = open_comm()
assert 'mpi4py.MPI' in sys.modules
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
assert (c.Get_rank(), c.Get_size()) == (rank, size)
assert c.allgather(bytes([rank]) * (rank * 1000)) == [bytes([r]) * (r * 1000) for r in range(size)]
close_comm(c)
half = MPI.COMM_WORLD.Split(rank % 2, -rank)
h = open_comm(half)
assert h.Get_rank() == half.Get_rank()
assert h.allgather(b'%d' % rank) == [b'%d' % r for r in reversed(range(rank % 2, size, 2))]
close_comm(h)
half.Free()
for wrong in (half, MPI.COMM_NULL):
    try: open_comm(wrong)
    except InvalidArgument as e: assert 'COMM_NULL' in str(e)
    else: raise AssertionError
if size > 1:
    half = MPI.COMM_WORLD.Split(rank % 2, rank)
    inter = half.Create_intercomm(0, MPI.COMM_WORLD, 1 - rank % 2)
    try: open_comm(inter)
    except InvalidArgument as e: assert 'intercommunicator' in str(e)
    else: raise AssertionError
c = open_comm(MPI.COMM_WORLD)
MPI.Finalize()
close_comm(c)
try: open_comm(MPI.COMM_WORLD)
except InvalidArgument as e: assert 'finalized' in str(e)
else: raise AssertionError
sys.stdout.write('good\\n')
"""


@pytest.mark.parametrize("size", [2, 3])
def test_mpi4py_communicators(size):
    done = run_python(MPI_BODY, launch=size)
    assert done.stdout.split() == ["good"] * size, done.stderr


def test_imported_mpi4py_is_used_without_a_launcher():
    code = "from mpi4py import MPI; from tdx.runtime.comm import *; c = open_comm(); "
    done = run_python(code + "assert type(c).__name__ == '_MpiComm' and c.Get_size() == 1")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("imported", [False, True])
def test_launcher_of_the_other_mpi(imported):
    version = run_python("from mpi4py import MPI; print(MPI.Get_library_version())").stdout
    env = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}
    launcher = "srun"
    if not imported and "MPICH" in version:
        env = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}  # would end the process in MPI_Init
        launcher = "Open MPI's mpirun"
    code = "from mpi4py import MPI;" * imported
    done = run_python(code + "from tdx.runtime.comm import open_comm; open_comm()", **env)
    last = done.stderr.strip().splitlines()[-1]
    assert "InvalidArgument" in last
    assert f"{launcher} started 4 ranks" in last
    assert "tdx run -n 4" in last
    assert "MPICH" in last or "Open MPI v" in last


def test_launcher_but_no_mpi4py():
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from tdx.runtime.comm import open_comm; open_comm()"
    )
    done = run_python(code, PMI_SIZE="2")
    assert "TdxError" in done.stderr
    assert "pip install mpi4py mpich" in done.stderr


@pytest.mark.parametrize("imported", [False, True])
def test_torchrun_alone_is_no_launcher(imported):
    """Each process would be a world of one, and every collective an identity."""
    code = "from tdx.runtime.comm import open_comm; open_comm()"
    start = "from mpi4py import MPI;" * imported
    done = run_python(start + code, RANK="1", WORLD_SIZE="4")
    last = done.stderr.strip().splitlines()[-1]
    assert "InvalidArgument: WORLD_SIZE=4 and RANK=1" in last
    assert "tdx run -n 4" in last
    assert "comm=" in last
    assert run_python(start + code, RANK="0", WORLD_SIZE="1").returncode == 0
    given = (
        "from types import SimpleNamespace as S; from tdx.runtime.comm import open_comm; "
        "open_comm(S(Get_rank=int, Get_size=lambda: 1, allgather=lambda x: [x]))"
    )
    assert run_python(start + given, RANK="0", WORLD_SIZE="4").returncode == 0
    assert run_python(start + code, launch=2, RANK="0", WORLD_SIZE="4").returncode == 0


def test_mpi_not_initialized():
    code = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from tdx.runtime.comm import open_comm; open_comm()"
    )
    done = run_python(code, PMI_SIZE="2")
    assert "MPI is not initialized" in done.stderr


class Module:
    """What is asked of mpi4py.MPI, of a library that has MPIX functions or not."""

    def __init__(self, kinds, library):
        self.kinds, self.__file__, self.COMM_WORLD = kinds, str(library), self

    def Is_initialized(self):
        return True

    def Is_finalized(self):
        return False

    def Get_library_version(self):
        return "Some MPI"

    def Get_info(self):
        return self

    def Get(self, key):
        assert key == "mpi_memory_alloc_kinds"
        return self.kinds

    def Free(self):
        pass


def test_what_mpi_says_of_gpu_memory(monkeypatch, tmp_path):
    """By MPI 4.1's info, by functions of the library, or not at all."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert comm_module.mpi_takes_gpu_memory("cuda") is None
    libraries = {"": ctypes.util.find_library("m")}
    for answer in "01":
        source = tmp_path / f"mpi{answer}.c"
        source.write_text(
            f"int MPIX_Query_cuda_support(void) {{ return {answer}; }}"
            f"int MPIX_Query_rocm_support(void) {{ return {answer}; }}"
        )
        libraries[answer] = source.with_suffix(".so")
        compiler = shutil.which("cc") or shutil.which("gcc") or skip("no C compiler")
        subprocess.run([compiler, "-shared", "-o", libraries[answer], source], check=True)
    for kinds, library, backend, expected in [
        (None, "", "cuda", None),
        ("mpi,system", "", "cuda", None),
        ("mpi,system,cuda:device:host", "", "cuda", True),
        ("mpi,system,cuda", "", "hip", None),
        ("mpi,rocm", "0", "hip", True),
        (None, "0", "cuda", False),
        ("mpi", "1", "cuda", True),
        ("mpi", "1", "hip", True),
        ("mpi", "0", "hip", False),
    ]:
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", Module(kinds, libraries[library]))
        assert comm_module.mpi_takes_gpu_memory(backend) is expected, (kinds, library, backend)
    assert comm_module.mpi_name() == "Some MPI"


def test_all_is_complete():
    assert all(hasattr(comm_module, name) for name in comm_module.__all__)
