"""All-reduce: every rank gets the reduction of all ranks' arrays.

W ranks, S bytes each:

one_shot     Each rank copies its array into a symmetric slot, all meet block by block, and each
             reads the slots of all ranks. (W - 1) * S bytes in, one hop and one meeting. Two
             slots used in turn replace a meeting at the end: a rank can be in call n + 2 only
             after every other has finished reading in call n, because each call meets all.
low_latency  Each rank pushes its array to all others as 64-bit words, 4 bytes of data and 4 of
             flag (the epoch), and reads what the others pushed. 2 * (W - 1) * S bytes out, one
             hop and no meeting: the data is its own signal. The protocol is that of NCCL's LL.
             Two slots in turn, as above. Types of 2 and 4 bytes.

Result: accumulated in float32 (float64 for float64, integers in their own type, wrapping) from
rank 0 upwards, then divided by W for "avg", plus bias, plus residual, rounded once. So its bits
depend neither on the algorithm nor on size, blocks or rank. max and min propagate NaN.

Ordering: when the operation is complete on a rank's stream, no peer reads its operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.operand import elements, operand
from tdx.kernels.plan import Call, Plan, cached, world_of
from tdx.kernels.select import block_elements, constants, power_of_two
from tdx.runtime import dtypes
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["AllReduce", "Config", "all_reduce"]

ALGORITHMS = ("low_latency", "one_shot")
OPERATIONS = ("sum", "avg", "max", "min")
LOW_LATENCY_LIMIT_BYTES = 4 << 20  # its slots take 4 * W times this


@dataclass(frozen=True)
class Config:
    """How an all-reduce runs.

    Attributes
    ----------
    algorithm : {"one_shot", "low_latency"}
    block : int
        Elements a block handles at a time, a power of two >= 2.
    num_warps : int
        Warps of a block, a power of two.
    """

    algorithm: str
    block: int
    num_warps: int = 8

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise InvalidArgument(
                f"algorithm={self.algorithm!r} is not one of {', '.join(ALGORITHMS)}"
            )
        for name in ("block", "num_warps"):
            value = getattr(self, name)
            if value != power_of_two(value) or value < (2 if name == "block" else 1):
                raise InvalidArgument(f"{name}={value} must be a power of two")


@triton.jit
def _combine(total, value, OP: tl.constexpr):
    if OP == "max":
        total = tl.maximum(total, value, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "min":
        total = tl.minimum(total, value, propagate_nan=tl.PropagateNan.ALL)
    else:
        total = total + value
    return total


@triton.jit
def _finish(
    total, out, bias, residual, offsets, mask, columns, ranks,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Divide, add bias and residual, round once and store."""
    if OP == "avg":
        if total.dtype == tl.float64:
            total = total / ranks.to(tl.float64)
        else:
            total = tl.div_rn(total, ranks.to(tl.float32) + tl.zeros_like(total))
    if HAS_BIAS:
        total = total + tl.load(bias + offsets % columns, mask=mask).to(total.dtype)
    if HAS_RESIDUAL:
        total = total + tl.load(residual + offsets, mask=mask).to(total.dtype)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["numel", "columns"])
