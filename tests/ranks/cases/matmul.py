"""The local product."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tdx.kernels.matmul import ACTIVATIONS, Config
from tdx.runtime.errors import DtypeError, InvalidArgument
from tests.helpers.blocks import many_blocks
from tests.helpers.cases import worlds
from tests.helpers.reference import (
    activated,
    assert_same_bits,
    error_bound,
    poisoned,
    product,
    values,
)

SHAPES = [(1, 1, 1), (5, 7, 3), (16, 16, 16), (33, 65, 129), (130, 17, 40), (64, 1, 200)]
SMALL = Config(32, 32, 32, num_warps=4)


def close(got, wanted, depth, *kinds):
    got = np.asarray(got.numpy() if hasattr(got, "numpy") else got).astype(np.float64)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    bound = error_bound(depth, *kinds)
    assert not got.size or np.abs(got - wanted).max() <= bound, (np.abs(got - wanted).max(), bound)


@worlds(1, 2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def case_values(world, dtype):
    """Any size, b as given and transposed, one tile and many."""
    for m, k, n in SHAPES:
        a, b = values(0, (m, k), dtype), values(1, (k, n), dtype)
        x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
        turned = world.array(np.ascontiguousarray(b.T), symmetric=False)
        for config in (None, SMALL):
            out = world.array(poisoned((m, n), dtype), symmetric=False)
            assert tdx.matmul(x, y, out=out, config=config) is out
            close(out, product(a, b), k, dtype)
            assert_same_bits(tdx.matmul(x, turned.T, config=config).numpy(), out.numpy())


@worlds(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", [2, 3, 16])
def case_split_along_k(world, dtype, split):
    """Parts of K, some without any of it: added in their order, in each call, with an end."""
    config = Config(16, 32, 16, split_k=split, num_warps=4)
    for m, k, n in [(1, 1, 1), (5, 40, 70), (17, 300, 33), (16, 0, 16)]:
        a, b, bias = values(0, (m, k), dtype), values(1, (k, n), dtype), values(2, n, dtype)
        x, y, z = (world.array(v, symmetric=False) for v in (a, b, bias))
        turned = world.array(np.ascontiguousarray(b.T), symmetric=False)
        wanted = activated(product(a, b) + bias.astype(np.float64), "relu")
        with many_blocks():
            outs = [
                tdx.matmul(x, right, bias=z, activation="relu", config=config)
                for right in (y, y, turned.T)
            ]
        for out in outs:
            close(out, wanted, k + 1, dtype, "float32")
            assert_same_bits(out.numpy(), outs[0].numpy())


@worlds(1)
def case_split_products_on_two_streams(world):
    """They share memory for partial sums: one waits for the other."""
    config = Config(16, 16, 16, split_k=4)
    given = [values(salt, (20, 100), "float32") for salt in range(6)]
    b = values(9, (100, 40), "float32")
    y = world.array(b, symmetric=False)
    streams = [world.new_stream(), world.new_stream()]
    loaded = [world.array(a, symmetric=False) for a in given]
    world.synchronize()
    outs = [tdx.matmul(x, y, config=config, stream=streams[i % 2]) for i, x in enumerate(loaded)]
    for a, out in zip(given, outs, strict=True):
        close(out, product(a, b), 100, "float32")


@worlds(1)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def case_nan_stays_nan(world, activation):
    a, b = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
    a[3], b[:, 5] = np.nan, np.nan
    x, y = world.array(a), world.array(b)
    wanted = np.zeros((16, 16), bool)
    wanted[3], wanted[:, 5] = True, True
    assert (np.isnan(tdx.matmul(x, y, activation=activation).numpy()) == wanted).all()


@worlds(1)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def case_bias_and_activation(world, activation):
    m, k, n = 33, 40, 29
    for dtype, out_dtype in [("float32", None), ("bfloat16", "float32"), ("float32", "bfloat16")]:
        a, b, bias = values(0, (m, k), dtype), values(1, (k, n), dtype), values(2, n, dtype)
        x, y, z = (world.array(v, symmetric=False) for v in (a, b, bias))
        result = tdx.matmul(x, y, bias=z, activation=activation, out_dtype=out_dtype, config=SMALL)
        wanted = activated(product(a, b) + bias.astype(np.float64), activation)
        assert result.dtype.name == (out_dtype or dtype)
        close(result, wanted, k, out_dtype or dtype, "float32")


@worlds(1)
def case_leading_axes_and_empty(world):
    a, b = values(0, (3, 4, 8), "float32"), values(1, (8, 5), "float32")
    x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
    close(tdx.matmul(x, y), product(a, b), 8, "float32")
    close(tdx.matmul(x[1], y), product(a[1], b), 8, "float32")
    close(tdx.matmul(x[:, 1], y), product(a[:, 1], b), 8, "float32")
    assert tdx.matmul(x[:0], y).shape == (0, 4, 5)
    assert tdx.matmul(x, y[:, :0]).shape == (3, 4, 0)
    zero = tdx.matmul(world.empty((3, 0), "float32"), world.empty((0, 5), "float32"))
    assert_same_bits(zero.numpy(), np.zeros((3, 5), np.float32))


@worlds(1)
def case_bits_do_not_depend_on_blocks_or_frameworks(world):
    a, b = values(0, (70, 50), "float32"), values(1, (50, 45), "float32")
    x, y = world.array(a, symmetric=False), world.array(b, symmetric=False)
    config = Config(32, 16, 16, num_warps=4)
    wanted = tdx.matmul(x, y, config=config).numpy()
    for group_m in (1, 3, 8):
        again = tdx.matmul(x, y, config=Config(32, 16, 16, group_m, num_warps=4))
        assert_same_bits(again.numpy(), wanted)
    assert_same_bits(tdx.matmul(x[32:64], y, config=config).numpy(), wanted[32:64])
    if world.backend == "host":
        assert_same_bits(tdx.matmul(a, b, config=config), wanted)
        assert_same_bits(tdx.matmul(a, np.asfortranarray(b), config=config), wanted)


@worlds(1)
def case_bad_arguments(world):
    x, y = world.zeros((4, 8), "float32"), world.zeros((8, 5), "float32")
    for kind, words, call in [
        (InvalidArgument, "do not fit", lambda: tdx.matmul(x, y.T)),
        (InvalidArgument, "2 axes", lambda: tdx.matmul(x, y[0])),
        (DtypeError, "float32", lambda: tdx.matmul(x, world.zeros((8, 5), "float16"))),
        (
            DtypeError,
            "products take .* and give",
            lambda: tdx.matmul(x.view("int32"), y.view("int32")),
        ),
        (InvalidArgument, "activation='tanh'", lambda: tdx.matmul(x, y, activation="tanh")),
        (InvalidArgument, "which no option takes", lambda: tdx.matmul(x, y, out_dtype=[])),
        (InvalidArgument, "bias", lambda: tdx.matmul(x, y, bias=x[0])),
        (InvalidArgument, "scale_a is for", lambda: tdx.matmul(x, y, scale_a=1.0)),
        (InvalidArgument, ">= 16", lambda: Config(8, 16, 16)),
        (InvalidArgument, "shape", lambda: tdx.matmul(x, y, out=x)),
    ]:
        with pytest.raises(kind, match=words):
            call()
