"""Reduce-scatter: rank r gets part r of the reduction of all ranks' arrays.

W ranks, S bytes each:

push         Each rank pushes part p to rank p, which reduces what it got, step by step. One hop,
             (W - 1) / W * S bytes out and one signal per block and step; see shards.py for the
             order of pushes and for the slots. Two ranks push a step before they reduce the one
             before it; of more, pushes of two steps at once would share links.
low_latency  Each rank pushes part p to rank p as words of data and flag (see all_reduce.py): 8/7 of
             the bytes, one hop and no signals. Two slots in turn: a rank can be in call n + 2 only
             after every other has read its words of call n, because each call waits for all. Up to
             16 ranks, types of 2 and 4 bytes, 4 MiB.

Result: as in an all-reduce, the same bits: accumulated in float32 (float64 for float64, integers in
their own type, wrapping) from rank 0 upwards, then divided by W for "avg", rounded once.

Ordering: peers do not read operands at all; a rank's input may be reused, and its result read, when
the operation is complete on its stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.call import one_line
from tdx.kernels.copying import VECTOR
from tdx.kernels.operand import Operand, elements
from tdx.kernels.packed import (
    VALUES,
    low_latency_elements,
    packed_bytes,
    part_of_tile,
    slot_words,
    tiles_of,
)
from tdx.kernels.plan import Plan, check_low_latency, plain_shape
from tdx.kernels.pushing import check_overlap
from tdx.kernels.reduction import (
    ReductionConfig,
    check_types,
    finish,
)
from tdx.kernels.select import (
    STEP_BYTES,
    cheapest,
    shard_block,
    takes_low_latency,
)
from tdx.kernels.shards import (
    Steps,
    fewest_steps,
    notify_ranks,
    part_length,
    push_packed,
    push_step,
    sum_of_packed,
    sum_of_ranks,
)
from tdx.language.words import packed_blocks
from tdx.runtime import dtypes
from tdx.runtime.driver.base import Bound
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["Config", "ReduceScatter", "reduce_scatter"]

_VECTOR = tl.constexpr(VECTOR)
_VALUES = tl.constexpr(VALUES)
_LEAST_STEPS = 4  # of two ranks' large arrays: nothing hides the sums of the last step


@dataclass(frozen=True)
class Config(ReductionConfig):
    """How a reduce-scatter runs: see tdx.kernels.reduction.ReductionConfig.

    `algorithm` is "low_latency" or "push".
    """

    algorithms: ClassVar[tuple[str, ...]] = ("low_latency", "push")


@triton.jit
def _reduce_at(
    own, slot, size, out, at, mask, world, OP: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    total = sum_of_ranks(own, slot, size, at, mask, world, OP, RANKS)
    finish(total, out, (), at, mask, tdl.num_ranks(world), OP)


@triton.jit(do_not_specialize=["numel", "units", "step_vectors", "steps"])
def push_kernel(
    x, out, staging, signals, channel, world, numel, units, step_vectors, steps,
    OP: tl.constexpr, RANKS: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push step s, reduce step s - AHEAD, for all steps. Parts have `units` * UNIT elements, the
    last ones less if there are not so many. EVEN: `numel` is a multiple of UNIT.

    `signals` holds RANKS words for each block: who has pushed its part of which step.
    """
    index = tl.program_id(0)
    parts = tl.num_programs(0)
    shard = tl.cast(units, tl.int64) * UNIT
    size = tl.cast(step_vectors, tl.int64) * _VECTOR
    if EVEN:  # so that the compiler knows
        numel = numel // UNIT * UNIT
    me = tdl.rank(world).to(tl.int64)
    pushed = signals + index * RANKS
    first = (tdl.epoch(channel) - 1) * steps  # steps of all calls before this one
    ok = (steps > 0) & tdl.no_fault(world)
    for s in range(0, steps + AHEAD):
        now = first + s
        if s < steps:
            if ok:
                slot = staging + (now & (SLOTS - 1)).to(tl.int64) * RANKS * size
                push_step(x, slot, world, numel, shard, s * size, size, BLOCK)
            notify_ranks(pushed, world, now + 1, ok)
        if s >= AHEAD:
            done = now - AHEAD
            ok = tdl.wait_all(pushed, RANKS, world, done + 1) & ok
            if ok:
                slot = staging + (done & (SLOTS - 1)).to(tl.int64) * RANKS * size
                begin = (s - AHEAD) * size
                own = x + me * shard + begin
                to = out + begin
                count = part_length(me, shard, numel, begin, size)
                whole = count // BLOCK
                for block in range(index, whole, parts):
                    at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                    _reduce_at(own, slot, size, to, at, None, world, OP, RANKS)
                if (whole * BLOCK < count) & (whole % parts == index):
                    at = tl.cast(whole, tl.int64) * BLOCK + tl.arange(0, BLOCK)
                    _reduce_at(own, slot, size, to, at, at < count, world, OP, RANKS)