def one_shot_kernel(
    x, out, bias, residual, slots, channel, world, numel, columns,
    OP: tl.constexpr, ACC: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    ranks = tdl.num_ranks(world)
    slot = slots + (tdl.epoch(channel) & 1).to(tl.int64) * numel
    for start in range(first, numel, step):
        offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = offsets < numel
        tl.store(slot + offsets, tl.load(x + offsets, mask=mask), mask=mask)
    ok = tdl.barrier(channel, world)
    for start in range(first, numel, step):
        offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = (offsets < numel) & ok
        total = tl.load(tdl.symm_at(slot, 0, world) + offsets, mask=mask).to(ACC)
        for peer in range(1, ranks):
            value = tl.load(tdl.symm_at(slot, peer, world) + offsets, mask=mask).to(ACC)
            total = _combine(total, value, OP)
        _finish(
            total, out, bias, residual, offsets, mask, columns, ranks, OP, HAS_BIAS, HAS_RESIDUAL
        )


@triton.jit
def _to_words(values, PAIRS: tl.constexpr):
    """Elements of 2 or 4 bytes as int32 words."""
    if PAIRS:
        low, high = tl.split(tl.reshape(values, (values.shape[0] // 2, 2)))
        words = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = words | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        words = values.to(tl.int32, bitcast=True)
    return words


@triton.jit
def _from_words(words, DTYPE: tl.constexpr, PAIRS: tl.constexpr):
    """Undo _to_words."""
    if PAIRS:
        low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        values = tl.interleave(low, high)
    else:
        values = words.to(DTYPE, bitcast=True)
    return values


@triton.jit(do_not_specialize=["numel", "columns", "capacity"])
def low_latency_kernel(
    x, out, bias, residual, slots, channel, world, numel, columns, capacity,
    OP: tl.constexpr, ACC: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = BLOCK // 2 if PAIRS else BLOCK
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    flag = tdl.epoch(channel)
    base = slots + (flag & 1).to(tl.int64) * ranks * capacity
    first = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    for start in range(first, numel, step):
        offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        words = _to_words(tl.load(x + offsets, mask=offsets < numel, other=0), PAIRS)
        at = tl.cast(start, tl.int64) // (BLOCK // WORDS) + tl.arange(0, WORDS)
        for hop in range(1, ranks):
            tdl.store_ll(base + me * capacity + at, words, flag, (me + hop) % ranks, world,
                         at < capacity)  # fmt: skip
    for start in range(first, numel, step):
        offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = offsets < numel
        at = tl.cast(start, tl.int64) // (BLOCK // WORDS) + tl.arange(0, WORDS)
        own = tl.load(x + offsets, mask=mask, other=0)
        words, ok = tdl.load_ll(base + at, flag, world, (at < capacity) & (me != 0), peer=0)
        value = _from_words(words, x.dtype.element_ty, PAIRS)
        total = tl.where(me == 0, own, value).to(ACC)
        for peer in range(1, ranks):
            words, arrived = tdl.load_ll(
                base + peer * capacity + at, flag, world, (at < capacity) & (me != peer), peer=peer
            )
            ok = ok & arrived
            value = _from_words(words, x.dtype.element_ty, PAIRS)
            total = _combine(total, tl.where(me == peer, own, value).to(ACC), OP)
        _finish(
            total, out, bias, residual, offsets, mask & ok, columns, ranks,
            OP, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


class AllReduce(Plan):
    """An all-reduce of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape, dtype
        Of every rank's input. float16/32/64, bfloat16, int32/64, and float8 with one_shot.
    op : {"sum", "avg", "max", "min"}
    out_dtype, optional
        Of the result: the input's, or for floats another float type.
    bias, residual : bool
        Whether calls pass a vector of the last axis' length, or an array of the input's shape,
        to be added after the reduction. Floats only.
    algorithm : {"one_shot", "low_latency"}, optional
    config : Config, optional
        Overrides the choice altogether.
    team : Team, optional

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted.
    """

    operation = "all_reduce"

    def __init__(
        self,
        world: World,
        shape: Any,
        dtype: Any,
        op: str = "sum",
        *,
        out_dtype: Any = None,
        bias: bool = False,
        residual: bool = False,
        algorithm: str | None = None,
        config: Config | None = None,
        team: Group | None = None,
    ):
        self.shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
        self.op = op
        self._has_bias, self._has_residual = bias, residual

        def check() -> None:
            self.dtype = dtypes.resolve(dtype)
            self.out_dtype = self.dtype if out_dtype is None else dtypes.resolve(out_dtype)
            _check_types(self.dtype, self.out_dtype, op, bias or residual)
            self.config = config or _choose(world, self.shape, self.dtype, algorithm)
            _check_algorithm(self.config.algorithm, self.shape, self.dtype)

        call = (
            f"all_reduce(shape={self.shape}, dtype={dtype}, op={op!r}, out_dtype={out_dtype}, "
            f"bias={bias}, residual={residual}, algorithm={algorithm!r}, config={config})"
        )
        super().__init__(world, call, team, check)

    def _build(self) -> None:
        numel = elements(self.shape)
        blocks = self.blocks_for(-(-numel // self.config.block))
        self._blocks = blocks
        self._channel = self.channel(blocks)
        self._pairs = self.dtype.itemsize == 2
        if self.config.algorithm == "one_shot":
            self._capacity = numel
            self._slots = self.workspace("slots", (2 * numel,), self.dtype)
        else:
            self._capacity = -(-numel // 2) if self._pairs else numel
            words = 2 * self.group.size * self._capacity
            self._slots = self.workspace("slots", (words,), np.int64)
        self._out = self.local(self.shape, self.out_dtype)

    def __call__(
        self, x: Any, out: Any = None, *, bias: Any = None, residual: Any = None, stream: Any = None
    ) -> Any:
        """Queue the all-reduce of `x`; returns `out`, or the plan's buffer when it is None.

        The buffer is overwritten by the next call. `out` may be `x`. The result is valid after
        the stream was waited for by a call that raises faults (synchronize, numpy, check).
        """
        op = self.input(x, self.shape, self.dtype)
        to = self.output(out, self._out, self.shape, self.out_dtype)
        if (bias is None) == self._has_bias or (residual is None) == self._has_residual:
            raise InvalidArgument(
                f"all_reduce: the plan was made with bias={self._has_bias}, "
                f"residual={self._has_residual}; pass just those"
            )
        columns = self.shape[-1] if self.shape else 1
        extra = [op, op]
        if bias is not None:
            extra[0] = self.input(bias, (columns,), self.dtype, "bias")
        if residual is not None:
            extra[1] = self.input(residual, self.shape, self.dtype, "residual")
        stream = self.begin(stream, op, to, *extra)
        numel = elements(self.shape)
        if numel:
            self._launch(stream, op, to, extra, numel, columns)
        return self._out if out is None else out

    def _launch(
        self, stream: int, op: Any, to: Any, extra: list[Any], numel: int, columns: int
    ) -> None:
        arguments = [
            op.pointer, to.pointer, extra[0].pointer, extra[1].pointer, self._slots,
            self._channel, self.group.handle, numel, max(1, columns),
        ]  # fmt: skip
        accumulator = getattr(tl, _TRITON_NAMES[dtypes.accumulator(self.dtype).name])
        named = {
            "OP": self.op,
            "ACC": accumulator,
            "HAS_BIAS": self._has_bias,
            "HAS_RESIDUAL": self._has_residual,
            "BLOCK": self.config.block,
            "num_warps": self.config.num_warps,
            # the host tier's sums are never contracted with a product; neither are the GPU's
            "enable_fp_fusion": False,
        }
        kernel: Any = one_shot_kernel
        if self.config.algorithm == "low_latency":
            kernel = low_latency_kernel
            arguments.append(self._capacity)
            named["PAIRS"] = self._pairs
        self.launch(kernel, self._blocks, stream, *arguments, **named)


_TRITON_NAMES = {
    "float32": "float32", "float64": "float64", "int32": "int32", "int64": "int64",
}  # fmt: skip
_INTEGERS = ("int32", "int64")
_WIDE_ONLY = ("float8_e4m3fn", "float8_e5m2", "float64", "int64")


def _check_types(dtype: np.dtype, out: np.dtype, op: str, adds: bool) -> None:
    if op not in OPERATIONS:
        raise InvalidArgument(f"op={op!r} is not one of {', '.join(OPERATIONS)}")
    if dtype.name in _INTEGERS:
        if op == "avg":
            raise Unsupported("all_reduce: op='avg' of integers is not offered; use op='sum'")
        if out != dtype or adds:
            raise DtypeError(
                f"all_reduce of {dtype}: out_dtype, bias and residual are for floats only"
            )
    elif not dtypes.is_float(dtype):
        raise DtypeError(
            f"all_reduce does not take {dtype}; it takes float16, float32, float64, bfloat16, "
            "float8_e4m3fn, float8_e5m2, int32 and int64"
        )
    elif not dtypes.is_float(out):
        raise DtypeError(f"all_reduce of {dtype}: out_dtype {out} must be a float type")


def _check_algorithm(algorithm: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    nbytes = elements(shape) * dtype.itemsize
    if algorithm == "low_latency" and dtype.name in _WIDE_ONLY:
        raise Unsupported(
            f"all_reduce: low_latency takes types of 2 and 4 bytes, not {dtype}; use one_shot"
        )
    if algorithm == "low_latency" and nbytes > LOW_LATENCY_LIMIT_BYTES:
        raise InvalidArgument(
            f"all_reduce: low_latency takes up to {LOW_LATENCY_LIMIT_BYTES} bytes, the input has "
            f"{nbytes}; use one_shot"
        )


def _choose(
    world: World, shape: tuple[int, ...], dtype: np.dtype, algorithm: str | None
) -> Config:
    limits = constants(world.backend)
    numel = elements(shape)
    if algorithm is None:
        small = numel * dtype.itemsize <= limits.low_latency_bytes
        algorithm = "low_latency" if small and dtype.name not in _WIDE_ONLY else "one_shot"
    return Config(algorithm, block_elements(world.backend, numel))


def all_reduce(
    x: Any,
    op: str = "sum",
    out: Any = None,
    out_dtype: Any = None,
    bias: Any = None,
    residual: Any = None,
    algorithm: str | None = None,
    team: Group | None = None,
    stream: Any = None,
) -> Any:
    """The reduction of every rank's `x`, on every rank. Collective over `team`.

    Parameters
    ----------
    x : tdx array, or any array of NumPy or a DLPack producer
        Same shape and dtype on every rank; see AllReduce for dtypes.
    op : {"sum", "avg", "max", "min"}
    out : array, optional
        Where the result goes; may be `x`.
    out_dtype, optional
        Type of the result: for floats any float type.
    bias, residual : arrays, optional
        (x.shape[-1],) and x.shape: added after the reduction, before the one rounding.
    algorithm : {"one_shot", "low_latency"}, optional
    team : Team, optional
    stream : optional
        None: the world's current stream.

    Returns the result in the caller's own framework, fresh unless `out` is given; a tdx array
    for a tdx array. Every rank gets the same bits.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    world = world_of(x)
    group = world.group(team)
    call = Call(world, group, x, "all_reduce")
    with call.posting_refusals():
        source = call.readable(x)
        like = operand(world, source, "x")
        options = {
            "out_dtype": None if out_dtype is None else dtypes.resolve(out_dtype),
            "bias": bias is not None,
            "residual": residual is not None,
            "algorithm": algorithm,
        }
        plan = cached(
            world,
            group,
            ("all_reduce", like.shape, like.dtype, op, *options.values()),
            lambda: AllReduce(world, like.shape, like.dtype, op, team=team, **options),
        )
        target = call.result(plan.shape, plan.out_dtype) if out is None else out
        plan(source, target, bias=bias, residual=residual, stream=stream)
    return call.finish(target)
