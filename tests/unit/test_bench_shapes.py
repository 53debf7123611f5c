"""Shapes and operands of the benches of products."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from tdx.runtime import dtypes
from tdx.runtime.errors import DtypeError, InvalidArgument
from tdx.tools import bench, presets
from tdx.tools.reference import Matrix, sample

OPERATIONS = (
    "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "all_reduce_rms_norm",
)  # fmt: skip


def test_default_is_the_same_layer_both_ways():
    gathered = presets.preset("default", "all_gather_matmul", 4)
    assert gathered == [(2048, 7168, 4096), (4096, 7168, 8192), (8192, 7168, 8192)]
    swapped = [(m, k, n) for m, n, k in gathered]
    for operation in OPERATIONS[1:3]:
        assert presets.preset("default", operation, 4) == swapped


def test_layers_of_a_model():
    """Of 8 ranks: Llama 3 70B has 80 heads of q, k and v, and 2 x 28672 columns of gate and up."""
    gathered = presets.preset("llama3-70b", "all_gather_matmul", 8)
    assert {(n, k) for _, n, k in gathered} == {(1280, 8192), (7168, 8192)}
    assert {m for m, _, _ in gathered} == {1 << n for n in range(3, 15)}
    reduced = presets.preset("llama3-70b", "matmul_all_reduce", 8)
    assert {(n, k) for _, n, k in reduced} == {(8192, 1024), (8192, 3584)}
    assert {m for m, _, _ in reduced} == {1 << n for n in range(15)}
    assert presets.preset("amd", "matmul_reduce_scatter", 8)[0] == (8192, 4096, 1536)
    assert presets.preset("amd", "all_gather_matmul", 8)[0] == (8192, 1536, 4096)


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", presets.PRESETS)
def test_shapes_fit_the_ranks(name, operation, ranks):
    shapes = presets.preset(name, operation, ranks)
    assert len(set(shapes)) == len(shapes) >= 2
    assert all(extent > 0 for shape in shapes for extent in shape)
    written = [",".join(map(str, shape)) for shape in shapes]
    assert presets.given(written, operation, ranks) == shapes


@pytest.mark.parametrize("text", ["", "1", "1,2", "1,2,3,4", "1,2,x", "1,-2,3", "0,1,2", "2,1,1"])
def test_refused_shapes(text):
    with pytest.raises(InvalidArgument, match="--shapes"):
        presets.given([text], "matmul_reduce_scatter", 3)


def test_parts_of_a_matrix():
    """Of one that is larger than the page that is repeated, too."""
    for shape in ((3, 5), (1030, 1100)):
        matrix = Matrix(1, shape, np.dtype("float32"))
        rows, columns = sample(shape[0]), sample(shape[1])
        assert (rows[0], rows[-1], columns[-1]) == (0, shape[0] - 1, shape[1] - 1)
        assert np.array_equal(matrix.part(rows, columns), matrix.whole()[np.ix_(rows, columns)])
        assert not np.array_equal(matrix.whole()[0], matrix.whole()[-1])
    with pytest.raises(DtypeError, match="bfloat16, float16, float32"):
        Matrix(1, (2, 2), np.dtype("int8"))
    with pytest.raises(DtypeError, match=r"float32$"):
        Matrix(1, (2, 2), dtypes.resolve("float8_e4m3fn"))


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("65536", 65536), ("64K", 65536), ("64KiB", 65536), ("1m", 1 << 20), ("2 GiB", 2 << 30)],
)
def test_sizes(text, nbytes):
    assert bench._bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "K", "4 KiBi", "-1", "1.5K", "4T"])
def test_what_is_no_size(text):
    with pytest.raises(InvalidArgument, match=r"--sizes: .* is no size"):
        bench._bytes(text)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1KiB:4KiB", [1024, 2048, 4096]),
        ("8:8", [8]),
        ("1K:1G", [1 << n for n in range(10, 31)]),
        ("62, 2:8,1K", [62, 2, 4, 8, 1024]),
    ],
)
def test_ranges_of_sizes(text, sizes):
    assert bench._sizes(argparse.Namespace(sizes=text)) == sizes


@pytest.mark.parametrize("text", ["3K:8K", "1K:1000", "4K:1K"])
def test_what_is_no_range(text):
    with pytest.raises(InvalidArgument, match=rf"--sizes: '{text}' is no range: .* 1KiB:1GiB"):
        bench._sizes(argparse.Namespace(sizes=f"64,{text}"))


@pytest.mark.parametrize("text", ["1K:", ":1K", "1K:2K:4K"])
def test_what_is_no_end_of_a_range(text):
    with pytest.raises(InvalidArgument, match="is no size"):
        bench._sizes(argparse.Namespace(sizes=text))
