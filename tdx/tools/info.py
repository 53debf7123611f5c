"""`tdx info`: versions, the backend that would be chosen, devices and limits."""

from __future__ import annotations

import argparse
import glob
import importlib.util
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from tdx.runtime.errors import TdxError
from tdx.tools.launcher import find_launcher, find_library

__all__ = ["add_arguments", "collect", "main"]

# distribution -> what it is for, if absent ("" for the ones tdx depends on)
_PACKAGES = {
    "tdx-kernels": "",
    "numpy": "",
    "triton": "",
    "mpi4py": "",
    "ml_dtypes": "",
    "greenlet": "",
    "cuda-bindings": "NVIDIA GPUs",
    "hip-python": "AMD GPUs",
}
_PCI_DISPLAY = "0x03"
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
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
        "versions": {"python": platform.python_version(), **versions},
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
    gpus = _gpus()
    wanted = os.environ.get("TDX_BACKEND")
    if wanted:
        chosen, why = wanted, "TDX_BACKEND is set"
    elif any(gpu.startswith("NVIDIA") for gpu in gpus) or glob.glob("/dev/nvidia[0-9]*"):
        chosen, why = "cuda", "an NVIDIA GPU is present"
        if _missing_module("cuda.bindings"):
            why += '; its binding is missing: pip install "tdx-kernels[cuda12]" or [cuda13]'
    else:
        chosen, why = "host", "no GPU that tdx has a driver for"
    return {"init() chooses": chosen, "because": why, "gpus": gpus}


def _gpus() -> list[str]:
    """Display controllers of the known vendors, from sysfs."""
    found = []
    for device in sorted(glob.glob("/sys/bus/pci/devices/*")):
        vendor = _VENDORS.get(_read(device, "vendor"))
        if vendor and _read(device, "class").startswith(_PCI_DISPLAY):
            found.append(f"{vendor} {_read(device, 'device')} at {os.path.basename(device)}")
    return found


def _read(*path: str) -> str:
    try:
        return Path(*path).read_text().strip()
    except OSError:
        return ""


def _missing_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


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
