"""Broadcast from rank 0 against NCCL. `bytes` are those of an array."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import tdx
from tdx.kernels.select import takes_low_latency
from tdx.tools.collectives import Collective, columns

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = ("low_latency", "low_latency_scatter", "scatter", "chain")
COLUMNS = columns(("nccl",), ALGORITHMS)
_SIZES = tuple(1 << shift for shift in range(12, 29, 2))  # 4 KiB to 256 MiB


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES):
        numel = nbytes // bench.dtype.itemsize
        given = bench.pattern(world.rank, numel * bench.dtype.itemsize)
        first = 0 if takes_low_latency(given.nbytes, world.size) else 1
        first = first if takes_low_latency(0, world.size) else 2
        yield from Collective(
            nbytes,
            partial(tdx.Broadcast, world, numel, bench.dtype, 0),
            ALGORITHMS[first:],
            given.view(bench.dtype),
            bench.pattern(0, given.nbytes).view(bench.dtype),
            sent=nbytes,
            peers=bench.peers.broadcast(given),
        ).rows(bench)
