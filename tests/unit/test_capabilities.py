"""What `tdx doctor` concludes from the facts."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from tdx.tools import facts
from tdx.tools.capabilities import judge
from tdx.tools.doctor import _cause

_GPU = {"name": "GPU X", "arch": "sm_90", "memory_bytes": 1 << 37}
HEALTHY = {
    "versions": dict.fromkeys(
        ("numpy", "triton", "mpi4py", "ml_dtypes", "greenlet", "threadpoolctl"), "3.9.0"
    ),
    "mpi": {"library": "MPICH", "launcher": "/bin/mpirun"},
    "backend": {
        "init() chooses": "cuda",
        "because": "the machine has such GPUs",
        "NVIDIA GPUs": 2,
        "AMD GPUs": 0,
    },
    "devices": {"driver": "13.0", "gpus": [_GPU | {"reaches": [1]}, _GPU | {"reaches": [0]}]},
    "frameworks": {"numpy": "2.0", "cupy": "14.0", "jax": "0.10 (CPU only)", "torch": None},
    "limits": {
        "dev_shm_bytes": 1 << 30,
        "descriptors": 4096,
        "compiler": "/usr/bin/gcc",
        "python_headers": True,
    },
    "job": {"ranks": 2, "bandwidth": [], "latency": [], "mpi_takes_gpu_memory": True},
}


def judged(**changes):
    found = copy.deepcopy(HEALTHY)
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            found[section][key.replace("_space_", " ")] = value
        else:
            found[section] = value
    return {one.name: one for one in judge(found)}


def failing(capabilities):
    return [name for name, one in capabilities.items() if one.required and not one.available]


def test_a_healthy_machine():
    capabilities = judged()
    assert failing(capabilities) == []
    assert capabilities["NVIDIA GPUs"].detail == "2 x GPU X"
    assert capabilities["GPUs that reach each other"].available
    assert capabilities["CuPy arrays"].available
    assert not capabilities["JAX arrays"].available, "a JAX without a GPU cannot take part"
    assert "cuda13" in capabilities["JAX arrays"].remedy
    assert "pip install torch" in capabilities["PyTorch arrays"].remedy
    assert "tdx-kernels[cublas13]" in capabilities["cuBLAS"].remedy
    assert judged(**{"versions__nvidia-cublas": "13.1"})["cuBLAS"].detail == "nvidia-cublas 13.1"


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"versions__greenlet": None}, "packages", "greenlet"),
        ({"limits__compiler": None}, "compiling for a GPU", "a C compiler"),
        ({"limits__python_headers": False}, "compiling for a GPU", "Python.h"),
        ({"devices": {"problem": "no permission"}}, "NVIDIA GPUs", "no permission"),
        (
            {"mpi": {"launcher": None, "problem": "no mpirun for it"}},
            "MPI launcher of mpi4py's library",
            "no mpirun",
        ),
        ({"job": {"ranks": 2, "problem": "late"}}, "ranks", "late"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_run_without(changes, name, said):
    capabilities = judged(**changes)
    assert failing(capabilities) == [name]
    assert said in capabilities[name].detail
    assert capabilities[name].remedy


def test_what_the_host_tier_does_not_need():
    host = HEALTHY["backend"] | {"init() chooses": "host"}
    capabilities = judged(backend=host, devices={}, limits__compiler=None)
    assert failing(capabilities) == []
    assert not capabilities["compiling for a GPU"].available
    assert capabilities["JAX arrays"].available
    assert "GPUs that reach each other" not in capabilities


def test_one_rank_needs_no_launcher():
    mpi = {"launcher": None, "problem": "no mpirun for it"}
    assert failing(judged(mpi=mpi, job=HEALTHY["job"] | {"ranks": 1})) == []


def test_what_mpi_says_of_gpu_memory():
    assert judged()["MPI calls on GPU memory"].available
    for answer, said in ((False, "does not take"), (None, "does not say")):
        capabilities = judged(job__mpi_takes_gpu_memory=answer)
        one = capabilities["MPI calls on GPU memory"]
        assert not one.available
        assert said in one.detail
        assert "world.mpi" in one.remedy
        assert failing(capabilities) == []
    host = HEALTHY["backend"] | {"init() chooses": "host"}
    assert "MPI calls on GPU memory" not in judged(backend=host)


def test_gpus_apart_are_named():
    gpus = [_GPU | {"reaches": []}, _GPU | {"reaches": [0]}]
    one = judged(devices={"gpus": gpus})["GPUs that reach each other"]
    assert not one.available
    assert one.detail == "no peer access: 0-1"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"limits__dev_shm_bytes": 64 << 20}, "/dev/shm for MPI"),
        ({"limits__dev_shm_bytes": None}, "/dev/shm for MPI"),
        ({"limits__descriptors": 256}, "file descriptors"),
    ],
)
def test_limits_are_warnings(changes, name):
    capabilities = judged(**changes)
    assert failing(capabilities) == []
    assert not capabilities[name].available
    assert capabilities[name].remedy


def test_triton_out_of_range(monkeypatch):
    requirements = ["numpy>=1.26", "triton<3.10,>=3.6"]
    monkeypatch.setattr("tdx.tools.capabilities.metadata.requires", lambda _: requirements)
    assert failing(judged()) == []
    for version in ("3.5.1", "3.10.0", "4.0"):
        capabilities = judged(versions__triton=version)
        assert failing(capabilities) == ["Triton's version"]
        assert ">=3.6,<3.10" in capabilities["Triton's version"].remedy


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("", "it ended without a message"),
        ("tdx run: no mpirun for X\n", "tdx run: no mpirun for X"),
        (
            "Traceback\n  x\ntdx.runtime.errors.Unsupported: why\ntdx run: rank 1 raised\n",
            "tdx.runtime.errors.Unsupported: why",
        ),
        ("noise\nValueError: bad\nRuntimeError: later\n", "ValueError: bad"),
    ],
)
def test_cause_of_a_failed_job(output, cause):
    assert _cause(output) == cause


def test_devices_in_a_process_of_their_own(monkeypatch):
    """Whatever a driver does to its process, the doctor goes on."""
    monkeypatch.setattr(facts, "nvidia_gpus", lambda: 0)
    assert facts.devices() == {}
    monkeypatch.setattr(facts, "nvidia_gpus", lambda: 1)
    monkeypatch.setattr(facts, "_PROBE", "import os; os.abort()")
    assert facts.devices()["problem"]
    monkeypatch.setattr(facts, "_PROBE", "import sys; sys.exit('no such library')")
    assert facts.devices() == {"problem": "no such library"}
    monkeypatch.setattr(facts, "_PROBE", 'print("noise"); print(\'{"driver": "x", "gpus": []}\')')
    assert facts.devices() == {"driver": "x", "gpus": []}
    monkeypatch.setattr(facts, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(facts, "_PROBE_LIMIT_S", 0.2)
    assert "0.2 s" in facts.devices()["problem"]


def test_frameworks_are_not_imported():
    code = (
        "import sys; before = set(sys.modules); "
        "from tdx.tools import facts, doctor; facts.frameworks(); "
        "print({'torch', 'jax', 'cupy', 'cuda', 'mpi4py', 'triton'} & (set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
