"""Sending each peer its own number of rows: the all-to-all of expert parallelism.

    tdx run -n 4 examples/05_low_latency_all_to_all.py

Which token goes to which rank is decided on the device, so the counts are there and the host never
sees them. One kernel does everything: program p sends rank p its rows and their count, then waits
for what rank p sends. The signal travels behind the data, so there is no barrier.

Two buffers are used in turn. A rank starts call n + 2 only after all peers' signals of call n + 1,
and a peer sends those only when its call n, and what followed it on the stream, is done: nobody
reads the buffer of call n any more.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

import tdx
import tdx.language as tdl

MOST_ROWS, HIDDEN = 16, 128  # rows one rank sends to another, at most


@triton.jit
def all_to_all_kernel(
    rows, counts, received, received_counts, signals, channel, world,
    MOST_ROWS: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """rows: sorted by destination, counts[p] of them for rank p. One program for each peer."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    peer = tl.program_id(0)
    call = tdl.epoch(channel)  # counted on the device: right also in a replayed graph
    slot = (call & 1) * ranks
    first = 0
    for before in range(peer):
        first += tl.load(counts + before)
    count = tl.load(counts + peer)
    block = received + (slot + me) * MOST_ROWS * HIDDEN  # where `peer` keeps what I send
    tdl.put(block, rows + first * HIDDEN, count * HIDDEN, peer, world)
    tdl.put_signal(received_counts + slot + me, counts + peer, 1, signals + me, call, peer, world)

    tdl.wait(signals + peer, world, call, peer=peer)  # rows and count of `peer` are here


def rows_between(source: int, target: int, call: int) -> np.ndarray:
    """What `source` sends to `target`: known to both, to check the result."""
    count = (3 * source + 5 * target + call) % (MOST_ROWS + 1)
    tag = 100 * source + 10 * target + call
    return tag + np.arange(count * HIDDEN, dtype=np.float32).reshape(count, HIDDEN)


def main() -> None:
    with tdx.init() as world:
        size, rank = world.size, world.rank
        received = world.empty((2, size, MOST_ROWS, HIDDEN), "float32")
        received_counts = world.zeros((2, size), "int32")
        signals = world.zeros(size, "int32")
        channel = world.channel(blocks=size)  # also a meeting: all signals are zero
        for call in range(1, 6):
            outgoing = [rows_between(rank, peer, call) for peer in range(size)]
            rows = world.array(np.concatenate(outgoing), symmetric=False)
            counts = world.array(np.array([len(p) for p in outgoing], np.int32), symmetric=False)
            all_to_all_kernel[(size,)](
                rows, counts, received, received_counts, signals, channel, world.handle,
                MOST_ROWS, HIDDEN,
            )  # fmt: skip
            for source in range(size):
                expected = rows_between(source, rank, call)
                assert received_counts[call & 1, source].numpy() == len(expected)
                got = received[call & 1, source, : len(expected)].numpy()
                assert np.array_equal(got, expected), (call, source)
        print(f"rank {rank}: 5 calls right, {len(expected)} rows from rank {source} in the last")


if __name__ == "__main__":
    main()
