"""Broadcast from rank 0 against NCCL. `bytes` are those of an array."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tdx
from tdx.kernels.select import takes_low_latency

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = ("low_latency", "scatter")
COLUMNS = ("bytes", "nccl", *ALGORITHMS, "chosen", "floor", "ratio", "% of floor")
_SIZES = tuple(1 << shift for shift in range(12, 29, 2))  # 4 KiB to 256 MiB


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES):
        numel = max(1, nbytes // bench.dtype.itemsize)
        expected = bench.pattern(0, numel * bench.dtype.itemsize)
        given = bench.pattern(world.rank, expected.size)
        x = world.array(given.view(bench.dtype))
        row: dict[str, Any] = {"bytes": nbytes, **bench.peers.broadcast(given)}
        for algorithm in ALGORITHMS:
            if algorithm == "low_latency" and not takes_low_latency(x.nbytes, world.size):
                continue
            plan = tdx.Broadcast(world, numel, bench.dtype, 0, algorithm=algorithm)
            bench.measure(row, algorithm, plan, x, expected)
        row["chosen"] = tdx.Broadcast(world, numel, bench.dtype, 0).algorithm
        bench.rate(row, ours=(row["chosen"],), peers=("nccl",), sent=nbytes)
        yield row