@triton.jit(do_not_specialize=["units"])
def low_latency_kernel(
    x, out, words, channel, world, units,
    OP: tl.constexpr, RANKS: tl.constexpr, PAIRS: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Push the others' parts as words with flags, and reduce what arrives.

    For each parity of the epoch `words` holds a place for every rank's tiles: see packed.py.
    """
    TILE: tl.constexpr = BLOCK * _VALUES
    shard = tl.cast(units, tl.int64) * UNIT
    tiles = tl.cdiv(shard, TILE)
    stride = tiles * (4 * BLOCK // (2 if PAIRS else 1))
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    slots = words + (flag & 1) * RANKS * stride
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        push_packed(
            x, slots, stride, flag, world, RANKS * shard, shard, tile, sound, RANKS, PAIRS, BLOCK
        )
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        totals, arrived = sum_of_packed(
            x, slots, stride, flag, world, RANKS * shard, shard, tile, OP, RANKS, PAIRS, BLOCK
        )
        for j in tl.static_range(packed_blocks()):
            at, mask = part_of_tile(tl.cast(tile, tl.int64) * TILE, shard, j, BLOCK)
            mask &= arrived
            finish(totals[j], out, (), at, mask, tdl.num_ranks(world), OP)


class ReduceScatter(Plan):
    """A reduce-scatter of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape, dtype
        Of every rank's input: (size * n, ...); the result is (n, ...). float16/32/64, bfloat16,
        float8, int32/64.
    op : {"sum", "avg", "max", "min"}
    out_dtype, optional
        Of the result: the input's, or for floats another float type (of float64 none of 8 bits).
    algorithm : {"low_latency", "push"}, optional
    config : Config, optional
        Overrides the choice altogether.
    team : Team, optional
    buffer : bool
        Whether the plan has a result buffer, for calls without `out`.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted.
    """

    operation = "reduce_scatter"

    def __init__(
        self,
        world: World,
        shape: Any,
        dtype: Any,
        op: str = "sum",
        *,
        out_dtype: Any = None,
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
            check_types(self.operation, self.dtype, self.out_dtype, op, world.device.arch)
            self.out_shape = self._scattered()
            self.result = (self.out_shape, self.out_dtype)
            Config.check(config, self.operation, algorithm, self.dtype, world.backend)
            self._shard = elements(self.out_shape)
            self.config = config or self._choose(algorithm)
            if self.config.algorithm == "low_latency":
                nbytes = elements(self.shape) * self.dtype.itemsize
                check_low_latency("reduce_scatter", nbytes, self.group.size, (self.dtype,))
            shared.update(
                shape=self.shape, dtype=self.dtype, op=op, out_dtype=self.out_dtype,
                given_algorithm=algorithm, config=self.config,
            )  # fmt: skip
        with self.preparation():
            self._run = self._bind()
            self._out = self.result_buffer(self.out_shape, self.out_dtype, buffer)

    def _scattered(self) -> tuple[int, ...]:
        size = self.group.size
        if not self.shape:
            raise InvalidArgument("reduce_scatter: the input needs at least one axis, got shape ()")
        if self.shape[0] % size:
            raise InvalidArgument(
                f"reduce_scatter: the input's first axis, {self.shape[0]}, is no multiple of the "
                f"{size} ranks; pad it"
            )
        return (self.shape[0] // size, *self.shape[1:])

    def _choose(self, algorithm: str | None) -> Config:
        backend, size, ranks = self.world.backend, self.dtype.itemsize, self.group.size
        if algorithm is None:
            sent = {"push": (ranks - 1) * self._shard * size}
            if takes_low_latency(self._shard * size * ranks, ranks, (self.dtype,)):
                sent["low_latency"] = packed_bytes(sent["push"])
            algorithm = cheapest(backend, sent, ranks)
        if algorithm == "low_latency":
            return Config(algorithm, *low_latency_elements(backend, self._shard, size))
        block, warps = shard_block(backend, self._shard, size, ranks, passes_on=False)
        if backend != "host" and math.gcd(VECTOR, self._shard) * size < 16:
            block = min(block, 4 << 10)  # elements are loaded one by one, each to its register
        return Config(algorithm, block, warps)

    def _bind(self) -> Any:
        config, ranks, size = self.config, self.group.size, self.dtype.itemsize
        kinds = (self.dtype, self.out_dtype)
        if config.algorithm == "low_latency":
            nbytes, lanes = self._shard * size, config.lanes(self.dtype)
            blocks = self.blocks_for(tiles_of(nbytes, lanes), config.blocks)
            words = self.packed_slots(2 * ranks * slot_words(nbytes, lanes))
            unit = math.gcd(VECTOR, self._shard)
            return self.bind(
                low_latency_kernel, blocks, kinds, words, self.channel(blocks), self.group.handle,
                self._shard // unit, OP=self.op, RANKS=ranks, PAIRS=size == 2, UNIT=unit,
                BLOCK=config.block, num_warps=config.num_warps, enable_fp_fusion=False,
            )  # fmt: skip
        numel = ranks * self._shard
        return bind_push(self, config, self._shard, numel, kinds, self.op)

    def __call__(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """Queue the reduce-scatter of `x`; returns `out`, or the plan's buffer when it is None.

        The buffer is overwritten by the next call. `out` may be the own part of `x`. The result is
        valid after the stream was waited for by a call that raises faults.
        """
        handle, op, to = self.again(stream, x, out) or self._begin(stream, x, out)
        if self._shard:
            self._run(handle, op, to)
        return self._out if out is None else out

    def _begin(self, stream: Any, x: Any, out: Any) -> tuple[int, Operand, Operand]:
        try:
            op = self.input(x, self.shape, self.dtype)
            to = self.output(out, self._out, self.out_shape, self.out_dtype)
            sizes = (self.dtype.itemsize, self.out_dtype.itemsize)
            part, out_part = (self._shard * size for size in sizes)
            own = -self.group.rank * part if part == out_part else None
            check_overlap("reduce_scatter", op, to, own, (self.group.size * part, out_part))
            return self.begin_checked(stream, op, to)
        except Exception as error:
            self.refuse(error)
            raise


def bind_push(
    plan: Plan, config: ReductionConfig, shard: int, numel: int, kinds: tuple[np.dtype, np.dtype],
    op: str,
) -> Bound:  # fmt: skip
    """Workspaces and the kernel of push, for the `shard` elements of each of `numel`."""
    ranks, unit = plan.group.size, math.gcd(VECTOR, shard)
    slot_bytes = ranks * shard * kinds[0].itemsize
    ahead, least = ranks <= 2, config.steps
    if least is None and ahead:
        least = 1 if fewest_steps(slot_bytes) == 1 else _LEAST_STEPS
    elif least is None:
        least = -(-slot_bytes // STEP_BYTES)
    steps = Steps.make(shard, slot_bytes, least, ahead)
    blocks = plan.blocks_for(-(-steps.elements // config.block), config.blocks)
    staging = plan.workspace("shards", (steps.slots * ranks * steps.elements,), kinds[0])
    signals = plan.workspace("signals", (blocks * ranks,), np.int32, steps=steps.count)
    return plan.bind(
        push_kernel, blocks, kinds, staging, signals, plan.channel(blocks), plan.group.handle,
        numel, shard // unit, steps.vectors, steps.count, OP=op, RANKS=ranks, SLOTS=steps.slots,
        AHEAD=int(ahead), UNIT=unit, EVEN=numel % unit == 0, BLOCK=config.block,
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip


def reduce_scatter(
    x: Any,
    op: str = "sum",
    out: Any = None,
    out_dtype: Any = None,
    algorithm: str | None = None,
    team: Group | None = None,
    stream: Any = None,
) -> Any:
    """This rank's part of the reduction of every rank's `x`. Collective over `team`.

    Parameters
    ----------
    x : tdx array, or any array of NumPy or a DLPack producer
        (size * n, ...); same shape and dtype on every rank, see ReduceScatter for dtypes.
    op : {"sum", "avg", "max", "min"}
    out : array, optional
        (n, ...): where the result goes; may be the own part of `x`.
    out_dtype, optional
        Type of the result: for floats any float type, of float64 none of 8 bits.
    algorithm : {"low_latency", "push"}, optional
    team : Team, optional
    stream : optional
        None: the world's current stream for a tdx array, else the caller's.

    Returns (n, ...), rows rank * n to (rank + 1) * n of what all_reduce gives, bit for bit, in the
    caller's own framework; fresh unless `out` is given.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    options = {"op": op, "out_dtype": out_dtype, "algorithm": algorithm}
    return one_line(ReduceScatter, x, out, team, stream, options)
