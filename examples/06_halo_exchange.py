"""Ghost cells: a rod that cools down, each rank with a piece of it and a neighbour on either side.

    tdx run -n 4 examples/06_halo_exchange.py

A piece lies between two ghost cells, copies of the neighbours' outermost cells. Each step the first
block sends the leftmost cell to the left and waits for what comes from there, the last block does
so to the right, and the blocks between them compute without waiting. Each direction has a signal.
The ends of the rod stay at 0: there is no neighbour, and the ghost cell is never written.

No signal says that a ghost cell may be overwritten, since two buffers are used in turn and
neighbours wait for each other. A neighbour writes to a buffer in every second step. Before it does
so again it has waited, in the step between, for this rank's signal; and this rank sends that only
when the kernel that read the ghost cells is done. With a single buffer, or with data that goes one
way only, a signal in the other direction is needed, as in docs/tutorials/own_kernel.md.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

import tdx
import tdx.language as tdl

CELLS, BLOCK, STEPS = 1000, 256, 50  # of a rank; blocks are powers of two, so the last is masked


@triton.jit
def step_kernel(u, v, from_left, from_right, cells, channel, world, BLOCK: tl.constexpr):
    """v = u one step later. Both have a ghost cell at 0 and at cells + 1."""
    me, block = tdl.rank(world), tl.program_id(0)
    left, right = me - 1, me + 1
    has_left = (block == 0) & (left >= 0)
    has_right = (block == tl.num_programs(0) - 1) & (right < tdl.num_ranks(world))
    step = tdl.epoch(channel)

    if has_left:  # my first cell is the right ghost cell over there
        tdl.put_signal(u + cells + 1, u + 1, 1, from_right, step, left, world)
    if has_right:
        tdl.put_signal(u, u + cells, 1, from_left, step, right, world)
    if has_left:
        tdl.wait(from_left, world, step, peer=left)
    if has_right:
        tdl.wait(from_right, world, step, peer=right)

    at = 1 + block * BLOCK + tl.arange(0, BLOCK)
    inside = at <= cells
    neighbours = tl.load(u + at - 1, mask=inside) + tl.load(u + at + 1, mask=inside)
    tl.store(v + at, tl.load(u + at, mask=inside) / 2 + neighbours / 4, mask=inside)


def main() -> None:
    with tdx.init() as world:
        rod = np.random.default_rng(3).random(world.size * CELLS, np.float32)  # the same everywhere
        mine = slice(world.rank * CELLS, (world.rank + 1) * CELLS)
        u = world.zeros(CELLS + 2, "float32")  # with a zero at each end of the rod
        v = world.zeros(CELLS + 2, "float32")
        u[1:-1] = rod[mine]
        from_left = world.zeros(1, "int32", name="from_left")
        from_right = world.zeros(1, "int32", name="from_right")
        blocks = triton.cdiv(CELLS, BLOCK)
        channel = world.channel(blocks)  # all ranks meet here: nobody is still zeroing
        for _ in range(STEPS):
            step_kernel[(blocks,)](u, v, from_left, from_right, CELLS, channel, world.handle, BLOCK)
            u, v = v, u
            rod = np.pad(rod, 1)
            rod = rod[1:-1] / 2 + (rod[:-2] + rod[2:]) / 4

        error = np.abs(u[1:-1].numpy() - rod[mine]).max()
        assert error < 1e-6, error
        print(f"rank {world.rank}: {STEPS} steps of {CELLS} cells, largest error {error:.1e}")


if __name__ == "__main__":
    main()
