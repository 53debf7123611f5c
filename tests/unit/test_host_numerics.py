"""Narrow floats on the host tier: bit for bit what ml_dtypes and NumPy round to."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

import tdx

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
F16 = np.dtype(np.float16)


@pytest.fixture(scope="module")
def world():
    with tdx.init(backend="host", timeout_s=5) as world:
        yield world


@triton.jit
def _arithmetic(a, b, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x + y)
    tl.store(out + n + i, x - y)
    tl.store(out + 2 * n + i, x * y)
    tl.store(out + 3 * n + i, -x)
    tl.store(out + 4 * n + i, tl.abs(x))
    tl.store(out + 5 * n + i, tl.where(x < y, x, y))
    tl.store(out + 6 * n + i, tl.maximum(x, y))
    tl.store(out + 7 * n + i, x + 1.5)


@triton.jit
def _convert(source, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(source + i).to(out.dtype.element_ty))


@triton.jit
def _reductions(source, out, BLOCK: tl.constexpr):
    x = tl.load(source + tl.arange(0, BLOCK))
    tl.store(out, tl.sum(x))
    tl.store(out + 1, tl.max(x))
    tl.store(out + 2, tl.min(x))
    tl.store(out + 3 + tl.arange(0, BLOCK), tl.cumsum(x))
    tl.store(out + 3 + BLOCK + tl.arange(0, BLOCK), tl.sort(x))


@triton.jit
def _dot(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _accumulate(target, value, rounds):
    for _ in range(rounds):
        tl.atomic_add(target + tl.arange(0, 4), value.to(target.dtype.element_ty))


@triton.jit
def _fma(a, b, c, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.fma(tl.load(a + i), tl.load(b + i), tl.load(c + i)))


def _values(dtype, n, seed):
    """Random bit patterns without NaN, so that every exponent occurs."""
    bits = np.random.default_rng(seed).integers(0, 1 << (8 * dtype.itemsize), n)
    values = bits.astype(f"u{dtype.itemsize}").view(dtype)
    return np.where(np.isnan(values.astype(np.float32)), np.ones((), dtype), values)


def _same(found, wanted):
    """Equal bits, any NaN for any NaN."""
    nan = np.isnan(wanted.astype(np.float32))
    assert (np.isnan(found.astype(np.float32)) == nan).all()
    width = f"u{wanted.dtype.itemsize}"
    assert (found.view(width)[~nan] == wanted.view(width)[~nan]).all()


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_arithmetic(world, dtype):
    n = 1024
    a, b = _values(dtype, n, 1), _values(dtype, n, 2)
    out = world.empty(8 * n, dtype)
    _arithmetic[(1,)](world.array(a), world.array(b), out, n, BLOCK=n)
    one_and_a_half = np.asarray(1.5, dtype)
    with np.errstate(all="ignore"):
        wanted = [
            a + b, a - b, a * b, -a, np.abs(a), np.where(a < b, a, b), np.maximum(a, b),
            a + one_and_a_half,
        ]  # fmt: skip
    nothing = np.zeros((), dtype)
    for found, right in zip(out.numpy().reshape(8, n), wanted, strict=True):
        zero = right.astype(np.float32) == 0  # Triton negates by 0 - x: the zero's sign differs
        _same(np.where(zero, nothing, found), np.where(zero, nothing, right))


@pytest.mark.parametrize("source", [np.dtype("f4"), np.dtype("f8"), F16, BF16], ids=str)
@pytest.mark.parametrize("target", [BF16, F16, E4M3, E5M2], ids=str)
def test_conversions(world, source, target):
    n = 4096
    if source.itemsize == 8:  # also values just beside the middle of two narrow ones
        x = _values(target, n, 5).astype(np.float64) * (1 + 2.0**-9) * (1 + 2.0**-45)
        x = np.where(np.abs(x) < float(ml_dtypes.finfo(target).max) / 2, x, 1.0)
    else:
        x = _values(source, n, 3)
    out = world.empty(n, target)
    _convert[(1,)](world.array(x), out, BLOCK=n)
    with np.errstate(all="ignore"):
        if target in (E4M3, E5M2):  # the hardware saturates
            limit = float(ml_dtypes.finfo(target).max)
            x = np.clip(x.astype(np.float64), -limit, limit)
        wanted = _round_once(x, target) if x.dtype == np.float64 else x.astype(target)
    _same(out.numpy(), wanted)


def _round_once(values, target):
    """float64 to `target`, nearest even: the nearer of the two neighbours of a first guess."""
    guess = values.astype(np.float32).astype(target)
    width = np.dtype(f"i{target.itemsize}")
    best, error = guess, np.abs(guess.astype(np.float64) - values)
    for step in (-1, 1):
        other = (guess.view(width) + width.type(step)).view(target)
        distance = np.abs(other.astype(np.float64) - values)
        even = other.view(width) % 2 == 0
        nearer = (distance < error) | ((distance == error) & even)
        best, error = np.where(nearer, other, best), np.where(nearer, distance, error)
    return best


@pytest.mark.parametrize("source", [BF16, E4M3, E5M2], ids=str)
def test_widening_is_exact(world, source):
    bits = np.arange(1 << (8 * source.itemsize))[: 1 << 16]
    x = bits.astype(f"u{source.itemsize}").view(source)
    out = world.empty(x.shape, np.float32)
    _convert[(1,)](world.array(x), out, BLOCK=x.size)
    assert np.array_equal(out.numpy(), x.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_reductions_scans_and_sort(world, dtype):
    n = 64
    x = np.random.default_rng(0).integers(-8, 8, n).astype(dtype)
    out = world.empty(3 + 2 * n, dtype)
    _reductions[(1,)](world.array(x), out, BLOCK=n)
    found, wide = out.numpy().astype(np.float32), x.astype(np.float32)
    assert found[:3].tolist() == [wide.sum(), wide.max(), wide.min()]
    assert (found[3 : 3 + n] == np.cumsum(wide)).all()
    assert (found[3 + n :] == np.sort(wide)).all()


@pytest.mark.parametrize("dtype", [BF16, F16, E4M3, E5M2], ids=str)
def test_dot(world, dtype):
    n = 16
    a, b = (np.random.default_rng(s).integers(-4, 4, (n, n)).astype(dtype) for s in (0, 1))
    out = world.empty((n, n), np.float32)
    _dot[(1,)](world.array(a), world.array(b), out, N=n)
    assert (out.numpy() == a.astype(np.float32) @ b.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16, F16], ids=str)
@pytest.mark.parametrize("n", [16, 64])
def test_bits_of_dot_do_not_depend_on_the_place_in_the_tile(world, dtype, n):
    generator = np.random.default_rng(n)
    a = np.repeat(generator.standard_normal((1, n)), n, 0).astype(dtype)
    b = np.repeat(generator.standard_normal((n, 4)), n // 4, 1).astype(dtype)
    out = world.empty((n, n), np.float32)
    _dot[(1,)](world.array(a), world.array(b), out, N=n)
    found = out.numpy().view(np.int32)
    assert (found == found[0]).all()
    assert len(np.unique(found)) == 4


def test_dot_may_overflow(world):
    out = world.empty((16, 16), np.float32)
    huge = world.array(np.full((16, 16), 3e38, np.float32))
    _dot[(1,)](huge, huge, out, N=16)
    assert (out.numpy() == np.inf).all()


def test_fma_rounds_once(world):
    n = 1024
    a, b, c = (_values(BF16, n, s) for s in (1, 2, 3))
    out = world.empty(n, BF16)
    _fma[(1,)](world.array(a), world.array(b), world.array(c), out, BLOCK=n)
    with np.errstate(all="ignore"):
        a, b, c = (v.astype(np.longdouble) for v in (a, b, c))
        exact = (a * b + c).astype(np.float64)
    fine = np.isfinite(exact) & (np.abs(exact) < 3e38) & (np.abs(exact) > 1e-37)
    _same(out.numpy()[fine], _round_once(exact[fine], BF16))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_16_bit_atomics(world, dtype):
    target = world.zeros(4, dtype)
    _accumulate[(8,)](target, 1.0, 16)
    assert (target.numpy().astype(np.float32) == 128).all()


@triton.jit
def _extremes(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + N + i, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 2 * N + i, tl.maximum(x, y))
    tl.store(out + 3 * N + i, tl.minimum(x, y))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, F16, BF16, E5M2])
def test_zeros_of_both_signs(world, dtype):
    """+0 is the larger one, as PTX has it; NaN and all else as usual."""
    a = np.array([0.0, -0.0, 0.0, -0.0, np.nan, 1, -2, 3], dtype)
    b = np.array([-0.0, 0.0, 0.0, -0.0, 1, np.nan, -0.0, 3], dtype)
    x, y = (world.array(v, symmetric=False) for v in (a, b))
    out = world.empty((4, 8), dtype, symmetric=False)
    _extremes[(1,)](x, y, out, N=8)
    most, least = (np.float64(v) for v in ([0, 0, 0, -0.0], [-0.0, -0.0, 0, -0.0]))
    got = out.numpy().astype(np.float64)
    for row, zeros in zip(got, (most, least, most, least), strict=True):
        np.testing.assert_array_equal(np.signbit(row[:4]), np.signbit(zeros))
    assert np.isnan(got[:2, 4:6]).all()
    assert (got[2:, 4:6] == 1).all()
    np.testing.assert_array_equal(got[:, 6:], [[-0.0, 3], [-2, 3]] * 2)
