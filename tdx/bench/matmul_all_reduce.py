"""Product and all-reduce in one against the two after one another, with tdx and with PyTorch.

The products are those of a Llama 3 70B layer in tensor parallel, N = 8192; on the host tier N and K
are a sixteenth. `--sizes` are bytes of the result: they tell M. `library` is torch's product alone,
`nccl` is followed by NCCL's all-reduce; `matmul` is ours alone, `unfused` is followed by ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import tdx
from tdx.kernels.matmul_all_reduce import ALGORITHMS
from tdx.tools.timing import device_time, host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

COLUMNS = (
    "rows", "columns", "depth", "library", "nccl", "matmul", "unfused", *ALGORITHMS, "chosen",
    "ratio",
)  # fmt: skip
_HIDDEN, _INNER = 8192, 28672
_ROWS = (1, 16, 64, 128, 512, 2048, 8192)
_ONE_SHOT_ROWS = 512


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    world, dtype = bench.world, bench.dtype
    scale = 16 if world.backend == "host" else 1
    n = _HIDDEN // scale
    line = n * dtype.itemsize
    for nbytes in bench.sizes([m * line for m in _ROWS]):
        for whole in (_HIDDEN, _INNER):
            m, k = max(1, nbytes // line), whole // scale // world.size
            rng = np.random.default_rng(world.rank)
            a, b = (rng.standard_normal(s, np.float32).astype(dtype) for s in ((m, k), (k, n)))
            row: dict[str, Any] = {"rows": m, "columns": n, "depth": k}
            row |= bench.peers.matmul_all_reduce(a, b)
            _measure(bench, row, world.array(a, symmetric=False), world.array(b, symmetric=False))
            bench.rate(row, ours=("chosen",), peers=("nccl", "unfused"))
            yield row


def _measure(bench: Bench, row: dict[str, Any], x: Any, y: Any) -> None:
    world, (m, n) = bench.world, (row["rows"], row["columns"])
    calls = bench.calls(m * (row["depth"] + n) * bench.dtype.itemsize)
    product = world.empty((m, n), bench.dtype, symmetric=False)
    reduction = tdx.AllReduce(world, (m, n), bench.dtype)

    def unfused() -> Any:
        tdx.matmul(x, y, out=product)
        return reduction(product)

    row["matmul"] = device_time(world, partial(tdx.matmul, x, y, out=product), calls)
    row["unfused"] = device_time(world, unfused, calls)
    expected = unfused().numpy().astype(np.float32)
    for algorithm in (*ALGORITHMS, None):
        if algorithm == "one_shot" and m > _ONE_SHOT_ROWS:
            continue
        plan = tdx.MatmulAllReduce(world, x.shape, y.shape, bench.dtype, algorithm=algorithm)
        name, call = algorithm or "chosen", partial(plan, x, y)
        row[name] = device_time(world, call, calls)
        error = np.linalg.norm(call().numpy().astype(np.float32) - expected)
        if not error < 5e-3 * np.linalg.norm(expected):
            row["error"] = f"{name}: wrong result"
        row[f"{name}_host"] = host_time(world, call)
