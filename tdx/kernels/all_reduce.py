"""All-reduce: every rank gets the reduction of all ranks' arrays.

W ranks, S bytes each:

one_shot     Each rank copies its array into a symmetric slot, all meet block by block, and each
             reads the slots of all ranks. (W - 1) * S bytes in, one hop and one meeting. Two
             slots used in turn replace a meeting at the end: a rank can be in call n + 2 only
             after every other has finished reading in call n, because each call meets all.
low_latency  Each rank pushes its array to all others as 64-bit words, 4 bytes of data and 4 of
             flag (the epoch), and reads what the others pushed. 2 * (W - 1) * S bytes out, one
             hop and no meeting: the data is its own signal. The protocol is that of NCCL's LL.
             Two slots in turn, as above. Up to 16 ranks, types of 2 and 4 bytes, 4 MiB.

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
from tdx.kernels.call import Call
from tdx.kernels.copying import VECTOR, copy_share, padded
from tdx.kernels.operand import Operand, elements
from tdx.kernels.plan import Plan, plain_shape
from tdx.kernels.reduction import check_types, combine, finish, from_words, to_words, widen
from tdx.kernels.select import (
    block_elements,
    constants,
    low_latency_elements,
    power_of_two,
)
from tdx.runtime import dtypes
from tdx.runtime.errors import InvalidArgument, Unsupported
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["AllReduce", "Config", "all_reduce"]

ALGORITHMS = ("low_latency", "one_shot")
LOW_LATENCY_LIMIT_BYTES = 4 << 20  # its slots take 4 * W times this
LOW_LATENCY_LIMIT_RANKS = 16
_VECTOR = tl.constexpr(VECTOR)


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
def _reduce_block(
    out, bias, residual, slot, world, at, mask, columns, ranks,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Reduce the elements `at` of all ranks' slots, in rank order."""
    total = widen(tl.load(tdl.symm_at(slot, 0, world) + at, mask=mask))
    for peer in tl.range(1, ranks, loop_unroll_factor=4):
        value = tl.load(tdl.symm_at(slot, peer, world) + at, mask=mask)
        total = combine(total, widen(value), OP)
    finish(total, out, bias, residual, at, mask, columns, ranks, OP, HAS_BIAS, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["numel", "columns", "vectors"])
