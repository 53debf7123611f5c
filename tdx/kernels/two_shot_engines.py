"""A large all-reduce of which copy engines do the second half: they fill links better than stores.

Rank r reduces shard r as a reduce-scatter does (reduce_scatter.py: push), into its part of the
plan's own buffer, and copy engines send it to the others (copy_engine.py): 2 * (W - 1) / W * S
bytes out, two hops. A result that is wanted elsewhere is copied out at the end.

No meeting before the copies: a rank has reduced its shard when all ranks have pushed theirs, so
they are in this call, are done with their last result, and have read their buffer if that is their
input.
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
    """Workspaces and kernels for a plan, of `numel` > 0 elements; `kinds`: types in and out.

    What runs leaves results in the symmetric `buffer`, and in what it is given as `out`.
    """
    shard = padded(-(-numel // plan.group.size)) * VECTOR
    first = min(numel, plan.group.rank * shard)
    part = buffer.reshape(-1)[first : first + shard]
    own = operand(plan.world, part, "buffer")
    reduce = bind_push(plan, config, shard, numel, kinds, op)
    engine = CopyEngine(plan, buffer, first * kinds[1].itemsize, part.nbytes)

    def run(stream: int, x: Operand, out: Operand, *_: Operand) -> None:
        reduce(stream, x, own)
        engine.spread(stream, out)

    return run
