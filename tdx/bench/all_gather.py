"""All-gather against NCCL. `bytes` are those of a result."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import tdx
from tdx.kernels.select import takes_low_latency
from tdx.tools.collectives import Collective, columns

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = ("low_latency", "push", "copy_engine", "pull")
COLUMNS = columns(("nccl",), ALGORITHMS)
_SIZES = tuple(1 << shift for shift in range(12, 29, 2))  # 4 KiB to 256 MiB


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES, world.size):
        numel = nbytes // world.size // bench.dtype.itemsize
        given = [bench.pattern(r, numel * bench.dtype.itemsize) for r in range(world.size)]
        mine = given[world.rank]
        fast = takes_low_latency(mine.nbytes, world.size)
        yield from Collective(
            nbytes,
            partial(tdx.AllGather, world, numel, bench.dtype),
            ALGORITHMS if fast else ALGORITHMS[1:],
            mine.view(bench.dtype),
            np.concatenate(given).view(bench.dtype),
            sent=(world.size - 1) / world.size * nbytes,
            peers=bench.peers.all_gather(mine),
        ).rows(bench)
