"""All-gather and product in one against the two after one another, with tdx and with PyTorch.

Each rank has M / size rows of A (M, K) and its own B (K, N). `library` is torch.mm of the gathered
A alone, `matmul` ours; then sequences of an all-gather and a product, PyTorch's async-TP, and ours
in one. Operands of float8 have scales, and torch._scaled_mm multiplies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import tdx
from tdx.kernels.all_gather_matmul import ALGORITHMS
from tdx.tools.collectives import algorithm_of
from tdx.tools.reference import FACTORS, Gathered
from tdx.tools.timing import host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

SEQUENCES = ("nccl+library", "tdx+library", "tdx+matmul")
DTYPES = FACTORS
COLUMNS = (
    "M", "N", "K", "library", "matmul", *SEQUENCES, "async_tp", *ALGORITHMS, "chosen", "algorithm",
    "gap", "floor", "% of floor", "ratio",
)  # fmt: skip


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    for m, n, k in bench.shapes():
        yield _row(bench, m, n, k)


def _row(bench: Bench, m: int, n: int, k: int) -> dict[str, Any]:
    world, dtype = bench.world, bench.dtype
    given = Gathered(world, (m, n, k), dtype)
    a, whole, b, scales, result = given.a, given.whole, given.b, given.scales, given.result

    gather = tdx.AllGather(world, a.shape, dtype)
    row: dict[str, Any] = {"M": m, "N": n, "K": k}
    compared = bench.comparison(row)
    peers = bench.peers.products
    compared.peers(peers.matmul(whole, b, result.out), result)
    compared.ours(
        "matmul", lambda: tdx.matmul(whole, b, out=result.out, library=False, **scales), result
    )
    compared.peers(peers.all_gather_matmul(a, b, result.out, gather), result)
    compared.ours(
        "tdx+matmul",
        lambda: tdx.matmul(gather(a), b, out=result.out, library=False, **scales),
        result,
    )
    for algorithm in bench.algorithms(ALGORITHMS):
        plan = tdx.AllGatherMatmul(
            world, a.shape, b.shape, dtype, algorithm=algorithm, buffer=False
        )
        call = partial(plan, a, b, result.out, **scales)
        compared.ours(algorithm or "chosen", call, result)
    compared.time()
    alone = row.get("library", row["matmul"])
    bench.rate(row, ALGORITHMS, SEQUENCES, a.nbytes * (world.size - 1), alone)
    row["algorithm"], row["chosen_host"] = algorithm_of(plan), host_time(world, call)
    return row
