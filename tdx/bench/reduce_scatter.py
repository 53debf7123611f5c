"""Reduce-scatter against NCCL. Bytes are those of each rank's input."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import tdx
from tdx.kernels.select import takes_low_latency
from tdx.tools.timing import device_time, host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = ("low_latency", "push")
COLUMNS = ("bytes", "nccl", *ALGORITHMS, "chosen", "floor", "ratio", "% of floor")
_SIZES = tuple(1 << n for n in range(12, 29, 2))


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES):
        rows = max(1, nbytes // bench.dtype.itemsize // world.size)
        numel = rows * world.size
        values = [
            np.random.default_rng(r).integers(-8, 8, numel).astype(bench.dtype)
            for r in range(world.size)
        ]
        x = world.array(values[world.rank], symmetric=False)
        own = slice(world.rank * rows, (world.rank + 1) * rows)
        expected = np.sum([v[own].astype(np.float32) for v in values], axis=0).astype(bench.dtype)
        row: dict[str, Any] = {"bytes": nbytes, **bench.peers.reduce_scatter(values[world.rank])}
        for algorithm in (*ALGORITHMS, None):
            if algorithm == "low_latency" and not takes_low_latency(nbytes, world.size):
                continue
            plan = bench.plan(row, algorithm, partial(tdx.ReduceScatter, world, numel, bench.dtype))
            if plan is None:
                continue
            name, call = algorithm or "chosen", partial(plan, x)
            row[name] = device_time(world, call, bench.calls(nbytes))
            if not (call().numpy() == expected).all():
                row["error"] = f"{name}: wrong result"
            row[f"{name}_host"] = host_time(world, call)
        bench.rate(
            row, ours=("chosen",), peers=("nccl",), sent=(world.size - 1) / world.size * nbytes
        )
        yield row
