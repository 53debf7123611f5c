"""What is over, or not this thread's or process': calls that come all the same, and interrupts."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.kernels.all_reduce import Config
from tdx.runtime.errors import Closed, CollectiveMismatch, InvalidArgument, PeerLost, TdxError
from tests.helpers.cases import host_only, isolated, limit, worlds
from tests.ranks.cases.registration import by_memfd


@triton.jit
def spin_kernel(x, turns):
    for turn in range(turns):
        tl.store(x + turn % 16, tl.cast(turn, tl.float32))


@triton.jit
def rank_kernel(x, world):
    tl.store(x, tdl.rank(world))


@worlds(1, 2)
def case_another_thread_while_a_graph_is_recorded(world):
    plan = tdx.AllReduce(world, 64, "float32")
    x, out = world.array(np.ones(64, np.float32)), world.zeros(64, "float32", symmetric=False)
    side, refused = world.new_stream(), []

    def other():
        for call in (lambda: plan(x, out, stream=side), lambda: out.copy_from(x),
                     lambda: world.zeros(3, "float32", symmetric=False)):  # fmt: skip
            with pytest.raises(InvalidArgument, match="another thread records a graph") as caught:
                call()
            refused.append(caught)

    plan(x, out, stream=side)
    before = plan.calls
    with tdx.graph(world) as graph:
        plan(x, out)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 3
    graph.replay()
    assert (out.numpy() == world.size).all()
    assert plan.calls == before + 1
    world.barrier()


@worlds(1)
def case_a_recording_that_cannot_end(world, backend):
    plan, side = tdx.AllReduce(world, 64, "float32"), world.new_stream()
    x, out = (world.zeros(64, "float32", symmetric=False) for _ in range(2))
    plan(x, out)
    graph = tdx.graph(world)
    with pytest.raises(TdxError), graph:  # noqa: PT012  # the side stream is not joined back
        side.wait(world.stream)
        plan(x, out, stream=side)
    with pytest.raises(Closed, match="holds nothing"):
        graph.replay()
    world.synchronize()
    before = plan.calls
    with graph:
        plan(x, out)
    graph.replay()
    assert plan.calls == before + 1
    del graph, plan
    gc.collect()
    x.free()


@worlds(1, 2)
def case_a_forked_copy(world, comm):
    """It has no device: what it calls is refused, and its end leaves the rank alone."""
    x, plan = world.array(np.arange(4)), tdx.AllReduce(world, 4, "int64")
    plan(x)
    world.synchronize()
    world.barrier()
    if (child := os.fork()) == 0:
        try:
            for call in (x.numpy, lambda: plan(x), x.free, world.barrier, world.synchronize,
                         lambda: world.empty(3, "int8", symmetric=False),
                         lambda: tdx.all_reduce(np.ones(4))):  # fmt: skip
                with pytest.raises(Closed, match="forked from"):
                    call()
            with pytest.raises(InvalidArgument, match=r"tdx\.init: .* forked from"):
                tdx.init(comm)
            world.close()
            del x, plan
            gc.collect()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (plan(x).numpy() == world.size * np.arange(4)).all()
    world.barrier()


@worlds(1)
@pytest.mark.parametrize("way", ["in", "out"])
def case_an_interrupted_copy(world, backend, way):
    """The host's memory stays until the queued copy has used it."""
    host_only(backend)
    large = world.zeros(8 << 20, "uint8", symmetric=False)
    small = world.zeros(16, "float32", symmetric=False)
    world.synchronize()

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        spin_kernel[(1,)](small, 20_000)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            large.numpy() if way == "out" else large.copy_from(np.ones(8 << 20, np.uint8))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    gc.collect()
    assert small.numpy().max() == 19_999
    assert (large.numpy() == (way == "in")).all()


@isolated
@worlds(2)
@limit(30)
def case_the_handle_of_a_world_that_is_over(comm, backend):
    with tdx.init(comm, backend=backend) as world:
        old, team = world.handle, world.team([1, 0])
    with tdx.init(comm, backend=backend) as world:
        x = world.zeros(1, "int32", symmetric=False)
        for handle in (old, team.handle):
            with pytest.raises(Closed, match="the world is closed"):
                rank_kernel[(1,)](x, handle)
        rank_kernel[(1,)](x, world.handle)
        old = world.handle
        world.synchronize()
        world.barrier()
        world = world.recover()
        with pytest.raises(Closed, match="given up"):
            rank_kernel[(1,)](world.zeros(1, "int32"), old)
        world.close()


@isolated
@worlds(2)
@limit(30)
def case_ranks_that_allocate_differently(comm, backend):
    for call in (tdx.World.barrier, lambda world: world.channel(1), lambda world: world.team([0])):
        world = tdx.init(comm, backend=backend, timeout_s=5)
        began = time.monotonic()
        if world.rank == 0:
            world.zeros(4, "float32")
        world.zeros(3, "float32")
        with pytest.raises(CollectiveMismatch, match=r"differently.*allocation 1: rank 0"):
            call(world)
        assert time.monotonic() - began < 3
        world.close()


