"""world.recover(): who is in the new world, what it computes, and what is left of the old one."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import triton

import tdx
import tdx.language as tdl
from tdx.runtime import recovery
from tdx.runtime.errors import Closed, DriverError, PeerLost, PeerTimeout
from tests.helpers.cases import isolated, limit, worlds


@triton.jit
def await_kernel(signals, world):
    """Wait for a signal that nobody sends."""
    tdl.wait(signals, world, 1, peer=(tdl.rank(world) + 1) % tdl.num_ranks(world))


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_fault(world):
    """Raises it, within 10 s; the host sits in user code meanwhile."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        world.check()
        time.sleep(0.01)


def check_works(world, members, old_rank):
    """The world has the old ranks `members`, in order, and computes what it should."""
    assert world.size == len(members)
    assert world.rank == world.local_rank == members.index(old_rank)
    assert world.ranks == tuple(range(world.size))
    for count in (1, 1000):
        x = world.array(np.full(count, old_rank + 1, np.float32))
        total = tdx.all_reduce(x)
        assert (total.numpy() == sum(member + 1 for member in members)).all()
    rows = tdx.all_gather(world.array(np.full(3, old_rank, np.int32))).numpy()
    assert rows.reshape(-1, 3)[:, 0].tolist() == list(members)
    world.barrier()


def resume_later(seconds):
    """A process that lets this one, once stopped, go on after `seconds`."""
    program = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {signal.SIGCONT})"
    return subprocess.Popen([sys.executable, "-c", program])


@isolated(dies=[1])
@worlds(2, 3, 5)
@limit(60)
def case_a_killed_rank(comm, backend):
    """The survivors agree on who is gone; what is left of the old world."""
    world = tdx.init(comm, backend=backend, timeout_s=5)
    rank, size = world.rank, world.size
    x = world.array(np.arange(5, dtype=np.float32) + rank)
    local = world.array(np.arange(4), symmetric=False)
    strided = world.array(np.arange(12, dtype=np.int32).reshape(3, 4))[::2, ::-1]
    freed = world.empty(3, "int8")
    freed.free()
    peers = x.peer((rank + 1) % size)
    plan = tdx.AllReduce(world, (5,), "float32")
    total = plan(x)
    with tdx.graph(world) as graph:
        plan(x)
    channel = world.channel(1)
    side = world.new_stream()
    world.barrier()
    if rank == 1:
        kill_self()
    with pytest.raises(PeerLost) as lost:
        wait_for_fault(world)
    assert lost.value.ranks == (1,)
    start = time.monotonic()
    new = world.recover()
    assert time.monotonic() - start < 5
    members = [r for r in range(size) if r != 1]
    check_works(new, members, rank)
    assert (new.backend, new.timeout_s, world.closed) == (world.backend, 5, True)

    assert x.numpy().tolist() == (np.arange(5) + rank).tolist()
    assert x[1:3].numpy().tolist() == [1 + rank, 2 + rank]
    assert total.numpy()[0] == sum(range(size))
    assert local.numpy().tolist() == [0, 1, 2, 3]
    assert strided.numpy().tolist() == [[3, 2, 1, 0], [11, 10, 9, 8]]
    for use in (
        world.check, world.synchronize, world.barrier, world.recover, peers.numpy, freed.numpy,
        x.data_ptr, x.free, side.synchronize, graph.replay, world.new_stream,
        lambda: x.peer(0), lambda: x.copy_from(local), lambda: plan(x), lambda: x.__dlpack__(),
        lambda: world.empty(1, "int8"), lambda: world.team([0]), lambda: world.channel(1),
        lambda: tdx.all_reduce(x), lambda: channel.words.data_ptr(),
        lambda: tdx.AllReduce(world, (5,), "float32"),
    ):  # fmt: skip
        with pytest.raises(Closed):
            use()
    with pytest.raises(Closed, match=r"given up by world\.recover\(\)"):
        graph.replay()
    new.close()
    assert x.numpy()[0] == rank


