"""Barrier: all ranks of a team meet, in stream order.

Algorithm: dissemination to all at once. One block writes its epoch into its pad at every peer
(W - 1 messages of 4 bytes, one hop) and waits for every peer's. Epochs live on the device, so a
recorded barrier can be replayed.

Ordering: work queued before the barrier on every rank's stream happens before work queued after
it on any rank's stream, at system scope.
"""

from __future__ import annotations

from typing import Any

import triton

import tdx.language as tdl
from tdx.kernels.call import world_of
from tdx.kernels.plan import Plan, group_of
from tdx.kernels.plan_cache import cached
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["Barrier", "barrier"]


@triton.jit
def barrier_kernel(channel, world):
    tdl.barrier(channel, world)


class Barrier(Plan):
    """A barrier of a team, ready to be called: `plan(stream=None)`."""

    operation = "barrier"

    def __init__(self, world: World, team: Group | None = None):
        with self.agreement(world, team):
            pass
        with self.preparation():
            self._run = self.bind(
                barrier_kernel, 1, (), self.channel(1), self.group.handle, num_warps=1
            )

    def __call__(self, stream: Any = None) -> None:
        """Queue the barrier on `stream` (None: the current one)."""
        try:
            handle = self.begin(stream)
        except Exception as error:
            self.refuse(error)
            raise
        self._run(handle)


def barrier(team: Group | None = None, stream: Any = None) -> None:
    """Queue a barrier of all ranks of `team` (None: the world) on `stream`.

    Returns at once: it is the streams that meet. `world.barrier()` waits on the host.
    Raises a pending fault, CollectiveMismatch.
    """
    world = world_of()
    group = group_of(world, team, "barrier")
    cached(world, group, Barrier, stream=stream)(stream)
