"""Waits that nobody answers, with several streams, overlapping teams and graphs at once."""

from __future__ import annotations

import contextlib
import inspect
import time

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.kernels.all_reduce_rms_norm import Config as NormConfig
from tdx.kernels.barrier import Barrier
from tdx.kernels.matmul import Config as Tile
from tdx.kernels.pushing import announce
from tdx.runtime.errors import PeerTimeout, TdxError
from tests.helpers.blocks import many_blocks
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.movement import many_rounds

TIMEOUT_S = 1.0


@triton.jit
def pass_on_kernel(inbox, out, signals, mute, channel, world):
    """To the right neighbour, unless this rank's `mute` is set: then nothing is sent."""
    me, size = tdl.rank(world), tdl.num_ranks(world)
    call = tdl.epoch(channel)
    tl.store(tdl.symm_at(inbox, (me + 1) % size, world), call)
    tdl.notify(signals + 3, (me + 1) % size, world, call, when=tl.load(mute) == 0)
    ok = tdl.wait(signals + 3, world, call, peer=(me + size - 1) % size)
    tl.store(out, tl.load(inbox), mask=ok)
    tdl.barrier(channel, world)


@triton.jit
def patient_kernel(out, signals, world):
    """Waits for a signal that never comes."""
    ok = tdl.wait(signals, world, 1)
    tl.store(out, 1 + ok.to(tl.int32))


def raised(call, within=TIMEOUT_S + 1):
    """The PeerTimeout of a call, which comes in time."""
    start = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        call()
    assert time.monotonic() - start < within
    return caught.value


def at_once_again(fault, *calls):
    """Every later call raises the same fault without waiting."""
    for call in calls:
        assert raised(call, within=0.5) is fault


def close_all(world):
    """Peers have left the close of a rank with a fault: what they hear is not this case's."""
    with contextlib.suppress(TdxError):
        world.close()


def line_of(text):
    """ "file:line" of the one line of this file with `text` and the comment "# here"."""
    source = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    (number,) = (i for i, line in enumerate(source, 1) if text in line and "# here" in line)
    return f"{__file__}:{number}"


@isolated
@worlds(3)
@limit(60)
def case_overlapping_teams_on_two_streams(comm, backend):
    """Rank 1 is in both teams. What misses is told from what is queued behind and beside it."""
    world = tdx.init(comm, backend=backend, timeout_s=2 * TIMEOUT_S)
    first, second = world.team([1, 0]), world.team([2, 1])
    xs = [world.array(np.ones(40, np.float32)) for _ in range(2)]
    never = world.zeros(1, "int32", name="never")
    late = world.zeros(1, "int32", symmetric=False)
    streams = [world.new_stream() for _ in range(2)]
    plans = [
        tdx.AllReduce(world, 40, "float32", algorithm="one_shot", team=team) if team else None
        for team in (first, second)
    ]
    outs = [world.zeros(40, "float32", symmetric=False) for _ in range(2)]
    patient_kernel[(1,)](late, world.array(np.ones(1, np.int32)), world.handle)  # loads its code
    world.barrier()

    def call(number):
        plans[number](xs[number], outs[number], stream=streams[number])  # here: call

    for turn in range(20):
        if plans[1] is not None:
            call(1)
        if plans[0] is not None and turn < (2 if world.rank == 0 else 5):  # rank 0 misses three
            call(0)
    if world.rank != 1:
        world.synchronize()
        assert all((o.numpy() == 2).all() for o, p in zip(outs, plans, strict=True) if p)
        comm.barrier()
        close_all(world)
        return
    streams[1].synchronize()
    assert (outs[1].numpy() == 2).all()
    time.sleep(TIMEOUT_S)
    with world.on(streams[1]):
        patient_kernel[(1,)](late, never, world.handle)
    # the later wait, which has as long before it again, ends with the first one
    fault = raised(world.synchronize, within=1.8 * TIMEOUT_S)
    assert (fault.rank, fault.peer) == (1, 0)
    assert (fault.operation, fault.call_number) == ("all_reduce", 3)
    assert fault.location == line_of("plans[number]")
    assert fault.signal.startswith("channel[")
    assert "all_reduce, call 3, signal channel[" in str(fault)
    at_once_again(fault, lambda: call(0), lambda: call(1), world.check, late.numpy)
    comm.barrier()
    close_all(world)


