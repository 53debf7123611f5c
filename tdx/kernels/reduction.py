"""What the reducing operations share: types, how two values combine, the one rounding at the end.

Floats are accumulated in float32, float64 in float64, integers in their own type, wrapping. max and
min propagate NaN. "avg" is the sum divided by the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.select import MOST_ELEMENTS, MOST_WARPS, power_of_two
from tdx.runtime import dtypes
from tdx.runtime.checks import make_ints
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported

__all__ = [
    "OPERATIONS",
    "ReductionConfig",
    "add_to",
    "check_added",
    "check_types",
    "combine",
    "finish",
    "from_halves",
    "from_words",
    "load_added",
    "mean",
    "reduce_words",
    "to_halves",
    "to_words",
    "widen",
]

OPERATIONS = ("sum", "avg", "max", "min")
_THREAD_LANES = 4  # of words: with more of them a kernel spills, and compiles for minutes


@dataclass(frozen=True)
class ReductionConfig:
    """How a reduction runs; each operation has its own, with its algorithms.

    Attributes
    ----------
    algorithm : str
    block : int
        Elements a block handles at a time, a power of two >= 2; where data and flag share words,
        of each of the 7 values in a lane (see packed.py), on GPUs at most 4 lanes a thread.
    num_warps : int
        Warps of a block, a power of two.
    blocks : int, optional
        Most blocks; None: as many as there are tasks for. Never more than are resident together.
    steps : int, optional
        Least number of pieces in which shards pass through the staging memory, for algorithms
        that push shards; None: as many as are fast. More where that memory would be too large.
    """

    algorithm: str
    block: int
    num_warps: int = 8
    blocks: int | None = None
    steps: int | None = None

    algorithms: ClassVar[tuple[str, ...]] = ()
    packed: ClassVar[tuple[str, ...]] = ("low_latency",)  # how those with tiles of words begin

    @classmethod
    def check(
        cls, config: object, operation: str, algorithm: object, dtype: np.dtype | None = None,
        backend: str = "host",
    ) -> None:  # fmt: skip
        """Raise InvalidArgument unless `config` is None or one of this operation's `algorithm`,
        and threads of a GPU hold its tile of words of `dtype`, if that is given.
        """
        if config is None:
            return
        if not isinstance(config, cls):
            raise InvalidArgument(
                f"{operation}: config={config!r} must be a {cls.__module__}.Config"
            )
        if algorithm not in (None, config.algorithm):
            raise InvalidArgument(
                f"{operation}: algorithm={algorithm!r} beside a config of "
                f"{config.algorithm!r}; pass one of them"
            )
        if dtype is None or backend == "host" or not config.algorithm.startswith(cls.packed):
            return
        lanes, most = config.lanes(dtype), 32 * _THREAD_LANES * config.num_warps
        if lanes > most:
            raise InvalidArgument(
                f"{operation}: block={config.block} of {config.algorithm} is {lanes} lanes of "
                f"words of {dtype}, and num_warps={config.num_warps} have registers for {most} at "
                f"most; pass block={most * 4 // dtype.itemsize} or less"
            )

    def lanes(self, dtype: np.dtype) -> int:
        """Lanes of a tile of words with flags, of elements of `dtype`: see packed.py."""
        return self.block * dtype.itemsize // 4

    def __post_init__(self) -> None:
        if self.algorithm not in self.algorithms:
            raise InvalidArgument(
                f"algorithm={self.algorithm!r} is not one of {', '.join(self.algorithms)}"
            )
        given = [name for name in ("blocks", "steps") if getattr(self, name) is not None]
        make_ints(self, "block", "num_warps", *given)
        for name in ("block", "num_warps"):
            value = getattr(self, name)
            least = 2 if name == "block" else 1
            if value != power_of_two(value) or value < least:
                raise InvalidArgument(f"{name}={value} must be a power of two >= {least}")
        # the host tier holds 8 lanes' values in a block: see packed_blocks
        words = self.algorithm.startswith((*self.packed, "low_latency"))
        most = MOST_ELEMENTS // (8 if words else 1)
        if self.block > most or self.num_warps > MOST_WARPS:
            raise InvalidArgument(
                f"block={self.block} must be at most {most} for {self.algorithm}, and "
                f"num_warps={self.num_warps} at most {MOST_WARPS}"
            )
        for name in given:
            value = getattr(self, name)
            if value < 1:
                raise InvalidArgument(f"{name}={value} must be None or at least 1")


def check_added(operation: str, made: tuple[bool, bool], bias: Any, residual: Any) -> None:
    """Raise InvalidArgument unless a call adds what its plan was `made` with."""
    if (bias is not None, residual is not None) != made:
        raise InvalidArgument(
            f"{operation}: the plan was made with bias={made[0]}, residual={made[1]}; pass just "
            "those"
        )


def check_types(
    operation: str, dtype: np.dtype, out: np.dtype, op: str, arch: str, adds: bool = False
) -> None:
    """Raise unless `op` takes `dtype` on `arch` and may round to `out`.

    `adds`: bias or residual follow.
    """
    if op not in OPERATIONS:
        raise InvalidArgument(f"{operation}: op={op!r} is not one of {', '.join(OPERATIONS)}")
    if dtype.name in ("int32", "int64"):
        if op == "avg":
            raise Unsupported(f"{operation}: op='avg' of integers is not offered; use op='sum'")
        if out != dtype or adds:
            raise DtypeError(
                f"{operation} of {dtype}: out_dtype, bias and residual are for floats only"
            )
    elif not dtypes.is_float(dtype):
        raise DtypeError(
            f"{operation} does not take {dtype}; it takes float16, float32, float64, bfloat16, "
            "float8_e4m3fn, float8_e5m2, int32 and int64"
        )
    elif not dtypes.is_float(out):
        raise DtypeError(
            f"{operation} of {dtype}: out_dtype {out} must be a float type, such as {dtype}"
        )
    elif dtype.itemsize == 8 and out.itemsize == 1:  # no GPU rounds once from one to the other
        raise DtypeError(
            f"{operation} of {dtype}: out_dtype {out} is for inputs of at most 32 bits; pass "
            "float32, or another out_dtype"
        )
    elif arch.startswith("sm_") and int(arch[3:]) < 89:
        for kind in (dtype, out):
            if kind.name == "float8_e4m3fn":
                raise Unsupported(
                    f"{operation} of {kind} needs sm_89 or later, not {arch}; use float8_e5m2 or "
                    "bfloat16"
                )


@triton.jit
def widen(x):
    """Values in the type they are accumulated in."""
    if x.dtype.is_floating() and x.dtype != tl.float64:
        x = x.to(tl.float32)
    return x


@triton.jit
def combine(total, value, OP: tl.constexpr):
    """Two accumulated values as one."""
    if OP == "max":
        total = tl.maximum(total, value, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "min":
        total = tl.minimum(total, value, propagate_nan=tl.PropagateNan.ALL)
    else:
        total = total + value
    return total


@triton.jit
def mean(total, ranks, OP: tl.constexpr):
    """What is left to do when all ranks are combined: divide, for "avg"."""
    if OP == "avg":
        if total.dtype == tl.float64:
            total = total / ranks.to(tl.float64)
        else:
            total = tl.div_rn(total, ranks.to(tl.float32) + tl.zeros_like(total))
    return total


@triton.jit
def load_added(
    bias, residual, offsets, mask, columns, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):  # fmt: skip
    """What is added to the sums at `offsets`, a tuple. To be loaded while these are on their way:
    no load can be moved across a store.
    """
    added = ()
    if HAS_BIAS:
        added = added + (tl.load(bias + offsets % columns, mask=mask),)  # noqa: RUF005
    if HAS_RESIDUAL:
        added = added + (tl.load(residual + offsets, mask=mask),)  # noqa: RUF005
    return added


@triton.jit
def add_to(total, added):
    """The sum with what `load_added` returned."""
    for i in tl.static_range(len(added)):
        total = total + added[i].to(total.dtype)
    return total


@triton.jit
def finish(total, out, added, offsets, mask, ranks, OP: tl.constexpr):
    """Divide, add what `load_added` returned, round once and store."""
    total = add_to(mean(total, ranks, OP), added)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def to_words(values, PAIRS: tl.constexpr):
    """Elements as what store_ll takes: 4 or 8 bytes each, those of 2 bytes in pairs."""
    if PAIRS:
        low, high = tl.split(tl.reshape(values, (values.shape[0] // 2, 2)))
        words = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = words | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        words = values
    return words


@triton.jit
def from_words(words, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """Undo to_words."""
    if PAIRS:
        low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        values = tl.interleave(low, high)
    else:
        values = words
    return values


@triton.jit
def to_halves(values, HIGH: tl.constexpr):
    """The low or the high halves of elements of 4 bytes, as words of two neighbours' halves."""
    values = values.to(tl.int32, bitcast=True)
    first, second = tl.split(tl.reshape(values, (values.shape[0] // 2, 2)))
    high = ((first >> 16) & 0xFFFF) | (second & -0x10000)
    return high if HIGH else (first & 0xFFFF) | (second << 16)


@triton.jit
def from_halves(low, high, DTYPE: tl.constexpr):
    """Undo to_halves."""
    first = (low & 0xFFFF) | (high << 16)
    second = ((low >> 16) & 0xFFFF) | (high & -0x10000)
    return tl.interleave(first, second).to(DTYPE, bitcast=True)


@triton.jit
def reduce_words(
    own, words, world, DTYPE: tl.constexpr, OP: tl.constexpr, RANKS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Reduce what `load_ll_all` returned, and the own words, in rank order; not rounded."""
    me = tdl.rank(world)
    total = widen(from_words(tl.where(me == 0, own, words[0]), DTYPE, PAIRS))
    for peer in tl.static_range(1, RANKS):
        value = from_words(tl.where(me == peer, own, words[peer]), DTYPE, PAIRS)
        total = combine(total, widen(value), OP)
    return total
