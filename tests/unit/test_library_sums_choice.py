"""What cuBLAS multiplies of products whose sums are scattered, and in how many products."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tdx.kernels.library_sums import _share
from tdx.kernels.scattered_rows import Parts, fused_tile
from tdx.kernels.tiles import choose_tile


def planned(ranks, m, n, k, dtype="float16", gathered=False):
    """As on a H100."""
    kind = np.dtype(dtype)

    def tile(config, world, m, n, k, parts=1, sending_us=0.0):
        choose = partial(choose_tile, "cuda", "sm_90", m, n, k, kind.itemsize, True)
        return choose(blocks=132, parts=parts, sending_us=sending_us)

    plan = SimpleNamespace(
        world=SimpleNamespace(
            backend="cuda", driver=SimpleNamespace(resident_blocks=lambda: 132)
        ),
        group=SimpleNamespace(size=ranks), dtype=kind, partial_dtype=kind, shape_b=(k, n),
        product=SimpleNamespace(scaled=kind.itemsize == 1, tile=tile),
    )  # fmt: skip
    rows = m // ranks
    plan.config = fused_tile(plan, None, rows, gathered)
    return plan, SimpleNamespace(rows=rows, parts=Parts.of(plan, rows, gathered))


def share(*given, **options):
    return _share(*planned(*given, **options))


def parts(*given, **options):
    return planned(*given, gathered=True, **options)[1].parts


@pytest.mark.parametrize(
    ("ranks", "shape", "wanted"),
    [
        (4, (8192, 8192, 7168), ("others", 2)), (4, (4096, 8192, 3584), ("others", 2)),
        (4, (4096, 8192, 2048), ("others", 2)), (4, (1024, 16384, 4096), ("others", 1)),
        (4, (16384, 4096, 1792), ("all", 2)), (4, (8192, 4096, 1792), ("all", 2)),
        (4, (4096, 4096, 1792), ("all", 1)), (4, (2048, 4096, 14336), ("all", 1)),
        (4, (2048, 4096, 1792), ("all", 1)), (2, (8192, 4096, 1792), ("others", 2)),
        (2, (2048, 8192, 14336), ("others", 2)), (2, (16384, 8192, 3584), ("others", 2)),
    ],
)  # fmt: skip
def test_measured_shapes(ranks, shape, wanted):
    """Two products if both together fill the blocks as one does; "all" where sending takes longer,
    or own rows have few tiles."""
    assert share(ranks, *shape) == wanted


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [(2, (8192, 3584, 7168)), (2, (8192, 4608, 18432)), (4, (8192, 4608, 9216)),
     (4, (8192, 3584, 3584)), (2, (2048, 4096, 7168)), (2, (4096, 4096, 1024))],
)  # fmt: skip
def test_what_would_leave_blocks_idle_is_ours(ranks, shape):
    """Also one product for the one peer, and what is sent for longer than it is multiplied."""
    assert share(ranks, *shape)[0] == "none"


def test_gathered_sums_are_never_all_by_cublas():
    assert share(4, 8192, 8192, 7168, gathered=True) == ("others", 1)
    assert share(2, 8192, 8192, 7168, gathered=True) == ("others", 2)
    assert share(4, 16384, 4096, 1792, gathered=True)[0] == "none"


def test_other_types():
    """Float8 is cuBLAS's, in one product; IEEE float32 is never shared with our kernel."""
    assert share(2, 8192, 8192, 7168, "int8") == ("all", 1)
    assert share(2, 8192, 8192, 7168, "float32")[0] == "none"
    assert share(4, 8192, 8192, 7168, "float32")[0] == "all"


def test_several_peers_gather_in_phases():
    """Of as few rows as fill blocks, if there are."""
    assert parts(4, 8192, 8192, 7168) == Parts(512, 512, 512)
    assert parts(4, 16384, 4096, 3584) == Parts(1024, 1024, 1024)
    assert parts(4, 8192, 5120, 7168) == Parts(2048, 1024, 512)
    assert parts(2, 8192, 8192, 7168) == Parts(4096, 1024, 512)
    assert parts(4, 2048, 8192, 7168).phase == 512


def test_phases_of_float8_leave_no_few_rows():
    assert parts(4, 8192, 8192, 7168, "int8").phase == 512
    assert parts(4, 8704, 8192, 7168, "int8").phase == 2176
    assert parts(4, 8704, 8192, 7168).phase == 512