@isolated
@worlds(3)
@limit(60)
def case_a_dropped_notify_in_a_graph(comm, backend):
    """Of a team in another order; a replay later on, also of another graph, raises at once."""
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    team = world.team(range(world.size)[::-1])
    channel = world.channel(1, team=team)
    inbox, signals = world.zeros(1, "int32"), world.zeros(8, "int32", name="arrivals")
    out, mute = (world.zeros(1, "int32", symmetric=False) for _ in range(2))
    x = world.array(np.ones(40, np.float32))
    plan, side = tdx.AllReduce(world, 40, "float32"), world.new_stream()
    world.barrier()
    with tdx.graph(world) as graph:
        side.wait(world.stream)
        plan(x, stream=side)
        pass_on_kernel[(1,)](inbox, out, signals, mute, channel, team.handle)
        world.stream.wait(side)
    with tdx.graph(world) as other:
        plan(x)
    for number in (1, 2):
        graph.replay()
        other.replay()
        assert out.numpy().tolist() == [number]
    mute.copy_from(np.array([world.rank == 0], np.int32))
    world.barrier()
    graph.replay()
    fault = raised(world.synchronize)
    last = world.size - 1  # to the right of rank 0
    operation = "pass_on_kernel" if backend == "host" else "kernel"
    assert (fault.rank, fault.operation, fault.call_number) == (world.rank, operation, 0)
    if world.rank == last:
        assert (fault.peer, fault.signal) == (0, "arrivals[3]")
        assert (fault.expected, fault.seen) == (3, 2)
    else:
        assert fault.peer == last
        assert fault.signal.startswith("channel(1)[")
    at_once_again(fault, graph.replay, other.replay, lambda: plan(x), tdx.barrier, out.numpy)
    comm.barrier()
    close_all(world)


OPERATIONS = {
    "one_shot": ("all_reduce", "channel"),
    "low_latency": ("all_reduce", "slots"),
    "engines": ("all_reduce", "signals"),
    "pull": ("all_gather", "channel"),
    "copy_engine": ("all_gather", "channel"),
    "push": ("all_to_all", "places"),
    "words": ("all_to_all", "slots"),
    "scatter": ("broadcast", "places"),
    "chain": ("broadcast", "places"),
    "barrier": ("barrier", "channel"),
    "fused": ("all_gather_matmul", "credit progress"),
    "one_kernel": ("all_gather_matmul", "progress"),
    "unfused": ("all_gather_matmul", "slots"),
    "matmul_reduce_scatter": ("matmul_reduce_scatter", "credit"),
    "matmul_reduce_scatter-low_latency": ("matmul_reduce_scatter", "words"),
    "matmul_reduce_scatter-one_kernel": ("matmul_reduce_scatter", "partial_tiles"),
    "matmul_all_reduce-one_shot": ("matmul_all_reduce", "partial_tiles"),
    "matmul_all_reduce-two_shot": ("matmul_all_reduce", "partial_tiles"),
    "matmul_all_reduce-copy_engine": ("matmul_all_reduce", "credit"),
    "norm-two_shot": ("all_reduce_rms_norm", "signals"),
    "norm-low_latency": ("all_reduce_rms_norm", "slots"),
    "norm-low_latency_two_shot": ("all_reduce_rms_norm", "slots"),
    "norm-unfused": ("all_reduce_rms_norm", "slots"),
    "norm-unfused_two_shot": ("all_reduce_rms_norm", "slots"),
}


