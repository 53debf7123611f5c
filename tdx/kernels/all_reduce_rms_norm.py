"""All-reduce and RMS norm: h = sum of all ranks' x + bias + residual, y = norm(h).

    y = h / sqrt(mean(h ** 2) + eps) * weight, over the last axis, on every rank

W ranks, S bytes each:

one_shot              Each rank copies x into a symmetric slot, all meet block by block, and each
                      reads the rows of all ranks and normalises all of them. (W - 1) * S bytes in,
                      one hop and one meeting; two slots in turn (see all_reduce.py).
low_latency           The same by pushed words of data and flag: 2 * (W - 1) * S bytes out, no
                      meeting. Up to 16 ranks and 4 MiB, of rows padded to 64 bytes.
two_shot              Rank r adds the rows of shard r and pushes h to all, who normalise all rows:
                      2 * (W - 1) / W * S bytes out, two hops, as many bytes as the all-reduce
                      alone. Pushes go as shards.py has them, a step is reduced before the next.
low_latency_two_shot  The same by words of data and flag, but that each rank adds its columns of all
                      rows: twice the bytes, no signals. Limits as above, of columns of a rank
                      padded to 64 bytes.
unfused               low_latency of the all-reduce, then a kernel that normalises: 8/7 of the bytes
                      of one_shot, and no blocks that wait for each other's parts of a row.
unfused_two_shot      The same with low_latency_two_shot of the all-reduce, but that who adds a
                      shard adds bias and residual too, so that h travels as it is. For both:
                      up to 16 ranks and 4 MiB.

The others are one kernel. A row is one block's, so that its mean needs no other; but with words,
where all wait for what is on its way, several blocks share one (see rms_norm_words.py).

h is accumulated in float32 from rank 0 upwards, then bias, then residual, and rounded once to the
type of x: its bits are those of all_reduce(x, bias=, residual=). The norm is that of the rounded h,
as if it were a second operation. The sum of squares and all else is float32, y is rounded once.
Every rank gets the same bits, and for one Config every run.

Ordering: when the operation is complete on a rank's stream, no peer reads its operands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tdx.kernels.call import Call
from tdx.kernels.copying import VECTOR, padded
from tdx.kernels.operand import Operand, check_apart, elements
from tdx.kernels.packed import low_latency_elements, packed_bytes
from tdx.kernels.plan import Plan, check_algorithm, check_low_latency, plain_shape
from tdx.kernels.plan_cache import known_plan
from tdx.kernels.pushing import check_overlap
from tdx.kernels.reduction import ReductionConfig, check_added
from tdx.kernels.results import Results
from tdx.kernels.rms_norm_kernels import bind_two_kernels, one_shot_kernel, two_shot_kernel
from tdx.kernels.rms_norm_words import bind_words, word_bytes
from tdx.kernels.select import (
    HELD_ROW_BYTES,
    STAGING_BYTES,
    STEP_BYTES,
    cheapest,
    constants,
    row_block,
    row_words,
    takes_low_latency,
)
from tdx.runtime import dtypes
from tdx.runtime.array import Array
from tdx.runtime.checks import as_float, check_flag
from tdx.runtime.errors import DtypeError, InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["AllReduceRmsNorm", "Config", "all_reduce_rms_norm"]

_DTYPES = ("float16", "bfloat16", "float32")
_ONE_STEP_BYTES = 16 << 20  # of all rows; of more a second step hides norms of the first
_MOST_COLUMNS = 1 << 16  # a row is one block's


@dataclass(frozen=True)
class Config(ReductionConfig):
    """How it runs: see tdx.kernels.reduction.ReductionConfig. Pins the bits of the norm.

    `algorithm` is one of `algorithms`; `block` counts elements of a row, in "low_latency_two_shot"
    those that one rank reduces. Unfused it is that of the all-reduce, as are the other fields; the
    kernel behind it has one order of summing for each type and number of columns.
    """

    packed: ClassVar[tuple[str, ...]] = ("unfused",)

    algorithms: ClassVar[tuple[str, ...]] = (
        "low_latency", "low_latency_two_shot", "one_shot", "two_shot", "unfused",
        "unfused_two_shot",
    )  # fmt: skip


class AllReduceRmsNorm(Plan):
    """An all-reduce and RMS norm of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape, dtype
        Of every rank's input: (..., N) with N up to 65536; float16, bfloat16 or float32.
    bias, residual : bool
        Whether calls pass a vector of N elements, an array of the input's shape. Default: False.
    eps : float
        Finite and >= 0.
    algorithm : {"low_latency", "low_latency_two_shot", "one_shot", "two_shot", "unfused",
        "unfused_two_shot"}, optional
    config : Config, optional
        Overrides the choice altogether.
    team : Team, optional
    buffer : bool
        Whether the plan has result buffers, for calls without `out`.

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted.
    """

    operation = "all_reduce_rms_norm"

    def __init__(
        self,
        world: World,
        shape: Any,
        dtype: Any,
        *,
        bias: bool = False,
        residual: bool = False,
        eps: float = 1e-6,
        algorithm: str | None = None,
        config: Config | None = None,
        team: Group | None = None,
        buffer: bool = True,
    ):
        with self.agreement(world, team) as shared:
            self.shape, self.dtype = plain_shape(shape), dtypes.resolve(dtype)
            bias = self._has_bias = check_flag(self.operation, "bias", bias)
            residual = self._has_residual = check_flag(self.operation, "residual", residual)
            eps = self._check(eps)
            self._columns = self.shape[-1]
            self._rows = elements(self.shape[:-1])
            check_algorithm(self.operation, algorithm, Config.algorithms)
            Config.check(config, self.operation, algorithm, self.dtype, world.backend)
            size = self.group.size
            self.config = config or choose(
                world.backend, self._rows, self._columns, self.dtype, size, algorithm
            )
            way = self.config.algorithm
            if way.startswith("low_latency"):
                shares = size if way.endswith("two_shot") else 1
                nbytes = word_bytes(self._rows, self._columns, self.dtype, shares)
                unit = f"bytes of {'rows' if shares == 1 else 'shares of rows'} padded to 64"
                check_low_latency(self.operation, nbytes, size, (self.dtype,), way, unit=unit)
            elif way.startswith("unfused"):
                nbytes = self._rows * self._columns * self.dtype.itemsize
                check_low_latency(self.operation, nbytes, size, (self.dtype,), way)
            self.result, self._residuals = (self.shape, self.dtype), Results()
            shared.update(
                shape=self.shape, dtype=self.dtype, bias=bias, residual=residual, eps=eps,
                given_algorithm=algorithm, config=self.config,
            )  # fmt: skip
        with self.preparation():
            self._out = self.result_buffer(self.shape, self.dtype, buffer)
            self._kept = self.result_buffer(self.shape, self.dtype, buffer and residual)
            if self._rows and self._columns:
                self._run = self._bind(eps)

    def _check(self, given: Any) -> float:
        """Raise unless dtype, shape and eps are taken; eps as a float."""
        if self.dtype.name not in _DTYPES:
            raise DtypeError(
                f"{self.operation} does not take {self.dtype}; it takes {', '.join(_DTYPES)}"
            )
        if not self.shape or self.shape[-1] > _MOST_COLUMNS:
            raise InvalidArgument(
                f"{self.operation}: x needs a last axis of at most {_MOST_COLUMNS} elements, got "
                f"shape {self.shape}; use all_reduce, then a norm"
            )
        eps = as_float(given)
        if eps is None or not (eps >= 0 and math.isfinite(eps)):
            raise InvalidArgument(f"eps={given!r} must be a finite number >= 0")
        return eps

    def _bind(self, eps: float) -> Any:
        """Workspaces and the kernel."""
        config, ranks, kind = self.config, self.group.size, self.dtype
        rows, columns = self._rows, self._columns
        named: dict[str, Any] = {
            "EPS": eps, "HAS_BIAS": self._has_bias, "HAS_RESIDUAL": self._has_residual,
            "RANKS": ranks, "EVEN": columns % 16 == 0,
        }  # fmt: skip
        if config.algorithm.startswith("low_latency"):
            return bind_words(self, config, rows, columns, kind, named)
        if config.algorithm.startswith("unfused"):
            return bind_two_kernels(self, config, rows, columns, kind, named)
        slots: tuple[Any, ...]
        sizes: tuple[int, ...]
        kernel: Any
        tasks = rows
        if config.algorithm == "one_shot":
            kernel, sizes = one_shot_kernel, (padded(rows * columns),)
            slots = (self.workspace("slots", (2 * sizes[0] * VECTOR,), kind),)
        else:
            kernel, sizes = two_shot_kernel, self._steps()
            tasks = sizes[1]
            places = (ranks * tasks * columns,)
            named["HELD"] = columns * kind.itemsize <= HELD_ROW_BYTES
            slots = tuple(self.workspace(name, places, kind) for name in ("shards", "results"))
        blocks = self.blocks_for(tasks, config.blocks)
        if config.algorithm == "two_shot":
            words = blocks * 2 * ranks
            slots += (self.workspace("signals", (words,), np.int32, steps=sizes[-1]),)
        return self.bind(
            kernel, blocks, (kind,) * 6, *slots, self.channel(blocks), self.group.handle,
            rows, columns, *sizes, **named, PIECES=-(-columns // config.block),
            BLOCK=config.block, num_warps=config.num_warps,
            enable_fp_fusion=False,  # a contracted product and sum would round once less
        )  # fmt: skip

    def _steps(self) -> tuple[int, int, int]:
        """Rows of a shard, rows of it that go in a step, and steps."""
        shard = -(-self._rows // self.group.size)
        nbytes = self._rows * self._columns * self.dtype.itemsize
        least = self.config.steps or (1 if nbytes <= _ONE_STEP_BYTES else 2)
        step = -(-shard // max(-(-nbytes // STEP_BYTES), least))
        return shard, step, -(-shard // step)

    def __call__(
        self,
        x: Any,
        weight: Any,
        out: Any = None,
        residual_out: Any = None,
        stream: Any = None,
        *,
        bias: Any = None,
        residual: Any = None,
    ) -> Any:
        """Queue the operation: returns `out`, with a residual the pair (out, residual_out).

        The plan's own buffers, overwritten by its next call, stand in for what is None. Each result
        may be `x` or `residual`, but they must be two arrays.
        """
        result = self._out if out is None else out
        second = self._kept if residual_out is None else residual_out
        same = self.again_with(stream, weight, x, result, second, bias, residual)
        if same is None:
            handle, ops = self._begin(stream, x, weight, out, residual_out, bias, residual)
        else:
            handle, (scale, op, to, kept, vector, whole), _ = same
            kept = to if kept is None else kept
            vector, whole = (op if each is None else each for each in (vector, whole))
            ops = (op, to, kept, scale, vector, whole)
        if self._rows and self._columns:
            self._run(handle, *ops)
        return (result, second) if self._has_residual else result

    def _begin(
        self, stream: Any, x: Any, weight: Any, out: Any, residual_out: Any, bias: Any,
        residual: Any,
    ) -> tuple[int, tuple[Operand, ...]]:  # fmt: skip
        """Check a call and begin it: the stream's handle, the operands of the kernel."""
        try:
            op = self.input(x, self.shape, self.dtype)
            scale = self.input(weight, (self._columns,), self.dtype, "weight")
            check_added(self.operation, (self._has_bias, self._has_residual), bias, residual)
            to = kept = self.output(out, self._out, self.shape, self.dtype)
            vector = whole = op  # stand in for what there is not
            if bias is not None:
                vector = self.input(bias, (self._columns,), self.dtype, "bias")
            if residual is not None:
                whole = self.input(residual, self.shape, self.dtype, "residual")
                kept = self.output(residual_out, self._kept, self.shape, self.dtype)
                if kept.address == to.address and self._rows * self._columns:
                    raise InvalidArgument(f"{self.operation}: out and residual_out are one array")
            elif residual_out is not None:
                raise InvalidArgument(f"{self.operation}: residual_out needs a residual")
            apart = (scale,) if bias is None else (scale, vector)
            check_apart(self.operation, to, *apart, *([] if kept is to else [kept]))
            check_apart(self.operation, kept, *apart)
            nbytes = self._rows * self._columns * self.dtype.itemsize
            for result in {id(to): to, id(kept): kept}.values():
                for read in (op, whole):
                    check_overlap(self.operation, read, result, 0, (nbytes, nbytes))
            handle = self.begin(stream, op, to, kept, scale, vector, whole)
        except Exception as error:
            self.refuse(error)
            raise
        added = None if bias is None else vector
        second, rest = (None, None) if residual is None else (kept, whole)
        self.note(scale, (op, to, second, added, rest))
        return handle, (op, to, kept, scale, vector, whole)


