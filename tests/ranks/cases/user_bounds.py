"""Kernels that leave the memory of their arrays: the host tier names the array and the element."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tests.helpers.cases import host_only, worlds
from tests.helpers.mistakes import refused

N = tl.constexpr(64)


@triton.jit
def use_kernel(x, y, shift, n, VERB: tl.constexpr):
    lanes = tl.arange(0, N) + shift
    if VERB == "load":
        tl.store(y + tl.arange(0, N), tl.load(x + lanes, mask=lanes < n))
    elif VERB == "store":
        tl.store(x + lanes, lanes, mask=lanes < n)
    elif VERB == "add":
        tl.atomic_add(x + lanes, 1, mask=lanes < n)
    elif VERB == "cas":
        tl.atomic_cas(x + shift, 0, 1)


@triton.jit
def peer_kernel(x, y, shift, n, peer, world, VERB: tl.constexpr):
    lanes = tl.arange(0, N) + shift
    if VERB == "symm_at":
        tl.store(tdl.symm_at(x, peer, world) + lanes, lanes, mask=lanes < n)
    elif VERB == "put":
        tdl.put(x, y, N, peer, world)
    elif VERB == "get":
        tdl.get(y, x + shift, n, peer, world)
    elif VERB == "notify":
        tdl.notify(x + shift, peer, world, 1)
    elif VERB == "put_signal":
        tdl.put_signal(x, y, n, x + shift, 1, peer, world)
    elif VERB == "wait":
        tdl.wait(x + shift, world, 0, cmp="eq")
    elif VERB == "wait_all":
        tdl.wait_all(x + shift, n, world, 0)


@triton.jit
def table_kernel(table, to):
    from_address = tl.load(table).to(tl.pointer_type(tl.int32))
    tl.store(to + tl.arange(0, N), tl.load(from_address + tl.arange(0, N)))


@triton.jit
def wide_kernel(x):
    tl.store(x.to(tl.pointer_type(tl.int64)), 7)


class Foreign:
    """What another library passes to a kernel."""

    def __init__(self, values: np.ndarray):
        self.values = values
        self.dtype = values.dtype
        self.nbytes = values.nbytes

    def data_ptr(self) -> int:
        return self.values.ctypes.data


@worlds(1, 2)
@pytest.mark.parametrize("verb", ["load", "store", "add", "cas"])
@pytest.mark.parametrize("symmetric", [True, False])
def case_beyond_an_array(world, verb, symmetric):
    host_only(world.backend)
    y = world.zeros(64, "int32")
    x, other = (world.zeros(100, "int32", symmetric=symmetric) for _ in range(2))
    names = {"load": "load from", "store": "store to"}
    what = names.get(verb, "atomic access to")
    places = [(64, 128, 100), (-5, 128, -5)]
    if symmetric:  # far away, and not in another local array by chance
        places.append((1 << 27, 1 << 28, 1 << 27))
    for shift, n, wrong in places:
        use_kernel[(1,)](x, y, 100 if (verb, shift) == ("cas", 64) else shift, n, VERB=verb)
        refused(
            world,
            rf"kernel use_kernel, program \(0, 0, 0\): .*{what} element {wrong} of argument 'x', "
            r"whose memory has the elements 0\.\.99: mask what is outside",
        )
    use_kernel[(1,)](x, y, 36, 100, VERB=verb)  # up to the last
    use_kernel[(1,)](x, y, 64, 100, VERB=verb)  # and with a mask
    world.synchronize()
    assert not other.numpy().any()


@worlds(1, 2)
def case_arrays_side_by_side_are_apart(world):
    host_only(world.backend)
    arrays = [world.zeros(64, "int32") for _ in range(3)]
    for x in arrays:
        for shift in (-1, 1):
            use_kernel[(1,)](x, arrays[0], shift, 1000, VERB="store")
            refused(world, r"store to element (-1|64) of argument 'x'")
    assert not any(x.numpy().any() for x in arrays)
    wide_kernel[(1,)](world.zeros(1, "int32"))
    refused(world, r"store to 8 bytes at element 0 of argument 'x', .* 0\.\.0")


@worlds(1, 2, 3)
def case_beyond_a_peers_array(world):
    host_only(world.backend)
    x, y = world.zeros(100, "int32"), world.zeros(100, "int32")
    peer = (world.rank + 1) % world.size
    copy = "" if peer == world.rank else f" of rank {peer}"
    for verb, shift, n in (("symm_at", 64, 128), ("notify", 100, 0)):
        peer_kernel[(1,)](x, y, shift, n, peer, world.handle, VERB=verb)
        refused(world, f"element 100 of argument 'x'{copy}, whose memory has .* 0..99")
    peer_kernel[(1,)](x[90:], y, 0, 0, peer, world.handle, VERB="put")  # 64 of 10
    refused(world, r"element 10 of argument 'x'.*, whose memory has the elements -90\.\.9")
    peer_kernel[(1,)](x, y, 100, 0, peer, world.handle, VERB="wait")
    refused(world, "wait for element 100 of argument 'x'")
    world.barrier()
    peer_kernel[(1,)](x, y, 36, 100, peer, world.handle, VERB="symm_at")
    world.barrier()
    assert x.numpy()[36:].tolist() == list(range(36, 100))


@worlds(1, 2)
@pytest.mark.parametrize(
    ("verb", "behind", "before"),
    [
        ("symm_at", "mask what is outside", None), ("wait", "wait for one of them", None),
        ("notify", "notify one of them,( or)? leave it out with when=False", None),
        ("put_signal", "notify one of them,( or)? leave it out with when=False", None),
        ("wait_all", "wait for fewer of them", "begin at one of them"),
        ("get", "begin earlier, copy fewer elements", "begin at one of them"),
    ],
)  # fmt: skip
def case_remedies_fit_the_verb(world, verb, behind, before):
    host_only(world.backend)
    x, y = world.zeros(100, "int32"), world.zeros(200, "int32")
    place = r"argument 'x'.*, whose memory has the elements -?\d+\.\.\d+"
    for shift, remedy in ((100, f"{behind}, or make the array larger"), (-10, before or behind)):
        n = 8 if verb == "put_signal" else 128
        peer_kernel[(1,)](x, y, shift, n, world.rank, world.handle, VERB=verb)
        refused(world, rf"{place}: {remedy} at")
    world.barrier()


@worlds(1, 2)
def case_beyond_a_matrix(world):
    host_only(world.backend)
    y = world.zeros(64, "int32")
    for shift, n, wrong in ((36, 1000, r"80, \[20, 0\]"), (-1, 1000, r"-1, \[-1, 3\]")):
        use_kernel[(1,)](world.zeros((20, 4), "int32"), y, shift, n, VERB="load")
        refused(world, rf"element {wrong} of shape \(20, 4\), of argument 'x', whose")


@worlds(1, 2)
def case_a_view_reaches_its_whole_array(world):
    x, y = world.array(np.arange(128, dtype=np.int32)), world.zeros(64, "int32")
    use_kernel[(1,)](x[64:], y, -64, 1000, VERB="load")
    assert y.numpy().tolist() == list(range(64))


@worlds(1, 2)
def case_addresses_from_memory(world):
    given = world.array(np.arange(64, dtype=np.int32))
    to = world.zeros(64, "int32")
    table_kernel[(1,)](world.array(np.array([given.data_ptr()])), to)
    assert to.numpy().tolist() == list(range(64))
    if world.backend == "host":
        table_kernel[(1,)](world.array(np.array([64 << 30])), to)
        refused(world, "load from address 0x1000000000: the kernel was given no memory there")
        table_kernel[(1,)](world.array(np.array([to.data_ptr() + 4])), to)
        refused(world, "load from element 64 of argument 'to'")
    world.barrier()


@worlds(1)
def case_memory_of_others(world):
    host_only(world.backend)
    y = world.zeros(64, "int32")
    whole = np.arange(200, dtype=np.int32)
    use_kernel[(1,)](Foreign(whole[100:]), y, 36, 100, VERB="load")
    assert y.numpy().tolist() == list(range(136, 200))
    use_kernel[(1,)](Foreign(whole[:100]), y, 64, 128, VERB="load")
    refused(world, r"element 100 of argument 'x', whose memory has the elements 0\.\.99")
    part = Foreign(whole[:100])
    del part.nbytes  # then nobody knows where it ends
    use_kernel[(1,)](part, y, 64, 128, VERB="load")
    assert y.numpy().tolist() == list(range(64, 128))
    use_kernel[(1,)](part, y[1:], 64, 128, VERB="load")
    refused(world, r"store to element 63 of argument 'y', whose memory has the elements -1\.\.62")


@worlds(2)
def case_registered_memory(world):
    host_only(world.backend)
    fd = os.memfd_create("registered")
    os.ftruncate(fd, mmap.PAGESIZE)
    memory = mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)
    x = world.register(np.frombuffer(memory, np.int32))
    other = 1 - world.rank
    y = world.zeros(64, "int32")
    world.barrier()
    peer_kernel[(1,)](x, y, 960, 1024, other, world.handle, VERB="symm_at")
    world.barrier()
    assert x.numpy()[960:].tolist() == list(range(960, 1024))
    peer_kernel[(1,)](x, y, 961, 2000, other, world.handle, VERB="symm_at")
    refused(world, f"element 1024 of argument 'x' of rank {other}")
    world.barrier()
    x.free()


@worlds(1, 2)
def case_freed_behind_a_kernel(world):
    """The memory is there until the kernel, queued before, has run."""
    y = world.zeros(64, "int32")
    for symmetric in (True, False):
        for _ in range(20):
            x = world.array(np.arange(64, dtype=np.int32), symmetric=symmetric)
            use_kernel[(1,)](x, y, 0, 64, VERB="load")
            x.free()
    tdx.barrier()
    assert y.numpy().tolist() == list(range(64))
