"""All-reduce against NCCL and PyTorch's symmetric memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import tdx
from tdx.kernels.select import LOW_LATENCY_BYTES
from tdx.tools.timing import device_time, host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = ("low_latency", "low_latency_two_shot", "one_shot", "two_shot")
COLUMNS = (
    "bytes", "memory", "nccl", "torch_one_shot", "torch_two_shot", *ALGORITHMS, "chosen", "floor",
    "ratio", "% of floor",
)  # fmt: skip
_OWN = COLUMNS[3:5]  # work on memory of their own
_LIMITS = {"low_latency": 1 << 20, "low_latency_two_shot": LOW_LATENCY_BYTES, "one_shot": 4 << 20}
_SIZES = tuple(1 << n for n in range(10, 29, 2))


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world = bench.world
    for nbytes in bench.sizes(_SIZES):
        numel = max(1, nbytes // bench.dtype.itemsize)
        values = [
            np.random.default_rng(r).integers(-8, 8, numel).astype(bench.dtype)
            for r in range(world.size)
        ]
        peers = bench.peers.all_reduce(values[world.rank])
        expected = np.sum([v.astype(np.float32) for v in values], axis=0).astype(bench.dtype)
        for memory in ("symmetric", "foreign"):
            # foreign: as from another framework, with a result that is not the plan's buffer; of
            # the peers NCCL alone takes that
            others = (
                peers if memory == "symmetric" else {k: peers[k] for k in peers if k not in _OWN}
            )
            x = world.array(values[world.rank], symmetric=memory == "symmetric")
            out = None if memory == "symmetric" else world.empty(numel, x.dtype, symmetric=False)
            row: dict[str, Any] = {"bytes": nbytes, "memory": memory, **others}
            make = partial(tdx.AllReduce, world, numel, bench.dtype, buffer=out is None)
            for algorithm in (*ALGORITHMS, None):
                if nbytes > _LIMITS.get(algorithm or "", nbytes):
                    continue
                plan = bench.plan(row, algorithm, make)
                if plan is not None:
                    _measure(bench, row, plan, algorithm or "chosen", x, out, expected)
            bench.rate(
                row,
                ours=("chosen",),
                peers=COLUMNS[2:5],
                sent=2 * (world.size - 1) / world.size * nbytes,
            )
            yield row


def _measure(
    bench: Bench, row: dict[str, Any], plan: Any, name: str, x: Any, out: Any, expected: Any
) -> None:
    call = partial(plan, x, out)
    row[name] = device_time(bench.world, call, bench.calls(row["bytes"]))
    if not (call().numpy() == expected).all():
        row["error"] = f"{name}: wrong result"
    row[f"{name}_host"] = host_time(bench.world, call)
