"""What `tdx doctor` measures between ranks, and that it notices wrong results."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tdx.tools import links
from tests.helpers.cases import worlds


@worlds(1, 3)
def case_measure(world):
    found = links.measure(world)
    assert [entry["name"] for entry in found["devices"]] == [world.device.name] * world.size
    for name in ("bandwidth", "latency"):
        matrix = found[name]
        assert len(matrix) == world.size
        for i, row in enumerate(matrix):
            assert row[i] is None
            assert all(cell > 0 for j, cell in enumerate(row) if j != i)


@worlds(3)
def case_bytes_that_were_not_sent(world):
    """Every rank hears of it, and which pair it was."""
    right = tdx.put

    def lossy(dst, src, peer):
        if (world.rank, peer) != (0, 2):
            right(dst, src, peer)

    tdx.put = lossy
    try:
        with pytest.raises(tdx.errors.TdxError) as failure:
            links.measure(world)
    finally:
        tdx.put = right
    assert str(failure.value) == "other bytes than rank 0 put arrived at rank 2"


@worlds(2)
def case_wrong_sum(world):
    right = tdx.all_reduce
    tdx.all_reduce = lambda x: right(x) + np.float32(world.rank == 1)
    try:
        with pytest.raises(tdx.errors.TdxError, match="gave rank 1 4, and 3 is right"):
            links.measure(world)
    finally:
        tdx.all_reduce = right
