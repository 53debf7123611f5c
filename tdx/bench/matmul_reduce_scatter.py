"""Product and reduce-scatter in one against the two after one another, with tdx and with PyTorch.

Each rank has its own A (M, K) and B (K, N), and gets M / size rows of the sum over ranks.
`library` is torch.mm alone, `matmul` ours; then sequences of a product and a reduce-scatter,
PyTorch's async-TP, and ours in one. Operands of float8 have scales, and torch._scaled_mm
multiplies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import tdx
from tdx.kernels.matmul_reduce_scatter import ALGORITHMS
from tdx.kernels.select import takes_low_latency
from tdx.tools.collectives import algorithm_of
from tdx.tools.reference import FACTORS, Summands
from tdx.tools.timing import host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

SEQUENCES = ("nccl+library", "tdx+library", "tdx+matmul")
DTYPES = FACTORS
COLUMNS = (
    "M", "N", "K", "library", "matmul", *SEQUENCES, "async_tp", *ALGORITHMS, "chosen", "algorithm",
    "gap", "floor", "% of floor", "ratio",
)  # fmt: skip
_ONE_KERNEL_ROWS = 512  # nothing hides what more of them send


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    for m, n, k in bench.shapes():
        yield _row(bench, m, n, k)


def _row(bench: Bench, m: int, n: int, k: int) -> dict[str, Any]:
    world, dtype = bench.world, bench.dtype
    height = m // world.size
    summands = Summands(world, (m, n, k), dtype)
    a, b = summands.a, summands.b
    product = summands.product()
    result = summands.total(world.rank * height, height)

    scatter = tdx.ReduceScatter(world, (m, n), product.out.dtype)
    matmul = partial(tdx.matmul, a, b, out=product.out, library=False, **summands.scales)
    row: dict[str, Any] = {"M": m, "N": n, "K": k}
    compared = bench.comparison(row)
    peers = bench.peers.products
    compared.peers(peers.matmul(a, b, product.out), product)
    compared.ours("matmul", matmul, product)
    compared.peers(peers.matmul_reduce_scatter(a, b, product.out, result.out, scatter), result)
    compared.ours("tdx+matmul", lambda: scatter(matmul(), result.out), result)
    for algorithm in bench.algorithms(ALGORITHMS):
        if algorithm == "one_kernel" and m > _ONE_KERNEL_ROWS:
            continue
        if algorithm == "low_latency" and not takes_low_latency(result.out.nbytes, world.size):
            continue
        plan = tdx.MatmulReduceScatter(
            world, a.shape, b.shape, dtype, algorithm=algorithm, buffer=False
        )
        call = partial(plan, a, b, result.out, **summands.scales)
        compared.ours(algorithm or "chosen", call, result)
    compared.time()
    alone = row.get("library", row["matmul"])
    bench.rate(row, ALGORITHMS, SEQUENCES, result.out.nbytes * (world.size - 1), alone)
    row["algorithm"], row["chosen_host"] = algorithm_of(plan), host_time(world, call)
    return row
