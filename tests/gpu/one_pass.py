"""Every operation once, by each algorithm, on small odd shapes: for tools that slow kernels down.

    mpirun -n 2 compute-sanitizer --target-processes all --report-api-errors no \\
        python -m tests.gpu.one_pass

Results are compared with NumPy, exactly: all values are small integers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import tdx
from tdx.runtime.dtypes import resolve

_BF16 = resolve("bfloat16")
_NUMEL = 10007


def main() -> None:
    with tdx.init(timeout_s=120.0) as world:
        count = sum(_passes(world))
        tdx.barrier()
        world.synchronize()
        sys.stdout.write(f"rank {world.rank}: {count} calls are right\n")


def _passes(world: Any) -> Any:
    ranks, me = world.size, world.rank

    def integers(*shape: int) -> np.ndarray[Any, Any]:
        """Of each rank: the first axis is the ranks."""
        return np.random.default_rng(len(shape)).integers(-2, 3, (ranks, *shape)).astype(_BF16)

    def each(
        call: Callable[..., Any], algorithms: Sequence[str], wanted: np.ndarray[Any, Any]
    ) -> int:
        for algorithm in algorithms:
            found = call(algorithm=algorithm).numpy()
            if not np.array_equal(found.astype(np.float32), wanted.astype(np.float32)):
                raise AssertionError(f"{call.func.__name__}, {algorithm}: wrong result")
        return len(algorithms)

    def algorithms(operation: str) -> Sequence[str]:
        module = importlib.import_module(f"tdx.kernels.{operation}")
        known = getattr(module, "ALGORITHMS", None)
        return known or module.Config.algorithms

    x = integers(_NUMEL)
    total, mine = x.astype(np.float32).sum(axis=0), world.array(x[me])
    yield each(partial(tdx.all_reduce, mine), algorithms("all_reduce"), total)
    yield each(partial(tdx.all_gather, mine), algorithms("all_gather"), x.reshape(-1))
    yield each(partial(tdx.broadcast, mine, 0), algorithms("broadcast"), x[0])
    parts = integers(ranks, _NUMEL)
    sums, given = parts.astype(np.float32).sum(axis=0), world.array(parts[me])
    yield each(partial(tdx.reduce_scatter, given), algorithms("reduce_scatter"), sums[me : me + 1])
    yield each(partial(tdx.all_to_all, given), algorithms("all_to_all"), parts[:, me])

    for rows, depth, columns in ((72, 160, 136), (256, 64, 100)):
        a, b = integers(rows, depth), integers(depth, columns)[0]
        whole = a.reshape(-1, depth).astype(np.float32) @ b.astype(np.float32)
        multiply = partial(tdx.all_gather_matmul, world.array(a[me]), world.array(b))
        yield each(multiply, algorithms("all_gather_matmul"), whole.astype(_BF16))
        a, b = integers(ranks * rows, depth), integers(depth, columns)
        whole = np.einsum("rmk,rkn->mn", a.astype(np.float32), b.astype(np.float32)).astype(_BF16)
        left, right = world.array(a[me]), world.array(b[me])
        names = algorithms("matmul_all_reduce")
        yield each(partial(tdx.matmul_all_reduce, left, right), names, whole)
        names = algorithms("matmul_reduce_scatter")
        own = whole[me * rows : (me + 1) * rows]
        yield each(partial(tdx.matmul_reduce_scatter, left, right), names, own)

    x = integers(33, 4096)
    h = x.astype(np.float32).sum(axis=0)
    row, weight = world.array(x[me]), world.array(np.ones(4096, _BF16), symmetric=False)
    for algorithm in algorithms("all_reduce_rms_norm"):
        y = tdx.all_reduce_rms_norm(row, weight, algorithm=algorithm).numpy().astype(np.float32)
        wanted = h / np.sqrt((h * h).mean(axis=1, keepdims=True) + 1e-6)
        if np.linalg.norm(y - wanted) > 5e-3 * np.linalg.norm(wanted):
            raise AssertionError(f"all_reduce_rms_norm, {algorithm}: wrong result")
        yield 1


if __name__ == "__main__":
    main()
