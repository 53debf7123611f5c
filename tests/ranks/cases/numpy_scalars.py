"""NumPy's scalars are taken wherever Python's ints and floats are."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tdx.kernels.all_reduce import Config
from tdx.kernels.matmul import Config as Tile
from tdx.runtime.errors import InvalidArgument
from tests.helpers.cases import isolated, worlds


@worlds(2)
def case_arguments(world):
    two, size = np.int64(2), world.size
    x = world.array(np.ones((4, 16), np.float32))
    gather = tdx.AllGather(world, (4, 16), "float32", progress=True, chunks_per_rank=two)
    gather(x)
    world.synchronize()
    assert type(gather.chunks) is int
    product = tdx.AllGatherMatmul(world, (4, 16), (16, 16), "float32", chunks_per_rank=two)
    product(x, world.array(np.ones((16, 16), np.float32)))
    with pytest.raises(InvalidArgument, match=r"chunks_per_rank=0 must be an int from 1 to"):
        tdx.AllGatherMatmul(world, (4, 16), (16, 16), "float32", chunks_per_rank=0)
    weight = world.array(np.ones(16, np.float32))
    for eps in (np.float32(1e-5), np.float64(1e-5), np.int64(0)):
        tdx.all_reduce_rms_norm(x, weight, eps=eps)
    config = Config("one_shot", np.int64(64), num_warps=np.int64(4))
    total = tdx.AllReduce(world, (4, 16), "float32", config=config)(x)
    assert (total.numpy() == size).all()
    tile = Tile(*(np.int64(16) for _ in range(3)), num_warps=np.int64(4))
    square = world.array(np.ones((16, 16), np.float32), symmetric=False)
    assert (tdx.matmul(square, square, config=tile).numpy() == 16).all()
    assert (tdx.broadcast(x, np.int64(1)).numpy() == 1).all()
    signal = world.zeros(1, "int32")
    world.barrier()
    tdx.put(x, x, np.int64(world.rank), signal, value=np.array(3))
    assert signal.numpy()[0] == 3
    assert x.peer(np.int64(0)).reshape(np.int64(64)).shape == (64,)
    assert (tdx.all_reduce(x, stream=np.int64(world.stream.handle)).numpy() == size).all()
    world.channel(np.int64(2))
    world.team([np.int64(0)])
    world.barrier()


@isolated
@worlds(1, 2)
def case_settings(comm, backend):
    limits = np.int64(1 << 20), np.float32(20)
    with tdx.init(comm, backend, *limits) as world:
        assert world.timeout_s == 20
        world.zeros(np.int64(3), "int8")
