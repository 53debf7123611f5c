"""Waits that nobody answers: what is raised, when, how often it is said, and what still works."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.runtime.errors import Closed, PeerLost, PeerTimeout
from tests.helpers.cases import isolated, limit, worlds


@triton.jit
def _exchange(out, signals, world, mute):
    """Every rank notifies the next one, except rank `mute`."""
    me, size = tdl.rank(world), tdl.num_ranks(world)
    right, left = (me + 1) % size, (me + size - 1) % size
    tl.store(tdl.symm_at(out, right, world), me + 1)
    tdl.notify(signals + 3, right, world, 1, when=me != mute)
    ok = tdl.wait(signals + 3, world, 1, peer=left)
    tl.store(out + 1, tl.load(out), mask=ok)
    again = tdl.wait(signals + 4, world, 1, peer=left)  # while a fault stands: at once
    tl.store(out + 2, 1, mask=again)


@triton.jit
def _ring(signals, world, mute):
    me, size = tdl.rank(world), tdl.num_ranks(world)
    tdl.notify(signals, (me + 1) % size, world, 1, when=me != mute)
    tdl.wait(signals, world, 1, peer=(me + size - 1) % size)


@isolated
@worlds(3)
@limit(30)
def case_ranks_in_close_learn_of_it(comm, backend):
    """One rank waits in a kernel, in vain, while the others are on their way out."""
    world = tdx.init(comm, backend=backend, timeout_s=1.5)
    signals = world.zeros(1, "int32", name="arrivals")
    world.barrier()
    _ring[(1,)](signals, world.handle, 0)
    if world.rank == 1:
        with pytest.raises(PeerTimeout, match=r"rank 0: kernel.*, signal arrivals\[0\]"):
            world.synchronize()
        world.close()
    else:
        world.synchronize()
        with pytest.raises((PeerTimeout, PeerLost), match=r"has given up: .* arrivals\[0\]"):
            world.close()


@isolated
@worlds(2, 3)
@limit(30)
def case_a_dropped_notify(comm, backend):
    timeout = 1.0
    world = tdx.init(comm, backend=backend, timeout_s=timeout)
    out, signals = world.zeros(3, "int32"), world.zeros(8, "int32", name="arrivals")
    other = world.zeros(1, "int32")
    world.barrier()
    mute = 0
    muted = (mute + 1) % world.size
    start = time.monotonic()
    with _stderr() as said:
        _exchange[(1,)](out, signals, world.handle, mute)
        with pytest.raises(PeerTimeout) as caught:
            world.synchronize()
        waited = time.monotonic() - start
        time.sleep(0.6)
    fault = caught.value
    assert timeout <= waited < timeout + 1
    left = (world.rank - 1) % world.size
    word = 3 if world.rank == muted else 4
    assert (fault.rank, fault.peer, fault.expected, fault.seen) == (world.rank, left, 1, 0)
    assert fault.signal == f"arrivals[{word}]"
    if backend == "host":  # where every program can be asked
        assert fault.operation == "_exchange"
        assert "faults.py:" in fault.location
        assert f"rank {left}: kernel _exchange, signal arrivals[{word}]" in str(fault)
        assert f"_exchange(0, 0, 0) waits for arrivals[{word}] >= 1 (is 0)" in str(fault)
    else:
        assert fault.operation == "kernel"
        assert f"rank {left}: kernel, signal arrivals[{word}] expected 1, seen 0" in str(fault)
    assert said.text.count("tdx: rank") == 1
    # later calls fail at once with the same cause
    start = time.monotonic()
    for call in (
        world.check, world.synchronize, world.barrier, other.numpy, world.stream.synchronize,
        lambda: world.empty(1, "int8"), lambda: world.team([0]), lambda: tdx.all_reduce(other),
        lambda: np.asarray(other) if backend == "host" else other.numpy(),
    ):  # fmt: skip
        with pytest.raises(PeerTimeout) as again:
            call()
        assert again.value is fault
    world.close()
    assert time.monotonic() - start < 1
    with pytest.raises(Closed):
        world.check()
    comm.barrier()
    with tdx.init(comm, backend=backend) as world:
        world.barrier()


@isolated
@worlds(2)
@limit(30)
def case_an_unseen_fault_is_raised_by_close(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=0.5)
    out, signals = world.zeros(3, "int32"), world.zeros(8, "int32")
    world.barrier()
    _exchange[(1,)](out, signals, world.handle, 1)
    with pytest.raises(PeerTimeout):
        world.close()
    assert world.closed
    assert not [t for t in threading.enumerate() if t.name.startswith("tdx")]
    comm.barrier()


@isolated(dies=[1])
@worlds(2, 3)
@limit(30)
def case_a_lost_peer_is_told_from_a_slow_one(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=20)
    out, signals = world.zeros(3, "int32"), world.zeros(8, "int32")
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    _exchange[(1,)](out, signals, world.handle, -1)
    with pytest.raises(PeerLost, match="rank 1") as caught:
        world.synchronize()
    assert caught.value.ranks == (1,)
    assert (caught.value.rank, caught.value.peer) == (world.rank, 1)
    assert time.monotonic() - start < 3
    with pytest.raises(PeerLost):
        world.barrier()
    world.close()
    assert time.monotonic() - start < 5


@isolated(dies=[0, 1])
@worlds(2)
@limit(30)
def case_abort_when_a_peer_is_lost(comm, backend):
    world = tdx.init(comm, backend=backend, on_peer_failure="abort")
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(20)
    pytest.fail("rank 0 is still there")


@isolated
@worlds(2)
@limit(30)
def case_no_deadline(comm, backend):
    """timeout_s=0: a late peer is waited for; an idle one is no fault."""
    with tdx.init(comm, backend=backend, timeout_s=0) as world:
        out, signals = world.zeros(3, "int32"), world.zeros(8, "int32")
        world.barrier()
        if world.rank == 1:
            time.sleep(1.5)
            signals[4].peer(0).copy_from(np.int32(1))
            signals[4].copy_from(np.int32(1))
            world.synchronize()
        _exchange[(1,)](out, signals, world.handle, -1)
        assert out.numpy().tolist() == [2 - world.rank, 2 - world.rank, 1]
        world.barrier()


class _stderr:
    """What this process writes to descriptor 2 inside the block, as `text`."""

    def __enter__(self):
        import tempfile

        self.file = tempfile.TemporaryFile()
        self.saved = os.dup(2)
        os.dup2(self.file.fileno(), 2)
        return self

    def __exit__(self, *_):
        os.dup2(self.saved, 2)
        os.close(self.saved)
        self.file.seek(0)
        self.text = self.file.read().decode()
        self.file.close()
