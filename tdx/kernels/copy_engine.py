"""Gathers by copy engines: no multiprocessor moves data.

Every rank copies its part of S bytes to one peer after another on a side stream, rank + 1 first, so
that the ranks form a permutation (see pushing.py), and then all meet in a barrier of one block:
(W - 1) * S bytes out. It goes into the plan's own buffer of all parts, because a copy's target has
to be known on the host. An all-gather begins with such a barrier, too.

Ordering: the first barrier tells that all peers are done with their last results, the second that
all copies have arrived. A copy cannot look at faults: when a rank gives up waiting before them its
copies still go out, and a peer that comes later than the deadline may find its last result
overwritten before its own wait raises. So it is for who asks for it by name.
"""

from __future__ import annotations

from tdx.kernels.barrier import barrier_kernel
from tdx.kernels.operand import Operand, operand
from tdx.kernels.plan import Plan
from tdx.runtime.array import Array
from tdx.runtime.stream import order

__all__ = ["CopyEngine"]


class CopyEngine:
    """Spreads the own part of a buffer. Part of a plan.

    Parameters
    ----------
    plan : Plan
        In its preparation.
    buffer : Array
        Symmetric, of the plan: what every call overwrites.
    first, nbytes : int
        Where the own part begins in it, in bytes, and its length.
    """

    def __init__(self, plan: Plan, buffer: Array, first: int, nbytes: int):
        group, world = plan.group, plan.world
        plan._shown = [operand(world, buffer, "buffer")]
        self._driver = world.driver
        self._buffer, self._nbytes = buffer, nbytes
        self._meet = plan.bind(
            barrier_kernel, 1, (), plan.channel(1), group.handle, num_warps=1
        )  # fmt: skip
        self._side = world.streams.lend(self, priority=-1)
        hops = [group.ranks[(group.rank + hop) % group.size] for hop in range(1, group.size)]
        self._places = [buffer.peer(rank)._address + first for rank in hops] if nbytes else []
        self._own = buffer._address + first

    def run(self, plan: Plan, stream: int, x: Operand, to: Operand) -> None:
        """Queue an all-gather of `x`; copies the buffer to `to` where that is something else."""
        self._meet(stream)
        self.spread(stream, x, to)

    def spread(self, stream: int, x: Operand, to: Operand) -> None:
        """The same where all ranks are known to be in the call."""
        copy, side, nbytes = self._driver.copy, self._side.handle, self._nbytes
        order(self._driver, stream, side)
        for place in self._places:
            copy(place, x.address, nbytes, side, x.owner)
        if nbytes and x.address != self._own:
            copy(self._own, x.address, nbytes, stream, x.owner)
        order(self._driver, side, stream)
        self._meet(stream)
        buffer = self._buffer
        if to.address != buffer._address:
            copy(to.address, buffer._address, buffer.nbytes, stream, to.owner)
