"""world.register: memory of others, seen by all ranks and by its owner."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import tempfile
import weakref
from multiprocessing import shared_memory

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.runtime.errors import (
    Closed,
    CollectiveMismatch,
    InvalidArgument,
    TdxError,
    Unsupported,
)
from tdx.runtime.mappings import mappings
from tests.helpers.cases import isolated, worlds
from tests.helpers.reference import assert_same_bits, reduced, values
from tests.helpers.vmm import PIECE, allocated

PAGE = mmap.PAGESIZE


def by_memfd(nbytes, offset=0):
    fd = os.memfd_create("somebody")
    os.ftruncate(fd, offset // PAGE * PAGE + nbytes + PAGE)
    area = mmap.mmap(fd, nbytes + offset % PAGE, offset=offset // PAGE * PAGE)
    os.close(fd)  # the mmap has a duplicate
    return np.frombuffer(area, np.uint8)[offset % PAGE :][:nbytes]


def by_shared_memory(nbytes, offset=0):
    made = shared_memory.SharedMemory(create=True, size=nbytes + offset)
    made.unlink()
    array = np.frombuffer(made.buf, np.uint8)[offset:][:nbytes]
    made.close = lambda: None  # the array's memory is not to go with this object
    held.append(made)
    return array


def by_memmap(nbytes, offset=0):
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(nbytes + offset)
        return np.memmap(file.name, np.uint8, "r+", offset, nbytes)


def by_name(nbytes, offset=0):
    """Of a file that nobody has open any more."""
    folder = tempfile.TemporaryDirectory()
    held.append(folder)
    fd = os.open(f"{folder.name}/file", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, nbytes + offset)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    size, shift = ctypes.c_size_t(nbytes + offset), ctypes.c_long(0)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, shift)
    os.close(fd)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address + offset))


def somebodys():
    """How often memory of `by_memfd` is mapped in this process."""
    gc.collect()
    return sum("memfd:somebody" in m.file for m in mappings())


def needs_host_memory(backend):
    """Skip where others' memory is that of a GPU; see case_memory_of_a_gpu and the stand-in."""
    if backend != "host":
        pytest.skip("registers files in host memory, which GPUs do not take")


held = []  # objects whose memory or file goes with them
MAKERS = {
    "memfd": by_memfd,
    "shared_memory": by_shared_memory,
    "memmap": by_memmap,
    "name": by_name,
}


@triton.jit
def push_kernel(x, n, world, BLOCK: tl.constexpr):
    """Own values plus 1000 into the right neighbour's second half."""
    i = tl.arange(0, BLOCK)
    right = (tdl.rank(world) + 1) % tdl.num_ranks(world)
    mine = tl.load(x + i, mask=i < n)
    tl.store(tdl.symm_at(x, right, world) + n + i, mine + 1000, mask=i < n)


@worlds(1, 2, 3)
@pytest.mark.parametrize("offset", [0, 64, 3 * PAGE + 256])
@pytest.mark.parametrize("kind", MAKERS)
def case_memory_of_others(world, backend, kind, offset):
    """One memory at two addresses, and at the same place for every rank."""
    needs_host_memory(backend)
    n = 1500
    theirs = MAKERS[kind](8 * n, offset).view(np.int32)
    theirs[:] = np.arange(2 * n) + 10_000 * world.rank
    x = world.register(theirs)
    assert (x.symmetric, x.shape, x.dtype) == (True, theirs.shape, theirs.dtype)
    assert x.data_ptr() != theirs.ctypes.data
    world.barrier()
    for rank in range(world.size):
        assert (x.peer(rank).numpy() == np.arange(2 * n) + 10_000 * rank).all()
    world.barrier()
    theirs[0] = -7  # by its owner
    assert x.numpy()[0] == -7
    theirs[0] = 10_000 * world.rank
    push_kernel[(1,)](x, n, world.handle, BLOCK=2048)
    world.barrier()
    left = (world.rank - 1) % world.size
    assert (theirs[n:] == np.arange(n) + 10_000 * left + 1000).all()
    assert (theirs[:n] == np.arange(n) + 10_000 * world.rank).all()
    mine = world.array(np.full(n, world.rank, np.int32))
    world.barrier()
    tdx.put(x[:n], mine, left)
    world.barrier()
    assert (theirs[:n] == (world.rank + 1) % world.size).all()
    world.barrier()
    x.free()
    with pytest.raises(Closed, match="was freed"):
        x.numpy()
    theirs[:] = 3  # still its owner's


