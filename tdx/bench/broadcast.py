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
        # words are for few ranks, and those of the root for small arrays
        small, few = (takes_low_latency(n, world.size) for n in (given.nbytes, 0))
        yield from Collective(
            nbytes,
            partial(tdx.Broadcast, world, numel, bench.dtype, 0),
            ALGORITHMS[0 if small else 1 if few else 2 :],
            given.view(bench.dtype),
            bench.pattern(0, given.nbytes).view(bench.dtype),
            sent=nbytes,
            peers=bench.peers.broadcast(given),
        ).rows(bench)