@isolated
@worlds(2)
@limit(30)
def case_devices_of_different_sizes(comm, backend):
    """Grids and workspaces follow from the smallest."""
    host_only(backend)
    tdx.config.host_multiprocessors = 8 if comm.Get_rank() else 3
    with tdx.init(comm, backend=backend, timeout_s=10) as world:
        assert world.device.multiprocessors == 3
        for algorithm in ("one_shot", "two_shot"):
            config = Config(algorithm, 256)
            plan = tdx.AllReduce(world, 100_000, "float32", config=config)
            x = world.array(np.full(100_000, world.rank + 1, np.float32), symmetric=False)
            assert (plan(x).numpy() == 3).all()
        world.barrier()


@worlds(1)
def case_an_export_that_fails(world):
    x, before = world.zeros(4, "float32", symmetric=False), len(world.exports)
    for wrong in (1, ()):
        with pytest.raises((TypeError, IndexError)):
            x.__dlpack__(max_version=wrong)
    assert len(world.exports) == before
    with pytest.raises(InvalidArgument, match="view of 8 of the 16 bytes"):
        x[:2].free()
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"pass x\.numpy\(\) on"):
            copied(x)
    x.free()


@isolated
@worlds(3)
@limit(30)
@pytest.mark.parametrize("way", ["in the block", "at its end"])
def case_a_peer_that_left_by_an_error(comm, backend, way):
    """Who waits for it hears so soon after, not at the deadline."""

    def use():
        with tdx.init(comm, backend=backend, timeout_s=20) as world:
            plan = tdx.AllReduce(world, 100, "float32")
            x = world.array(np.ones(100, np.float32))
            assert (plan(x).numpy() == 3).all()
            world.barrier()
            if world.rank == 1:
                raise KeyError("left by an error")
            result = plan(x)
            if way == "in the block":
                result.numpy()

    began, left = time.monotonic(), comm.Get_rank() == 1
    text = (
        "left by" if left else "closed there.*; .*rank 1 has given up: KeyError: 'left by an error'"
    )
    with pytest.raises(KeyError if left else PeerLost, match=text):
        use()
    assert time.monotonic() - began < 10


@isolated
@worlds(3)
@limit(30)
@pytest.mark.parametrize("way", ["kernel", "host"])
def case_the_first_of_several_errors(comm, backend, way):
    """Who was lost by an error that another rank's error led to is not told of as the cause."""
    cause = "KeyError: 'the first'"

    def use(world):
        plan = tdx.AllReduce(world, 100, "float32")
        x = world.array(np.ones(100, np.float32))
        world.barrier()
        if world.rank == 1:
            raise KeyError("the first")
        if world.rank == 2:  # until rank 0 has left because of it
            while 0 not in world.channels.departed():
                time.sleep(0.01)
        if way == "host":
            world.channels.barrier("work", [0, 2] if world.rank else None)
        plan(x).numpy()

    world = tdx.init(comm, backend=backend, timeout_s=20)
    with pytest.raises(KeyError if world.rank == 1 else PeerLost) as caught, world:
        use(world)
    if world.rank != 1:
        text, first = str(caught.value), "first: " if world.rank else ""
        assert text.count("has given up") == 1
        assert f"; {first}rank 1 has given up: {cause}" in text
        assert caught.value.origin == (1, cause)
        gone = (0, 1) if way == "kernel" else (0,)
        assert caught.value.ranks == (gone if world.rank else (1,))
        assert (caught.value.rank, caught.value.peer) == (world.rank, 0 if world.rank else 1)
    comm.barrier()


@isolated
@worlds(2)
@limit(30)
def case_a_peer_that_left_when_nothing_is_queued(comm, backend):
    """What is done stays good."""
    world = tdx.init(comm, backend=backend, timeout_s=5)
    out = tdx.all_reduce(world.array(np.ones(100, np.float32)))
    world.barrier()
    if world.rank == 1:
        with pytest.raises(KeyError), world:
            raise KeyError
    else:
        time.sleep(2)
        assert (out.numpy() == 2).all()
        with pytest.raises(PeerLost, match="closed its world"):
            world.close()
    comm.Barrier()


@isolated
@worlds(1)
def case_registered_memory_in_a_graph(comm, backend):
    """What a graph uses by either address is not given back."""
    host_only(backend)
    with tdx.init(comm, backend=backend) as world:
        theirs = by_memfd(400).view(np.float32)
        theirs[:] = 3
        registered, out = world.register(theirs), world.zeros(100, "float32")
        plan = tdx.AllReduce(world, 100, "float32")
        with tdx.graph(world) as graph:
            plan(theirs, out)
        with pytest.raises(InvalidArgument, match="used by a recorded graph"):
            registered.free()
        graph.replay()
        assert (out.numpy() == 3).all()
        del graph
        gc.collect()
        registered.free()