def plan_of(world, name):
    """A plan and what to call it with."""
    if name == "barrier":
        return Barrier(world), ()
    x = world.zeros(12, "float32")
    if name in ("pull", "copy_engine"):
        return tdx.AllGather(world, 12, "float32", algorithm=name), (x,)
    if name in ("push", "words"):
        algorithm = "low_latency" if name == "words" else name
        return tdx.AllToAll(world, 12, "float32", algorithm=algorithm), (x,)
    if name in ("scatter", "chain"):
        return tdx.Broadcast(world, 12, "float32", 1, algorithm=name), (x,)
    if name in ("one_shot", "low_latency", "engines"):
        algorithm = "copy_engine" if name == "engines" else name
        return tdx.AllReduce(world, 12, "float32", algorithm=algorithm), (x,)
    if name.startswith("norm-"):  # by words two blocks share the row
        way, x = name.removeprefix("norm-"), world.zeros(100, "float32")
        config = NormConfig(way, 32 if way.endswith("two_shot") else 64, blocks=2)
        return tdx.AllReduceRmsNorm(world, 100, "float32", config=config), (x, x)
    a, b = world.zeros((12, 8), "float32"), world.zeros((8, 4), "float32")
    shapes = (a.shape, b.shape, "float32")
    if name in ("fused", "one_kernel", "unfused"):
        return tdx.AllGatherMatmul(world, *shapes, algorithm=name), (a, b)
    name, _, algorithm = name.partition("-")
    summed = {
        "matmul_all_reduce": tdx.MatmulAllReduce, "matmul_reduce_scatter": tdx.MatmulReduceScatter,
    }  # fmt: skip
    if algorithm == "two_shot":  # a tile for each of three ranks, and a block
        a = world.zeros((48, 8), "float32")
        with many_blocks():
            config = Tile(16, 16, 16)
            plan = tdx.MatmulAllReduce(
                world, a.shape, *shapes[1:], algorithm=algorithm, config=config
            )
            return plan, (a, b)
    return summed[name](world, *shapes, algorithm=algorithm or None), (a, b)


@isolated
@worlds(3)
@limit(90)
def case_a_rank_that_misses_a_call(comm, backend):
    """The others learn which rank, of which call, and where they made it."""
    for name in OPERATIONS:
        world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
        miss_a_call(world, name)
        comm.barrier()
        close_all(world)


def miss_a_call(world, name):
    plan, operands = plan_of(world, name)

    def queue(calls):
        for _ in range(calls):
            plan(*operands)  # here: some of them are queued behind the one that waits

    queue(2)
    world.synchronize()
    if world.rank == 0:
        return
    queue(4)
    fault = raised(world.synchronize)
    operation, signals = OPERATIONS[name]
    assert (fault.rank, fault.peer, fault.operation) == (world.rank, 0, operation)
    assert fault.signal.partition("[")[0] in signals.split()
    # which meets twice in each call
    assert name == "copy_engine" or (fault.call_number, fault.expected) == (3, 3)
    assert fault.location == line_of("plan(*operands)")
    at_once_again(fault, lambda: plan(*operands))


@isolated
@worlds(2)
@limit(60)
def case_a_rank_that_misses_a_replay(comm, backend):
    """Replays count as calls, made where they were recorded."""
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    x = world.zeros(12, "float32")
    plan = tdx.AllReduce(world, 12, "float32")
    world.barrier()
    plan(x)
    with tdx.graph(world) as graph:
        plan(x)
        plan(x, stream=None)  # here: the second call of each replay
    for _ in range(2):
        graph.replay()
    world.barrier()
    if world.rank == 0:
        plan(x)
        world.synchronize()
    else:
        for _ in range(3):
            graph.replay()
        fault = raised(world.synchronize)
        assert (fault.peer, fault.call_number, fault.expected) == (0, 7, 7)
        assert fault.location == line_of("plan(x, stream=None)")
        at_once_again(fault, graph.replay)
    comm.barrier()
    close_all(world)


