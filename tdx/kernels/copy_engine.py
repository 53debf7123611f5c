"""All-gather by copy engines: no multiprocessor moves data.

Every rank pushes its array of S bytes to one peer after another on a side stream, rank + 1 first,
so that the ranks form a permutation (see pushing.py), between two barriers of one block each:
(W - 1) * S bytes out. It goes into the plan's own buffer of W * S bytes, because a copy's target
has to be known on the host.

Ordering: the first barrier tells that all peers are done with their last results, the second that
all copies have arrived. A copy cannot look at faults: when a rank gives up waiting in the first
barrier its copies still go out, and a peer that comes later than the deadline may find its last
result overwritten before its own wait raises.
"""

from __future__ import annotations

from typing import Any

from tdx.kernels.barrier import barrier_kernel
from tdx.kernels.operand import Operand, operand
from tdx.kernels.plan import Plan
from tdx.runtime.stream import order

__all__ = ["CopyEngine"]


class CopyEngine:
    """Gathers into the plan's buffer. Part of a plan.

    Attributes
    ----------
    buffer : Array
        `out_shape`, symmetric: the result.
    """

    def __init__(self, plan: Plan, nbytes: int, out_shape: tuple[int, ...], dtype: Any):
        """In the plan's preparation; `nbytes` are those of one rank."""
        group, world = plan.group, plan.world
        self.buffer = plan.workspace("gathered", out_shape, dtype)
        plan._shown = [operand(world, self.buffer, "buffer")]
        self._driver = world.driver
        self._nbytes, self._ranks = nbytes, group.size
        self._meet = plan.bind(
            barrier_kernel, 1, (), plan.channel(1), group.handle, num_warps=1
        )  # fmt: skip
        self._side = world.streams.lend(self, priority=-1)
        own = group.rank * nbytes
        hops = [group.ranks[(group.rank + hop) % group.size] for hop in range(1, group.size)]
        self._places = [self.buffer.peer(rank)._address + own for rank in hops]
        self._own = self.buffer._address + own

    def run(self, plan: Plan, stream: int, x: Operand, to: Operand) -> None:
        """Queue it; copies the buffer to `to` where that is something else."""
        copy, side, nbytes = self._driver.copy, self._side.handle, self._nbytes
        self._meet(stream)
        order(self._driver, stream, side)
        for place in self._places:
            copy(place, x.address, nbytes, side, x.owner)
        if x.address != self._own:
            copy(self._own, x.address, nbytes, stream, x.owner)
        order(self._driver, side, stream)
        self._meet(stream)
        if to.address != self.buffer._address:
            copy(to.address, self.buffer._address, self._ranks * nbytes, stream, to.owner)
