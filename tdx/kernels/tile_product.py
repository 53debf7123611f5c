"""What kernels with products do with a tile: its place, the sum over K, the end, the store."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "finish_tile", "grouped_tile", "known", "known_strides", "quarters", "store_tile",
    "store_value", "tile_inside", "tile_places", "tile_product",
]  # fmt: skip

# Tensor cores of sm_89 and sm_90 sum products of float8 in less than float32: so much of the depth
# at a time, which for bfloat16 results adds 2 % to the error of rounding them.
_SPAN = tl.constexpr(512)


@triton.jit
def known(size, EVEN: tl.constexpr):
    """`size`; with EVEN it is a multiple of 16, in terms that the compiler sees through."""
    if EVEN:
        size = size // 16 * 16
    return size


@triton.jit
def known_strides(first, second, UNIT: tl.constexpr, EVEN: tl.constexpr):
    """Strides of which number UNIT is 1, or none, and with EVEN the others multiples of 16."""
    first = 1 if UNIT == 0 else known(first, EVEN)
    second = 1 if UNIT == 1 else known(second, EVEN)
    return first, second


@triton.jit
def grouped_tile(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile `index` in grouped order."""
    per_group = GROUP_M * tiles_n
    first = (index // per_group) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    return first + (index % per_group) % height, (index % per_group) // height


@triton.jit
def _add_product(total, part, x, y, depth, PRECISION: tl.constexpr):
    """`total`, and `part` + x . y; "promoted": the part joins the total at multiples of _SPAN."""
    if PRECISION == "promoted":
        part = tl.dot(x, y, part)
        if depth % _SPAN == 0:
            total += part
            part = tl.zeros_like(part)
    else:
        part = tl.dot(x, y, part, input_precision=PRECISION)
    return total, part


@triton.jit
def tile_product(
    a, b, scale_a, scale_b, base, row, col, rows, columns, depth,
    stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr, DESCRIBED: tl.constexpr,
    first=0,
):  # fmt: skip
    """The float32 product of tile (row, col) of A's `rows` rows from `base` on: (BM, BN).

    Of the depth from `first` to `depth`. Zero outside B, and of rows beyond `rows` undefined.
    DESCRIBED: a and b are tensor descriptors, b's of the transpose if B_UNIT is 0. float8 inputs
    are scaled: scales lie A_STEP, B_STEP elements apart; 0: one for all. PRECISION: "ieee"; "tf32",
    to which float32 operands are rounded; "promoted", see _SPAN.
    """
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    first_row = base + tl.cast(row, tl.int64) * BM
    first_column = tl.cast(col, tl.int64) * BN
    total = tl.zeros((BM, BN), tl.float32)
    part = tl.zeros((BM, BN), tl.float32)
    if DESCRIBED:
        for start in range(first, depth, BK):
            x = a.load([first_row.to(tl.int32), start])
            if B_UNIT == 0:
                y = b.load([first_column.to(tl.int32), start]).T
            else:
                y = b.load([start, first_column.to(tl.int32)])
            total, part = _add_product(total, part, x, y, start + BK, PRECISION)
    else:
        # scalars step through memory; the offsets of a tile's elements have 32 bits and stay
        rk = tl.arange(0, BK)
        begin = tl.cast(first, tl.int64)
        a_tile = a + first_row * stride_am + begin * stride_ak
        b_tile = b + first_column * stride_bn + begin * stride_bk
        a_at = rm[:, None] * stride_am + rk[None, :] * stride_ak
        b_at = rk[:, None] * stride_bk + rn[None, :] * stride_bn
        a_inside = rm[:, None] < rows - row * BM
        b_inside = rn[None, :] < columns - col * BN
        for start in range(first, depth, BK):
            left = depth - start
            x = tl.load(a_tile + a_at, mask=a_inside & (rk[None, :] < left), other=0.0)
            y = tl.load(b_tile + b_at, mask=(rk[:, None] < left) & b_inside, other=0.0)
            total, part = _add_product(total, part, x, y, start + BK, PRECISION)
            a_tile += BK * stride_ak
            b_tile += BK * stride_bk
    if PRECISION == "promoted":
        total += part
    else:
        total = part
    kind = a.dtype if DESCRIBED else a.dtype.element_ty
    if kind.is_fp8():
        scale_rows = tl.load(
            scale_a + (first_row + rm) * A_STEP, mask=rm < rows - row * BM, other=0.0
        )
        scale_columns = tl.load(
            scale_b + (first_column + rn) * B_STEP, mask=rn < columns - col * BN, other=0.0
        )
        total = total * scale_rows[:, None] * scale_columns[None, :]
    return total


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of a float32 block."""
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is 1 / (1 + exp(-2 * u))
        x = x / (1.0 + tl.exp(-1.5957691216057308 * x - 0.07135481282056927 * x * x * x))
    return x


@triton.jit
def finish_tile(
    total, bias, col, columns, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """Bias and activation of a tile in column `col`, not rounded."""
    if HAS_BIAS:
        rn = tl.arange(0, BN)
        first_column = tl.cast(col, tl.int64) * BN
        inside = rn < columns - col * BN
        vector = tl.load(bias + first_column + rn, mask=inside, other=0.0)
        total = total + vector.to(tl.float32)[None, :]
    return activate(total, ACTIVATION)


@triton.jit
def tile_inside(row, col, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Which elements of a tile are in the matrix."""
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    return (rm[:, None] < rows - row * BM) & (rn[None, :] < columns - col * BN)


@triton.jit
def tile_places(pitch, BM: tl.constexpr, BN: tl.constexpr):
    """Where the elements of a tile are in memory with `pitch` elements from row to row."""
    return tl.arange(0, BM)[:, None] * pitch + tl.arange(0, BN)[None, :]


@triton.jit
def store_value(c, value, row, col, columns, mask, BM: tl.constexpr, BN: tl.constexpr):
    """Store a tile of a matrix as it is."""
    c_tile = c + tl.cast(row, tl.int64) * BM * columns + tl.cast(col, tl.int64) * BN
    tl.store(c_tile + tile_places(columns, BM, BN), value, mask=mask)


@triton.jit
def quarters(x, BM: tl.constexpr, BN: tl.constexpr):
    """Columns of a tile, from left to right."""
    left, right = _halves(x, BM, BN)
    return _halves(left, BM, BN // 2) + _halves(right, BM, BN // 2)


@triton.jit
def _halves(x, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def store_tile(
    c, total, bias, row, col, rows, columns, stride_cm, when,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr = False,
):  # fmt: skip
    """Bias, activation, one rounding, and the store of a tile; nothing unless `when`."""
    if SPLIT:
        # half of the registers
        left, right = _halves(total, BM, BN)
        _store(
            c, left, bias, row, 2 * col, rows, columns, stride_cm, when, BM, BN // 2,
            HAS_BIAS, ACTIVATION,
        )  # fmt: skip
        _store(
            c, right, bias, row, 2 * col + 1, rows, columns, stride_cm, when, BM, BN // 2,
            HAS_BIAS, ACTIVATION,
        )  # fmt: skip
    else:
        _store(
            c, total, bias, row, col, rows, columns, stride_cm, when, BM, BN, HAS_BIAS, ACTIVATION
        )


@triton.jit
def _store(
    c, total, bias, row, col, rows, columns, stride_cm, when,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """As store_tile, in one piece."""
    total = finish_tile(total, bias, col, columns, BN, HAS_BIAS, ACTIVATION)
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    first_row = tl.cast(row, tl.int64) * BM
    first_column = tl.cast(col, tl.int64) * BN
    mask = (rm[:, None] < rows - row * BM) & (rn[None, :] < columns - col * BN) & when
    c_tile = c + first_row * stride_cm + first_column
    at = rm[:, None] * stride_cm + rn[None, :]
    tl.store(c_tile + at, total.to(c.dtype.element_ty), mask=mask)
