"""Computing on data while it arrives: a copy stream and a consuming kernel.

    tdx run -n 4 examples/03_gather_with_progress.py

While a gather is waited for as a whole, the device idles. Here the gather runs on a stream of
its own, in chunks, and sets a signal for each chunk that has arrived. The consumer starts
at once; its blocks wait for the chunk they need next, the rank's own chunks first. It is done by
hand, with a stream and a push kernel, and with the plan `tdx.AllGather(..., progress=True)`.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

import tdx
import tdx.language as tdl

CHUNKS, ROWS, COLUMNS = 4, 8, 256  # a rank has CHUNKS chunks of ROWS rows
BLOCKS = 2  # fewer than fit on the device: the push kernel needs a place as well


@triton.jit
def push_kernel(x, gathered, arrived, world, CHUNKS: tl.constexpr, SIZE: tl.constexpr):
    """Program k sends this rank's chunks to peer me + k, and announces each one there."""
    me = tdl.rank(world)
    peer = (me + tl.program_id(0)) % tdl.num_ranks(world)
    for chunk in range(CHUNKS):
        unit = me * CHUNKS + chunk
        to = gathered + unit * SIZE
        tdl.put_signal(to, x + chunk * SIZE, SIZE, arrived + unit, 1, peer, world)


@triton.jit
def row_sums(
    gathered, sums, arrived, value, world,
    CHUNKS: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The sum of every gathered row, chunk by chunk, own chunks first."""
    units = tdl.num_ranks(world) * CHUNKS
    for turn in range(tl.program_id(0), units, tl.num_programs(0)):
        unit = (tdl.rank(world) * CHUNKS + turn) % units
        ok = tdl.wait(arrived + unit, world, tl.load(value), peer=unit // CHUNKS)
        rows = unit * R + tl.arange(0, R)
        block = tl.load(gathered + rows[:, None] * C + tl.arange(0, C)[None, :])
        tl.store(sums + rows, tl.sum(block, axis=1), mask=ok)


def main() -> None:
    with tdx.init() as world:
        rows = world.size * CHUNKS * ROWS
        whole = np.random.default_rng(1).integers(0, 9, (rows, COLUMNS)).astype(np.float32)
        x = world.array(np.split(whole, world.size)[world.rank])
        sums = world.zeros(rows, "float32", symmetric=False)
        shape = {"CHUNKS": CHUNKS, "R": ROWS, "C": COLUMNS}

        # by hand, once: nothing resets the signals
        gathered = world.empty((rows, COLUMNS), "float32")
        arrived = world.zeros(world.size * CHUNKS, "int32")
        one = world.array(np.ones(1, np.int32), symmetric=False)
        world.barrier()  # every rank's signals are zero before the first one is set
        copies = world.new_stream()
        with world.on(copies):
            push_kernel[(world.size,)](x, gathered, arrived, world.handle, CHUNKS, ROWS * COLUMNS)
        row_sums[(BLOCKS,)](gathered, sums, arrived, one, world.handle, **shape)
        assert np.array_equal(sums.numpy(), whole.sum(axis=1))
        # with a plan: signals count calls, so it may be called again and again
        plan = tdx.AllGather(world, x.shape, x.dtype, progress=True, chunks_per_rank=CHUNKS)
        for _ in range(3):
            sums.copy_from(np.zeros(rows, np.float32))
            gathered = plan(x)
            row_sums[(BLOCKS,)](gathered, sums, plan.progress, plan.epoch, world.handle, **shape)
            assert np.array_equal(sums.numpy(), whole.sum(axis=1))
        print(f"rank {world.rank}: {rows} row sums right, by hand and three times with the plan")


if __name__ == "__main__":
    main()
