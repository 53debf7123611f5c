"""What it takes to begin: a world, and a plain launch beside one of stock Triton's driver.

    tdx run -n 2 --backend cuda -m tests.gpu.start

Prints how long `tdx.init` with a heap of 1 GiB took, first and again, and the device memory that it
left in use; then the host's microseconds of `kernel[grid]` on the same tensors of PyTorch, by
Triton's own driver and, in a world, by that of tdx, in turn.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from typing import Any

import triton
import triton.language as tl

import tdx
from tdx.tools.timing import slowest

_HEAP = 1 << 30
_ROUNDS, _LAUNCHES = 7, 300


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n)
    tl.store(out + at, total, mask=at < n)


def launches(x: Any, y: Any, out: Any, synchronize: Any) -> float:
    """Microseconds of a launch: the median of a few series, each with room in the queue."""
    taken = []
    for series in range(6):
        synchronize()
        begin = time.perf_counter()
        for _ in range(_LAUNCHES):
            add_kernel[(8,)](x, y, out, 1000, BLOCK=128)
        if series:  # the first one loads and warms up
            taken.append((time.perf_counter() - begin) / _LAUNCHES * 1e6)
    synchronize()
    return statistics.median(taken)


def main() -> None:
    torch: Any = importlib.import_module("torch")
    seconds, used, own, theirs = [], [], [], []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        with tdx.init(backend="cuda", heap_bytes=_HEAP) as world:
            seconds.append(slowest(world, time.perf_counter() - begin))
            torch.cuda.set_device(world.device.index)
            free, total = torch.cuda.mem_get_info()
            used.append((total - free) / 2**20)
            tensors = [torch.ones(1000, device="cuda") for _ in range(3)]
            own.append(slowest(world, launches(*tensors, torch.cuda.synchronize)))
            rank = world.rank
        theirs.append(launches(*tensors, torch.cuda.synchronize))
        del tensors
    if rank == 0:
        sys.stdout.write(
            f"tdx.init: first {seconds[0]:.2f} s, then {statistics.median(seconds[1:]):.2f} s; "
            f"{used[0]:.0f} MiB of the GPU in use\n"
            f"kernel[grid]: tdx {statistics.median(own):.2f} us, "
            f"Triton's driver {statistics.median(theirs):.2f} us\n"
        )


if __name__ == "__main__":
    main()