def choose(
    backend: str, rows: int, columns: int, dtype: np.dtype, ranks: int, algorithm: str | None = None
) -> Config:
    """The algorithm, unless given, and its tile."""
    itemsize, peers = dtype.itemsize, ranks - 1
    if algorithm is None:
        whole = rows * columns * itemsize
        sent = {"norm_two_shot": 2 * peers * whole / ranks}
        if 2 * whole <= STAGING_BYTES:
            sent["norm_one_shot"] = peers * whole
        words, shared = (word_bytes(rows, columns, dtype, shares) for shares in (1, ranks))
        if ranks > 1 and takes_low_latency(words, ranks, (dtype,)):
            sent["norm_low_latency"] = 2 * peers * words
        if ranks > 1 and takes_low_latency(shared, ranks, (dtype,)):
            sent["norm_low_latency_two_shot"] = 4 * peers * shared / ranks
        held = columns <= row_block(backend, columns, itemsize, 1)[0]  # a row, by a block
        if ranks > 1 and held and takes_low_latency(whole, ranks, (dtype,)):
            sent["norm_unfused"] = packed_bytes(peers * whole)
            sent["norm_unfused_two_shot"] = packed_bytes(2 * peers * whole / ranks)
        algorithm = cheapest(backend, sent, ranks).removeprefix("norm_")
    if algorithm.startswith("low_latency"):
        shares = ranks if algorithm.endswith("two_shot") else 1
        block, warps = row_words(backend, rows, -(-columns // shares), itemsize, ranks)
    elif algorithm.startswith("unfused"):
        shares = ranks if algorithm.endswith("two_shot") else 1
        block, warps = low_latency_elements(backend, -(-rows * columns // shares), itemsize)
    else:
        block, warps = row_block(backend, columns, itemsize, ranks, algorithm == "two_shot")
    return Config(algorithm, block, warps, blocks=constants(backend).blocks)


def all_reduce_rms_norm(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    eps: float = 1e-6,
    out: Any = None,
    residual_out: Any = None,
    algorithm: str | None = None,
    team: Group | None = None,
    stream: Any = None,
) -> Any:
    """RMS norm of h = (sum of every rank's `x`) + bias + residual. Collective over `team`.

    y = h / sqrt(mean(h ** 2) + eps) * weight over the last axis.

    Parameters
    ----------
    x : tdx array, or any array of NumPy or a DLPack producer
        (..., N): float16, bfloat16 or float32, N <= 65536; same shape and dtype on every rank.
    weight : array
        (N,) of the type of x.
    bias, residual : arrays, optional
        (N,) and x.shape, of the type of x, the same values on every rank: which rank's are added
        depends on the algorithm.
    eps : float
    out, residual_out : arrays, optional
        Where the results go; each may be `x` or `residual`, residual_out only with a residual.
    algorithm : {"low_latency", "low_latency_two_shot", "one_shot", "two_shot", "unfused",
        "unfused_two_shot"}, optional
    team, stream : optional
        As in all_reduce.

    Returns y, or with a residual (y, h): h, rounded to the type of x, is the next residual. In the
    caller's own framework, fresh unless given. Every rank gets the same bits.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    options = {
        "bias": bias is not None, "residual": residual is not None, "eps": eps,
        "algorithm": algorithm,
    }  # fmt: skip
    if type(x) is Array and type(weight) is Array:
        arrays = (x, weight, bias, residual, out, residual_out)
        known = known_plan(AllReduceRmsNorm, team, (x.shape, x.dtype), options, *arrays)
        if known is not None:
            out = known.fresh_result() if out is None else out
            if residual is not None and residual_out is None:
                residual_out = known.fresh_result(known._residuals)
            return known(x, weight, out, residual_out, stream, bias=bias, residual=residual)
    call = Call("all_reduce_rms_norm", x, weight, out, residual_out, team=team, stream=stream)
    with call:
        source, scale = call.operand(x, "x"), call.operand(weight, "weight")
        vector, whole = call.optional(bias, "bias"), call.optional(residual, "residual")
        plan = call.plan(AllReduceRmsNorm, source.shape, source.dtype, **options)
        target = call.target(out, plan.shape, plan.dtype)
        kept = residual_out
        if residual is not None:
            kept = call.target(residual_out, plan.shape, plan.dtype)
        plan(source, scale, target, kept, bias=vector, residual=whole, stream=call.stream)
    return call.finish(target if residual is None else (target, kept))
