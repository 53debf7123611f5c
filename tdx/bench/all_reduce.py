"""All-reduce against NCCL and PyTorch's symmetric memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import tdx
from tdx.tools.timing import device_time, host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

COLUMNS = ("bytes", "nccl", "torch_one_shot", "torch_two_shot", "low_latency", "one_shot", "ratio")
_LOW_LATENCY_BYTES = 1 << 20
_LINK_BYTES_PER_US = 370e3  # NVLink 4 x 18, one direction, as NCCL's ring reaches it


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes((1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)):
        numel = max(1, nbytes // bench.dtype.itemsize)
        values = [
            np.random.default_rng(r).integers(-8, 8, numel).astype(bench.dtype)
            for r in range(world.size)
        ]
        x = world.array(values[world.rank])
        row: dict[str, Any] = {"bytes": nbytes, **bench.peers.all_reduce(values[world.rank])}
        expected = np.sum([v.astype(np.float64) for v in values], axis=0)
        for algorithm in ("low_latency", "one_shot"):
            if algorithm == "low_latency" and nbytes > _LOW_LATENCY_BYTES:
                continue
            plan = tdx.AllReduce(world, numel, bench.dtype, algorithm=algorithm)
            call = partial(plan, x)
            row[algorithm] = device_time(world, call, bench.calls(nbytes))
            if not (plan(x).numpy().astype(np.float64) == expected).all():
                row["error"] = f"{algorithm}: wrong result"
            row[f"{algorithm}_host"] = host_time(world, call)
        bench.rate(row, ours=("low_latency", "one_shot"), peers=COLUMNS[1:4])
        yield row
