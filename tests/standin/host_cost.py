"""What calls cost on the host, without a GPU: `python -m tests.standin.host_cost`.

The driver is the stand-in, whose launch costs little, so that the difference to the first row is
tdx's own time. Rows are measured in turn, many times, and medians printed: other load of the
machine then hits all of them alike.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton

from tests.standin.fake import build
from tests.standin.foreign import CupyArray, stand_in_for_cupy
from tests.standin.ranks import Rank

_ROUNDS, _CALLS = 300, 40


@triton.jit
def empty_kernel(x, y, n):
    pass


class Plain:
    """As little as stock Triton asks of an argument."""

    dtype = "fp32"

    def __init__(self, address: int):
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def rows() -> Iterator[tuple[str, Callable[[], object]]]:
    """(what, call to be measured)"""
    import tdx
    from tdx.kernels.operand import operand

    world = Rank().init()
    x, y = world.zeros(1024, np.float32), world.zeros(1024, np.float32)
    plain, other = Plain(x.data_ptr()), Plain(y.data_ptr())
    run = world.driver.bind(empty_kernel, 1, (x.dtype, y.dtype), (7,), {})
    barrier, plan = tdx.Barrier(world), tdx.AllReduce(world, x.shape, x.dtype)
    bare = run.bare(world.stream.handle, operand(world, x, "x"), operand(world, y, "y"))
    yield "prebuilt cuLaunchKernelEx", bare
    yield "Barrier plan", barrier
    yield "AllReduce plan", lambda: plan(x, out=y)
    weight = world.zeros(256, "bfloat16", symmetric=False)
    a, b, out = (world.zeros((256, 256), "bfloat16", symmetric=False) for _ in range(3))
    added = tdx.AllReduce(world, a.shape, a.dtype, bias=True, residual=True)
    yield "AllReduce plan, bias, residual", partial(added, a, out, bias=weight, residual=b)
    yield "tdx.barrier()", tdx.barrier
    yield "tdx.all_reduce(x, out=y)", lambda: tdx.all_reduce(x, out=y)
    yield "tdx.all_reduce(x)", lambda: tdx.all_reduce(x)
    yield "tdx.reduce(x, 0, out=y)", lambda: tdx.reduce(x, 0, out=y)
    signal = world.zeros(1, np.int32)
    yield "tdx.put(y, x, 0)", lambda: tdx.put(y, x, 0)
    yield "tdx.put(y, x, 0, signal=)", lambda: tdx.put(y, x, 0, signal=signal)
    given, taken = _cupy_arrays(world, x, y)
    yield "tdx.all_reduce(cupy, out=cupy)", lambda: tdx.all_reduce(given, out=taken)
    yield "kernel[grid], plain pointers", lambda: empty_kernel[(1,)](plain, other, 7)
    yield "kernel[grid], tdx arrays", lambda: empty_kernel[(1,)](x, y, 7)
    for kind in (tdx.AllGatherMatmul, tdx.MatmulReduceScatter, tdx.MatmulAllReduce):
        product = kind(world, a.shape, b.shape, a.dtype)
        to = out[: product.out_shape[0]] if hasattr(product, "out_shape") else None
        yield f"{kind.__name__} plan", partial(product, a, b, to)
    yield "tdx.matmul(a, b, out=y)", lambda: tdx.matmul(a, b, out=out)
    yield "tdx.matmul_all_reduce(out=y)", lambda: tdx.matmul_all_reduce(a, b, out=out)
    yield "tdx.matmul_all_reduce()", lambda: tdx.matmul_all_reduce(a, b)
    yield "tdx.all_gather_matmul(out=y)", lambda: tdx.all_gather_matmul(a, b, out=out)
    norm = tdx.AllReduceRmsNorm(world, a.shape, a.dtype)
    yield "AllReduceRmsNorm plan", lambda: norm(a, weight, out)
    yield "tdx.all_reduce_rms_norm(out=y)", lambda: tdx.all_reduce_rms_norm(a, weight, out=out)


def _cupy_arrays(world: Any, *memory: Any) -> list[CupyArray]:
    """What stands in for CuPy's arrays over that memory."""
    stand_in_for_cupy(types.SimpleNamespace(ptr=world.new_stream().handle))
    arrays = [CupyArray(world, each) for each in memory]
    for array, each in zip(arrays, memory, strict=True):
        array.shape, array.dtype = each.shape, each.dtype
    return arrays


def main() -> None:
    calls = list(rows())
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for taken, (_, call) in zip(samples, calls, strict=True):
            call()
            start = time.perf_counter()
            for _ in range(_CALLS):
                call()
            taken.append((time.perf_counter() - start) / _CALLS * 1e6)
    for taken, (what, _) in zip(samples, calls, strict=True):
        line = f"{what:>32} {statistics.median(taken):8.2f} us, least {min(taken):.2f}"
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    if os.environ.get("TDX_HOST_COST") is None:
        folder = build(Path(tempfile.mkdtemp()))
        paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        environment = os.environ | {"LD_LIBRARY_PATH": ":".join(paths), "TDX_HOST_COST": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.standin.host_cost"], environment)
    main()
