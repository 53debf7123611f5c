"""An engine with its own processes, communicator and stream; no MPI launcher.

python examples/frameworks/engine_sockets.py 4
"""

import sys

import socket_comm

import tdx


def own_stream(world):
    """The handle of a stream that tdx did not make; the host tier has only those of tdx."""
    if world.backend != "cuda":
        return world.stream.handle
    from cuda.bindings import driver

    error, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return int(stream)


def work(comm):
    from layer import check, rows, weights  # NumPy starts threads: not before the fork

    with tdx.init(comm=comm) as world:
        stream = own_stream(world)
        x = world.array(rows(world.rank, world.size))
        up, down = map(world.array, weights(world.rank, world.size))
        inner = tdx.all_gather_matmul(x, up, activation="relu", stream=stream)
        y = tdx.matmul_reduce_scatter(inner, down, stream=stream)
        check(y.numpy(), world.size, world.rank)
        print(f"rank {world.rank}: y {y.shape} on stream {stream:#x}", flush=True)


comm = socket_comm.fork(int(sys.argv[1]))
work(comm)
socket_comm.wait(comm)
