"""Product and all-reduce in one against the two after one another, with tdx and with PyTorch.

Each rank has its own A (M, K) and B (K, N), and gets the sum over ranks of their products.
`library` is torch.mm alone, `matmul` ours; then sequences of a product and an all-reduce, of which
`symm+library` is with PyTorch's two-shot all-reduce, and ours in one. Operands of float8 have
scales, and torch._scaled_mm multiplies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import tdx
from tdx.kernels.matmul_all_reduce import ALGORITHMS
from tdx.tools.collectives import algorithm_of
from tdx.tools.reference import FACTORS, Summands
from tdx.tools.timing import host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

SEQUENCES = ("nccl+library", "symm+library", "tdx+library", "tdx+matmul")
DTYPES = FACTORS
COLUMNS = (
    "M", "N", "K", "library", "matmul", *SEQUENCES, *ALGORITHMS, "chosen", "algorithm", "gap",
    "floor", "% of floor", "ratio",
)  # fmt: skip
_ONE_SHOT_BYTES = 8 << 20  # of a result, for more it takes long


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    for m, n, k in bench.shapes():
        yield _row(bench, m, n, k)


def _row(bench: Bench, m: int, n: int, k: int) -> dict[str, Any]:
    world, dtype = bench.world, bench.dtype
    summands = Summands(world, (m, n, k), dtype)
    a, b = summands.a, summands.b
    product, result = summands.product(), summands.total(0, m)

    reduction = tdx.AllReduce(world, (m, n), product.out.dtype)
    matmul = partial(tdx.matmul, a, b, out=product.out, library=False, **summands.scales)
    row: dict[str, Any] = {"M": m, "N": n, "K": k}
    compared = bench.comparison(row)
    peers = bench.peers.products
    compared.peers(peers.matmul(a, b, product.out), product)
    compared.ours("matmul", matmul, product)
    compared.peers(peers.matmul_all_reduce(a, b, product.out, result.out, reduction), result)
    compared.ours("tdx+matmul", lambda: reduction(matmul(), result.out), result)
    for algorithm in bench.algorithms(ALGORITHMS):
        if algorithm == "one_shot" and result.out.nbytes > _ONE_SHOT_BYTES:
            continue
        plan = tdx.MatmulAllReduce(world, a.shape, b.shape, dtype, algorithm=algorithm)
        fused = partial(plan, a, b, result.out, **summands.scales)
        compared.ours(algorithm or "chosen", fused, result)
    compared.time()
    sent = 2 * (world.size - 1) / world.size * result.out.nbytes
    alone = row.get("library", row["matmul"])
    bench.rate(row, ALGORITHMS, SEQUENCES, sent, alone)
    row["algorithm"], row["chosen_host"] = algorithm_of(plan), host_time(world, fused)
    return row
