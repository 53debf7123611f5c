"""More mistakes in kernels of users: assertions, counts, roots and grids that are too large."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.runtime.errors import PeerTimeout
from tests.helpers.cases import host_only, isolated, limit, worlds
from tests.helpers.mistakes import refused

N = tl.constexpr(64)
MINUS = tl.constexpr(-5)


@triton.jit
def assert_kernel(x, least, size, VERB: tl.constexpr):
    lanes = tl.arange(0, N)
    value = tl.load(x + lanes)
    if VERB == "block":
        tl.device_assert(value >= least, "too small")
    elif VERB == "masked":
        tl.device_assert(value >= least, "too small", mask=lanes < size)
    elif VERB == "scalar":
        tl.device_assert(tl.load(x + 3) >= least)
    elif VERB == "statement":
        assert value >= least, "too small"
    tl.store(x + lanes, value + 1)


@triton.jit
def assert_wait_kernel(signal, world):
    ok = tdl.wait(signal, world, 1)
    tl.device_assert(ok, "nothing came")


@triton.jit
def chain_kernel(signals, world):
    me, program = tdl.rank(world), tl.program_id(0)
    last = tl.num_programs(0) - 1
    tdl.wait(signals + program, world, (program < last).to(tl.int32), peer=me)
    tdl.notify(signals + program - 1, me, world, 1, when=program > 0)


@triton.jit
def meet_kernel(channel):
    tdl.grid_barrier(channel)


@triton.jit
def any_kernel(signals, out, count, turns, world):
    done = tdl.nothing_done()
    for turn in range(turns):
        index, done, ok = tdl.wait_any(signals, count, world, 1, done)
        tl.store(out + turn, tl.where(ok, index, 99))


@triton.jit
def count_kernel(x, own, count, root, world, VERB: tl.constexpr):
    me = tdl.rank(world)
    if VERB == "put":
        tdl.put(x + 32, own, count, me, world)
    elif VERB == "constant":
        tdl.put(x + 32, own, MINUS, me, world)
    elif VERB == "get":
        tdl.get(own, x + 32, count, me, world)
    elif VERB == "put_signal":
        tdl.put_signal(x + 32, own, count, x, 1, me, world)
    elif VERB == "broadcast":
        tdl.broadcast(x + 32, own, count, root, world)
    else:
        tdl.wait_all(x, count, world, 0)


@triton.jit
def many_ranks_kernel(words, out, world, RANKS: tl.constexpr):
    values, ok = tdl.load_ll_all(words + tl.arange(0, 2), 2, 1, world, RANKS)
    tl.store(out + tl.arange(0, 2), values[0], mask=ok)


@worlds(1, 2)
def case_an_assertion_that_does_not_hold(world):
    host_only(world.backend)
    x = world.array(np.arange(64, dtype=np.int32))
    for verb in ("block", "statement"):
        assert_kernel[(1,)](x, 3, 0, VERB=verb)
        text = r"\(0, 0, 0\): AssertionError: the assertion does not hold for 3 of 64 elements, "
        refused(world, text + r"the first \[0\]: too small at .*(tl.device_assert|assert value)")
    assert_kernel[(1,)](x, 4, 0, VERB="scalar")
    refused(world, r"AssertionError: the assertion does not hold at .*tl.load\(x \+ 3\) >= least")
    assert_kernel[(1,)](x, 2, 4, VERB="masked")
    refused(world, r"for 2 of 64 elements, the first \[0\]: too small")
    assert (x.numpy() == np.arange(64)).all()
    for verb, least in (("block", 0), ("statement", 1), ("scalar", 5), ("masked", 99)):
        assert_kernel[(1,)](x, least, 0, VERB=verb)  # each adds one
    assert (x.numpy() == np.arange(64) + 4).all()
    world.barrier()


@isolated
@worlds(1, 2)
def case_an_assertion_after_a_wait_that_gave_up(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=0.3)
    assert_wait_kernel[(1,)](world.zeros(1, "int32", name="late"), world.handle)
    with pytest.raises(PeerTimeout, match=r"late\[0\] expected 1"):
        world.synchronize()
    world.close()


@isolated
@worlds(1, 2)
@limit(30)
def case_programs_that_wait_for_one_that_has_not_begun(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=0.5)
    host_only(world.backend)
    resident = world.device.multiprocessors
    assert resident == 8
    chain_kernel[(12,)](world.zeros(12, "int32"), world.handle)
    text = (
        r"4 of 12 programs of chain_kernel are not started: 8 are resident at once "
        r"\(world.device.multiprocessors\).*TDX_HOST_MULTIPROCESSORS"
    )
    with pytest.raises(PeerTimeout, match=text):
        world.synchronize()
    world.close()


@worlds(1, 2)
def case_a_grid_barrier_of_more_programs_than_are_resident(world):
    host_only(world.backend)
    most = world.device.multiprocessors
    meet_kernel[(most + 8,)](world.channel(most + 8))
    text = rf"{most + 8} programs, of which {most} are resident.*TDX_HOST_MULTIPROCESSORS"
    refused(world, text)
    meet_kernel[(most,)](world.channel(most))
    world.synchronize()
    world.barrier()


@worlds(1, 2)
def case_nothing_left_to_wait_for(world):
    host_only(world.backend)
    signals, out = world.array(np.ones(1024, np.int32)), world.zeros(64, "int32")
    any_kernel[(1,)](signals, out, 3, 3, world.handle)
    assert out.numpy()[:3].tolist() == [0, 1, 2]
    for count, turns, text in (
        (3, 4, "all 3 signals are done"),
        (0, 1, "count is 0"),
    ):
        any_kernel[(1,)](signals, out, count, turns, world.handle)
        refused(world, rf"kernel any_kernel, .*wait_any: nothing is left to wait for: {text}")
    for count in (1025, -1):
        any_kernel[(1,)](signals, out, count, 1, world.handle)
        refused(world, rf"wait_any: count is {count}: it takes 1 to 1024 signals")
    any_kernel[(1,)](signals, out, 1024, 1, world.handle)
    world.synchronize()
    world.barrier()


@isolated
@worlds(1, 2)
def case_nothing_left_after_a_wait_that_gave_up(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=0.3)
    signals, out = world.zeros(2, "int32", name="late"), world.zeros(64, "int32")
    any_kernel[(1,)](signals, out, 2, 2 if backend != "host" else 5, world.handle)
    with pytest.raises(PeerTimeout, match="late"):
        world.synchronize()
    world.close()


@worlds(1, 2, 3)
def case_a_root_that_does_not_exist(world):
    host_only(world.backend)
    x, own = world.zeros(64, "int32"), world.zeros(64, "int32")
    for root in (world.size, -1, 9):
        count_kernel[(1,)](x, own, 4, root, world.handle, VERB="broadcast")
        refused(world, rf"broadcast: root {root} is outside 0\.\.{world.size - 1}: .* ranks at")
    world.barrier()


@worlds(1, 2)
@pytest.mark.parametrize("verb", ["put", "constant", "get", "put_signal", "broadcast", "wait_all"])
def case_a_negative_count(world, verb):
    host_only(world.backend)
    x, own = world.zeros(64, "int32"), world.array(np.ones(64, np.int32))
    count_kernel[(1,)](x, own, -5, world.rank, world.handle, VERB=verb)
    refused(world, rf"{'count' if verb == 'wait_all' else 'numel'} is -5: it must be 0")
    assert not x.numpy().any()
    if verb != "constant":
        count_kernel[(1,)](x, own, 0, world.rank, world.handle, VERB=verb)
        world.synchronize()
        assert not x.numpy()[32:].any()
    world.barrier()


@worlds(1, 2)
def case_load_ll_all_of_too_many_ranks(world):
    host_only(world.backend)
    words, out = world.zeros(64, "int64"), world.zeros(64, "int32")
    many_ranks_kernel[(1,)](words, out, world.handle, RANKS=17)
    refused(world, "load_ll_all takes at most 16 ranks, got 17; use load_ll")
    world.barrier()


@triton.jit
def early_kernel(x, inbox, out, arrived, channel, world):
    right = (tdl.rank(world) + 1) % tdl.num_ranks(world)
    call = tdl.epoch(channel)
    tdl.barrier(channel, world)
    tdl.notify(arrived, right, world, call)  # before the data
    tl.store(tdl.symm_at(inbox, right, world), tl.load(x))
    ok = tdl.wait(arrived, world, call)
    tl.store(out, tl.load(inbox), mask=ok)


@isolated
@worlds(2)
def case_a_seed_shows_data_stored_after_the_notify(comm, backend):
    host_only(backend)
    wrong = 0
    for seed in range(1, 6):
        tdx.config.host_seed = seed
        with tdx.init(comm, backend=backend) as world:
            x, inbox, out = (world.zeros(1, "int32") for _ in range(3))
            arrived, channel = world.zeros(1, "int32"), world.channel(1)
            for call in range(1, 21):
                x.copy_from(np.full(1, call, np.int32))
                early_kernel[(1,)](x, inbox, out, arrived, channel, world.handle)
                wrong += int(out.numpy()[0] != call)
    assert sum(comm.allgather(wrong)) > 0


@triton.jit
def halves_kernel(signal, floats, world, VERB: tl.constexpr):
    size = tdl.num_ranks(world)
    if VERB == "peer":
        tdl.notify(signal, size / 2, world)
    elif VERB == "value":
        tdl.notify(signal, 0, world, 1.5)
    elif VERB == "wait":
        tdl.wait(signal, world, 0.5)
    elif VERB == "wait_all":
        tdl.wait_all(signal, 1, world, size / 2)
    elif VERB == "wait_any":
        tdl.wait_any(signal, 1, world, 0.5, tdl.nothing_done())
    elif VERB == "word":
        tdl.notify(floats, 0, world)


@worlds(2)
@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("peer", "notify: peer must be an integer, got fp32: divide by //"),
        ("value", "notify: value must be an integer, got 1.5"),
        ("wait", "wait: value .*, got 0.5"), ("wait_all", "wait_all: value .*, got fp32"),
        ("wait_any", "wait_any: value .*, got 0.5"),
        ("word", "notify: ptr must point to int32 .*, got a pointer to fp32, argument 'floats'"),
    ],
)  # fmt: skip
def case_signals_are_integers(world, verb, text):
    host_only(world.backend)
    signal, floats = world.zeros(1, "int32"), world.zeros(1, "float32")
    halves_kernel[(1,)](signal, floats, world.handle, VERB=verb)
    refused(world, text)
    world.barrier()
