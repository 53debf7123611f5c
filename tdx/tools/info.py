"""`tdx info`: versions, the backend that would be chosen, devices and limits."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

import tdx
from tdx.runtime.backends import amd_gpus, choose, nvidia_gpus
from tdx.runtime.config import config
from tdx.runtime.errors import TdxError
from tdx.tools.launcher import find_launcher, find_library

__all__ = ["add_arguments", "collect", "main"]

_PACKAGES = (
    "numpy",
    "triton",
    "mpi4py",
    "ml_dtypes",
    "greenlet",
    "cuda-bindings",
    "hip-python",
)
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Print what `collect` finds; returns 0."""
    found = collect()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for section, entries in found.items():
        print(section)
        for name, value in entries.items():
            print(f"  {name:<16}{'none' if value in (None, []) else _text(value)}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Sections "versions", "mpi", "backend", "limits"; no vendor binding is imported.

    Sizes are in bytes; what cannot be found is None.
    """
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "versions": {"tdx": tdx.__version__, "python": platform.python_version(), **versions},
        "mpi": _mpi(),
        "backend": _backend(),
        "limits": {
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "cgroup_bytes": _cgroup_limit(),
            "cores": len(os.sched_getaffinity(0)),
            "compiler": _compiler(),
            "python_headers": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        },
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _mpi() -> dict[str, Any]:
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


def _backend() -> dict[str, Any]:
    gpus = {"NVIDIA GPUs": nvidia_gpus(), "AMD GPUs": amd_gpus()}
    try:
        chosen = choose(None)
    except TdxError as error:
        return {"init() chooses": None, "problem": str(error), **gpus}
    if config.backend:
        why = "the setting TDX_BACKEND"
    elif chosen == "host":
        why = "no GPU was found that tdx has a driver for"
    else:
        why = "the machine has such GPUs"
    return {"init() chooses": chosen, "because": why, **gpus}


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


def _compiler() -> str | None:
    """What Triton compiles its launchers with."""
    names = [os.environ.get("CC"), "gcc", "clang", "cc"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value >= 1 << 20:
        return f"{value / (1 << 30):.1f} GiB"
    return ", ".join(value) if isinstance(value, list) else str(value)
