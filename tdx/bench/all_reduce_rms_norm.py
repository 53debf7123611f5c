"""All-reduce with a residual and RMS norm in one, against NCCL's or ours with torch's norm.

Each rank has M rows of N elements. `all_reduce` is ours alone, to memory that is not symmetric;
`cost` is what the fused operation takes in units of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import tdx
from tdx.kernels.select import LOW_LATENCY_BYTES
from tdx.tools.collectives import algorithm_of
from tdx.tools.reference import BOUNDS, Matrix, Result, sample
from tdx.tools.timing import host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

ALGORITHMS = (
    "low_latency", "low_latency_two_shot", "one_shot", "two_shot", "unfused", "unfused_two_shot",
)  # fmt: skip
DTYPES = tuple(BOUNDS)
_PEERS = ("nccl+library", "tdx+library")
COLUMNS = (
    "M", "N", *_PEERS, "all_reduce", *ALGORITHMS, "chosen", "algorithm", "gap", "cost",
    "floor", "% of floor", "ratio",
)  # fmt: skip
_LIMITS = {
    **{name: LOW_LATENCY_BYTES for name in ALGORITHMS if "latency" in name or "unfused" in name},
    "one_shot": 16 << 20,
}
_EPS = 1e-6


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    for m, n in bench.shapes():
        yield _row(bench, m, n)


def _row(bench: Bench, m: int, n: int) -> dict[str, Any]:
    world, dtype = bench.world, bench.dtype
    parts = [Matrix(rank, (m, n), dtype) for rank in range(world.size)]
    residual, weight = (Matrix(world.size + i, s, dtype) for i, s in enumerate(((m, n), (1, n))))
    x, r, w = (
        world.array(matrix.whole(), symmetric=False)
        for matrix in (parts[world.rank], residual, weight)
    )
    w = w.reshape((n,))
    lines, columns = sample(m), sample(n)
    total = np.sum([part.part(lines) for part in parts], axis=0)
    h = total + residual.part(lines)
    normed = weight.part() * h / np.sqrt((h * h).mean(axis=1, keepdims=True) + _EPS)
    out, reduced = (world.empty((m, n), dtype, symmetric=False) for _ in range(2))
    result = Result(out, lines, columns, normed[:, columns])

    row: dict[str, Any] = {"M": m, "N": n}
    compared = bench.comparison(row)
    reduction = tdx.AllReduce(world, (m, n), dtype)
    makers = bench.peers.products.all_reduce_rms_norm(x, w, r, _EPS, out, reduction)
    compared.peers(makers, result)
    alone = partial(reduction, x, reduced)
    compared.ours("all_reduce", alone, Result(reduced, lines, columns, total[:, columns]))
    make = partial(tdx.AllReduceRmsNorm, world, (m, n), dtype, residual=True, eps=_EPS)
    for algorithm in bench.algorithms(ALGORITHMS):
        if x.nbytes > _LIMITS.get(algorithm or "", x.nbytes):
            continue
        plan = bench.plan(row, algorithm, make)
        if plan is None:
            continue
        fused = partial(plan, x, w, out, residual=r)
        compared.ours(algorithm or "chosen", fused, result)
    compared.time()
    row["cost"] = row["chosen"] / row["all_reduce"]
    sent = 2 * (world.size - 1) / world.size * x.nbytes
    bench.rate(row, ALGORITHMS, _PEERS, sent)
    row["algorithm"], row["chosen_host"] = algorithm_of(plan), host_time(world, fused)
    return row
