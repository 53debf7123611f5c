"""All-to-all against NCCL. `bytes` are those of an input, and of a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

import tdx
from tdx.kernels.select import takes_low_latency

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = ("low_latency", "push")
COLUMNS = ("bytes", "nccl", *ALGORITHMS, "chosen", "floor", "ratio", "% of floor")
_SIZES = tuple(1 << shift for shift in range(12, 29, 2))  # 4 KiB to 256 MiB


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES):
        block = max(1, nbytes // world.size // bench.dtype.itemsize) * bench.dtype.itemsize
        given = [bench.pattern(r, block * world.size) for r in range(world.size)]
        x = world.array(given[world.rank].view(bench.dtype))
        mine = slice(world.rank * block, (world.rank + 1) * block)
        expected = np.concatenate([values[mine] for values in given])
        row: dict[str, Any] = {"bytes": nbytes, **bench.peers.all_to_all(given[world.rank])}
        for algorithm in ALGORITHMS:
            if algorithm == "low_latency" and not takes_low_latency(block, world.size):
                continue
            plan = tdx.AllToAll(world, x.shape, bench.dtype, algorithm=algorithm)
            bench.measure(row, algorithm, plan, x, expected)
        row["chosen"] = tdx.AllToAll(world, x.shape, bench.dtype).algorithm
        bench.rate(
            row, ours=(row["chosen"],), peers=("nccl",), sent=(world.size - 1) / world.size * nbytes
        )
        yield row