@isolated(dies=[1])
@worlds(2, 3, 5)
@limit(60)
def case_killed_while_the_others_are_in_a_kernel(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=30)
    rank = world.rank
    signals = world.zeros(1, "int32")
    world.barrier()
    if rank == 1:
        time.sleep(0.3)
        kill_self()
    start = time.monotonic()
    await_kernel[(1,)](signals, world.handle)
    new = world.recover()  # without a look at the fault
    assert time.monotonic() - start < 10
    check_works(new, [r for r in range(comm.Get_size()) if r != 1], rank)
    new.close()


@isolated
@worlds(1, 2, 3, 5)
def case_nobody_died_and_again(comm, backend):
    """Three times, the last of which ranks come to with some delay; pending work is done first."""
    size, rank = comm.Get_size(), comm.Get_rank()
    world = tdx.init(comm, backend=backend, timeout_s=10)
    for turn in range(3):
        x = world.array(np.full(3, rank, np.float32))
        y = tdx.all_reduce(x)
        if turn == 2:
            time.sleep(0.3 * rank)
        new = world.recover()
        assert y.numpy()[0] == sum(range(size))
        assert world.closed
        world = new
        check_works(world, list(range(size)), rank)
    world.close()
    with pytest.raises(Closed):
        world.recover()
    comm.barrier()
    with tdx.init(comm, backend=backend) as world:  # MPI is whole
        world.barrier()


@isolated(dies=[0, 3])
@worlds(4, 5)
def case_twice_with_losses(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=10)
    rank = world.rank
    members = list(range(world.size))
    for victim in (3, 0):
        world.barrier()
        if rank == victim:
            kill_self()
        with pytest.raises(PeerLost):
            world.barrier()
        world = world.recover()
        members.remove(victim)
        check_works(world, members, rank)
    world.close()


@isolated(dies=[1, 2])
@worlds(3)
def case_a_world_of_one_is_left(comm, backend):
    with tdx.init(comm, backend=backend, timeout_s=10) as world:
        world.barrier()
        if world.rank:
            kill_self()
        with pytest.raises(PeerLost):
            world.barrier()
        new = world.recover()
        check_works(new, [0], 0)
        again = new.recover()
        check_works(again, [0], 0)
        again.close()


PLACES = ["enter", "connect", "allgather", "conclude", "settle"]


@isolated(dies=[1])
@worlds(3)
@limit(60)
@pytest.mark.parametrize("place", PLACES)
def case_killed_within_recover(comm, backend, place):
    """Before and in the middle of each step; nobody waits for the deadline."""
    world = tdx.init(comm, backend=backend, timeout_s=20)
    rank = world.rank
    if rank == 1:
        owner = type(world.channels) if place == "enter" else recovery.Survivors
        step, calls = getattr(owner, place), []

        def dying(*args, **options):
            calls.append(place)
            if place != "allgather" or len(calls) == 5:
                kill_self()
            return step(*args, **options)

        setattr(owner, place, dying)
    world.barrier()
    start = time.monotonic()
    new = world.recover()
    if place == "settle":  # the others may have heard of it that all is well, or not
        with contextlib.suppress(PeerLost):
            new.barrier()
        new = new.recover() if new.size == 3 else new
    assert time.monotonic() - start < 15
    check_works(new, [0, 2], rank)
    new.close()


@isolated
@worlds(3)
@limit(60)
def case_a_stopped_rank_is_left_out(comm, backend):
    """It hears so when it goes on."""
    timeout = 2.0
    world = tdx.init(comm, backend=backend, timeout_s=timeout)
    rank = world.rank
    signals = world.zeros(1, "int32")
    world.barrier()
    if rank == 1:
        helper = resume_later(3 * timeout + 4)
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(PeerLost, match="too late") as late:
            world.recover()
        assert late.value.ranks == (0, 2)
        assert world.closed
        assert helper.wait() == 0
        return
    start = time.monotonic()
    if rank == 0:
        await_kernel[(1,)](signals, world.handle)
        with pytest.raises(PeerTimeout):
            world.synchronize()
    else:
        time.sleep(timeout / 2)  # its own wait would end long after that of rank 0
        with pytest.raises(PeerTimeout):
            world.barrier()
    new = world.recover()
    assert time.monotonic() - start < 3 * timeout + 2
    check_works(new, [0, 2], rank)
    new.close()


