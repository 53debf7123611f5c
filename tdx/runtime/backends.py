"""Which backend a rank uses, and how its driver is opened."""

from __future__ import annotations

import glob
import os
import sys
from typing import TYPE_CHECKING

from tdx.runtime.config import config
from tdx.runtime.errors import DriverError, InvalidArgument, Unsupported

if TYPE_CHECKING:
    from tdx.runtime.driver.base import Driver

__all__ = ["BACKENDS", "amd_gpus", "announce", "choose", "nvidia_gpus", "open_driver"]

BACKENDS = ("cuda", "hip", "host")
_said = False


def nvidia_gpus() -> int:
    """NVIDIA GPUs whose device nodes exist; loads nothing."""
    return len(glob.glob("/dev/nvidia[0-9]*"))


def amd_gpus() -> int:
    """AMD GPUs of the compute driver; loads nothing."""
    if not os.path.exists("/dev/kfd"):
        return 0
    return len(glob.glob("/dev/dri/renderD*"))


def choose(backend: str | None) -> str:
    """The backend for `tdx.init(backend=...)`; None: the setting, else what the machine has.

    Raises InvalidArgument for an unknown name, DriverError when the named GPU is not there,
    Unsupported when tdx has no driver for it.
    """
    said = f"backend={backend!r}"
    if backend is None:
        backend = config.backend or None
        said = f"tdx.config.backend={backend!r} (TDX_BACKEND)"
    if backend is None:
        return "cuda" if nvidia_gpus() else "host"
    if backend not in BACKENDS:
        raise InvalidArgument(f"{said} is not one of {', '.join(BACKENDS)}")
    if backend == "hip":
        raise Unsupported(
            f"{said}: kernels compile for AMD GPUs, but the HIP driver is not there yet; "
            "use backend='host'"
        )
    if backend == "cuda" and not nvidia_gpus():
        raise DriverError(
            f"{said}: this machine shows no NVIDIA GPU (no /dev/nvidia0); use "
            "backend='host', or pass the GPU into the container"
        )
    return backend


def open_driver(backend: str, device: int, local_size: int) -> Driver:
    """Open device number `device`, for one of `local_size` ranks of this host."""
    if backend == "cuda":
        interpreter = sys.modules.get("tdx.runtime.driver.host.interpreter")
        if interpreter is not None and interpreter._builder is not None:
            raise Unsupported(
                "this process has had a world on the host tier, after which Triton cannot compile "
                "for a GPU any more; start a new process"
            )
        from tdx.runtime.driver.cuda import CudaDriver

        return CudaDriver(device, local_size)
    from tdx.runtime.driver.host import HostDriver

    return HostDriver(device, local_size)


def announce(backend: str | None, chosen: str, rank: int) -> None:
    """Say once, on rank 0, that nobody chose the backend and which one it is."""
    global _said
    nobody = backend is None and not config.backend
    if nobody and chosen == "host" and rank == 0 and not (_said or config.quiet):
        _said = True
        amd = " (there is no driver for the AMD GPU yet)" if amd_gpus() else ""
        sys.stderr.write(f"tdx: found no GPU that tdx can drive{amd}: running on 'host', the CPU\n")
