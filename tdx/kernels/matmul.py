"""Matrix product on one rank, and the tile code that the overlapped products share.

C = act(A . B + bias): A (M, K), B (K, N), any strides, any M, N, K. Accumulates in float32.
Persistent blocks walk over the tiles in groups of rows, so that tiles which run together share
columns of B in cache (the grouped order of Triton's matmul tutorial).

float32 inputs are multiplied as IEEE float32 unless `allow_tf32=True`. For one Config the bits
of a tile depend on its inputs only: not on the rank, the run, or how many blocks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl

from tdx.kernels.call import Call, remembered
from tdx.kernels.operand import Operand, check_output, enter, flattened, operand
from tdx.kernels.select import constants, power_of_two, tile_for
from tdx.runtime import dtypes
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["ACTIVATIONS", "Config", "Epilogue", "choose", "matmul"]

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
_INPUTS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Config:
    """How a matmul runs; pins the bits of its result.

    Attributes
    ----------
    block_m, block_n, block_k : int
        Rows, columns and depth of a tile, powers of two >= 16.
    group_m : int
        Rows of tiles that are walked through together.
    num_warps, num_stages : int
        Warps of a block, and depth of the load pipeline.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(self, name)
            if value < 16 or value != power_of_two(value):
                raise InvalidArgument(f"{name}={value} must be a power of two >= 16")
        if self.num_warps < 1 or self.num_warps != power_of_two(self.num_warps):
            raise InvalidArgument(f"num_warps={self.num_warps} must be a power of two")
        if self.group_m < 1 or self.num_stages < 1:
            raise InvalidArgument(
                f"group_m={self.group_m} and num_stages={self.num_stages} must be >= 1"
            )


