"""Streams of several ranks: order, overlap, and kernels that feed each other across them."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tests.helpers.cases import worlds


@triton.jit
def _send(tiles, signals, rounds, world, TILE: tl.constexpr):
    """Tile after tile into the next rank's memory."""
    i = tl.arange(0, TILE)
    right = (tdl.rank(world) + 1) % tdl.num_ranks(world)
    for tile in range(rounds):
        tl.store(tdl.symm_at(tiles, right, world) + tile * TILE + i, tdl.rank(world) + tile + i)
        tdl.notify(signals + tile, right, world, 1)


@triton.jit
def _consume(tiles, signals, out, rounds, world, TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    left = (tdl.rank(world) + tdl.num_ranks(world) - 1) % tdl.num_ranks(world)
    for tile in range(rounds):
        ok = tdl.wait(signals + tile, world, 1, peer=left)
        tl.store(out + tile * TILE + i, 2 * tl.load(tiles + tile * TILE + i), mask=ok)


@worlds(1, 2, 3)
def case_producers_and_consumers_on_two_streams(world):
    rounds, tile = 10, 16
    tiles, out = world.zeros((rounds, tile), "int32"), world.zeros((rounds, tile), "int32")
    signals = world.zeros(rounds, "int32")
    side = world.new_stream(priority=-1)
    world.barrier()
    _consume[(1,)](tiles, signals, out, rounds, world.handle, TILE=tile)
    with world.on(side):
        _send[(1,)](tiles, signals, rounds, world.handle, TILE=tile)
    left = (world.rank - 1) % world.size
    wanted = 2 * (left + np.arange(rounds)[:, None] + np.arange(tile))
    assert (out.numpy() == wanted).all()
    world.barrier()


@worlds(1, 2)
def case_streams_of_other_libraries(world):
    """`stream=` takes what carries a handle in one of the usual ways."""

    class Protocol:
        def __cuda_stream__(self):
            return 0, world.stream.handle

    class Torch:
        cuda_stream = world.stream.handle

    class CuPy:
        ptr = world.stream.handle

    for stream in (Protocol(), Torch(), CuPy(), world.stream.handle, world.stream):
        with world.on(stream):
            assert world.driver.current_stream() == world.stream.handle
    assert world.stream.__cuda_stream__() == (0, world.stream.handle)