@isolated
@worlds(2, 3)
@limit(60)
def case_a_stopped_rank_that_comes_back_in_time(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=8)
    rank, size = world.rank, world.size
    world.barrier()
    if rank == 1:
        helper = resume_later(1.5)
        os.kill(os.getpid(), signal.SIGSTOP)
        assert helper.wait() == 0
    new = world.recover()
    check_works(new, list(range(size)), rank)
    new.close()


@isolated
@worlds(3)
@limit(60)
def case_a_rank_that_closed_is_left_out(comm, backend):
    """As after an exception that left the `with` block of one rank."""
    world = tdx.init(comm, backend=backend, timeout_s=10)
    rank = world.rank
    if rank == 1:
        with contextlib.suppress(ValueError), world:
            raise ValueError("of this rank alone")
    else:
        with pytest.raises(PeerLost, match=r"closed its world; .* ValueError: of this rank alone"):
            world.barrier()
        new = world.recover()
        check_works(new, [0, 2], rank)
        new.close()
    comm.barrier()


@isolated
@worlds(3)
@limit(60)
def case_a_fault_of_one_rank_reaches_all(comm, backend):
    """A rank in world.recover() after a fault: the others hear of it within a second."""
    world = tdx.init(comm, backend=backend, timeout_s=2)
    rank = world.rank
    signals = world.zeros(1, "int32")
    world.barrier()
    if rank == 2:
        await_kernel[(1,)](signals, world.handle)
    else:
        with pytest.raises(PeerTimeout, match="call it on rank"):
            wait_for_fault(world)
    new = world.recover()
    check_works(new, [0, 1, 2], rank)
    new.close()


@isolated
@worlds(2)
@limit(60)
def case_a_failing_bring_up_raises_everywhere(comm, backend):
    """An error that is not of a lost rank is no reason for another round."""
    from tdx.runtime import backends

    world = tdx.init(comm, backend=backend, timeout_s=10)
    rank = world.rank
    x = world.array(np.full(3, rank, np.int32))
    world.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:

            def failing(*args):
                raise DriverError("injected")

            patch.setattr(backends, "open_driver", failing)
        with pytest.raises(DriverError, match="injected"):
            world.recover()
    assert x.numpy()[0] == rank
    assert world.closed
    comm.barrier()
    tdx.init(comm, backend=backend).close()


@isolated
@worlds(2)
@limit(60)
def case_an_open_graph(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=10)
    x = world.zeros(3, "float32")
    plan = tdx.AllReduce(world, (3,), "float32")
    graph = tdx.graph(world).__enter__()
    plan(x)
    new = world.recover()
    with pytest.raises(Closed, match="given up"):
        graph.__exit__(None, None, None)
    check_works(new, [0, 1], comm.Get_rank())
    new.close()


@isolated
@worlds(2)
@limit(60)
def case_nothing_stays_of_old_worlds(comm, backend):
    """Threads, descriptors and mappings, once the old arrays are dropped."""

    def resources():
        gc.collect()
        with open("/proc/self/maps") as file:
            ends = [line.split()[0].split("-") for line in file]
        sizes = [int(high, 16) - int(low, 16) for low, high in ends]
        # bytes, not how many: neighbours may become one
        large = sum(size for size in sizes if size > 1 << 30) >> 30
        return threading.active_count(), len(os.listdir("/proc/self/fd")), large

    world = tdx.init(comm, backend=backend, timeout_s=10)
    for turn in range(6):
        x = world.array(np.arange(3))
        view = np.from_dlpack(x) if backend == "host" and turn % 2 else None
        new = world.recover()
        assert x.numpy().tolist() == [0, 1, 2]
        if view is not None:
            del x, world
            gc.collect()
            assert view.tolist() == [0, 1, 2]
        world = x = view = new
        x = None
        if turn == 1:
            before = resources()
    after = resources()
    assert after == before, f"{after} instead of {before}"
    world.close()
