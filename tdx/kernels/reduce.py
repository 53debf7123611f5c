"""Reduce: one rank, the root, gets the reduction of all ranks' arrays.

W ranks, S bytes each:

two_shot     Rank r reduces shard r and pushes the result to the root, which copies it from a slot:
             (W - 1) / W * S bytes out of each rank and as many into the root, twice, in two hops.
             All ranks sending to the root would be W times as much over the root's links. See
             two_shot.py.
low_latency  The all-reduce of that name, of which only the root keeps the result: the root's
             links take as long for the words of all ranks as those of each rank for sending them
             to all. And because each call waits for every rank, two slots need no credits.

Result: the bits that all_reduce gives.

Ordering: when the operation is complete on a rank's stream, its input was sent and may be reused.
The root's result may then be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tdx.kernels.all_reduce_words import bind_low_latency
from tdx.kernels.call import Call
from tdx.kernels.operand import Operand, elements
from tdx.kernels.packed import low_latency_elements, packed_bytes
from tdx.kernels.plan import Plan, check_low_latency, plain_shape
from tdx.kernels.plan_cache import known_plan
from tdx.kernels.pushing import check_overlap
from tdx.kernels.reduction import ReductionConfig, check_types
from tdx.kernels.select import (
    cheapest,
    shard_block,
    takes_low_latency,
)
from tdx.kernels.two_shot import bind_two_shot
from tdx.runtime import dtypes
from tdx.runtime.array import Array
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["Config", "Reduce", "reduce"]


@dataclass(frozen=True)
class Config(ReductionConfig):
    """How a reduce runs: see tdx.kernels.reduction.ReductionConfig.

    `algorithm` is "low_latency" or "two_shot".
    """

    algorithms: ClassVar[tuple[str, ...]] = ("low_latency", "two_shot")


class Reduce(Plan):
    """A reduce of one shape and dtype to one root, ready to be called.

    Parameters
    ----------
    world : World
    shape, dtype
        Of every rank's input. float16/32/64, bfloat16, float8, int32/64.
    root : int
        Rank of `team` that gets the result.
    op : {"sum", "avg", "max", "min"}
    out_dtype, optional
        Of the result: the input's, or for floats another float type (of float64 none of 8 bits).
    algorithm : {"low_latency", "two_shot"}, optional
    config : Config, optional
        Overrides the choice altogether.
    team : Team, optional
    buffer : bool
        Whether the root has a result buffer, for calls without `out`.

    Attributes
    ----------
    here : bool
        Whether this rank is the root.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted.
    """

    operation = "reduce"

    def __init__(
        self,
        world: World,
        shape: Any,
        dtype: Any,
        root: int,
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
            self.result = (self.shape, self.out_dtype)
            self.op, self.root = op, self.group.check_rank(root, f"{self.operation}: root")
            check_types(self.operation, self.dtype, self.out_dtype, op, world.device.arch)
            ranks = self.group.size
            Config.check(config, self.operation, algorithm, self.dtype, world.backend)
            self._numel = elements(self.shape)
            self.config = config or self._choose(algorithm)
            if self.config.algorithm == "low_latency":
                nbytes = self._numel * self.dtype.itemsize
                check_low_latency("reduce", nbytes, ranks, (self.dtype,))
            shared.update(
                shape=self.shape, dtype=self.dtype, root=self.root, op=op, out_dtype=self.out_dtype,
                given_algorithm=algorithm, config=self.config,
            )  # fmt: skip
        self.here = self.group.rank == self.root
        with self.preparation():
            named = {"OP": op, "HAS_BIAS": False, "HAS_RESIDUAL": False}
            kinds = (self.dtype, self.out_dtype)
            if self.config.algorithm == "low_latency":
                self._run = bind_low_latency(self, self.config, self.shape, kinds, named)
            else:
                self._run, _ = bind_two_shot(
                    self, self.config, self.shape, kinds, named, root=self.root
                )
            # elsewhere low_latency leaves the result in a buffer that nobody sees
            wanted = buffer if self.here else self.config.algorithm == "low_latency"
            self._out = self.result_buffer(self.shape, self.out_dtype, wanted)

    def _choose(self, algorithm: str | None) -> Config:
        backend, size, ranks = self.world.backend, self.dtype.itemsize, self.group.size
        nbytes = self._numel * size
        if algorithm is None:
            results = self._numel * self.out_dtype.itemsize
            sent = {"two_shot": (ranks - 1) * (nbytes + results) / ranks}
            if takes_low_latency(nbytes, ranks, (self.dtype,)):
                sent["low_latency"] = packed_bytes((ranks - 1) * nbytes)
            algorithm = cheapest(backend, sent, ranks)
        if algorithm == "low_latency":
            return Config(algorithm, *low_latency_elements(backend, self._numel, size))
        return Config(algorithm, *shard_block(backend, -(-self._numel // ranks), size, ranks))

    def __call__(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """Queue the reduce of `x`. Returns None on all ranks but the root.

        On the root returns `out`, or the plan's buffer when it is None, which the next call
        overwrites. `out` may be `x`; other ranks pass None. The result is valid after the stream
        was waited for by a call that raises faults.
        """
        writes = self.here or self._out is not None
        known = None
        if self.here or out is None:
            known = self.again(stream, x, out if writes else x)
        handle, op, to = known or self._begin(stream, x, out)
        if self._numel:
            self._run(handle, op, to, op, op)
        if not self.here:
            return None
        return self._out if out is None else out

    def _begin(self, stream: Any, x: Any, out: Any) -> tuple[int, Operand, Operand]:
        try:
            op = self.input(x, self.shape, self.dtype)
            if not self.here and out is not None:
                raise InvalidArgument(f"reduce: out= is for the root, rank {self.root}; pass None")
            if self.here or self._out is not None:
                to = self.output(out, self._out, self.shape, self.out_dtype)
                sizes = (self._numel * self.dtype.itemsize, self._numel * self.out_dtype.itemsize)
                check_overlap("reduce", op, to, 0 if sizes[0] == sizes[1] else None, sizes)
            else:
                to = op  # not written to
            return self.begin_checked(stream, op, to)
        except Exception as error:
            self.refuse(error)
            raise


def reduce(
    x: Any,
    root: int,
    op: str = "sum",
    out: Any = None,
    out_dtype: Any = None,
    algorithm: str | None = None,
    team: Group | None = None,
    stream: Any = None,
) -> Any:
    """The reduction of every rank's `x`, on the root. Collective over `team`.

    Parameters
    ----------
    x : tdx array, or any array of NumPy or a DLPack producer
        Same shape and dtype on every rank; see Reduce for dtypes.
    root : int
        Rank of `team` that gets the result.
    op : {"sum", "avg", "max", "min"}
    out : array, optional
        Where the root's result goes; may be `x`. None on the other ranks.
    out_dtype, optional
        Type of the result: for floats any float type, of float64 none of 8 bits.
    algorithm : {"low_latency", "two_shot"}, optional
    team : Team, optional
    stream : optional
        None: the world's current stream for a tdx array, else the caller's.

    Returns the result in the caller's own framework on the root, fresh unless `out` is given, and
    None on the other ranks.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    options = {"root": root, "op": op, "out_dtype": out_dtype, "algorithm": algorithm}
    if type(x) is Array and (out is None or type(out) is Array):
        plan = known_plan(Reduce, team, (x.shape, x.dtype), options, x)
        if plan is not None:
            return plan(x, plan.fresh_result() if out is None and plan.here else out, stream)
    call = Call("reduce", x, out, team=team, stream=stream)
    with call:
        source = call.operand(x, "x")
        plan = call.plan(Reduce, source.shape, source.dtype, **options)
        target = call.target(out, *plan.result) if plan.here else out
        plan(source, target, stream=call.stream)
    result = call.finish(target)
    return result if plan.here else None
