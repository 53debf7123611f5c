"""Shapes and operands of the benches of products."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import numpy as np
import pytest

from tdx.kernels.reduction import check_types
from tdx.runtime import dtypes
from tdx.runtime.errors import DtypeError, InvalidArgument
from tdx.tools import bench_options, facts, presets
from tdx.tools.bench import Bench
from tdx.tools.collectives import REDUCED
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


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("65536", 65536), ("64K", 65536), ("64KiB", 65536), ("1m", 1 << 20), ("2 GiB", 2 << 30)],
)
def test_sizes(text, nbytes):
    assert bench_options._bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "K", "4 KiBi", "-1", "1.5K", "4T"])
def test_what_is_no_size(text):
    with pytest.raises(InvalidArgument, match=r"--sizes: .* is no size"):
        bench_options._bytes(text)


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
    assert bench_options.sizes(argparse.Namespace(sizes=text)) == sizes


@pytest.mark.parametrize("text", ["3K:8K", "1K:1000", "4K:1K"])
def test_what_is_no_range(text):
    with pytest.raises(InvalidArgument, match=rf"--sizes: '{text}' is no range: .* 1KiB:1GiB"):
        bench_options.sizes(argparse.Namespace(sizes=f"64,{text}"))


@pytest.mark.parametrize("text", ["1K:", ":1K", "1K:2K:4K"])
def test_what_is_no_end_of_a_range(text):
    with pytest.raises(InvalidArgument, match="is no size"):
        bench_options.sizes(argparse.Namespace(sizes=text))


def bench_of(words, ranks):
    """What modules get on `ranks` ranks, given these options."""
    parser = argparse.ArgumentParser()
    bench_options.add_arguments(parser)
    world = SimpleNamespace(size=ranks, backend="host")
    return Bench(world, parser.parse_args(["all_gather", "--no-peers", *words]))


@pytest.mark.parametrize(
    ("ranks", "dtype", "sizes"),
    [
        (1, "int8", [1, 64, 1000]),
        (3, "int8", [3, 63, 999]),
        (3, "bfloat16", [6, 60, 996]),
        (5, "float32", [20, 60, 1000]),
    ],
)
def test_sizes_are_equal_parts_of_whole_elements(ranks, dtype, sizes):
    asked = bench_of(["--sizes", "1,64,1000", "--dtype", dtype], ranks)
    assert asked.sizes([], ranks) == sizes
    assert bench_of(["--dtype", dtype], ranks).sizes((1, 64, 1000), ranks) == sizes


def test_types_that_are_asked_for():
    bench = bench_of(["--dtype", "bf16, float32,bfloat16"], 2)
    assert [dtype.name for dtype in bench.dtypes] == ["bfloat16", "float32"]
    module = SimpleNamespace(rows=lambda bench: iter([{"us": bench.dtype.itemsize}]))
    named = [{"dtype": "bfloat16", "us": 2}, {"dtype": "float32", "us": 4}]
    assert list(bench.rows(module)) == named
    assert list(bench_of([], 2).rows(module)) == [{"us": 2}]
    with pytest.raises(DtypeError, match="'nothing' is not a dtype"):
        bench_of(["--dtype", "int8,nothing"], 2)


def test_types_of_reductions_are_those_of_the_kernels():
    for dtype in dtypes.SUPPORTED:
        if dtype.name in REDUCED:
            check_types("all_reduce", dtype, dtype, "sum", "sm_90")
        else:
            with pytest.raises(DtypeError):
                check_types("all_reduce", dtype, dtype, "sum", "sm_90")


@pytest.mark.parametrize("size", ["600M", "4K,512M:1G"])
def test_memory_of_a_gpu(monkeypatch, size):
    gpus = [{"memory_bytes": 2 << 30}, {"memory_bytes": 800 << 20}]
    monkeypatch.setattr(facts, "devices", lambda: {"gpus": gpus})
    monkeypatch.setattr("tdx.runtime.backends.choose", lambda name: "cuda")
    given = argparse.Namespace(
        operation="all_gather", dtype="int8", shapes=None, ranks=2, backend=None, sizes=size
    )
    with pytest.raises(InvalidArgument, match=r"--sizes: .* of each of 2 ranks, .* 800 MiB; take"):
        bench_options._check_memory(given)
    given.sizes = "500M"
    bench_options._check_memory(given)