def one_shot_kernel(
    x, out, bias, residual, slots, channel, world, numel, columns, vectors,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Stage the own elements, meet, and reduce everybody's. A slot has VECTOR * vectors elements.

    Block b reads what block b of each peer has staged: the same elements.
    """
    index = tl.program_id(0)
    parts = tl.num_programs(0)
    ranks = tdl.num_ranks(world)
    slot = slots + (tdl.epoch(channel) & 1).to(tl.int64) * vectors * _VECTOR
    copy_share(slot, x, numel, index, parts, BLOCK)
    ok = tdl.barrier(channel, world)
    if ok:
        whole = numel // BLOCK
        for block in range(index, whole, parts):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            _reduce_block(
                out, bias, residual, slot, world, at, None, columns, ranks,
                OP, HAS_BIAS, HAS_RESIDUAL,
            )  # fmt: skip
        if (whole * BLOCK < numel) & (whole % parts == index):
            at = tl.cast(whole, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            _reduce_block(
                out, bias, residual, slot, world, at, at < numel, columns, ranks,
                OP, HAS_BIAS, HAS_RESIDUAL,
            )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "columns", "vectors"])
def low_latency_kernel(
    x, out, bias, residual, slots, channel, world, numel, columns, vectors,
    OP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Push the own elements to everybody as words with flags, and reduce what arrives.

    Each rank's slot has VECTOR * vectors words of 8 bytes, which hold 4 bytes of data.
    """
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    WORDS: tl.constexpr = BLOCK // PER_WORD
    KIND: tl.constexpr = tl.int32 if PAIRS else x.dtype.element_ty
    me = tdl.rank(world)
    flag = tdl.epoch(channel)
    stride = vectors * _VECTOR
    base = slots + (flag & 1).to(tl.int64) * RANKS * stride
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, numel, step):
        offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        words = to_words(tl.load(x + offsets, mask=offsets < numel, other=0), PAIRS)
        at = tl.cast(start, tl.int64) // PER_WORD + tl.arange(0, WORDS)
        own = base + me * stride + at
        for hop in tl.static_range(1, RANKS):
            tdl.store_ll(own, words, flag, (me + hop) % RANKS, world, at < stride)
    for start in range(tl.program_id(0) * BLOCK, numel, step):
        offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = offsets < numel
        at = tl.cast(start, tl.int64) // PER_WORD + tl.arange(0, WORDS)
        own = to_words(tl.load(x + offsets, mask=mask, other=0), PAIRS)
        words, arrived = tdl.load_ll_all(base + at, stride, flag, world, RANKS, at < stride, KIND)
        if PAIRS:
            arrived = tl.interleave(arrived, arrived)
        total = widen(from_words(tl.where(me == 0, own, words[0]), x.dtype.element_ty, PAIRS))
        for peer in tl.static_range(1, RANKS):
            value = tl.where(me == peer, own, words[peer])
            value = from_words(value, x.dtype.element_ty, PAIRS)
            total = combine(total, widen(value), OP)
        finish(
            total, out, bias, residual, offsets, mask & arrived, columns, tdl.num_ranks(world),
            OP, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip


class AllReduce(Plan):
    """An all-reduce of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape, dtype
        Of every rank's input. float16/32/64, bfloat16, float8, int32/64.
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
    buffer : bool
        Whether the plan has a result buffer, for calls without `out`.

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
        buffer: bool = True,
    ):
        with self.agreement(world, team) as shared:
            self.shape = plain_shape(shape)
            self.dtype = dtypes.resolve(dtype)
            self.out_dtype = self.dtype if out_dtype is None else dtypes.resolve(out_dtype)
            self.op = op
            self._has_bias, self._has_residual = bias, residual
            check_types("all_reduce", self.dtype, self.out_dtype, op, bias or residual)
            self._numel = elements(self.shape)
            ranks = self.group.size
            if config is not None and not isinstance(config, Config):
                raise InvalidArgument(f"config must be an all_reduce Config, got {config!r}")
            self.config = config or _choose(world, self._numel, self.dtype, ranks, algorithm)
            _check_algorithm(self.config.algorithm, self._numel, self.dtype, ranks)
            shared.update(
                shape=self.shape, dtype=self.dtype, op=op, out_dtype=self.out_dtype, bias=bias,
                residual=residual, config=self.config,
            )  # fmt: skip
        with self.preparation():
            self._blocks = self.blocks_for(-(-self._numel // self.config.block))
            self._channel = self.channel(self._blocks)
            if self.config.algorithm == "one_shot":
                self._vectors = padded(self._numel)
                slots, kind = 2, self.dtype
            else:
                self._vectors = padded(-(-self._numel * self.dtype.itemsize // 4))
                slots, kind = 2 * ranks, np.dtype(np.int64)
            self._slots = self.workspace("slots", (slots * self._vectors * VECTOR,), kind)
            self._out = self.result_buffer(self.shape, self.out_dtype, buffer)

    def __call__(
        self, x: Any, out: Any = None, stream: Any = None, *, bias: Any = None, residual: Any = None
    ) -> Any:
        """Queue the all-reduce of `x`; returns `out`, or the plan's buffer when it is None.

        The buffer is overwritten by the next call. `out` may be `x`. The result is valid after
        the stream was waited for by a call that raises faults (synchronize, numpy, check).
        """
        op = self.input(x, self.shape, self.dtype)
        to = self.output(out, self._out, self.shape, self.out_dtype)
        if (bias is not None) != self._has_bias or (residual is not None) != self._has_residual:
            raise InvalidArgument(
                f"all_reduce: the plan was made with bias={self._has_bias}, "
                f"residual={self._has_residual}; pass just those"
            )
        vector = whole = op  # stand in for what there is not
        columns = self.shape[-1] if self.shape else 1
        if bias is not None:
            vector = self.input(bias, (columns,), self.dtype, "bias")
        if residual is not None:
            whole = self.input(residual, self.shape, self.dtype, "residual")
        handle = self.begin(stream, op, to, vector, whole)
        if self._numel:
            self._launch(handle, op, to, vector, whole, max(1, columns))
        return self._out if out is None else out

    def _launch(
        self, stream: int, op: Operand, to: Operand, vector: Operand, whole: Operand, columns: int
    ) -> None:
        named = {
            "OP": self.op,
            "HAS_BIAS": self._has_bias,
            "HAS_RESIDUAL": self._has_residual,
            "BLOCK": self.config.block,
            "num_warps": self.config.num_warps,
            "enable_fp_fusion": False,  # a contracted product and sum would round once less
        }
        kernel: Any = one_shot_kernel
        if self.config.algorithm == "low_latency":
            kernel = low_latency_kernel
            named.update(PAIRS=self.dtype.itemsize == 2, RANKS=self.group.size)
        self.launch(
            kernel, self._blocks, stream, op.pointer, to.pointer, vector.pointer, whole.pointer,
            self._slots, self._channel, self.group.handle, self._numel, columns, self._vectors,
            **named,
        )  # fmt: skip


def _check_algorithm(algorithm: str, numel: int, dtype: np.dtype, ranks: int) -> None:
    if algorithm != "low_latency":
        return
    nbytes = numel * dtype.itemsize
    if dtype.itemsize not in (2, 4):
        raise Unsupported(
            f"all_reduce: low_latency takes types of 2 and 4 bytes, not {dtype}; use one_shot"
        )
    if nbytes > LOW_LATENCY_LIMIT_BYTES or ranks > LOW_LATENCY_LIMIT_RANKS:
        raise InvalidArgument(
            f"all_reduce: low_latency takes up to {LOW_LATENCY_LIMIT_BYTES} bytes and "
            f"{LOW_LATENCY_LIMIT_RANKS} ranks, not {nbytes} bytes on {ranks} ranks; use one_shot"
        )


def _choose(world: World, numel: int, dtype: np.dtype, ranks: int, algorithm: str | None) -> Config:
    if algorithm == "two_shot":
        raise Unsupported("all_reduce: two_shot is not offered yet; use one_shot")
    if algorithm is None:
        small = numel * dtype.itemsize <= constants(world.backend).low_latency_bytes
        fits = dtype.itemsize in (2, 4) and ranks <= LOW_LATENCY_LIMIT_RANKS
        algorithm = "low_latency" if small and fits else "one_shot"
    if algorithm == "low_latency":
        return Config(algorithm, low_latency_elements(world.backend, numel, dtype.itemsize))
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
        None: the world's current stream for a tdx array, else the caller's.

    Returns the result in the caller's own framework, fresh unless `out` is given; a tdx array
    for a tdx array. Every rank gets the same bits.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    call = Call("all_reduce", x, out, team=team, stream=stream)
    with call.checks():
        source = call.operand(x, "x")
        vector, whole = call.optional(bias, "bias"), call.optional(residual, "residual")
        plan = call.plan(
            AllReduce, source.shape, source.dtype, op, out_dtype=out_dtype, bias=bias is not None,
            residual=residual is not None, algorithm=algorithm,
        )  # fmt: skip
        target = call.target(out, plan.shape, plan.out_dtype)
        plan(source, target, bias=vector, residual=whole, stream=call.stream)
    return call.finish(target)
