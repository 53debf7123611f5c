"""What a call on arrays of CuPy and PyTorch costs the host, beside one on symmetric arrays.

    tdx run -n 2 --backend cuda -m tests.gpu.foreign_cost

Prints microseconds of a one-line all-reduce of 2048 float32: with `out=`, and with a fresh result.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import tdx
from tdx.tools.timing import host_time

_NUMEL = 2048


def main() -> None:
    with tdx.init(backend="cuda") as world:
        pairs = {
            "symmetric": [world.array(np.ones(_NUMEL, np.float32)) for _ in range(2)],
            **{name: _arrays(name, world.device.index) for name in ("cupy", "torch")},
        }
        for name, (x, out) in pairs.items():
            calls: dict[str, Callable[[], Any]] = {
                "out=": partial(tdx.all_reduce, x, out=out),
                "fresh": partial(tdx.all_reduce, x),
            }
            for how, call in calls.items():
                taken = host_time(world, call)
                if world.rank == 0:
                    sys.stdout.write(f"{name:10s} {how:6s} {taken:6.2f} us\n")


def _arrays(name: str, device: int) -> list[Any]:
    """Two of them, on the GPU of this rank."""
    framework = importlib.import_module(name)
    if name == "cupy":
        framework.cuda.Device(device).use()
        return [framework.ones(_NUMEL, framework.float32) for _ in range(2)]
    framework.cuda.set_device(device)
    return [framework.ones(_NUMEL, device="cuda") for _ in range(2)]


if __name__ == "__main__":
    main()
