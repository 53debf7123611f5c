"""Kernels that make tensor descriptors themselves, for which Triton asks for scratch memory."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
from tests.helpers.cases import limit, worlds

SHAPE, TILE = (48, 80), 16


@triton.jit
def copy_tiles(source, target, rows, columns, stride, amount, TILE: tl.constexpr):
    """target = source + amount, a tile in each program, through descriptors made here."""
    read = tl.make_tensor_descriptor(source, [rows, columns], [stride, 1], [TILE, TILE])
    write = tl.make_tensor_descriptor(target, [rows, columns], [stride, 1], [TILE, TILE])
    at = [tl.program_id(0) * TILE, tl.program_id(1) * TILE]
    write.store(at, read.load(at) + amount)


def launch(source, target, amount):
    """Copy the whole array, and nothing beyond its rows."""
    rows, columns = source.shape
    grid = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))
    copy_tiles[grid](source, target, rows, columns, source.stride()[0], amount, TILE=TILE)


def numbers(shape, start=0):
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)


@worlds(1, 2)
@pytest.mark.parametrize("shape", [(48, 80), (43, 76), (1, 4)])
def case_tiles_are_copied(world, shape):
    """Also where the last tiles are cut, by rows and by columns."""
    data = numbers(shape, 1000 * world.rank)
    x, y = world.array(data), world.zeros((shape[0] + 1, shape[1]), "float32")
    launch(x, y[:-1], 1)
    launch(x, y[:-1], 2)
    found = y.numpy()
    assert (found[:-1] == data + 2).all()
    assert not found[-1].any()


@worlds(1, 2)
def case_streams(world):
    """Kernels at once on several streams, each with descriptors of its own."""
    data = numbers(SHAPE)
    pairs = [(world.array(data + n), world.zeros(SHAPE, "float32")) for n in range(4)]
    world.synchronize()
    for x, y in pairs:
        with world.on(world.new_stream()):
            for amount in range(3):
                launch(x, y, amount)
    for n, (_, y) in enumerate(pairs):
        assert (y.numpy() == data + n + 2).all()


@worlds(1, 2)
@limit(90)
@pytest.mark.parametrize("warm", [True, False])
def case_graph(world, warm):
    """Replayed while other launches use, and outgrow, the scratch memory of the stream."""
    data = numbers(SHAPE)
    x, y, z = world.array(data), world.zeros(SHAPE, "float32"), world.zeros(SHAPE, "float32")
    side = TILE * (80 if world.backend != "host" else 3)
    large = world.zeros((side, side), "float32", symmetric=False)
    stream, other = world.new_stream(), world.new_stream()
    with world.on(stream):
        if warm:
            launch(x, y, 5)
        with tdx.graph(world) as graph:
            launch(x, y, 1)
            launch(y, z, 10)
        for number in range(1, 4):
            x[...] = data * number
            launch(x, y, 100)
            if number == 2:
                launch(large, large, 1)  # on GPUs more programs than the first piece is for
            graph.replay(other if number == 3 else stream)
            world.synchronize()
            assert (y.numpy() == data * number + 1).all()
            assert (z.numpy() == data * number + 11).all()
    assert (large.numpy() == 1).all()
    world.barrier()


@worlds(2, 3)
def case_reads_a_peer(world):
    """The descriptor's base is another rank's memory."""
    data = numbers(SHAPE, 1000 * world.rank)
    x, y = world.array(data), world.zeros(SHAPE, "float32")
    world.barrier()
    peer = (world.rank + 1) % world.size
    launch(x.peer(peer), y, 0)
    assert (y.numpy() == numbers(SHAPE, 1000 * peer)).all()
    world.barrier()
