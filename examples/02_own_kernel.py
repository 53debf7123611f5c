"""A kernel of your own: one-shot all-reduce.

    tdx run -n 4 examples/02_own_kernel.py

An ordinary `@triton.jit` kernel becomes a distributed one with three things: `world.handle` tells
it which rank it is, `tdl.symm_at` turns an address in its own heap into the same place in a peer's
heap, and `tdl.barrier` lets block b of every rank meet block b of all others. What a rank has
stored before the barrier, all may read after it.

Two barriers are needed. After the first, every rank's input is there. After the second, nobody
reads this rank's input any more, so what follows on the stream may overwrite it.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

import tdx
import tdx.language as tdl

BLOCKS = 4  # they wait for each other, so all must be resident at once


@triton.jit
def all_reduce_kernel(x, out, numel, channel, world, BLOCK: tl.constexpr):
    """out = sum over ranks of x; each block takes its share of the elements."""
    tdl.barrier(channel, world)
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < numel
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in range(tdl.num_ranks(world)):  # rank 0 first everywhere: the same bits on all
            total += tl.load(tdl.symm_at(x + offsets, peer, world), mask=mask, other=0.0)
        tl.store(out + offsets, total, mask=mask)
    tdl.barrier(channel, world)


def main() -> None:
    numel = 5000
    with tdx.init() as world:
        channel = world.channel(BLOCKS)  # signals for the barrier, and its count, on the device
        x = world.empty(numel, "float32")
        out = world.empty(numel, "float32", symmetric=False)  # peers do not need this one
        for call in range(3):
            x.copy_from(np.arange(numel, dtype=np.float32) + world.rank + call)
            all_reduce_kernel[(BLOCKS,)](x, out, numel, channel, world.handle, BLOCK=1024)

        ranks = np.arange(world.size)[:, None]
        expected = (np.arange(numel) + ranks + call).sum(axis=0)
        assert np.array_equal(out.numpy(), expected)
        print(f"rank {world.rank}: sum over {world.size} ranks right, it begins {expected[:3]}")


if __name__ == "__main__":
    main()