# a peer's later data lies where that of the late call was: each of these uses two slots in turn
TWO_SLOTS = {
    "one_shot": lambda world: tdx.AllReduce(world, 64, "float32", algorithm="one_shot"),
    "pull": lambda world: tdx.AllGather(world, 64, "float32", algorithm="pull"),
    "push": lambda world: tdx.ReduceScatter(world, 64, "float32", algorithm="push"),
    "matmul": lambda world: tdx.MatmulReduceScatter(world, (64, 16), (16, 16), "float32"),
}


@isolated
@worlds(2)
@limit(30)
@pytest.mark.parametrize("name", TWO_SLOTS)
def case_calls_behind_a_fault_leave_the_late_rank_its_data(comm, backend, name):
    """Rank 0 gives up call 2 and has queued calls 3 and 4 when rank 1 comes to call 2."""
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    plan = TWO_SLOTS[name](world)
    others = ()
    if name == "matmul":
        others = (world.array(np.eye(16, dtype=np.float32), symmetric=False),)
    shape = (64, 16) if name == "matmul" else 64
    inputs = [world.array(np.full(shape, 10**i, np.float32), symmetric=False) for i in range(4)]
    with tdx.graph(world) as later:
        for x in inputs[1:]:
            plan(x, *others)
    plan(inputs[0], *others)
    world.barrier()
    world.barrier()
    if world.rank == 0:
        later.replay()
        with pytest.raises(PeerTimeout):
            world.synchronize()
        comm.barrier()
    else:
        comm.barrier()
        with contextlib.suppress(PeerTimeout):  # it may hear of the fault, or get what is right
            values = set(plan(inputs[1], *others).numpy().ravel().tolist())
            assert values == ({10.0} if name == "pull" else {20.0})
    comm.barrier()
    close_all(world)


@triton.jit
def stops_kernel(out, stage, places, sent, channel, world, rounds, turns):
    """A peer's side of a broadcast into staging, which stops after `turns` rounds."""
    ranks = tdl.num_ranks(world)
    number = tdl.epoch(channel)
    announce(places + (number & 1) * 2 * tl.num_programs(0) * ranks, stage, out, 0, number, world)
    everyone = tl.arange(0, 64)
    own = sent + tl.program_id(0) * ranks + tdl.rank(world)
    for turn in range(0, turns):
        value = (number - 1) * rounds + turn + 1
        tdl.notify(own, everyone, world, value, when=everyone < ranks)


@isolated
@worlds(3)
@limit(60)
@pytest.mark.parametrize("algorithm", ["scatter", "chain"])
def case_who_stops_within_a_broadcast(comm, backend, algorithm):
    """Is named, also by a peer that writes to symmetric memory and so waits for the root alone.

    In a chain only the rank before it waits for it, and the root, if that has slots, for that one.
    """
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    count = 1 << 20
    with many_rounds(rounds=(1 << 16, 1 << 16)):
        plan = tdx.Broadcast(world, count, "int8", 0, algorithm=algorithm)
    turns = 2
    assert plan._rounds > 4 + turns
    x = world.zeros(count, "int8", symmetric=False)
    out = world.zeros(count, "int8", symmetric=algorithm == "scatter")
    arguments = (plan._stage, plan._places, plan._sent, plan._channel, world.handle, plan._rounds)
    stops_kernel[(plan._blocks,)](x, *arguments, 0)  # compiled beforehand; nothing else is sent
    comm.barrier()
    if world.rank == 2:
        stops_kernel[(plan._blocks,)](x, *arguments, turns)
        world.synchronize()
    else:
        plan(x, out=out)
        fault = raised(world.synchronize, within=10)
        named = (1, 2) if algorithm == "chain" and world.rank == 0 else (2,)
        assert fault.peer in named, fault
        assert fault.operation == "broadcast"
        assert fault.signal.startswith("sent[")
    comm.barrier()
    close_all(world)
