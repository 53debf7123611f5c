"""Reduce-scatter against NCCL. `bytes` are those of each rank's input."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import tdx
from tdx.kernels.select import takes_low_latency
from tdx.tools.collectives import REDUCED, Collective, columns, summands

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = ("low_latency", "push")
DTYPES = REDUCED
COLUMNS = columns(("nccl",), ALGORITHMS)
_SIZES = tuple(1 << n for n in range(12, 29, 2))


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES, world.size):
        shard = nbytes // world.size // bench.dtype.itemsize
        given, total = summands(bench, shard * world.size)
        fast = takes_low_latency(nbytes, world.size)
        yield from Collective(
            nbytes,
            partial(tdx.ReduceScatter, world, given.shape, bench.dtype),
            ALGORITHMS if fast else ALGORITHMS[1:],
            given,
            total[world.rank * shard :][:shard],
            sent=(world.size - 1) / world.size * nbytes,
            peers=bench.peers.reduce_scatter(given),
        ).rows(bench)