@pytest.mark.gpu
@worlds(2, 4)
def case_memory_of_a_gpu(world):
    """As case_memory_of_others, in pieces of cuMemCreate; to its owner it has no name here."""
    n, driver, stream = PIECE // 8, world.driver, world.stream.handle
    with allocated(world.device.index, pieces=3) as allocator:
        theirs = allocator.array(PIECE - 4096, 2 * n)
        held = np.arange(2 * n, dtype=np.int32) + 1_000_000 * world.rank
        driver.copy_in(theirs.address, held.ctypes.data, held.nbytes, stream)
        x = world.register(theirs)
        world.barrier()
        for rank in range(world.size):
            assert (x.peer(rank).numpy() == np.arange(2 * n) + 1_000_000 * rank).all()
        world.barrier()
        push_kernel[(1,)](x, 1000, world.handle, BLOCK=1024)
        world.barrier()
        left = (world.rank - 1) % world.size
        driver.copy_out(held.ctypes.data, theirs.address, held.nbytes, stream)
        assert (held[1000:2000] == np.arange(1000) + 1_000_000 * left + 1000).all()
        world.barrier()
        x.free()


@worlds(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def case_operations(world, backend, dtype):
    """Registered arrays are operands and results like all symmetric ones."""
    needs_host_memory(backend)
    given = [values(rank, (50, 20), dtype) for rank in range(world.size)]
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    source, target = (by_memfd(1000 * kind.itemsize).view(kind).reshape(50, 20) for _ in range(2))
    source[...] = given[world.rank]
    x, out = world.register(source), world.register(target)
    for algorithm in (None, "one_shot", "two_shot"):
        target[...] = 0
        assert tdx.all_reduce(x, out=out, algorithm=algorithm) is out
        world.synchronize()
        assert_same_bits(target, reduced(given))
    assert_same_bits(tdx.all_gather(x).numpy(), np.concatenate(given))
    with tdx.graph(world) as graph:
        out.copy_from(x)
    graph.replay()
    world.synchronize()
    assert_same_bits(target, given[world.rank])
    del graph
    world.barrier()
    x.free()
    out.free()


@worlds(1, 2)
def case_nothing_is_left(world, backend):
    """Freed, or dropped by all: mappings, descriptors and the owner's object go."""
    needs_host_memory(backend)

    def usage():
        return somebodys(), len(os.listdir("/proc/self/fd"))

    first = by_memfd(PAGE)
    world.register(first).free()
    before = usage()
    for _ in range(20):
        world.register(first).free()
        x = world.register(first)
        del x  # is unmapped by the next call
    assert usage()[1] == before[1]
    world.register(first).free()
    assert usage() == before
    second = by_memfd(PAGE)
    gone = weakref.ref(second.base.base)
    x = world.register(second)
    address = x.data_ptr()
    del second
    gc.collect()
    assert gone() is not None
    x.free()
    del x
    assert gone() is None
    x = world.register(first)
    assert x.data_ptr() == address
    world.barrier()
    del x


@worlds(1, 2)
def case_exports_hold_the_memory(world, backend):
    needs_host_memory(backend)
    theirs = by_memfd(PAGE)
    x = world.register(theirs)
    view = np.from_dlpack(x)
    theirs[5] = 77
    assert view[5] == 77
    mine = world.rank == world.size - 1
    if not mine:
        del view
    # whoever does not export learns of the one that does
    with pytest.raises(InvalidArgument if mine else CollectiveMismatch, match="exported to 1"):
        x.free()
    assert x.numpy()[5] == 77
    if mine:
        del view
    x.free()


@worlds(1, 2, 3)
def case_refusals(world, backend):
    """The same error on all ranks, or that of one and a table on the others."""
    good = np.zeros(10, np.float32) if backend != "host" else by_memfd(PAGE).view(np.float32)
    readonly = good.view()
    readonly.flags.writeable = False
    refused = [
        (InvalidArgument, "tdx's own", world.zeros(3, "int8")),
        (InvalidArgument, "DLPack producer", None),
        (InvalidArgument, "DLPack producer", [1, 2]),
    ]
    if backend == "host":
        refused += [
            (InvalidArgument, "read-only", readonly),
            (InvalidArgument, "not contiguous", good[::2]),
            (InvalidArgument, "no elements", good[:0]),
            (Unsupported, "private to this process.*memfd_create", np.zeros_like(good)),
        ]
    else:
        refused.append((Unsupported, "on DLPack device", good))
    for kind, words, array in refused:
        with pytest.raises(kind, match=words):
            world.register(array)
        mine = world.rank == world.size - 1  # one rank only
        with pytest.raises(kind if mine else TdxError, match=words if mine else "register"):
            world.register(array if mine else good)
        world.barrier()
    with pytest.raises(InvalidArgument, match="in a graph"), tdx.graph(world):
        world.register(good)
    world.barrier()


@worlds(2, 3)
def case_ranks_differ(world, backend):
    """In shape, in type, in where the array begins, in what kind of memory it is."""
    needs_host_memory(backend)
    one = world.rank == 1
    before = somebodys()
    base = by_memfd(4 * PAGE)
    for array in (base[: 100 + one], base[:100].view("int8" if one else "uint8")):
        with pytest.raises(CollectiveMismatch) as mismatch:
            world.register(array)
        assert len(set(mismatch.value.calls.values())) == 2
    with pytest.raises(Unsupported, match=r"rank 0: 256, rank 1: 4352.*register one large array"):
        world.register(base[256 + PAGE * one :][:100])
    with pytest.raises(Unsupported, match="rank 1: Unsupported" if not one else "private"):
        world.register(np.zeros(4 * PAGE, np.uint8) if one else base)
    # without a descriptor or a name there is no way to its file; peers have both
    hidden = np.frombuffer(mmap.mmap(-1, 4 * PAGE), np.uint8) if one else base
    with pytest.raises(Unsupported, match="rank 1: Unsupported" if not one else "no open descr"):
        world.register(hidden)
    del array, base, hidden, mismatch
    assert somebodys() == before
    same = by_memfd((3 if one else 7) * PAGE)[:PAGE]  # files of several sizes are fine
    same[:] = world.rank
    x = world.register(same)
    world.barrier()
    assert all((x.peer(rank).numpy() == rank).all() for rank in range(world.size))
    world.barrier()
    x.free()


@isolated
@worlds(2)
def case_ends_with_its_world(comm, backend):
    """Closing gives the memory back; after recovery what was left can be read."""
    needs_host_memory(backend)
    theirs = by_memfd(PAGE)
    before = somebodys()
    with tdx.init(comm, backend=backend) as world:
        x = world.register(theirs)
        theirs[:] = 1 + world.rank
    with pytest.raises(Closed):
        x.numpy()
    with pytest.raises(Closed):
        x.free()
    with pytest.raises(Closed):
        world.register(theirs)
    with tdx.init(comm, backend=backend) as world:
        y = world.register(theirs)
        new = world.recover()
        assert (y.numpy() == 1 + world.rank).all()
        z = new.register(theirs)
        new.barrier()
        assert (z.peer(1 - new.rank).numpy() == 2 - world.rank).all()
        new.barrier()
        new.close()
    del world, new, x, y, z
    assert somebodys() == before
    theirs[:] = 0
