"""All-to-all against NCCL. `bytes` are those of an input, and of a result."""

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

ALGORITHMS = ("low_latency", "push")
COLUMNS = columns(("nccl",), ALGORITHMS)
_SIZES = tuple(1 << shift for shift in range(12, 29, 2))  # 4 KiB to 256 MiB


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES, world.size):
        block = nbytes // world.size
        given = [bench.pattern(r, block * world.size) for r in range(world.size)]
        blocks = [values[world.rank * block :][:block] for values in given]
        x = given[world.rank].view(bench.dtype)
        fast = takes_low_latency(block, world.size)
        yield from Collective(
            nbytes,
            partial(tdx.AllToAll, world, x.shape, bench.dtype),
            ALGORITHMS if fast else ALGORITHMS[1:],
            x,
            np.concatenate(blocks).view(bench.dtype),
            sent=(world.size - 1) / world.size * nbytes,
            peers=bench.peers.all_to_all(given[world.rank]),
        ).rows(bench)
