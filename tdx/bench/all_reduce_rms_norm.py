"""All-reduce with a residual and RMS norm against the all-reduce alone, and NCCL with torch's norm.

Bytes are those of each rank's input, rows of 8192 elements. `cost` is what the fused operation
takes in units of the all-reduce alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import tdx
from tdx.tools.timing import device_time, host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = ("low_latency", "one_shot", "two_shot")
COLUMNS = ("bytes", "rows", "nccl", "all_reduce", *ALGORITHMS, "chosen", "cost", "ratio")
_HIDDEN = 8192
_LIMITS = {"low_latency": 4 << 20, "one_shot": 16 << 20}
_SIZES = tuple(1 << n for n in range(14, 29, 2))


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES):
        count = max(1, nbytes // bench.dtype.itemsize // _HIDDEN)
        shape = (count, _HIDDEN)
        values = [
            np.random.default_rng(r).integers(-8, 8, shape).astype(bench.dtype)
            for r in range(world.size)
        ]
        h = np.sum([v.astype(np.float32) for v in values], axis=0) + 1
        expected = h / np.sqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
        x = world.array(values[world.rank], symmetric=False)
        ones = np.ones(shape, bench.dtype)
        weight, residual = (world.array(v, symmetric=False) for v in (ones[0], ones))
        row: dict[str, Any] = {"bytes": x.nbytes, "rows": count}
        row |= bench.peers.all_reduce_rms_norm(values[world.rank])
        calls = bench.calls(x.nbytes)
        alone = tdx.AllReduce(world, shape, bench.dtype)
        row["all_reduce"] = device_time(world, partial(alone, x), calls)
        for algorithm in (*ALGORITHMS, None):
            if x.nbytes > _LIMITS.get(algorithm or "", x.nbytes):
                continue
            plan = tdx.AllReduceRmsNorm(
                world, shape, bench.dtype, residual=True, algorithm=algorithm
            )
            name, call = algorithm or "chosen", partial(plan, x, weight, residual=residual)
            row[name] = device_time(world, call, calls)
            got = call()[0].numpy().astype(np.float32)
            if not (np.abs(got - expected) <= 0.01 * np.abs(expected)).all():
                row["error"] = f"{name}: wrong result"
            row[f"{name}_host"] = host_time(world, call)
        row["cost"] = row["chosen"] / row["all_reduce"]
        bench.rate(row, ours=("chosen",), peers=("nccl",))
        yield row
