"""All-gather against NCCL. `bytes` are those of a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

import tdx
from tdx.kernels.select import takes_low_latency

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = ("low_latency", "push", "copy_engine", "pull")
COLUMNS = ("bytes", "nccl", *ALGORITHMS, "chosen", "floor", "ratio", "% of floor")
_SIZES = tuple(1 << shift for shift in range(12, 29, 2))  # 4 KiB to 256 MiB


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES):
        numel = max(1, nbytes // world.size // bench.dtype.itemsize)
        given = [bench.pattern(r, numel * bench.dtype.itemsize) for r in range(world.size)]
        x = world.array(given[world.rank].view(bench.dtype))
        expected = np.concatenate(given)
        row: dict[str, Any] = {"bytes": nbytes, **bench.peers.all_gather(given[world.rank])}
        for algorithm in ALGORITHMS:
            if algorithm == "low_latency" and not takes_low_latency(x.nbytes, world.size):
                continue
            plan = tdx.AllGather(world, numel, bench.dtype, algorithm=algorithm)
            bench.measure(row, algorithm, plan, x, expected)
        row["chosen"] = tdx.AllGather(world, numel, bench.dtype).algorithm
        bench.rate(
            row, ours=(row["chosen"],), peers=("nccl",), sent=(world.size - 1) / world.size * nbytes
        )
        yield row
