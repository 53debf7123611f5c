"""Ranks, symmetric arrays, and a look into a peer's memory.

    tdx run -n 4 examples/01_hello_ranks.py

or, with an MPI of your own, `mpirun -n 4 python examples/01_hello_ranks.py`.

`tdx.init()` is called by every rank. It maps the heaps of all ranks into each of them. An array
made by the world lies at the same place in every rank's heap, so `x.peer(r)` is rank r's copy of
`x`: no message is sent, it is an address. What a rank may read there, and when, is for the program
to order; here a barrier does it.
"""

from __future__ import annotations

import numpy as np

import tdx


def main() -> None:
    with tdx.init() as world:
        x = world.array(np.full(4, 10 * world.rank, np.int32))  # the same call on every rank
        world.barrier()  # every rank has filled its copy

        right = (world.rank + 1) % world.size
        seen = x.peer(right).numpy()
        assert (seen == 10 * right).all()

        # a NumPy array in, a NumPy array out
        total = tdx.all_reduce(np.array([world.rank], np.int64))
        assert total[0] == world.size * (world.size - 1) // 2

        print(
            f"rank {world.rank} of {world.size} on {world.device.name}: "
            f"rank {right} has {seen.tolist()}, all ranks add up to {total[0]}"
        )


if __name__ == "__main__":
    main()
