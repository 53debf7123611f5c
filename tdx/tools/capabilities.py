"""What follows from the facts: each capability of tdx, whether it is there, why not, what to do.

`judge` looks at nothing but what it is given, so that every answer can be tested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

__all__ = ["Capability", "judge"]

_LEAST_SHM_BYTES = 256 << 20
_LEAST_DESCRIPTORS = 1024
_NAMES = {"cupy": "CuPy", "jax": "JAX", "torch": "PyTorch"}
_INSTALL = {
    "cupy": "pip install cupy-cuda13x (or cupy-cuda12x)",
    "jax": 'pip install jax (with a GPU: "jax[cuda13]")',
    "torch": "pip install torch",
}


@dataclass(frozen=True)
class Capability:
    """One line of the doctor's answer.

    available : whether it is there. required : whether tdx cannot run here without it.
    detail : what was found, or the reason why it is missing. remedy : what to do; "" for nothing.
    """

    name: str
    available: bool
    required: bool = False
    detail: str = ""
    remedy: str = ""


def judge(found: dict[str, Any]) -> list[Capability]:
    """Capabilities, from the sections that doctor.py collects."""
    return [
        *_packages(found),
        *_backends(found),
        *_ranks(found),
        *_limits(found),
        *_frameworks(found),
        *_not_offered(found),
    ]


def _packages(found: dict[str, Any]) -> Iterator[Capability]:
    versions = found["versions"]
    needed = ["numpy", "triton", "mpi4py", "ml_dtypes", "greenlet", "threadpoolctl"]
    missing = [name for name in needed if not versions[name]]
    yield Capability(
        "packages",
        not missing,
        required=True,
        detail=f"not installed: {', '.join(missing)}" if missing else "",
        remedy=f"pip install {' '.join(missing)}" if missing else "",
    )
    bounds = _triton_bounds()
    if bounds and versions["triton"]:
        fits = bounds[0] <= _numbers(versions["triton"]) < bounds[1]
        span = f">={_dotted(bounds[0])},<{_dotted(bounds[1])}"
        yield Capability(
            "Triton's version",
            fits,
            required=True,
            detail=f"{versions['triton']}, and tdx is made for {span}",
            remedy="" if fits else f'pip install "triton{span}"',
        )


def _triton_bounds() -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The range of Triton that the installed distribution asks for; None: it is not installed."""
    try:
        requirements = metadata.requires("tdx-kernels") or []
    except metadata.PackageNotFoundError:
        return None
    text = next((r for r in requirements if re.match(r"triton\b", r)), "")
    low, high = re.search(r">=([\d.]+)", text), re.search(r"<([\d.]+)", text)
    return (_numbers(low[1]), _numbers(high[1])) if low and high else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _backends(found: dict[str, Any]) -> Iterator[Capability]:
    backend, devices, limits = found["backend"], found["devices"], found["limits"]
    chosen = backend["init() chooses"]
    yield Capability(
        "backend",
        chosen is not None,
        required=True,
        detail=f"{chosen}, because {backend['because']}" if chosen else backend["problem"],
        remedy="" if chosen else "leave --backend and TDX_BACKEND away, or name another one",
    )
    yield Capability("host tier (the CPU)", True, detail="kernels run, for tests and development")
    gpus = devices.get("gpus", [])
    if gpus:
        detail, remedy = f"{len(gpus)} x {gpus[0]['name']}", ""
    elif devices:
        detail, remedy = devices["problem"], "see the message; or use --backend host"
    else:
        detail = "there is no device node /dev/nvidia0"
        remedy = "install the NVIDIA driver; in a container, pass the GPUs in: --gpus all"
    yield Capability("NVIDIA GPUs", bool(gpus), chosen == "cuda", detail, remedy)
    lacking = [] if limits["compiler"] else ["a C compiler"]
    lacking += [] if limits["python_headers"] else ["Python.h"]
    yield Capability(
        "compiling for a GPU",
        not lacking,
        required=chosen == "cuda",
        detail=f"Triton needs {' and '.join(lacking)}" if lacking else limits["compiler"],
        remedy="apt-get install gcc python3-dev" if lacking else "",
    )
    if gpus:
        yield _cublas(found["versions"])
    if len(gpus) > 1:
        yield _reach(gpus)


