"""What this machine and this Python have: the facts that `tdx info` and `tdx doctor` print.

Nothing here imports a framework or a vendor binding: versions come from the packages' metadata,
and devices from a process of their own. Sizes are in bytes; what cannot be found is None.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import tdx
from tdx.runtime.backends import amd_gpus, choose, nvidia_gpus
from tdx.runtime.config import config
from tdx.runtime.errors import TdxError
from tdx.tools.child import python_words
from tdx.tools.launcher import find_launcher, find_library

__all__ = ["FRAMEWORKS", "backend", "devices", "frameworks", "limits", "mpi", "versions"]

_PACKAGES = (
    "numpy",
    "triton",
    "mpi4py",
    "ml_dtypes",
    "greenlet",
    "threadpoolctl",
    "cuda-bindings",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "hip-python",
)
FRAMEWORKS = {  # module -> distributions it may come from
    "numpy": ("numpy",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0", "cupy"),
    "jax": ("jax",),
    "torch": ("torch",),
}
_JAX_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin")
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
# Ends with one line of JSON: the GPUs, or why there are none.
_PROBE = """
import json
from tdx.runtime.errors import TdxError
try:
    from tdx.runtime.driver.cuda_device import probe
    print(json.dumps(probe()))
except TdxError as error:
    print(json.dumps({"problem": str(error)}))
"""
_PROBE_LIMIT_S = 60


def versions() -> dict[str, Any]:
    """Versions of tdx, Python and what tdx builds on."""
    found = {name: _version(name) for name in _PACKAGES}
    return {"tdx": tdx.__version__, "python": platform.python_version(), **found}


def frameworks() -> dict[str, str | None]:
    """Version of each framework whose arrays tdx takes; "unknown" without metadata."""
    found: dict[str, str | None] = {}
    for module, names in FRAMEWORKS.items():
        version = next((v for name in names if (v := _version(name))), None)
        if version is None and importlib.util.find_spec(module):
            version = "unknown"
        found[module] = version
    if found["jax"]:
        plugins = [name for name in _JAX_PLUGINS if _version(name)]
        found["jax"] += f" ({plugins[0] if plugins else 'CPU only'})"
    return found


def mpi() -> dict[str, Any]:
    """The library mpi4py loads, and the launcher of that library."""
    try:
        library = find_library()
    except TdxError as error:
        return {"library": None, "launcher": None, "problem": str(error)}
    found: dict[str, Any] = {"library": library.version, "file": library.path}
    try:
        found["launcher"] = find_launcher(library).path
    except TdxError as error:
        found |= {"launcher": None, "problem": str(error)}
    return found


def backend(name: str | None = None) -> dict[str, Any]:
    """What `tdx.init(backend=name)` chooses, and why."""
    gpus = {"NVIDIA GPUs": nvidia_gpus(), "AMD GPUs": amd_gpus()}
    try:
        chosen = choose(name)
    except TdxError as error:
        return {"init() chooses": None, "problem": str(error), **gpus}
    if name:
        why = "it was asked for"
    elif config.backend:
        why = "the setting TDX_BACKEND"
    elif chosen == "host":
        why = "no GPU was found that tdx has a driver for"
    else:
        why = "the machine has such GPUs"
    return {"init() chooses": chosen, "because": why, **gpus}


def limits() -> dict[str, Any]:
    """Memory, cores, descriptors, and what Triton needs to compile for a GPU."""
    return {
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cgroup_bytes": _cgroup_limit(),
        "dev_shm_bytes": _shm_bytes(),
        "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cores": len(os.sched_getaffinity(0)),
        "compiler": _compiler(),
        "python_headers": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    }


def devices() -> dict[str, Any]:
    """The NVIDIA GPUs as the CUDA driver shows them; found out in a process of its own.

    {} where there is none; {"problem": why} where they cannot be used; else "driver", the CUDA
    version of the driver, and "gpus", a list of {"name", "arch", "memory_bytes", "reaches"}, the
    last of which are the numbers of the GPUs whose memory it can reach.
    """
    if not nvidia_gpus():
        return {}
    try:
        done = subprocess.run(
            python_words(_PROBE),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"the CUDA driver did not answer within {_PROBE_LIMIT_S} s"}
    if done.returncode:
        return {"problem": (done.stderr.strip().splitlines() or ["the probe was killed"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _cgroup_limit() -> int | None:
    for path in _CGROUP_LIMITS:
        text = _read(path)
        if text.isdigit() and int(text) < 1 << 60:  # cgroup v1 says "no limit" by a huge number
            return int(text)
    return None


def _shm_bytes() -> int | None:
    """Free space of /dev/shm, which MPI libraries use."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def _compiler() -> str | None:
    """What Triton compiles its launchers with."""
    names = [os.environ.get("CC"), "gcc", "clang", "cc"]
    return next((path for name in names if name and (path := shutil.which(name))), None)
