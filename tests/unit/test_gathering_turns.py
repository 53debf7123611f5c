"""Which algorithm and how many senders gather rows within a product."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from tdx.kernels.gathering_turns import (
    choices,
    is_compared,
    most_senders,
    one_kernel,
    schedule,
    turns_of,
)
from tdx.kernels.tiles import Config


def test_few_waves_are_gathered_where_they_are_multiplied():
    for rows, nbytes, ranks, expected in (
        (512, 8 << 20, 2, True), (512, 8 << 20, 4, True), (2048, 32 << 20, 2, True),
        (511, 8 << 20, 2, False), (2049, 32 << 20, 2, False), (2048, 16 << 20, 4, True),
        (2049, 16 << 20, 4, False),
        (512, 33 << 20, 2, False), (2048, 32 << 20, 4, True), (2048, 33 << 20, 4, False),
        (512, 4 << 20, 1, False),
    ):  # fmt: skip
        assert one_kernel("cuda", rows, nbytes, ranks) is expected
        assert not one_kernel("host", rows, nbytes, ranks)


def test_short_products_of_many_ranks_are_not_fused_with_copy_engines():
    world = SimpleNamespace(backend="cuda", driver=SimpleNamespace(resident_blocks=lambda: 132))
    product = SimpleNamespace(dtype=np.dtype("float16"))
    for rows, columns, depth, ranks, expected in (
        (384, 1536, 4096, 4, "unfused"), (384, 7168, 8192, 4, "fused"),
        (256, 4608, 16384, 4, "unfused"),
        (512, 2560, 8192, 4, "unfused"), (512, 7168, 4096, 4, "one_kernel"),
        (1024, 1536, 4096, 4, "one_kernel"), (1024, 2560, 8192, 4, "one_kernel"),
        (2048, 2560, 8192, 4, "one_kernel"), (1024, 7168, 8192, 4, "fused"),
        (512, 1536, 4096, 2, "one_kernel"),
    ):  # fmt: skip
        usual, other, gains = choices(world, product, rows, columns, depth, ranks)
        assert (other if gains else usual) == expected
    wide = SimpleNamespace(dtype=np.dtype("float32"))
    assert not choices(world, wide, 512, 1536, 4096, 4)[2]


def test_what_products_take_is_compared_where_they_may_be_short():
    for rows, nbytes, ranks, expected in (
        (384, 3 << 20, 4, True), (512, 4 << 20, 4, True), (128, 1 << 20, 4, False),
        (384, 3 << 20, 2, False), (2048, 16 << 20, 4, True), (2049, 16 << 20, 4, False),
    ):  # fmt: skip
        assert is_compared("cuda", rows, nbytes, ranks) is expected
        assert not is_compared("host", rows, nbytes, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("columns", [0, 1024, 3072, 5120, 7168, 28672])
@pytest.mark.parametrize("rows", [512, 2048])
def test_all_tiles_are_taken_by_the_turns_that_end_first(rows, columns, ranks):
    driver = SimpleNamespace(resident_blocks=lambda: 132)
    world = SimpleNamespace(backend="cuda", driver=driver)
    config = Config(128, 256, 64)
    end, senders, late = schedule(world, rows, columns, ranks, config.block_m, config.block_n)
    assert 1 <= senders <= most_senders(world)
    tiles = config.tiles(rows, columns) * ranks
    multipliers = max(1, min(tiles, 132 - senders))
    counts = [turns_of(tiles, i, senders, multipliers, late) for i in range(multipliers + senders)]
    taken = sum(counts[:multipliers]) + sum(max(n - late, 0) for n in counts[multipliers:])
    assert taken == tiles
    assert -(-tiles // 132) <= max(counts) <= -(-tiles // 132) + 1
    assert end >= max(counts)
