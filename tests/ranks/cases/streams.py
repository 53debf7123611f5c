"""Streams of several ranks: order, overlap, and kernels that feed each other across them."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.runtime.errors import InvalidArgument
from tests.helpers.cases import worlds


@triton.jit
def _send(tiles, signals, rounds, turn, world, TILE: tl.constexpr):
    """Tile after tile into the next rank's memory."""
    i = tl.arange(0, TILE)
    right = (tdl.rank(world) + 1) % tdl.num_ranks(world)
    for tile in range(rounds):
        value = tdl.rank(world) + turn * tile + i
        tl.store(tdl.symm_at(tiles, right, world) + tile * TILE + i, value)
        tdl.notify(signals + tile, right, world, turn)


@triton.jit
def _consume(tiles, signals, out, rounds, turn, world, TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    left = (tdl.rank(world) + tdl.num_ranks(world) - 1) % tdl.num_ranks(world)
    for tile in range(rounds):
        ok = tdl.wait(signals + tile, world, turn, peer=left)
        tl.store(out + tile * TILE + i, 2 * tl.load(tiles + tile * TILE + i), mask=ok)


@worlds(1, 2, 3)
def case_producers_and_consumers_on_two_streams(world):
    rounds, tile = 10, 16
    tiles, out = world.zeros((rounds, tile), "int32"), world.zeros((rounds, tile), "int32")
    signals = world.zeros(rounds, "int32")
    side = world.new_stream(priority=-1)
    world.barrier()

    def consume(turn):
        _consume[(1,)](tiles, signals, out, rounds, turn, world.handle, TILE=tile)

    def send(turn):
        with world.on(side):
            _send[(1,)](tiles, signals, rounds, turn, world.handle, TILE=tile)

    # A GPU loads a kernel when it is first launched, which may wait for one that is running: the
    # first turn has the producer first, the second the consumer.
    left = (world.rank - 1) % world.size
    # Turns start at 2: Triton would compile another kernel for an argument that is 1.
    for turn, (first, second) in enumerate([(send, consume), (consume, send)], 2):
        first(turn)
        second(turn)
        wanted = 2 * (left + turn * np.arange(rounds)[:, None] + np.arange(tile))
        assert (out.numpy() == wanted).all()
        side.synchronize()
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


@worlds(1, 2)
def case_a_stream_that_was_closed(world):
    """Its work goes on; what was used there is used elsewhere after it, and given back."""
    n = 1 << 16
    side = world.new_stream()
    x, out = (world.array(np.full(n, 1, np.float32), symmetric=False) for _ in range(2))
    symmetric = world.array(np.full(n, 1, np.float32))
    plan = tdx.AllReduce(world, n, "float32")
    doubled = tdx.AllReduce(world, n, "float32", residual=True)
    with world.on(side):
        for _ in range(50):
            plan(x, out=out)
            doubled(symmetric, out=symmetric, residual=x)
            symmetric.copy_from(x)
    plan(symmetric, out=out, stream=side)
    side.close()
    seen = plan(out)
    assert (seen.numpy() == world.size**2).all()
    assert (symmetric.numpy() == 1).all()
    x.free()
    symmetric.free()
    with pytest.raises(tdx.errors.Closed, match="stream was closed"):
        plan(out, stream=side)
    world.barrier()


@worlds(1, 2)
def case_a_stream_that_never_was(world):
    """A first call, and one on arrays used before: neither spoils the plan or the arrays."""
    if world.backend != "host":
        pytest.skip("CUDA does not check handles")
    plan = tdx.AllReduce(world, 8, "float32")
    x = world.array(np.ones(8, np.float32))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="12345"):
            plan(x, stream=12345)
        with pytest.raises(InvalidArgument, match="12345"):
            tdx.all_reduce(np.ones(8, np.float32), stream=12345)
        assert (plan(x).numpy() == world.size).all()
    x.free()
    world.barrier()