def _cublas(versions: dict[str, Any]) -> Capability:
    """What multiplies where it is faster than the kernels of tdx."""
    wheels = [
        f"{name} {versions[name]}" for name in versions if "cublas" in name and versions[name]
    ]
    if wheels:
        return Capability("cuBLAS", True, detail=", ".join(wheels))
    detail = "no wheel of it, so products are those of tdx unless the loader finds it"
    remedy = 'pip install "tdx-kernels[cublas13]" (or [cublas12])'
    return Capability("cuBLAS", False, detail=detail, remedy=remedy)


def _reach(gpus: list[dict[str, Any]]) -> Capability:
    apart = [
        f"{one}-{other}"
        for one, gpu in enumerate(gpus)
        for other in range(len(gpus))
        if other != one and other not in gpu["reaches"]
    ]
    name = "GPUs that reach each other"
    if apart:
        remedy = "choose GPUs that reach each other with CUDA_VISIBLE_DEVICES"
        return Capability(name, False, detail=f"no peer access: {', '.join(apart)}", remedy=remedy)
    return Capability(name, True, detail="all pairs")


def _ranks(found: dict[str, Any]) -> Iterator[Capability]:
    mpi, job = found["mpi"], found["job"]
    several = mpi["launcher"] is not None
    yield Capability(
        "MPI launcher of mpi4py's library",
        several,
        required=job["ranks"] > 1,
        detail=mpi["launcher"] or mpi["problem"],
        remedy="" if several else "pip install mpi4py mpich",
    )
    runs = "bandwidth" in job
    what = f"{job['ranks']} rank{'' if job['ranks'] == 1 else 's'} started"
    done = f"{what}, reached each other and reduced right"
    remedy = "see the message; --json has the whole output"
    if "timeout_s" in job:
        remedy = f"give them longer than --timeout {job['timeout_s']:g}"
    yield Capability(
        "ranks",
        runs,
        required=True,
        detail=done if runs else job.get("problem", "none was started: there is no backend"),
        remedy="" if runs else remedy,
    )
    if runs and found["backend"]["init() chooses"] != "host":
        takes = job["mpi_takes_gpu_memory"]
        says = {True: "MPI says that it takes it", False: "MPI says that it does not take it"}
        yield Capability(
            "MPI calls on GPU memory",
            bool(takes),
            detail=says.get(takes, "MPI does not say whether it takes it"),
            remedy="" if takes else "send x.numpy(), or use an MPI built for GPUs; see world.mpi",
        )


def _limits(found: dict[str, Any]) -> Iterator[Capability]:
    limits = found["limits"]
    free = limits["dev_shm_bytes"]
    enough = free is not None and free >= _LEAST_SHM_BYTES
    there = "is missing" if free is None else f"has {free / (1 << 20):.0f} MiB free"
    yield Capability(
        "/dev/shm for MPI",
        enough,
        detail=f"it {there}" + ("" if enough else "; MPI libraries need some, tdx none"),
        remedy="" if enough else "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm",
    )
    descriptors = limits["descriptors"]
    enough = descriptors < 0 or descriptors >= _LEAST_DESCRIPTORS
    yield Capability(
        "file descriptors",
        enough,
        detail=f"ulimit -n is {descriptors}; each rank holds several for every peer",
        remedy="" if enough else f"ulimit -n {_LEAST_DESCRIPTORS}",
    )


def _frameworks(found: dict[str, Any]) -> Iterator[Capability]:
    on_gpu = found["backend"]["init() chooses"] == "cuda"
    for module, name in _NAMES.items():
        version = found["frameworks"][module]
        on_cpu = version is not None and ("CPU" in version or version.endswith("+cpu"))
        if version is None:
            yield Capability(
                f"{name} arrays", False, detail="not installed", remedy=_INSTALL[module]
            )
        elif on_gpu and on_cpu:
            detail = f"{version} has no GPU support: its arrays cannot take part on GPUs"
            yield Capability(f"{name} arrays", False, detail=detail, remedy=_INSTALL[module])
        else:
            yield Capability(f"{name} arrays", True, detail=version)


def _not_offered(found: dict[str, Any]) -> Iterator[Capability]:
    count = found["backend"]["AMD GPUs"]
    there = f"the machine has {count}, but " if count else ""
    yield Capability("AMD GPUs", False, detail=f"{there}the HIP driver is not there yet")
    yield Capability("several hosts", False, detail="tdx connects the ranks of one host for now")
    yield Capability("NVLink multicast", False, detail="tdx does not use it yet")
