"""All-reduce against NCCL and PyTorch's symmetric memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import tdx
from tdx.kernels.all_reduce import Config
from tdx.kernels.select import LOW_LATENCY_BYTES
from tdx.tools.collectives import REDUCED, Collective, columns, summands

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = Config.algorithms
_OWN_MEMORY = ("torch_one_shot", "torch_two_shot")
DTYPES = REDUCED
COLUMNS = columns(("nccl", *_OWN_MEMORY), ALGORITHMS)
_LIMITS = {"low_latency": 1 << 20, "low_latency_two_shot": LOW_LATENCY_BYTES, "one_shot": 4 << 20}
_SIZES = tuple(1 << n for n in range(10, 29, 2))


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES):
        numel = nbytes // bench.dtype.itemsize
        given, expected = summands(bench, numel)
        yield from Collective(
            nbytes,
            partial(tdx.AllReduce, world, numel, bench.dtype),
            [name for name in ALGORITHMS if nbytes <= _LIMITS.get(name, nbytes)],
            given,
            expected,
            sent=2 * (world.size - 1) / world.size * nbytes,
            peers=bench.peers.all_reduce(given),
            own_memory=_OWN_MEMORY,
        ).rows(bench)
