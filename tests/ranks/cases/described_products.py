"""Products whose operands are read through tensor descriptors: the bits of all other loads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tdx
from tdx.kernels.all_gather_matmul import ALGORITHMS as GATHERS
from tdx.kernels.matmul import Config
from tdx.kernels.matmul_all_reduce import ALGORITHMS
from tdx.runtime.errors import Unsupported
from tests.helpers.cases import worlds
from tests.helpers.reference import assert_same_bits, poisoned, product, values

FLOAT8 = "float8_e4m3fn"
SMALL = Config(32, 32, 32, num_warps=4, descriptors=True)
WIDE = Config(64, 256, 32, num_warps=8, descriptors=True)
# rows a rank, depth, columns, configuration: lines of 16 bytes, tiles that stick out at every edge
SHAPES = [(7, 48, 16, SMALL), (40, 80, 48, SMALL), (33, 48, 272, WIDE)]


def need_descriptors(world):
    if world.backend == "hip" or (world.backend == "cuda" and int(world.device.arch[3:]) < 90):
        pytest.skip(f"{world.device.arch} has no tensor descriptors")


def plain(config):
    return replace(config, descriptors=False)


def layouts(world, b):
    """b as given, and contiguous along its other axis, which is all that float8 has."""
    turned = world.array(np.ascontiguousarray(b.T), symmetric=False).T
    return [turned] if b.dtype.name == FLOAT8 else [world.array(b, symmetric=False), turned]


def close(got, wanted):
    error = np.linalg.norm(got.numpy().astype(np.float64) - wanted)
    assert got.shape == wanted.shape
    assert error <= 5e-3 * np.linalg.norm(wanted)


@worlds(1, 3)
@pytest.mark.parametrize("dtype", ["bfloat16", FLOAT8])
def case_values(world, dtype):
    need_descriptors(world)
    for m, k, n, config in SHAPES:
        rows = world.size * m
        parts = [values(rank, (rows, k), dtype) for rank in range(world.size)]
        a, b = parts[world.rank], values(0, (k, n), dtype, 1)
        x = world.array(a, symmetric=False)
        for y in layouts(world, b):
            own = tdx.matmul(x, y, config=config)
            close(own, product(a, b))
            assert_same_bits(own.numpy(), tdx.matmul(x, y, config=plain(config)).numpy())
            for algorithm in GATHERS:
                everybody = tdx.all_gather_matmul(x[:m], y, config=config, algorithm=algorithm)
                close(everybody, product(np.concatenate([part[:m] for part in parts]), b))
                mine = everybody.numpy()[world.rank * m : (world.rank + 1) * m]
                assert_same_bits(mine, own.numpy()[:m])
            whole = sum(product(part, b) for part in parts)
            summed = tdx.matmul_reduce_scatter(x, y, config=config, partial_dtype="float32")
            close(summed, whole[world.rank * m : (world.rank + 1) * m])
            for algorithm in ALGORITHMS:
                given = {"algorithm": algorithm, "partial_dtype": "float32"}
                result = tdx.matmul_all_reduce(x, y, config=config, **given)
                close(result, whole)
                other = tdx.matmul_all_reduce(x, y, config=plain(config), **given)
                assert_same_bits(result.numpy(), other.numpy())


@worlds(1)
def case_bias_activation_and_strides(world):
    """a's rows further apart than they are long; several leading axes."""
    need_descriptors(world)
    a, b, bias = (values(i, s, "float16") for i, s in enumerate([(3, 9, 48), (24, 40), 40]))
    x, y, z = (world.array(v, symmetric=False) for v in (a, b, bias))
    given = {"bias": z, "activation": "silu", "out_dtype": "float32"}
    for config in (SMALL, WIDE):
        got = tdx.matmul(x[..., 8:32], y, config=config, **given)
        wanted = tdx.matmul(x[..., 8:32], y, config=plain(config), **given)
        assert_same_bits(got.numpy(), wanted.numpy())


@worlds(2)
@pytest.mark.parametrize("chunks", [1, 4])
def case_memory_changes_from_call_to_call(world, chunks):
    """More memory than there are encoded descriptors kept; several b; then a graph."""
    need_descriptors(world)
    m, k, n = 70, 32, 24  # the last of 4 chunks is shorter
    plan = tdx.AllGatherMatmul(
        world, (m, k), [(k, n), (k, 2 * n)], "bfloat16", config=SMALL, chunks_per_rank=chunks
    )
    parts = [values(rank, (m, k), "bfloat16") for rank in range(world.size)]
    x = world.array(parts[world.rank], symmetric=False)
    ys, outs = [], []
    count = 3 if world.backend == "host" else 70
    for i in range(count):
        b = values(i, (k, 2 * n), "bfloat16")
        y = world.array(b, symmetric=False)
        halves = world.array(b[:, :n].copy(), symmetric=False)
        shapes = plan.out_shapes
        out = [world.array(poisoned(s, "bfloat16"), symmetric=False) for s in shapes]
        plan(x, [halves, y], out)
        ys.append((halves, y, b))
        outs.append(out)
    whole = np.concatenate(parts)
    for (_, _, b), (narrow, wide) in zip(ys, outs, strict=True):
        close(wide, product(whole, b))
        assert_same_bits(narrow.numpy(), np.ascontiguousarray(wide.numpy()[:, :n]))
    halves, y, _ = ys[0]
    with tdx.graph(world) as graph:
        results = plan(x, [halves, y])
    for _ in range(3):
        graph.replay()
        assert_same_bits(results[1].numpy(), outs[0][1].numpy())


@worlds(1)
def case_operands_that_they_do_not_take(world):
    """None: other loads. True: an error that says why."""
    need_descriptors(world)
    free = replace(SMALL, descriptors=None)
    a, b = values(0, (9, 48), "bfloat16"), values(1, (48, 40), "bfloat16")
    x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
    f = world.array(a.astype("float32"), symmetric=False)
    g = world.array(b.astype("float32"), symmetric=False)
    e, h = world.zeros((9, 48), FLOAT8), world.zeros((48, 48), FLOAT8)
    odd = world.zeros((9, 49), "bfloat16")
    turned = world.array(np.ascontiguousarray(a.T), symmetric=False).T
    for words, left, right in [
        ("products of float32 take none", f, g),
        ("contiguous along K and b along K or N", turned, y),
        ("contiguous along K and b along K;", e, h),
        ("a or b does not begin at a multiple", x[:, 1:9], y[:8]),
        ("lie multiples of 16 bytes apart", odd[:, :48], y),
    ]:
        with pytest.raises(Unsupported, match=words):
            tdx.matmul(left, right, config=SMALL)
        got = tdx.matmul(left, right, config=free)
        assert_same_bits(got.numpy(), tdx.matmul(left, right, config=plain(SMALL)).numpy())
    for left, right in ((x[:, :0], y[:0]), (x[:0], y), (x, y[:, :0])):
        assert not tdx.matmul(left, right, config=SMALL).numpy().any()
    f, g = world.zeros((2, 8), "float32"), world.zeros((8, 8), "float32")
    for kind in (tdx.AllGatherMatmul, tdx.MatmulReduceScatter, tdx.MatmulAllReduce):
        with pytest.raises(Unsupported, match="products of float32"):
            kind(world, f.shape, g.shape, "float32", config=SMALL)
    with pytest.raises(Unsupported, match="longer than 256"):
        tdx.matmul(x, y, config=replace(SMALL, block_m=512))
