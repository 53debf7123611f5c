"""What products have in common on the host: types, tiles, and the checks of operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from tdx.kernels.operand import Operand, check_operand, operand
from tdx.kernels.plan import Plan
from tdx.kernels.plan_cache import check_recording, remembered
from tdx.kernels.select import constants
from tdx.kernels.tiles import FLOAT8_DEPTH, Config, choose_tile
from tdx.runtime import dtypes
from tdx.runtime.checks import as_float, check_bool
from tdx.runtime.driver.base import Described
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported
from tdx.runtime.world import World

__all__ = [
    "ACTIVATIONS",
    "Config",
    "Product",
    "blocks_for",
    "check_loading",
    "least_us",
]

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
_FLOAT8 = "float8_e4m3fn"
_OUTPUTS = ("float16", "bfloat16", "float32")
_INPUTS = (*_OUTPUTS, _FLOAT8)
_FLOAT32 = dtypes.resolve("float32")
_MOST = float(np.finfo(np.float32).max)
_BIASES = ", ".join(dtype.name for dtype in dtypes.SUPPORTED if dtypes.is_float(dtype))
_IMPRECISE = ("sm_89", "sm_90")  # sum float8 in less than float32


def usual_output(dtype: np.dtype) -> np.dtype:
    """The type of a product of `dtype` inputs, unless another is asked for."""
    return dtypes.resolve("bfloat16") if dtype.name == _FLOAT8 else dtype


@dataclass(frozen=True)
class Product:
    """The types of a product, and what happens to it before it is stored.

    Attributes
    ----------
    dtype : np.dtype
        Of a and b.
    out_dtype : np.dtype
    bias : bool
        Whether calls pass a vector of N elements.
    activation : str or None
        One of ACTIVATIONS.
    precision : {"ieee", "tf32", "promoted"}
        How sums over K are made: see tile_product.
    scaled : bool
        Whether inputs have scales: those of float8.
    library : bool or None
        Whether cuBLAS multiplies; None: where it is faster. See library_product.py.
    tune : bool
        Whether its algorithms are compared. See library_comparison.py.
    """

    dtype: np.dtype
    out_dtype: np.dtype
    bias: bool
    activation: str | None
    precision: str
    scaled: bool
    library: bool | None = None
    tune: bool = False

    @classmethod
    def make(
        cls, world: World, dtype: Any, *, bias: bool = False, activation: str | None = None,
        out_dtype: Any = None, allow_tf32: bool = False, fast_accum: bool = False,
        library: bool | None = None, tune: bool = True,
    ) -> Product:  # fmt: skip
        """Check the options of a product of `dtype` inputs."""
        dtype, arch = dtypes.resolve(dtype), world.device.arch
        allow_tf32 = check_bool("allow_tf32", allow_tf32)
        fast_accum = check_bool("fast_accum", fast_accum)
        scaled = dtype.name == _FLOAT8
        out = usual_output(dtype) if out_dtype is None else dtypes.resolve(out_dtype)
        if dtype.name not in _INPUTS or out.name not in _OUTPUTS:
            raise DtypeError(
                f"products take {', '.join(_INPUTS)} and give {', '.join(_OUTPUTS)}; got {dtype} "
                f"and out_dtype {out}"
            )
        if scaled and arch.startswith("sm_") and int(arch[3:]) < 89:
            raise Unsupported(f"products of {dtype} need sm_89 or later, not {arch}; use bfloat16")
        if activation is not None and not (
            isinstance(activation, str) and activation in ACTIVATIONS
        ):
            raise InvalidArgument(f"activation={activation!r} is not one of {ACTIVATIONS}")
        if scaled and world.recording is None:
            _constant(world, 1.0, "scale")  # calls without scales, recorded ones too, find it there
        if scaled and arch in _IMPRECISE and not fast_accum:
            precision = "promoted"
        else:
            precision = "tf32" if allow_tf32 and dtype == _FLOAT32 else "ieee"
        if library is not None and not isinstance(library, (bool, np.bool_)):
            raise InvalidArgument(f"library={library!r} must be True, False or None")
        library = None if library is None else bool(library)
        tune = check_bool("tune", tune)
        return cls(dtype, out, bias, activation, precision, scaled, library, tune)

    @property
    def scale_dtype(self) -> np.dtype:
        """The type of scales, or of what stands in for them."""
        return _FLOAT32 if self.scaled else self.dtype

    @property
    def bias_dtype(self) -> np.dtype:
        """The type that a bias usually has, or of what stands in for it."""
        return self.out_dtype if self.bias else self.dtype

    @property
    def constants(self) -> dict[str, Any]:
        """Constexpr arguments of a kernel that stores results."""
        return {"HAS_BIAS": self.bias, "ACTIVATION": self.activation or "none"}

    def tile(
        self, config: Config | None, world: World, m: int, n: int, k: int, parts: int = 1,
        split: bool = False, sending_us: float = 0, described: bool = True,
        ends: Callable[[int, int], float] | None = None,
    ) -> Config:  # fmt: skip
        """`config` if it will do, or else the tile for `parts` products of this size.

        `described`: as the operands are, tensor descriptors may fill it. The others: see
        choose_tile.
        """
        if config is None:
            described &= self._unfit(world, Config(16, 16, 16)) is None
            return choose_tile(
                world.backend, world.device.arch, m, n, k, self.dtype.itemsize, described,
                world.driver.resident_blocks(), parts, split, sending_us,
                self.precision == "promoted", ends,
            )  # fmt: skip
        if self.scaled and config.block_k < FLOAT8_DEPTH:
            raise InvalidArgument(
                f"block_k={config.block_k} must be >= {FLOAT8_DEPTH} for products of {self.dtype}"
            )
        if config.group_m * -(-n // config.block_n) >= 1 << 31:  # kernels count them in 32 bits
            raise InvalidArgument(
                f"group_m={config.group_m} with N={n}: so many rows of tiles must have less than "
                "2**31 tiles; pass less"
            )
        if config.descriptors:
            _refuse(self._unfit(world, config))
        return config

    def described(
        self, world: World, config: Config, sizes: Sequence[int], aligned: bool = True
    ) -> bool:
        """Whether a and b are read through tensor descriptors.

        `sizes`: rows of a in all, N, K, and two strides each; `aligned`: they begin at multiples
        of 16 bytes. What is empty is not read.
        """
        if config.descriptors is False or (config.descriptors is None and world.backend == "host"):
            return False
        refusal = self._unfit(world, config) or self._unfit_operands(sizes, aligned)
        if config.descriptors and min(sizes[:3]):
            _refuse(refusal)
        return refusal is None

    def prepares(self, config: Config, sizes: Sequence[int]) -> bool:
        """Whether a kernel can be prepared for operands so laid out, which may not come.

        Not if those would be refused: by `config`, or by cuBLAS, which is to multiply.
        """
        pinned = config.descriptors and self._unfit_operands(sizes, True)
        return not (pinned or self.library)

    def _unfit(self, world: World, config: Config) -> str | None:
        """Why tensor descriptors will not do with any operands."""
        arch = world.device.arch
        if world.backend == "hip" or (world.backend == "cuda" and int(arch[3:]) < 90):
            return f"{arch} has no tensor descriptors"
        if self.dtype.itemsize == 4:
            return f"products of {self.dtype} take none"
        if max(config.block_m, config.block_n, config.block_k) > 256:
            return "a side of the tile is longer than 256"
        return None

    def _unfit_operands(self, sizes: Sequence[int], aligned: bool) -> str | None:
        """Why they will not do with these. The limits are those of cuTensorMapEncodeTiled."""
        rows, n, k, a_row, a_unit, *b_strides = sizes
        size = self.dtype.itemsize
        if not min(rows, n, k):
            return "a or b is empty"
        if max(rows, n, k) >= 1 << 31:  # loads take coordinates of 32 bits
            return "a or b is longer than 2**31"
        if not aligned:
            return "a or b does not begin at a multiple of 16 bytes"
        along_n = b_strides[1] == 1 and not self.scaled  # Hopper reads float8 along K only
        if a_unit != 1 or not (along_n or b_strides[0] == 1):
            wanted = "K" if self.scaled else "K or N"
            return f"a must be contiguous along K and b along {wanted}"
        lines = ((a_row, k), (b_strides[0], n) if along_n else (b_strides[1], k))
        if any(step * size % 16 or step < extent for step, extent in lines):
            return "rows of a or lines of b do not lie multiples of 16 bytes apart"
        return None

    def kinds(
        self, config: Config, described: bool, sizes: Sequence[int]
    ) -> tuple[np.dtype | Described, np.dtype | Described]:
        """What a kernel takes as a and b; `sizes` as for `described`."""
        if not described:
            return self.dtype, self.dtype
        rows, n, k, *strides = sizes
        tile_m, tile_n, tile_k = config.block_m, config.block_n, config.block_k
        a = Described(self.dtype, (rows, k), (strides[0], 1), (tile_m, tile_k))
        if _unit(strides[2:]) == 1:
            b = Described(self.dtype, (k, n), (strides[2], 1), (tile_k, tile_n))
        else:
            b = Described(self.dtype, (n, k), (strides[3], 1), (tile_n, tile_k))
        return a, b

    def product_constants(
        self, config: Config, sizes: Sequence[int], steps: tuple[int, int], described: bool
    ) -> dict[str, Any]:
        """Constexpr arguments and options of a kernel with such a product; see `described`.

        `steps`: how far apart the scales of rows and of columns are; 0 where one is for all.
        """
        _, n, k, *a = sizes
        a, b = a[:2], a[2:]
        units = [_unit(a), _unit(b)]
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
            "PRECISION": self.precision,
            "A_UNIT": units[0],
            "B_UNIT": units[1],
            "A_STEP": steps[0],
            "B_STEP": steps[1],
            "EVEN": not any(extent % 16 for extent in (k, n, *rest)),
            "DESCRIBED": described,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }

    # ---- operands of a call
    def check(self, a: Operand, b: Operand, k: int, n: int) -> None:
        """Raise unless `a` and `b` are (..., k) and (k, n) of this type."""
        if a.dtype != self.dtype or b.dtype != self.dtype:
            raise DtypeError(f"a and b must be {self.dtype}, got {a.dtype} and {b.dtype}")
        if a.shape[-1] != k or b.shape != (k, n):
            raise InvalidArgument(
                f"a of shape {a.shape} and b of shape {b.shape} do not fit: expected (..., {k}) "
                f"and ({k}, {n})"
            )

    def check_bias(self, world: World, bias: Any, n: int, fallback: Operand) -> Operand:
        """The bias as an operand; `fallback` stands in when there is none."""
        if (bias is not None) != self.bias:
            remedy = "pass one, or one for each of several b" if self.bias else "pass none"
            raise InvalidArgument(
                f"bias: the plan was made with bias={self.bias}: {remedy}, or make the plan with "
                f"bias={not self.bias}"
            )
        if bias is None:
            return fallback
        op = operand(world, bias, "bias")
        if not dtypes.is_float(op.dtype):
            raise DtypeError(f"bias has dtype {op.dtype}, expected one of {_BIASES}")
        return check_operand(op, (n,), op.dtype, "bias")

    def check_row_scales(self, given: Any) -> bool:
        """The option row_scales."""
        if check_bool("row_scales", given) and not self.scaled:
            raise InvalidArgument(f"row_scales is for inputs of {_FLOAT8}, not of {self.dtype}")
        return bool(given)

    def takes_as_given(self, *scales: Any) -> bool:
        """Whether check_scale gives them as operands, or the fallback where there are none.

        Numbers, and what is multiplied by where float8 has no scale, are others.
        """
        return not self.scaled or not any(x is None or isinstance(x, Real) for x in scales)

    def check_scale(
        self, world: World, scale: Any, shape: tuple[int, ...], what: str, fallback: Operand
    ) -> tuple[Operand, int]:
        """The scale as an operand, and how far apart elements are; `fallback` if there are none.

        `shape` is that of one scale for each row of a, or column of b.
        """
        if not self.scaled:
            if scale is None:
                return fallback, 0
            raise InvalidArgument(f"{what} is for inputs of {_FLOAT8}, not of {self.dtype}")
        if scale is None or isinstance(scale, Real):
            return _constant(world, 1.0 if scale is None else _float32(scale, what), what), 0
        op = operand(world, scale, what)
        if op.dtype != _FLOAT32:
            raise DtypeError(f"{what} must be float32, got {op.dtype}")
        if math.prod(op.shape) == 1 and (op.shape != shape or shape == (1,)):
            return op, 0
        if op.shape != shape:
            raise InvalidArgument(
                f"{what} must be a number, an array of one element, or contiguous with shape "
                f"{shape}; got shape {op.shape}"
            )
        return check_operand(op, shape, op.dtype, what), 1


def _refuse(refusal: str | None) -> None:
    """Raise Unsupported for the reason why descriptors=True cannot be."""
    if refusal is not None:
        raise Unsupported(f"descriptors=True: {refusal}; leave it None for other loads there")


def _unit(strides: Sequence[int]) -> int:
    """Along which axis of a matrix elements are neighbours; -1: along neither."""
    return 1 if strides[1] == 1 else 0 if strides[0] == 1 else -1


def _float32(value: Real, what: str) -> float:
    number = as_float(float(value) if isinstance(value, bool) else value)
    if number is None or (abs(number) > _MOST and value not in (math.inf, -math.inf)):
        raise InvalidArgument(f"{what} is {number:g}: float32 ends at {_MOST:.6g}")
    return number


def _constant(world: World, value: float, what: str) -> Operand:
    """A number in the device's memory; the last few are kept, and 1."""

    def make() -> Operand:
        if world.recording is not None:
            raise InvalidArgument(
                f"{what}={value} would be copied to the device while a graph is being recorded; "
                "call once with it before recording, or pass a float32 array of one element"
            )
        array = world.array(np.full(1, value, np.float32), symmetric=False)
        return operand(world, array, what)

    return remembered(world, "scale" if value != 1 else "scale of 1", value, make)


def check_loading(plan: Plan, stream: Any, *operands: Operand) -> None:
    """Raise InvalidArgument if another library records the stream of a call of `plan`, which is
    about to load a kernel; see Plan.begin."""
    if stream is None and plan.world.recording is None:
        stream = next((op.home for op in operands if op.home is not None), None)
    check_recording(plan.world, plan.operation, stream)


def least_us(world: World, itemsize: int, rows: int, columns: int, depth: int) -> float:
    """Microseconds of a product, at least: as if no block was ever idle."""
    limits = constants(world.backend)
    tiles = rows * columns / (limits.tile[0] * max(limits.tile_times))
    return tiles / world.driver.resident_blocks() * limits.tile_us * depth * itemsize / 1024


def blocks_for(world: World, tiles: int, beside: int = 0) -> int:
    """Persistent blocks for `tiles` tiles, all resident beside that many blocks of others."""
    resident = world.driver.resident_blocks() - beside
    return max(1, min(tiles, resident, constants(world.backend).matmul_blocks))
