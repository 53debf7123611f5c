"""Rows of the benches of collectives: algorithms in symmetric memory and in other memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.runtime import dtypes
from tdx.tools.comparison import shared_reason
from tdx.tools.timing import calls_for, device_time, host_time

if TYPE_CHECKING:
    from tdx.tools.bench import Bench

__all__ = ["REDUCED", "Collective", "algorithm_of", "columns", "summands"]

# Types that reductions take.
REDUCED = tuple(
    kind.name
    for kind in dtypes.SUPPORTED
    if dtypes.is_float(kind) or kind.name in ("int32", "int64")
)
_PAGE = (1 << 20) + 13  # odd, so that parts of an array differ


def columns(peers: Sequence[str], algorithms: Sequence[str]) -> tuple[str, ...]:
    """What a row holds, in order."""
    return (
        "bytes", "memory", *peers, *algorithms, "chosen", "algorithm", "gap", "floor", "ratio",
        "% of floor",
    )  # fmt: skip


def algorithm_of(plan: Any) -> str:
    """What a plan runs; plans of reductions have it in their config."""
    return str(plan.algorithm if hasattr(plan, "algorithm") else plan.config.algorithm)


@dataclass(frozen=True)
class Collective:
    """A collective of one size.

    Attributes
    ----------
    nbytes : int
        As the first column has it.
    make : callable
        `make(algorithm=, buffer=)` gives a plan.
    algorithms : sequence of str
        Those that take the size.
    given, expected : np.ndarray
        This rank's input and result, of one axis.
    sent : float
        Bytes that each rank must send.
    peers : dict
        Their microseconds, see Peers.
    own_memory : sequence of str
        Peers that work on symmetric memory of their own alone.
    """

    nbytes: int
    make: Callable[..., Any]
    algorithms: Sequence[str]
    given: np.ndarray[Any, Any]
    expected: np.ndarray[Any, Any]
    sent: float
    peers: dict[str, Any] = field(default_factory=dict)
    own_memory: Sequence[str] = ()

    def rows(self, bench: Bench) -> Iterator[dict[str, Any]]:
        """A row for a symmetric input and the plan's buffer, and one for foreign memory.

        Foreign: input and result lie where those of other frameworks do.
        """
        yield self._row(bench, "symmetric", self.peers)
        others = {name: self.peers[name] for name in self.peers if name not in self.own_memory}
        yield self._row(bench, "foreign", others)

    def _row(self, bench: Bench, memory: str, peers: dict[str, Any]) -> dict[str, Any]:
        world, symmetric = bench.world, memory == "symmetric"
        x = world.array(self.given, symmetric=symmetric)
        out = None if symmetric else world.empty(self.expected.shape, x.dtype, symmetric=False)
        row: dict[str, Any] = {"bytes": self.nbytes, "memory": memory, **peers}
        make = partial(self.make, buffer=symmetric)
        for algorithm in bench.algorithms(self.algorithms):
            plan = bench.plan(row, algorithm, make)
            if plan is not None:
                self._measure(bench, row, algorithm or "chosen", partial(plan, x, out), out)
        row["algorithm"] = algorithm_of(plan)
        theirs = [name for name in peers if name != "failed"]
        bench.rate(row, self.algorithms, theirs, self.sent)
        return row

    def _measure(
        self, bench: Bench, row: dict[str, Any], name: str, call: Callable[[], Any], out: Any
    ) -> None:
        """Add times of `call` and its host side as `name`; the bytes must be `expected`."""
        row[name] = device_time(bench.world, call, calls_for(self.nbytes))
        expected = np.ascontiguousarray(self.expected).view(np.uint8)
        if out is not None:  # the results of other algorithms are still there
            out.copy_from((~expected).view(out.dtype))
        wrong = "" if call().numpy().tobytes() == expected.tobytes() else "wrong result"
        if reason := shared_reason(bench.world, name, wrong):
            row["error"] = f"{name}: {reason}"
        row[f"{name}_host"] = host_time(bench.world, call)


def summands(bench: Bench, numel: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """This rank's `numel` small integers, and the sums over ranks."""
    pages = [
        np.random.default_rng(rank).integers(-8, 8, min(_PAGE, numel)).astype(bench.dtype)
        for rank in range(bench.world.size)
    ]
    total = np.sum([page.astype(np.float32) for page in pages], axis=0).astype(bench.dtype)
    return np.resize(pages[bench.world.rank], numel), np.resize(total, numel)
