"""Which algorithm a matrix product and all-reduce takes if none is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tdx.kernels import matmul_all_reduce
from tdx.kernels.product import Product


@pytest.fixture
def chosen(monkeypatch):
    """As on H100s, where all ranks have the same K."""
    monkeypatch.setattr(matmul_all_reduce, "unanimous", lambda group, call, own: own)

    def choose(
        ranks, m, n, k, backend="cuda", cublas=True, dtype="bfloat16", algorithm=None, **given
    ):
        """The algorithm, or the tile of the one that is given."""
        plan = matmul_all_reduce.MatmulAllReduce.__new__(matmul_all_reduce.MatmulAllReduce)
        plan.world = SimpleNamespace(
            backend=backend, driver=SimpleNamespace(resident_blocks=lambda: 132),
            device=SimpleNamespace(arch="sm_90"), recording=True,
        )  # fmt: skip
        plan.group, plan.call = SimpleNamespace(size=ranks), "matmul_all_reduce"
        plan.product = Product.make(plan.world, dtype, **given)
        plan.dtype, plan.partial_dtype = plan.product.dtype, plan.product.out_dtype
        plan.shape_a, plan.shape_b = (m, k), (k, n)
        plan.pinned, plan.has_library = None, lambda: cublas
        return plan._choose(None, algorithm)[algorithm is None]

    return choose


@pytest.mark.parametrize("cublas", [True, False])
@pytest.mark.parametrize(
    ("ranks", "shape", "wanted"),
    [
        (4, (1, 4096, 1024), "unfused"), (4, (64, 8192, 7168), "unfused"),
        (4, (256, 4096, 3584), "unfused"), (4, (256, 8192, 7168), "unfused"),
        (4, (512, 8192, 7168), "two_shot"), (4, (2048, 4096, 1024), "two_shot"),
        (4, (4096, 4096, 3584), "two_shot"), (4, (16384, 4096, 1024), "two_shot"),
        (4, (16384, 4096, 1792), "two_shot"), (4, (4096, 8192, 2048), "two_shot"),
        (4, (8192, 8192, 2048), "two_shot"), (4, (8192, 4096, 3584), "copy_engine"),
        (4, (16384, 4096, 3584), "copy_engine"), (4, (4096, 8192, 7168), "copy_engine"),
        (2, (1, 8192, 4096), "unfused"), (2, (16, 8192, 7168), "unfused"),
        (2, (256, 4096, 2048), "unfused"), (2, (512, 4096, 2048), "one_shot"),
        (2, (64, 8192, 4096), "one_shot"), (2, (512, 8192, 7168), "one_shot"),
        (2, (2048, 4096, 1024), "two_shot"), (2, (1024, 8192, 7168), "two_shot"),
        (2, (8192, 4096, 1024), "two_shot"), (2, (4096, 4096, 3584), "two_shot"),
        (2, (8192, 8192, 3584), "copy_engine"), (2, (4096, 8192, 7168), "copy_engine"),
        (1, (64, 8192, 7168), "one_shot"),
    ],
)  # fmt: skip
def test_measured_shapes(chosen, ranks, shape, wanted, cublas):
    assert chosen(ranks, *shape, cublas=cublas) == wanted


def test_float8_is_multiplied_first_where_cublas_is(chosen):
    given = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}
    assert chosen(2, 1024, 8192, 7168, **given) == "unfused"
    assert chosen(2, 1024, 8192, 7168, cublas=False, **given) == "two_shot"


@pytest.mark.parametrize(
    "given", [{"dtype": "float32"}, {"dtype": "bfloat16", "out_dtype": "float32"},
              {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}],
)  # fmt: skip
def test_short_products_of_two_ranks_are_known_of_16_bits(chosen, given):
    assert chosen(2, 8192, 8192, 2048) == "two_shot"
    assert chosen(2, 8192, 8192, 2048, **given) == "copy_engine"


def test_ranks_vote_whether_products_are_short(chosen, monkeypatch):
    """One rank's product is long: all send by copy engines."""
    votes = []
    monkeypatch.setattr(
        matmul_all_reduce, "unanimous", lambda group, call, own: votes.append(own) or False
    )
    assert chosen(4, 16384, 4096, 1024) == "copy_engine"
    assert chosen(2, 8192, 4096, 1024) == "copy_engine"
    assert votes == [True, True]


@pytest.mark.parametrize("others", [True, False])
def test_tiles_of_one_kernel_are_ragged_on_all_ranks_or_none(chosen, monkeypatch, others):
    """Ranks meet tile by tile: rows and columns of a tile depend on no rank's own K."""
    monkeypatch.setattr(matmul_all_reduce, "unanimous", lambda group, call, own: own and others)
    wide, ragged = (chosen(4, 2048, 4096, k, algorithm="two_shot") for k in (1024, 1025))
    tiles = [(tile.block_m, tile.block_n, tile.group_m) for tile in (wide, ragged)]
    assert (tiles[0] == tiles[1]) == (not others)


def test_host_tier_counts_what_is_sent(chosen):
    assert chosen(4, 8, 64, 64, backend="host", dtype=np.float32) == "one_shot"
