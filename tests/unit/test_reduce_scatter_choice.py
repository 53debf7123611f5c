"""What matmul_reduce_scatter does if no algorithm is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tdx.kernels import scattered_rows
from tdx.kernels.matmul_reduce_scatter import MatmulReduceScatter


@pytest.fixture
def chosen(monkeypatch):
    """(backend, ranks, rows of a rank, columns, depth) to the algorithm for bfloat16 on a H100."""
    monkeypatch.setattr(scattered_rows, "unanimous", lambda group, call, mine: mine)
    world = SimpleNamespace(driver=SimpleNamespace(resident_blocks=lambda: 132))

    def choose(backend, ranks, rows, columns, depth, split=False, cublas=False):
        world.backend = backend
        monkeypatch.setattr(scattered_rows, "may_multiply", lambda *product: cublas)
        plan = SimpleNamespace(
            call="matmul_reduce_scatter", world=world, group=SimpleNamespace(size=ranks),
            dtype=np.dtype("float16"), partial_dtype=np.dtype("float16"), _rows=rows,
            shape_b=(depth, columns), partial_product=None, pinned=None,
        )  # fmt: skip
        return MatmulReduceScatter._usual(plan, split)

    return choose


@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "depth", "algorithm"),
    [
        (2, 8, 8192, 7168, "low_latency"), (2, 128, 8192, 7168, "one_kernel"),
        (2, 1024, 4096, 7168, "fused"), (2, 512, 4096, 2048, "unfused"),
        (4, 1, 16384, 4096, "unfused"), (4, 4, 8192, 7168, "unfused"),
        (4, 512, 4096, 7168, "unfused"), (4, 1024, 4096, 1024, "unfused"),
        (4, 512, 8192, 2048, "fused"), (4, 256, 16384, 4096, "fused"),
        (4, 1024, 8192, 7168, "fused"),
    ],
)  # fmt: skip
def test_measured_shapes(chosen, ranks, rows, columns, depth, algorithm):
    """Of more than two ranks words never go, and few bytes follow the product."""
    assert chosen("cuda", ranks, rows, columns, depth) == algorithm


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "algorithm"),
    [
        (512, 4096, 7168, "fused"), (512, 4096, 1792, "fused"), (1024, 2048, 3584, "fused"),
        (1024, 2048, 1024, "unfused"), (512, 2048, 7168, "unfused"), (256, 8192, 7168, "unfused"),
    ],
)  # fmt: skip
def test_measured_shapes_by_cublas(chosen, rows, columns, depth, algorithm):
    """Beside which copy engines are worth fewer bytes."""
    assert chosen("cuda", 4, rows, columns, depth, cublas=True) == algorithm


def test_few_rows_of_split_products_are_not_fused(chosen):
    assert chosen("cuda", 2, 8, 8192, 7168, split=True) == "unfused"


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_host_tier_fuses(chosen, ranks):
    assert chosen("host", ranks, 8, 64, 64) == "fused"
