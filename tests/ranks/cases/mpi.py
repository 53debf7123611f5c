"""mpi4py with tdx arrays: directly, after pending work, and what `world.mpi` refuses."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
from tdx.runtime.comm import mpi_takes_gpu_memory
from tdx.runtime.errors import Closed, InvalidArgument, Unsupported
from tests.helpers.cases import isolated, worlds

DTYPES = (
    "bool", "int8", "uint8", "int16", "int32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "complex64",
)  # fmt: skip
PENDING_S = 0.1


@triton.jit
def late_kernel(gate, x, n, value, BLOCK: tl.constexpr):
    """Add to x once the host has opened the gate."""
    while tl.atomic_add(gate, 0) < 1:
        pass
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + value, mask=i < n)


class Pending:
    """Kernels that end no sooner than 100 ms after they were launched."""

    def __init__(self, world):
        self.world = world
        self.gate = world.zeros(1, "int64", symmetric=False)
        warm = world.zeros(1, "int64", symmetric=False)
        world.synchronize()
        world.driver.poke(self.gate.data_ptr(), 1)
        late_kernel[(1,)](self.gate, warm, 1, 7, BLOCK=16)  # compiled
        world.synchronize()

    def add(self, x, value, stream=None):
        self.world.driver.poke(self.gate._address, 0)
        with self.world.on(stream or self.world.stream):
            late_kernel[(1,)](self.gate, x, x.size, value, BLOCK=16)
        opening = (self.gate._address, 1)
        threading.Timer(PENDING_S, self.world.driver.poke, opening).start()


def needs_mpi_for(world):
    """Skip on GPUs whose memory the MPI that runs the ranks does not take."""
    if world.backend != "host" and not mpi_takes_gpu_memory(world.backend):
        pytest.skip("this MPI does not take GPU memory")


@worlds(2)
@pytest.mark.parametrize("side", [False, True])
def case_send_while_a_kernel_is_pending(world, comm, side):
    """The kernel's results are sent, and what is received is there for the next kernel."""
    needs_mpi_for(world)
    peer = 1 - world.rank
    pending, stream = Pending(world), world.new_stream() if side else world.stream
    x = world.array(np.arange(10, dtype=np.int32))
    y = world.array(np.full(10, -5, np.int32), symmetric=False)
    world.synchronize()
    pending.add(x, 100 + world.rank, stream)
    assert not world.driver.stream_query(stream.handle)
    with world.mpi(x, y) as given:
        assert given == (x, y)
        assert world.driver.stream_query(stream.handle)
        if world.rank == 0:
            comm.Send(x, dest=peer)
            comm.Recv(y, source=peer)
        else:
            comm.Recv(y, source=peer)
            comm.Send(x, dest=peer)
    late_kernel[(1,)](pending.gate, y, 10, 1000, BLOCK=16)
    assert (y.numpy() == np.arange(10) + 1100 + peer).all()
    # an array that is about to be received into may not be overwritten by what is pending
    pending.add(y, 7, stream)
    with world.mpi(y) as given:
        assert given is y
        comm.Sendrecv(x.numpy(), peer, recvbuf=y, source=peer)
    assert (y.numpy() == np.arange(10) + 100 + peer).all()


@worlds(2)
def case_bare_arrays(world, comm, backend):
    """On the host tier MPI waits for pending work without being told."""
    if backend != "host":
        pytest.skip("on GPUs MPI is to be told by world.mpi")
    peer, pending = 1 - world.rank, Pending(world)
    x = world.array(np.arange(10, dtype=np.int32))
    y = world.empty(10, np.int32)
    pending.add(x, 100 + world.rank)
    comm.Sendrecv(x, peer, recvbuf=y, source=peer)
    assert (y.numpy() == np.arange(10) + 100 + peer).all()
    pending.add(x, 1)
    comm.Allreduce(x, y)
    assert (y.numpy() == 2 * (np.arange(10) + 1) + 201).all()
    for stream in (None, -1, 1):  # which says nothing to an array in host memory
        pending.add(x, 1)
        x.__dlpack__(stream=stream)
        assert world.driver.stream_query(world.stream.handle)


@worlds(1, 2, 3)
@pytest.mark.parametrize("dtype", DTYPES)
def case_every_dtype(world, comm, dtype):
    needs_mpi_for(world)
    ring = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    data = [(np.arange(12).reshape(3, 4) % 5 + r).astype("int8") for r in range(world.size)]
    x = world.array(data[world.rank].astype(world.empty(0, dtype).dtype))
    y = world.zeros((3, 4), dtype)
    with world.mpi(x, y):
        comm.Sendrecv(x, ring[0], recvbuf=y, source=ring[1])
    assert y.numpy().tobytes() == data[ring[1]].astype(x.dtype).tobytes()
    gathered = world.zeros((world.size, 3, 4), dtype)
    with world.mpi(x, gathered):
        comm.Allgather(x, gathered)
    assert gathered.numpy().tobytes() == np.stack(data).astype(x.dtype).tobytes()
    if x.dtype.isbuiltin == 1 and dtype != "bool":  # MPI adds no others
        with world.mpi(x, y):
            comm.Allreduce(x, y)
        assert (y.numpy() == sum(d.astype(x.dtype) for d in data)).all()


@worlds(1, 2)
def case_refusals(world):
    x = world.zeros(4, "float32")
    freed = world.zeros(4, "float32", symmetric=False)
    freed.free()
    refused = [
        (InvalidArgument, "got none", ()),
        (InvalidArgument, "tdx arrays, got ndarray", (x, np.zeros(3))),
        (InvalidArgument, "got NoneType", (None,)),
        (Closed, "was freed", (freed,)),
    ]
    if world.size > 1:
        theirs = x.peer(1 - world.rank)
        refused.append((InvalidArgument, f"rank {1 - world.rank}'s", (theirs,)))
    for kind, words, arrays in refused:
        with pytest.raises(kind, match=words), world.mpi(*arrays, gpu_aware=True):
            pass
    graph = tdx.graph(world)
    words = "a graph cannot record"
    with pytest.raises(InvalidArgument, match=words), graph, world.mpi(x, gpu_aware=True):
        pass
    if world.backend != "host":
        words = r"GPU memory.*x\.numpy\(\).*gpu_aware=True"
        with pytest.raises(Unsupported, match=words), world.mpi(x, gpu_aware=False):
            pass
    with pytest.raises(KeyError), world.mpi(x, gpu_aware=True):
        raise KeyError
    world.barrier()


@isolated
@worlds(1)
def case_worlds_that_are_gone(backend):
    with tdx.init(backend=backend) as old:
        x = old.zeros(4, "float32")
    with pytest.raises(Closed), old.mpi(x):
        pass
    world = tdx.init(backend=backend)
    with world, pytest.raises(InvalidArgument, match="another world"), world.mpi(x):
        pass
