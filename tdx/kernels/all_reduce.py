"""All-reduce: every rank gets the reduction of all ranks' arrays.

W ranks, S bytes each:

one_shot     Each rank copies its array into a symmetric slot, all meet block by block, and each
             reads the slots of all ranks. (W - 1) * S bytes in, one hop and one meeting. Two
             slots used in turn replace a meeting at the end: a rank can be in call n + 2 only
             after every other has finished reading in call n, because each call meets all.
low_latency  Each rank pushes its array to all others as 64-bit words, 7 bytes of data and one of
             flag, and reads what the others pushed: see packed.py. 8/7 * (W - 1) * S bytes out, one
             hop, no meeting, two slots as above. Up to 16 ranks, 4 MiB, types of 2 and 4 bytes.
two_shot     Rank r reduces shard r and pushes the result to all: 2 * (W - 1) / W * S bytes out, two
             hops (two_shot.py); low_latency_two_shot, the same in words (all_reduce_words.py);
             copy_engine, the same but that copy engines send results, into the plan's own buffer:
             see two_shot_engines.py. With `out` one more copy. No bias, no residual. Only by name:
             what a rank that comes after the deadline has changed there may be overwritten.

Result: accumulated in float32 (float64 for float64, integers in their own type, wrapping) from
rank 0 upwards, then divided by W for "avg", plus bias, plus residual, rounded once. So its bits
depend neither on the algorithm nor on size, blocks or rank. max and min propagate NaN.

Ordering: when the operation is complete on a rank's stream, no peer reads its operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.all_reduce_words import bind_low_latency, bind_low_latency_two_shot
from tdx.kernels.call import one_line
from tdx.kernels.copying import VECTOR, copy_share, padded
from tdx.kernels.operand import check_apart, elements, operand
from tdx.kernels.packed import low_latency_elements, packed_bytes
from tdx.kernels.plan import Plan, check_algorithm, check_low_latency, plain_shape
from tdx.kernels.pushing import check_overlap
from tdx.kernels.reduction import (
    ReductionConfig,
    check_added,
    check_types,
    combine,
    finish,
    load_added,
    widen,
)
from tdx.kernels.select import (
    STAGING_BYTES,
    block_elements,
    cheapest,
    shard_block,
    takes_low_latency,
)
from tdx.kernels.two_shot import Run, bind_two_shot
from tdx.kernels.two_shot_engines import bind_engines
from tdx.runtime import dtypes
from tdx.runtime.checks import check_flag
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["AllReduce", "Config", "all_reduce"]

_VECTOR = tl.constexpr(VECTOR)


@dataclass(frozen=True)
class Config(ReductionConfig):
    """How an all-reduce runs, by one of `algorithms`: see ReductionConfig."""

    algorithms: ClassVar[tuple[str, ...]] = (
        "low_latency", "low_latency_two_shot", "one_shot", "two_shot", "copy_engine",
    )  # fmt: skip


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
    added = load_added(bias, residual, at, mask, columns, HAS_BIAS, HAS_RESIDUAL)
    finish(total, out, added, at, mask, ranks, OP)


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
    if tdl.no_fault(world):
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


class AllReduce(Plan):
    """An all-reduce of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape, dtype
        Of every rank's input. float16/32/64, bfloat16, float8, int32/64.
    op : {"sum", "avg", "max", "min"}
    out_dtype, optional
        Of the result: the input's, or for floats another float type (of float64 none of 8 bits).
    bias, residual : bool
        Whether calls pass a vector of the last axis' length, or an array of the input's shape,
        of the input's dtype, to be added after the reduction. Floats only.
    algorithm : {"low_latency", "low_latency_two_shot", "one_shot", "two_shot",
        "copy_engine"}, optional
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
            self.result = (self.shape, self.out_dtype)
            self.op = op
            self._has_bias = bias = check_flag(self.operation, "bias", bias)
            self._has_residual = residual = check_flag(self.operation, "residual", residual)
            self._numel = elements(self.shape)
            self._columns = self.shape[-1] if self.shape else 1
            adds, arch = bias or residual, world.device.arch
            check_types(self.operation, self.dtype, self.out_dtype, op, arch, adds)
            check_algorithm(self.operation, algorithm, Config.algorithms)
            Config.check(config, self.operation, algorithm, self.dtype, world.backend)
            travels = dtypes.accumulator(self.dtype) if adds else self.out_dtype
            self.config = config or choose(
                world.backend, self._numel, self.dtype, travels, self.group.size, algorithm
            )
            way, nbytes = self.config.algorithm, self._numel * self.dtype.itemsize
            if adds and way == "copy_engine":
                raise InvalidArgument(
                    "all_reduce: copy_engine adds neither bias nor residual; use two_shot"
                )
            if way.startswith("low_latency"):
                kinds = (self.dtype, travels) if way.endswith("two_shot") else (self.dtype,)
                check_low_latency(self.operation, nbytes, self.group.size, kinds, way)
            shared.update(
                shape=self.shape, dtype=self.dtype, op=op, out_dtype=self.out_dtype, bias=bias,
                residual=residual, given_algorithm=algorithm, config=self.config,
            )  # fmt: skip
        with self.preparation():
            self._build(buffer)

    def _build(self, buffer: bool) -> None:
        self._sizes = (self._numel * self.dtype.itemsize, self._numel * self.out_dtype.itemsize)
        self._near = (-self._sizes[1], self._sizes[0])  # the distances at which out touches x
        self._in_place = 0 if self._sizes[0] == self._sizes[1] else None
        named = {"OP": self.op, "HAS_BIAS": self._has_bias, "HAS_RESIDUAL": self._has_residual}
        config = self.config
        kinds = (self.dtype, self.out_dtype)
        what = (self, config, self.shape, kinds, named)
        # results of two_shot travel as they are, unless something is added to them
        direct = config.algorithm == "two_shot" and not (self._has_bias or self._has_residual)
        if config.algorithm == "copy_engine":
            gathered = self.workspace("result", self.shape, self.out_dtype)
            self._run = bind_engines(self, config, self._numel, kinds, self.op, gathered)
            self._out, self._run_direct = gathered if buffer else None, self._run
            return
        if buffer and direct and self._numel:
            self._out = self.workspace("result", self.shape, self.out_dtype)
            self._shown = [operand(self.world, self._out, "buffer")]
            self._run, self._run_direct = bind_two_shot(*what, buffer=self._out)
            return
        self._out = self.result_buffer(self.shape, self.out_dtype, buffer)
        if config.algorithm == "two_shot":
            self._run, _ = bind_two_shot(*what)
        elif config.algorithm == "one_shot":
            self._run = _bind_one_shot(*what)
        elif config.algorithm == "low_latency":
            self._run = bind_low_latency(*what)
        else:
            self._run = bind_low_latency_two_shot(*what)
        self._run_direct = self._run  # what runs without `out`

    def __call__(
        self, x: Any, out: Any = None, stream: Any = None, *, bias: Any = None, residual: Any = None
    ) -> Any:
        """Queue the all-reduce of `x`; returns `out`, or the plan's buffer when it is None.

        The buffer is overwritten by the next call. `out` may be `x`. The result is valid after
        the stream was waited for by a call that raises faults (synchronize, numpy, check).
        """
        if bias is residual is None and (known := self.again(stream, x, out)):
            handle, op, to = known
            vector = whole = op  # stand in for what there is not
        else:
            given = (stream, x, out, bias, residual)
            handle, op, to, vector, whole = self.again_adding(*given) or self._begin(*given)
        if self._numel:
            (self._run_direct if out is None else self._run)(handle, op, to, vector, whole)
        return self._out if out is None else out

    def _begin(self, stream: Any, x: Any, out: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
        try:
            op = vector = whole = self.input(x, self.shape, self.dtype)
            to = self.output(out, self._out, self.shape, self.out_dtype)
            check_added(self.operation, (self._has_bias, self._has_residual), bias, residual)
            for each in (to, *self._shown):  # peers write to the own buffer whatever `out` is
                if self._near[0] < each.address - op.address < self._near[1]:
                    check_overlap("all_reduce", op, each, self._in_place, self._sizes)
            if bias is not None:
                vector = self.input(bias, (self._columns,), self.dtype, "bias")
                check_apart("all_reduce", to, vector)
            if residual is not None:
                whole = self.input(residual, self.shape, self.dtype, "residual")
                if whole.address != to.address or self._in_place is None:
                    check_apart("all_reduce", to, whole)
            if bias is None and residual is None:
                return *self.begin_checked(stream, op, to), op, op
            handle = self.begin(stream, op, to, vector, whole)
            added = (None if bias is None else vector, None if residual is None else whole)
            self.note_adding(op, to, *added)
            return handle, op, to, vector, whole
        except Exception as error:
            self.refuse(error)
            raise


def _bind_one_shot(
    plan: Plan, config: ReductionConfig, shape: tuple[int, ...], kinds: tuple[np.dtype, np.dtype],
    named: dict[str, Any],
) -> Run:  # fmt: skip
    """Workspaces and the kernel for a plan, as two_shot.bind_two_shot."""
    dtype, out_dtype = kinds
    numel = elements(shape)
    vectors = padded(numel)
    blocks = plan.blocks_for(-(-numel // config.block), config.blocks)
    return plan.bind(
        one_shot_kernel, blocks, (dtype, out_dtype, dtype, dtype),
        plan.workspace("slots", (2 * vectors * VECTOR,), dtype), plan.channel(blocks),
        plan.group.handle, numel, max(1, shape[-1] if shape else 1), vectors, **named,
        # a contracted product and sum would round once less
        BLOCK=config.block, num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def choose(
    backend: str, numel: int, dtype: np.dtype, travels: np.dtype, ranks: int,
    algorithm: str | None = None,
) -> Config:  # fmt: skip
    """The algorithm, unless given, and its tile."""
    if algorithm is None:
        algorithm = _cheapest(backend, numel, dtype, travels, ranks)
    shard = -(-numel // ranks)
    if algorithm.startswith("low_latency"):
        part = numel if algorithm == "low_latency" else shard
        return Config(algorithm, *low_latency_elements(backend, part, dtype.itemsize))
    if algorithm == "copy_engine":
        return Config(algorithm, *shard_block(backend, shard, dtype.itemsize, ranks, False))
    if algorithm == "two_shot":
        return Config(algorithm, *shard_block(backend, shard, dtype.itemsize, ranks))
    return Config(algorithm, block_elements(backend, numel))


def _cheapest(backend: str, numel: int, dtype: np.dtype, travels: np.dtype, ranks: int) -> str:
    whole, results = numel * dtype.itemsize, numel * travels.itemsize
    if ranks == 1:
        return "two_shot"  # which reads the own part where it is
    peers = ranks - 1
    sent = {"two_shot": peers * (whole + results) / ranks}
    if 2 * whole <= STAGING_BYTES:  # the slots of one_shot
        sent["one_shot"] = peers * whole
    if takes_low_latency(whole, ranks, (dtype,)):
        sent["low_latency"] = packed_bytes(peers * whole)
    if takes_low_latency(whole, ranks, (dtype, travels)):
        sent["low_latency_two_shot"] = packed_bytes(peers * (whole + results) / ranks)
    return cheapest(backend, sent, ranks)


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
        Type of the result: for floats any float type, of float64 none of 8 bits.
    bias, residual : arrays, optional
        (x.shape[-1],) and x.shape, of the dtype of x: added after the reduction, before the one
        rounding.
    algorithm : {"low_latency", "low_latency_two_shot", "one_shot", "two_shot",
        "copy_engine"}, optional
    team : Team, optional
    stream : optional
        None: the world's current stream for a tdx array, else the caller's.

    Returns the result in the caller's own framework, fresh unless `out` is given; a tdx array
    for a tdx array. Every rank gets the same bits, but that each adds its own bias and residual.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, a fault.
    """
    options = {
        "op": op, "out_dtype": out_dtype, "bias": bias is not None,
        "residual": residual is not None, "algorithm": algorithm,
    }  # fmt: skip
    others = {} if bias is residual is None else {"bias": bias, "residual": residual}
    return one_line(AllReduce, x, out, team, stream, options, others)
