"""Choices of algorithm, block and tile."""

from __future__ import annotations

import pytest

from tdx.kernels.all_reduce import Config as AllReduceConfig
from tdx.kernels.matmul import Config as MatmulConfig
from tdx.kernels.operand import byte_units
from tdx.kernels.select import (
    CONSTANTS,
    block_bytes,
    block_elements,
    low_latency_elements,
    power_of_two,
    tile_for,
)
from tdx.runtime.errors import InvalidArgument


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (1023, 1024)])
def test_power_of_two(n, power):
    assert power_of_two(n) == power


@pytest.mark.parametrize("backend", CONSTANTS)
@pytest.mark.parametrize("numel", [0, 1, 1000, 1 << 20, 1 << 33])
def test_blocks_are_powers_of_two_within_limits(backend, numel):
    fewest, most = CONSTANTS[backend].block_elements
    block = block_elements(backend, numel)
    assert fewest <= block <= most
    assert block == power_of_two(block)
    assert block_bytes(backend, 8 * numel) == 8 * block
    for itemsize in (2, 4):
        assert 2 <= low_latency_elements(backend, numel, itemsize) <= block


@pytest.mark.parametrize("backend", CONSTANTS)
def test_tiles_fit_the_product(backend):
    rows, columns, _ = tile_for(backend, 4096, 4096, 4096, 2)
    assert (rows, columns) == CONSTANTS[backend].tile[:2]
    assert tile_for(backend, 1, 1, 1, 2) == (16, 16, 16)
    for shape in [(1, 4096, 4096), (4096, 17, 33), (100, 100, 100)]:
        for itemsize in (2, 4):
            MatmulConfig(*tile_for(backend, *shape, itemsize))


@pytest.mark.parametrize(
    ("multiples", "expected"),
    [
        ((128, 256), ("i8", 16)), ((0, 0), ("i8", 16)), ((64, 1 << 20), ("i8", 8)),
        ((24, 16), ("i8", 1)), ((4, 4096), ("i4", 1)), ((6, 4), ("i2", 1)), ((7, 128), ("i1", 1)),
    ],
)  # fmt: skip
def test_units_divide_everything(multiples, expected):
    assert byte_units(*multiples) == expected


@pytest.mark.parametrize("values", [(8, 16, 16), (16, 24, 16), (16, 16, 0)])
def test_a_tile_must_be_powers_of_two(values):
    with pytest.raises(InvalidArgument, match="power of two >= 16"):
        MatmulConfig(*values)


@pytest.mark.parametrize("options", [{"num_warps": 3}, {"group_m": 0}, {"num_stages": 0}])
def test_other_options_of_a_matmul(options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        MatmulConfig(16, 16, 16, **options)


@pytest.mark.parametrize(
    ("values", "words"),
    [(("ring", 64), "not one of"), (("one_shot", 1), "power of two"), (("one_shot", 96), "power")],
)
def test_all_reduce_config(values, words):
    with pytest.raises(InvalidArgument, match=words):
        AllReduceConfig(*values)
