"""All-to-all: block i of every rank's array goes to rank i, which stacks them in rank order.

W ranks, blocks of S bytes:

low_latency  8/7 * (W - 1) * S bytes out as words of data and flag, one hop and no meeting; see
             low_latency.py. Blocks of up to 4 MiB, up to 16 ranks.
push         (W - 1) * S bytes out, straight into results in symmetric memory, else through staging
             slots of at most 64 MiB; two meetings, and one more for each further round of staging;
             see pushing.py.

Data moves as bytes, in words as wide as size and addresses allow: any element type.

Ordering: when the operation is complete on a rank's stream, no peer reads its operands or writes
its result.
"""

from __future__ import annotations

from typing import Any

from tdx.kernels.call import one_line
from tdx.kernels.low_latency import LowLatency
from tdx.kernels.operand import Operand, elements
from tdx.kernels.plan import Plan, check_algorithm, check_low_latency, plain_shape
from tdx.kernels.pushing import Push, check_overlap
from tdx.kernels.select import movement_algorithm
from tdx.runtime import dtypes
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["AllToAll", "all_to_all"]

ALGORITHMS = ("low_latency", "push")


class AllToAll(Plan):
    """An all-to-all of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape, dtype
        Of every rank's input, (size * n, ...), and of the result. Any dtype.
    algorithm : {"low_latency", "push"}, optional
    team : Team, optional
    buffer : bool
        Whether the plan has a result buffer, for calls without `out`.

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted.
    """

    operation = "all_to_all"

    def __init__(
        self,
        world: World,
        shape: Any,
        dtype: Any,
        *,
        algorithm: str | None = None,
        team: Group | None = None,
        buffer: bool = True,
    ):
        with self.agreement(world, team) as shared:
            self.shape = plain_shape(shape)
            self.dtype = dtypes.resolve(dtype)
            self.result = (self.shape, self.dtype)
            ranks = self.group.size
            if not self.shape or self.shape[0] % ranks:
                raise InvalidArgument(
                    f"all_to_all: the first axis of shape {self.shape} must hold a block for each "
                    f"of {ranks} ranks: make it a multiple of {ranks}"
                )
            self._nbytes = elements(self.shape) // ranks * self.dtype.itemsize
            check_algorithm("all_to_all", algorithm, ALGORITHMS)
            self.algorithm = algorithm or movement_algorithm(
                world.backend, self._nbytes, ranks, "push"
            )
            if self.algorithm == "low_latency":
                check_low_latency("all_to_all", self._nbytes, ranks)
            shared.update(
                shape=self.shape, dtype=self.dtype, given_algorithm=algorithm,
                algorithm=self.algorithm,
            )  # fmt: skip
        with self.preparation():
            kind = LowLatency if self.algorithm == "low_latency" else Push
            self._movement = kind(self, self._nbytes, each=True)
            # peers write into it themselves
            self._out = self.workspace("result", self.shape, self.dtype) if buffer else None

    def __call__(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """Queue the all-to-all of `x`; returns `out`, or the plan's buffer when it is None.

        The buffer is overwritten by the next call. `out` may be `x`.
        """
        handle, op, to = self.again(stream, x, out) or self._begin(stream, x, out)
        if self._nbytes:
            self._movement.run(self, handle, op, to)
        return self._out if out is None else out

    def _begin(self, stream: Any, x: Any, out: Any) -> tuple[int, Operand, Operand]:
        try:
            op = self.input(x, self.shape, self.dtype)
            to = self.output(out, self._out, self.shape, self.dtype)
            whole = self.group.size * self._nbytes
            check_overlap("all_to_all", op, to, 0, (whole, whole))
            return self.begin_checked(stream, op, to)
        except Exception as error:
            self.refuse(error)
            raise


def all_to_all(
    x: Any,
    out: Any = None,
    team: Group | None = None,
    stream: Any = None,
    algorithm: str | None = None,
) -> Any:
    """Block i of every rank's `x` goes to rank i. Collective over `team`.

    Parameters
    ----------
    x : tdx array, or any array of NumPy or a DLPack producer
        (size * n, ...), any dtype; same shape and dtype on every rank.
    out : array, optional
        (size * n, ...): the ranks' blocks in rank order. May be `x`.
    team : Team, optional
    stream : optional
        None: the world's current stream for a tdx array, else the caller's.
    algorithm : {"low_latency", "push"}, optional

    Returns the result in the caller's own framework, fresh unless `out` is given.

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted, and a pending fault.
    """
    return one_line(AllToAll, x, out, team, stream, {"algorithm": algorithm})
