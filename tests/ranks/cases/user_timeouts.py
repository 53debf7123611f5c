"""Waits in kernels of users that nobody ends: what PeerTimeout says of them."""

from __future__ import annotations

import time

import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.runtime.errors import InvalidArgument, PeerTimeout
from tests.helpers.cases import isolated, limit, worlds
from tests.ranks.cases.user_mistakes import words_kernel


@triton.jit
def wait_kernel(signal, peer, world):
    tdl.wait(signal + 2, world, 1, peer=peer)


@triton.jit
def barrier_kernel(channel, world):
    tdl.barrier(channel, world)


@triton.jit
def some_come_kernel(channel):
    if tl.program_id(0) < 2:
        tdl.grid_barrier(channel)


@isolated
@worlds(2)
@limit(30)
def case_a_grid_barrier_to_which_some_do_not_come(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=0.5)
    channel = world.channel(4)
    some_come_kernel[(4,)](channel)
    with pytest.raises(PeerTimeout, match=r"for its own programs.*2 of 4 programs came") as caught:
        world.synchronize()
    assert caught.value.signal == "channel(4)[grid_barrier]"
    world.close()


@isolated
@worlds(2)
@limit(30)
def case_a_wait_of_the_host_is_given_up_for_good(comm, backend):
    """By who waited in vain, and by who comes too late: they have not met."""
    world = tdx.init(comm, backend=backend, timeout_s=0.5)
    plan = tdx.AllReduce(world, 4, "float32")
    x = world.zeros(4, "float32")
    world.barrier()
    if world.rank == 1:
        time.sleep(2)
    said = "rank 0 waited in barrier for rank 1: nothing heard of rank 1 for 0.5 s"
    for attempt in (world.barrier, world.check, world.barrier, lambda: plan(x), world.synchronize):
        with pytest.raises(PeerTimeout, match=said):
            attempt()
    world.close()


@isolated
@worlds(2)
@limit(30)
@pytest.mark.parametrize("name", ["arrived", None])
def case_a_timeout_names_kernel_launch_and_signal(comm, backend, name):
    world = tdx.init(comm, backend=backend, timeout_s=0.5)
    world.zeros(4, "int8")
    signal = world.zeros(4, "int32", name=name)
    peer = 1 - world.rank
    wait_kernel[(1,)](signal, peer, world.handle)
    with pytest.raises(PeerTimeout) as caught:
        world.synchronize()
    fault = caught.value
    assert (fault.rank, fault.peer, fault.signal) == (world.rank, peer, f"{signal.name}[2]")
    if backend == "host":
        line = case_a_timeout_names_kernel_launch_and_signal.__code__.co_firstlineno + 9
        assert fault.operation == "wait_kernel"
        assert fault.location == f"{__file__}:{line}"
        assert f"kernel wait_kernel, signal {signal.name}[2] expected 1" in str(fault)
        assert f"called at {fault.location}" in str(fault)
        assert f"waits for {signal.name}[2] >= 1 (is 0) from peer {peer} at" in str(fault)
    world.close()


@isolated
@worlds(2)
@limit(30)
def case_a_timeout_counts_the_words_of_the_array(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=0.5)
    words = world.zeros(8, "int64", name="words")
    words_kernel[(1,)](words, 1 - world.rank, world.handle)
    if backend == "host":
        del words  # the name is known all the same
    with pytest.raises(PeerTimeout) as caught:
        world.synchronize()
    assert (caught.value.peer, caught.value.signal) == (1 - world.rank, "words[3]")
    world.close()


@isolated
@worlds(2)
@limit(30)
def case_a_timeout_names_blocks_of_a_barrier(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=0.5)
    channel = world.channel(4)
    if world.rank == 0:
        barrier_kernel[(4,)](channel, world.handle)
        with pytest.raises(PeerTimeout) as caught:
            world.synchronize()
        assert caught.value.signal.startswith("channel(4)[block ")
        assert caught.value.signal.endswith(", rank 1]")
    comm.barrier()
    world.close() if world.rank == 0 else world.__exit__(InvalidArgument, InvalidArgument(), None)