def choose(backend: str, m: int, n: int, k: int, dtype: np.dtype) -> Config:
    """The tile for a product of this size."""
    tile = tile_for(backend, m, n, k, dtype.itemsize)
    return Config(*tile, num_stages=constants(backend).stages)


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
def tile_product(
    a, b, row, col, rows, columns, depth, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The float32 product of tile (row, col): (BM, BN), zero outside the matrices."""
    # scalars step through memory; the offsets of a tile's elements have 32 bits and stay
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rk = tl.arange(0, BK)
    first_row = tl.cast(row, tl.int64) * BM
    first_column = tl.cast(col, tl.int64) * BN
    a_tile = a + first_row * stride_am
    b_tile = b + first_column * stride_bn
    a_at = rm[:, None] * stride_am + rk[None, :] * stride_ak
    b_at = rk[:, None] * stride_bk + rn[None, :] * stride_bn
    a_inside = rm[:, None] < rows - row * BM
    b_inside = rn[None, :] < columns - col * BN
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        left = depth - start
        x = tl.load(a_tile + a_at, mask=a_inside & (rk[None, :] < left), other=0.0)
        y = tl.load(b_tile + b_at, mask=(rk[:, None] < left) & b_inside, other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        a_tile += BK * stride_ak
        b_tile += BK * stride_bk
    return total


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of a float32 block."""
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
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
def store_tile(
    c, total, bias, row, col, rows, columns, stride_cm, when,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Bias, activation, one rounding, and the store of a tile; nothing unless `when`."""
    total = finish_tile(total, bias, col, columns, BN, HAS_BIAS, ACTIVATION)
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    first_row = tl.cast(row, tl.int64) * BM
    first_column = tl.cast(col, tl.int64) * BN
    mask = (rm[:, None] < rows - row * BM) & (rn[None, :] < columns - col * BN) & when
    c_tile = c + first_row * stride_cm + first_column
    at = rm[:, None] * stride_cm + rn[None, :]
    tl.store(c_tile + at, total.to(c.dtype.element_ty), mask=mask)


_SIZES = ["rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn"]


@triton.jit(do_not_specialize=_SIZES)
def matmul_kernel(
    a, b, c, bias, rows, columns, depth, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_am, stride_ak = known_strides(stride_am, stride_ak, A_UNIT, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(columns, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        total = tile_product(
            a, b, row, col, rows, columns, depth, stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION,
        )  # fmt: skip
        store_tile(
            c, total, bias, row, col, rows, columns, columns, True, BM, BN, HAS_BIAS, ACTIVATION
        )


@dataclass(frozen=True)
class Epilogue:
    """What happens to a product before it is stored.

    Attributes
    ----------
    bias : bool
        Whether calls pass a vector of N elements.
    activation : str or None
        One of ACTIVATIONS.
    out_dtype : np.dtype
    allow_tf32 : bool
        Whether float32 inputs may be rounded to tf32.
    """

    bias: bool
    activation: str | None
    out_dtype: np.dtype
    allow_tf32: bool

    @classmethod
    def make(
        cls, dtype: Any, bias: bool, activation: str | None, out_dtype: Any, allow_tf32: bool
    ) -> Epilogue:
        """Check the options of a product of `dtype` inputs."""
        dtype = dtypes.resolve(dtype)
        out = dtype if out_dtype is None else dtypes.resolve(out_dtype)
        if dtype.name.startswith("float8"):
            raise Unsupported(f"products of {dtype} are not offered yet; convert to bfloat16")
        if dtype.name not in _INPUTS or out.name not in _INPUTS:
            raise DtypeError(
                f"matmul takes and gives {', '.join(_INPUTS)}; got {dtype} and out_dtype {out}"
            )
        if activation is not None and activation not in ACTIVATIONS:
            raise InvalidArgument(f"activation={activation!r} is not one of {ACTIVATIONS}")
        return cls(bias, activation, out, allow_tf32)

    @property
    def constants(self) -> dict[str, Any]:
        """Constexpr arguments of a kernel that stores results."""
        return {"HAS_BIAS": self.bias, "ACTIVATION": self.activation or "none"}

    def product_constants(
        self, config: Config, k: int, n: int, a: Sequence[int], b: Sequence[int]
    ) -> dict[str, Any]:
        """Constexpr arguments and options of a kernel with a product of these extents, strides."""
        units = [1 if s[1] == 1 else 0 if s[0] == 1 else -1 for s in (a, b)]
        rest = [
            stride
            for strides, unit in zip((a, b), units, strict=True)
            for axis, stride in enumerate(strides)
            if axis != unit
        ]
        reach = max(abs(stride) for stride in (*a, *b, n)) * max(
            config.block_m, config.block_n, config.block_k
        )
        if reach >= 1 << 31:
            raise Unsupported(f"strides {a} and {b}, N={n}: a tile must lie within 2**31 elements")
        return {
            "BM": config.block_m,
            "BN": config.block_n,
            "BK": config.block_k,
            "GROUP_M": config.group_m,
            "PRECISION": "tf32" if self.allow_tf32 else "ieee",
            "A_UNIT": units[0],
            "B_UNIT": units[1],
            "EVEN": not any(extent % 16 for extent in (k, n, *rest)),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }


def check_product(a: Operand, b: Operand, k: int, n: int, dtype: np.dtype) -> None:
    """Raise unless `a` and `b` are what the plan was made for."""
    if a.dtype != dtype or b.dtype != dtype:
        raise DtypeError(f"a and b must be {dtype}, got {a.dtype} and {b.dtype}")
    if a.shape[-1] != k or b.shape != (k, n):
        raise InvalidArgument(
            f"a of shape {a.shape} and b of shape {b.shape} do not fit: expected (..., {k}) and "
            f"({k}, {n})"
        )


def check_bias(world: World, bias: Any, wanted: bool, n: int, fallback: Operand) -> Operand:
    """The bias as an operand; `fallback` stands in when there is none."""
    if (bias is not None) != wanted:
        raise InvalidArgument(f"the plan was made with bias={wanted}; pass just that")
    if bias is None:
        return fallback
    op = operand(world, bias, "bias")
    if op.shape != (n,) or not op.contiguous:
        raise InvalidArgument(f"bias must be contiguous with shape ({n},), got {op.shape}")
    return op


def blocks_for(world: World, tiles: int, beside: int = 0) -> int:
    """Persistent blocks for `tiles` tiles, all resident beside that many blocks of others."""
    resident = world.driver.resident_blocks() - beside
    return max(1, min(tiles, resident, constants(world.backend).matmul_blocks))


def no_scales(*scales: Any) -> None:
    """Scaled float8 products are not offered yet."""
    if any(scale is not None for scale in scales):
        raise Unsupported("scale_a and scale_b: float8 products are not there yet; convert to bf16")


def check_fused(algorithm: str | None) -> None:
    """The overlapped products have one algorithm."""
    if algorithm not in (None, "fused"):
        raise InvalidArgument(f"algorithm={algorithm!r} is not one of None, 'fused'")


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: Any = None,
    out: Any = None,
    allow_tf32: bool = False,
    config: Config | None = None,
    algorithm: str | None = None,
    team: Group | None = None,
    stream: Any = None,
) -> Any:
    """act(a . b + bias) on this rank alone.

    Parameters
    ----------
    a, b : tdx arrays, or arrays of NumPy or a DLPack producer
        (..., K) and (K, N): float16, bfloat16 or float32. b may be strided (w.T), never copied.
    bias : array, optional
        (N,).
    activation : {"relu", "silu", "gelu", "gelu_tanh"}, optional
    out_dtype, out : optional
        Type of the result, or the array it goes to.
    allow_tf32 : bool
        Round float32 inputs to tf32.
    config : Config, optional
        Pins the tile, and with it the bits of the result.
    algorithm, team : None
        As the overlapped products have them: there is one algorithm, and no rank but this one.

    Returns (..., N) in the framework of `a`. Raises InvalidArgument, DtypeError, Unsupported.
    """
    call = Call("matmul", a, b, stream=stream)
    world = call.world
    world.check()
    no_scales(scale_a, scale_b)
    world.group(team)
    if algorithm is not None:
        raise InvalidArgument(f"algorithm={algorithm!r}: a matmul on one rank has only one")
    x, y = call.operand(a, "a", strided=True), call.operand(b, "b", strided=True)
    if len(y.shape) != 2:
        raise InvalidArgument(f"b must have 2 axes (K, N), got shape {y.shape}")
    k, n = y.shape
    epilogue = Epilogue.make(x.dtype, bias is not None, activation, out_dtype, allow_tf32)
    check_product(x, y, k, n, x.dtype)
    rows, *strides = flattened(x)
    shape = (*x.shape[:-1], n)
    target = call.target(out, shape, epilogue.out_dtype)
    to = check_output(world, target, shape, epilogue.out_dtype)
    vector = check_bias(world, call.optional(bias, "bias"), bias is not None, n, x)
    config = config or choose(world.backend, rows, n, k, x.dtype)
    strides = (*strides, *y.strides)
    if rows and n:
        ops = (x, y, to, vector)
        run = remembered(
            world, "matmul", (rows, n, k, strides, *(op.dtype for op in ops), epilogue, config),
            lambda: _bind(world, rows, n, k, strides, ops, epilogue, config),
        )  # fmt: skip
        handle = call.handle()
        enter(world, handle, *ops)
        run(handle, *ops)
    return call.finish(target)


def _bind(
    world: World, rows: int, n: int, k: int, strides: tuple[int, ...], ops: Sequence[Operand],
    epilogue: Epilogue, config: Config,
) -> Callable[..., None]:  # fmt: skip
    tiles = -(-rows // config.block_m) * -(-n // config.block_n)
    constants = epilogue.product_constants(config, k, n, strides[:2], strides[2:])
    return world.driver.bind(
        matmul_kernel, blocks_for(world, tiles), tuple(op.dtype for op in ops),
        (rows, n, k, *strides), constants | epilogue.constants,
    )  # fmt: skip
