"""The host tier's device: programs that wait, streams, events, graphs, in a world of one."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

import tdx
import tdx.language as tdl
from tdx.runtime.errors import Closed, DriverError, InvalidArgument, PeerTimeout
from tests.helpers.host_kernels import add, count, nothing, spin


@pytest.fixture
def world():
    with tdx.init(backend="host", timeout_s=5) as world:
        yield world


@pytest.fixture
def settings():
    """tdx.config, put back afterwards."""
    names = ("host_seed", "host_multiprocessors", "launch_blocking")
    before = {name: getattr(tdx.config, name) for name in names}
    yield tdx.config
    for name, value in before.items():
        setattr(tdx.config, name, value)


@triton.jit
def _wait_for_the_next(signals, out, world):
    """Block i waits for block i + 1; the last one starts the chain."""
    i = tl.program_id(0)
    last = tl.num_programs(0) - 1
    ok = True
    if i != last:
        ok = tdl.wait(signals + i + 1, world, 1)
    tl.store(out + i, 1, mask=ok)
    tdl.notify(signals + i, tdl.rank(world), world, 1, when=ok)


@triton.jit
def _spin_on_two(flag):
    while tl.atomic_add(flag, 0) + tl.atomic_add(flag + 1, 0) < 2:
        pass


@triton.jit
def _hand_over(mine, theirs, tiles, out, rounds, first: tl.constexpr, world):
    """Two of these on two streams write a tile in turn."""
    me = tdl.rank(world)
    for i in range(rounds):
        ok = True
        if not first or i > 0:
            ok = tdl.wait(theirs, world, i if first else i + 1)
        value = tl.load(tiles)
        tl.store(tiles, value + 1, mask=ok)
        tl.store(out + i, value, mask=ok)
        tdl.notify(mine, me, world, i + 1, when=ok)


@triton.jit
def _spin_on_load(flag):
    while tl.load(flag) == 0:
        pass


@triton.jit
def _spin_on_block(flags):
    seen = tl.load(flags + tl.arange(0, 2))
    while tl.sum(seen) == 0:
        seen = tl.load(flags + tl.arange(0, 2))


@triton.jit
def _power(x, out, rounds):
    value = 0
    for _ in range(rounds):
        value = value * 3 + tl.load(x)
    tl.store(out, value)


@triton.jit
def _count_in_a_tuple(x, out, rounds):
    s = (tl.load(x), tl.load(x) * 0)
    while s[1] < rounds:
        s = (tl.load(x), s[1] + 1)
    tl.store(out, s[1])


@triton.jit
def _count_in_nested_tuples(x, out, rounds):
    s = ((tl.load(x), (tl.load(x) * 0,)), 1)
    while s[0][1][0] < rounds:
        s = ((tl.load(x), (s[0][1][0] + 1,)), 1)
    tl.store(out, s[0][1][0])


@aggregate
class _Count:
    __annotations__ = {"seen": tl.tensor, "turn": tl.tensor}  # Triton 3.6 takes no strings

    @triton.constexpr_function
    def __init__(self, seen, turn):
        self.seen = seen
        self.turn = turn


@triton.jit
def _count_in_an_aggregate(x, out, rounds):
    s = _Count(tl.load(x), tl.load(x) * 0)
    while s.turn < rounds:
        s = _Count(tl.load(x), s.turn + 1)
    tl.store(out, s.turn)


@triton.jit
def _spin_with_a_tuple(flag):
    s = (tl.load(flag), (1, None))
    while s[0] == 0:
        s = (tl.load(flag), (1, None))


@triton.jit
def _order(counter, out):
    tl.store(out + tl.program_id(0), tl.atomic_add(counter, 1))


# ---- programs that wait
def test_blocks_wait_for_later_blocks(world):
    blocks = world.driver.resident_blocks()
    signals, out = world.zeros(blocks, "int32"), world.zeros(blocks, "int32")
    _wait_for_the_next[(blocks,)](signals, out, world.handle)
    assert (out.numpy() == 1).all()


def test_grid_above_occupancy_that_waits_for_itself_is_named():
    world = tdx.init(backend="host", timeout_s=0.3)
    blocks = 2 * world.driver.resident_blocks()
    signals, out = world.zeros(blocks, "int32"), world.zeros(blocks, "int32")
    _wait_for_the_next[(blocks,)](signals, out, world.handle)
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"8 of 16 programs .* are not started: 8 are resident"):
        world.synchronize()
    assert time.monotonic() - start < 1.5
    world.close()


@pytest.mark.parametrize(
    ("kernel", "arguments", "line"),
    [
        (spin, (1,), r"while tl\.atomic_add"),
        (_spin_on_two, (), r"while tl\.atomic_add"),
        (_spin_on_load, (), r"while tl\.load"),
        (_spin_on_block, (), r"while tl\.sum|seen = tl\.load"),
        (_spin_with_a_tuple, (), r"s = \(tl\.load"),
    ],
)
def test_a_spin_loop_that_nobody_ends_is_named(kernel, arguments, line):
    with tdx.init(backend="host", timeout_s=0.2) as world:
        flag = world.zeros(2, "int32")
        kernel[(1,)](flag, *arguments)
        text = rf"rank 0: deadlock.*spins at .*: ({line}).*wait with tdl\.wait"
        with pytest.raises(DriverError, match=text):
            world.synchronize()
        add[(1,)](flag, 2, 1, BLOCK=2)
        assert flag.numpy().tolist() == [1, 1]


def test_work_that_loads_the_same_for_longer_than_the_deadline_is_no_spin_loop():
    with tdx.init(backend="host", timeout_s=0.1) as world:
        x, out = world.array(np.ones(1, np.int32)), world.zeros(1, "int32")
        rounds, taken = 1000, 0.0
        while taken < 1.2:  # twice as long as a spin loop may take
            rounds *= 2
            start = time.monotonic()
            _power[(1,)](x, out, rounds)
            world.synchronize()
            taken = time.monotonic() - start
        found = int(out.numpy()[0]) % (1 << 32)
        assert found == (pow(3, rounds, 1 << 33) - 1) // 2 % (1 << 32)


@pytest.mark.parametrize(
    "kernel", [_count_in_a_tuple, _count_in_nested_tuples, _count_in_an_aggregate]
)
def test_a_loop_whose_state_is_in_a_tuple_is_no_spin_loop(kernel):
    with tdx.init(backend="host", timeout_s=0.1) as world:
        x, out = world.array(np.ones(1, np.int32)), world.zeros(1, "int32")
        rounds, taken = 1000, 0.0
        while taken < 1.2:
            rounds *= 2
            start = time.monotonic()
            kernel[(1,)](x, out, rounds)
            world.synchronize()
            taken = time.monotonic() - start
        assert out.numpy().tolist() == [rounds]


def test_a_spin_loop_ends_when_another_stream_stores():
    with tdx.init(backend="host", timeout_s=1) as world:
        flag, counter = world.zeros(2, "int32"), world.zeros(1, "int32")
        side = world.new_stream()
        world.synchronize()
        _spin_on_load[(1,)](flag)
        with world.on(side):
            count[(200,)](counter)
            add[(1,)](flag, 2, 1, BLOCK=2)
        world.synchronize()
        assert flag.numpy().tolist() == [1, 1]


def test_a_cooperative_grid_above_occupancy_is_refused(world):
    with pytest.raises(InvalidArgument, match=r"9 programs.*8 are resident"):
        nothing[(9,)](launch_cooperative_grid=True)
    nothing[(8,)](launch_cooperative_grid=True)


def test_kernels_on_two_streams_hand_tiles_to_each_other(world):
    rounds = 50
    signals, tiles = world.zeros(2, "int32"), world.zeros(1, "int32")
    outs = [world.zeros(rounds, "int32") for _ in range(2)]
    world.synchronize()
    first, second = world.new_stream(), world.new_stream()
    with world.on(second):
        _hand_over[(1,)](signals[1:], signals, tiles, outs[1], rounds, False, world.handle)
    with world.on(first):
        _hand_over[(1,)](signals, signals[1:], tiles, outs[0], rounds, True, world.handle)
    world.synchronize()
    assert outs[0].numpy().tolist() == list(range(0, 2 * rounds, 2))
    assert outs[1].numpy().tolist() == list(range(1, 2 * rounds, 2))


def test_a_long_kernel_lets_other_streams_run(world):
    counter, flag = world.zeros(1, "int32"), world.zeros(1, "int32")
    world.synchronize()
    other = world.new_stream()
    count[(1000,)](counter)
    with world.on(other):
        add[(1,)](flag, 1, 1, BLOCK=1)
    other.synchronize()
    assert len(world.driver.device.streams[world.stream.handle].queue) == 1
    assert counter.numpy() == [1000]


def test_no_deadline_waits_as_long_as_it_takes():
    with tdx.init(backend="host", timeout_s=0) as world:
        flag = world.zeros(1, "int32")
        spin[(1,)](flag, 1)
        time.sleep(0.7)
        other = world.new_stream()
        assert not world.driver.stream_query(world.stream.handle)
        with world.on(other):
            count[(1,)](flag)
        world.synchronize()


def test_an_error_leaves_a_block_with_work_still_queued():
    """Leaving by an exception waits for nothing, also without a deadline."""
    start = time.monotonic()
    with (  # noqa: PT012
        pytest.raises(KeyError),
        tdx.init(backend="host", timeout_s=0) as world,
    ):
        spin[(1,)](world.zeros(1, "int32"), 1)
        raise KeyError
    assert time.monotonic() - start < 2


def test_a_seed_changes_the_order_and_not_the_result(settings):
    orders = set()
    for seed in range(1, 9):
        settings.host_seed = seed
        with tdx.init(backend="host", timeout_s=5) as world:
            counter, out = world.zeros(1, "int32"), world.zeros(8, "int32")
            signals, done = world.zeros(8, "int32"), world.zeros(8, "int32")
            _order[(8,)](counter, out)
            _wait_for_the_next[(8,)](signals, done, world.handle)
            order = out.numpy()
            assert sorted(order) == list(range(8))
            assert (done.numpy() == 1).all()
            orders.add(tuple(order))
    assert len(orders) > 2


# ---- streams, events, graphs
def test_streams_are_ordered_by_events(world):
    flag, x = world.zeros(1, "int32"), world.zeros(4, "float32")
    world.synchronize()
    side = world.new_stream()
    with world.on(side):
        spin[(1,)](flag, 1)
        add[(1,)](x, 4, 1.0, BLOCK=4)
    world.stream.wait(side)
    add[(1,)](x, 4, 1.0, BLOCK=4)
    start = world.stream.record()
    assert not start.query()
    with world.on(world.new_stream()):
        count[(1,)](flag)
    end = side.record()
    end.wait()
    start.wait()
    assert (x.numpy() == 2).all()
    assert end.elapsed(start) == -start.elapsed(end)
    side.wait(start)
    side.wait(world.stream.handle)
    for wrong in ("stream", None, True):
        with pytest.raises(InvalidArgument, match="is not a stream"):
            side.wait(wrong)
    with pytest.raises(InvalidArgument, match="not an open stream"), world.on(1 << 40):
        nothing[(1,)]()


def test_on_is_per_thread_and_restored(world):
    side = world.new_stream()
    seen = []
    with world.on(side):
        assert world.driver.current_stream() == side.handle
        thread = threading.Thread(target=lambda: seen.append(world.driver.current_stream()))
        thread.start()
        thread.join()
    assert seen == [world.stream.handle] == [world.driver.current_stream()]


def test_a_graph_replays_with_side_streams(world):
    x = world.zeros(4, "float32")
    side = world.new_stream()
    with tdx.graph(world) as graph:
        add[(1,)](x, 4, 1.0, BLOCK=4)
        side.wait(world.stream)
        with world.on(side):
            add[(1,)](x, 4, 10.0, BLOCK=4)
        world.stream.wait(side)
        add[(1,)](x, 4, 100.0, BLOCK=4)
    assert (x.numpy() == 0).all()
    for _ in range(3):
        graph.replay()
    assert (x.numpy() == 333).all()
    graph.replay(world.new_stream())
    assert (x.numpy() == 444).all()


def test_a_graph_holds_its_arrays(world):
    x = world.array(np.ones(4, np.float32), symmetric=False)
    out = world.zeros(4, "float32")
    with tdx.graph(world) as graph:
        out.copy_from(x)
        add[(1,)](out, 4, 1.0, BLOCK=4)
    del x
    gc.collect()
    others = [world.zeros(4, "float32", symmetric=False) for _ in range(100)]
    graph.replay()
    graph.replay()
    assert (out.numpy() == 2).all()
    assert len(others) == 100


def test_what_a_graph_refuses(world):
    x = world.zeros(4, "float32")
    world.synchronize()
    graph = tdx.graph(world)
    with pytest.raises(Closed, match="holds nothing"):
        graph.replay()
    for wrong in (x.numpy, world.synchronize, world.stream.synchronize, world.barrier):
        with pytest.raises(InvalidArgument, match="while a graph is recorded"), tdx.graph(world):
            wrong()
    with pytest.raises(InvalidArgument, match="captured already"), tdx.graph(world):
        tdx.graph(world).__enter__()
    side = world.new_stream()
    with pytest.raises(InvalidArgument, match="joined back"), tdx.graph(world):  # noqa: PT012
        side.wait(world.stream)
        with world.on(side):
            nothing[(1,)]()
    with graph:
        add[(1,)](x, 4, 1.0, BLOCK=4)
    with pytest.raises(InvalidArgument, match="once"), graph:
        pass
    graph.replay()
    assert (x.numpy() == 1).all()
    world.close()
    with pytest.raises(Closed):
        graph.replay()
