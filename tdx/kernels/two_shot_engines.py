"""A large all-reduce of which copy engines do the second half: they fill links better than stores.

Rank r reduces shard r as a reduce-scatter does (reduce_scatter.py: push), and copy engines send it
to the others, into the plan's own buffer (copy_engine.py): 2 * (W - 1) / W * S bytes out, two hops.
A result that is wanted elsewhere is copied out at the end.

No meeting before the copies: a rank has reduced its shard when all ranks have pushed theirs, so
they are in this call, are done with their last result, and have read of their buffer what others
write. A rank that gave that up sends what it had reduced in its last call, which is what others
have there, unless they have changed it: shards are reduced outside of the buffer, which a user may
write to.
"""

from __future__ import annotations

import numpy as np

from tdx.kernels.copy_engine import CopyEngine
from tdx.kernels.copying import VECTOR, padded
from tdx.kernels.operand import Operand, operand
from tdx.kernels.plan import Plan
from tdx.kernels.reduce_scatter import bind_push
from tdx.kernels.reduction import ReductionConfig
from tdx.kernels.two_shot import Run
from tdx.runtime.array import Array

__all__ = ["bind_engines"]


def bind_engines(
    plan: Plan, config: ReductionConfig, numel: int, kinds: tuple[np.dtype, np.dtype], op: str,
    buffer: Array,
) -> Run:  # fmt: skip
    """Workspaces and kernels for a plan, of `numel` elements; `kinds`: types in and out.

    What runs leaves results in the symmetric `buffer`, and in what it is given as `out`.
    """
    shard, size = padded(-(-numel // plan.group.size)) * VECTOR, kinds[1].itemsize
    first = min(numel, plan.group.rank * shard)
    part = operand(plan.world, plan.workspace("part", (shard,), kinds[1]), "part")
    reduce = bind_push(plan, config, shard, numel, kinds, op)
    engine = CopyEngine(plan, buffer, first * size, min(shard, numel - first) * size)

    def run(stream: int, x: Operand, out: Operand, *_: Operand) -> None:
        reduce(stream, x, part)
        engine.spread(stream, part, out)

    return run
