"""Prints a digest of each result of a rank's products and norms, by every algorithm.

    tdx run -n 2 -m tests.helpers.product_bits

tests/gpu/test_product_bits.py compares what two runs print.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import tdx
from tdx.kernels import (
    all_gather_matmul,
    all_reduce_rms_norm,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from tests.helpers.reference import values

# rows, depth and columns of a rank's product, the last ones on GPUs only, which are fast enough
SHAPES = ((40, 72, 96), (72, 136, 160), (1024, 4096, 1792))


def main() -> None:
    with tdx.init(timeout_s=120.0) as world:
        for rows, depth, columns in SHAPES[: 1 if world.backend == "host" else None]:
            for dtype in ("bfloat16", "float32"):
                x = world.array(values(world.rank, (rows * world.size, depth), dtype))
                y = world.array(values(world.rank, (depth, columns), dtype, salt=1))
                weight = world.array(values(0, depth, dtype, salt=2))
                for call, module, a, b in (
                    (tdx.all_gather_matmul, all_gather_matmul, x[:rows], y),
                    (tdx.matmul_reduce_scatter, matmul_reduce_scatter, x, y),
                    (tdx.matmul_all_reduce, matmul_all_reduce, x, y),
                    (tdx.all_reduce_rms_norm, all_reduce_rms_norm, x, weight),
                ):
                    for algorithm in _algorithms(module):
                        bits = call(a, b, algorithm=algorithm).numpy().tobytes()
                        name = f"{call.__name__} {algorithm} {dtype} {rows}"
                        sys.stdout.write(f"{name}: {hashlib.sha256(bits).hexdigest()[:16]}\n")


def _algorithms(module: Any) -> tuple[str, ...]:
    known = getattr(module, "ALGORITHMS", None)
    return tuple(known or module.Config.algorithms)


if __name__ == "__main__":
    main()
