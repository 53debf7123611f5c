"""Kernels as users write them: every way to define and launch one, and meetings of ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.testing import do_bench
from triton.tools.tensor_descriptor import TensorDescriptor

import tdx
import tdx.language as tdl
from tdx.runtime.errors import InvalidArgument, Unsupported
from tests.helpers.cases import worlds

SCALE = tl.constexpr(3)


@triton.jit
def _scaled(x):
    return _twice(x) * SCALE


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _nested(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, _scaled(tl.load(x + i, mask=i < n)), mask=i < n)


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
@triton.jit
def _heuristic(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, BLOCK, mask=i < n)


@triton.autotune([triton.Config({"BLOCK": 2}), triton.Config({"BLOCK": 8}, num_warps=2)], key=["n"])
@triton.jit
def _tuned(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, BLOCK, mask=i < n)


@triton.jit
def _add_block(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + BLOCK, mask=i < n)


class Inner(NamedTuple):
    data: object
    factor: int


class Outer(NamedTuple):
    inner: Inner
    n: int


@triton.jit
def _from_tuples(outer, pair, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(outer.inner.data + i, mask=i < outer.n) * outer.inner.factor + pair[1]
    tl.store(out + i, value + tl.load(pair[0] + i), mask=i < outer.n)


@triton.jit
def _transpose_tiles(source, target, TILE: tl.constexpr):
    row, column = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    target.store([column, row], tl.trans(source.load([row, column])))


@triton.jit
def _library(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(out + i, tl.sort(value, descending=True))
    tl.store(out + N + i, tl.softmax(value))
    tl.store(out + 2 * N + i, tl.cumsum(value))
    tl.store(out + 3 * N + i, tl.flip(value, 0) + tl.max(value) + tl.sum(value))
    tl.store(out + 4 * N + i, tl.argmax(value, 0) + tl.exp(value) + tl.sigmoid(value))


@triton.jit
def _to_the_right(out, signals, value, n, world, BLOCK: tl.constexpr):
    """Write into the next rank's memory, notify it, wait for the previous one, add it up."""
    i = tl.arange(0, BLOCK)
    me, size = tdl.rank(world), tdl.num_ranks(world)
    right = (me + 1) % size
    tl.store(tdl.symm_at(out, right, world) + i, value + i, mask=i < n)
    tdl.notify(signals, right, world, 1)
    ok = tdl.wait(signals, world, 1, peer=(me + size - 1) % size)
    tl.store(out + i, tl.load(out + i, mask=i < n) + 1, mask=(i < n) & ok)


@triton.jit
def _rounds(out, channel, world, rounds):
    me, size = tdl.rank(world), tdl.num_ranks(world)
    for _ in range(rounds):
        number = tdl.epoch(channel)
        tl.store(tdl.symm_at(out + me, (me + 1) % size, world), number)
        tdl.barrier(channel, world)
        seen = tl.load(out + (me + size - 1) % size)
        tl.store(out + size, tl.load(out + size) + (seen == number))
        tdl.barrier(channel, world)


@triton.jit
def _add_16_bit(x, rounds, world):
    for _ in range(rounds):
        for peer in range(tdl.num_ranks(world)):
            tl.atomic_add(tdl.symm_at(x, peer, world), 1.0)


def _close_over(factor, local_type):
    extra = tl.constexpr(5)

    @triton.jit
    def helper(x):
        return x * factor

    @triton.jit
    def kernel(x, n, BLOCK: local_type.constexpr, add: local_type.constexpr = extra):
        i = tl.arange(0, BLOCK)
        tl.store(x + i, helper(tl.load(x + i, mask=i < n)) + add, mask=i < n)

    return kernel


@pytest.mark.smoke
@worlds(1, 2)
def case_nested_helpers_and_globals(world):
    x = world.array(np.arange(10, dtype=np.float32))
    _nested[(3,)](x, 10, BLOCK=4)
    assert (x.numpy() == 6 * np.arange(10)).all()


@worlds(1)
def case_closures(world):
    if world.backend != "host":
        pytest.skip("Triton's compiler looks annotations up among a kernel's globals only")
    x = world.array(np.arange(8, dtype=np.int32))
    _close_over(tl.constexpr(10), tl)[(1,)](x, 8, BLOCK=8)
    assert (x.numpy() == 10 * np.arange(8) + 5).all()
    _close_over(tl.constexpr(2), tl)[(1,)](x, 8, BLOCK=8, add=1)
    assert (x.numpy() == 20 * np.arange(8) + 11).all()


@worlds(1, 2)
def case_heuristics_and_autotune(world):
    x = world.zeros(10, "int32")
    _heuristic[(1,)](x, 10)
    assert (x.numpy() == 16).all()
    _tuned[lambda args: (triton.cdiv(args["n"], args["BLOCK"]),)](x, 10)
    block = _tuned.best_config.kwargs["BLOCK"]
    assert block in ((2,) if world.backend == "host" else (2, 8))  # every rank takes the first one
    assert (x.numpy() == block).all()


@worlds(1, 2)
def case_autotune_once_for_each_key(world):
    """All that is tried runs on the user's stream, before the launch itself; then nothing is."""
    asked = []
    configs = [triton.Config({"BLOCK": size}) for size in (2, 4, 8)]

    def bench(call, quantiles):
        asked.append(quantiles)
        call()
        return [1.0 / len(asked)] * len(quantiles)  # later ones are faster

    tuned = triton.autotune(configs, key=["n"], do_bench=bench)(_add_block)
    x, y = world.zeros(16, "int32"), world.zeros(9, "int32", symmetric=False)
    with world.on(world.new_stream()):
        for _ in range(3):
            tuned[lambda args: (triton.cdiv(args["n"], args["BLOCK"]),)](x, 16)
        assert len(asked) == 3
        tuned[lambda args: (triton.cdiv(args["n"], args["BLOCK"]),)](y, 9)
    assert len(asked) == 6
    assert tuned.best_config.kwargs == {"BLOCK": 8}
    assert (x.numpy() == 2 + 4 + 8 + 3 * 8).all()
    assert (y.numpy() == 2 + 4 + 8 + 8).all()


@worlds(1, 2)
def case_do_bench(world):
    """Measures GPUs, with events of tdx; the host tier's driver has none to measure with."""
    x = world.zeros(8, "int32", symmetric=False)

    def run():
        _add_block[(2,)](x, 8, BLOCK=4)

    if world.backend == "host":
        with pytest.raises(Unsupported, match="do_bench measures GPUs"):
            do_bench(run, warmup=1, rep=5)
        return
    mean = do_bench(run, warmup=1, rep=5)
    assert 0 < mean < 1000  # milliseconds
    times = do_bench(run, warmup=1, rep=5, return_mode="all")
    assert len(times) >= 1
    assert min(times) > 0
    least, most = do_bench(run, warmup=1, rep=5, quantiles=[0.0, 1.0])
    assert 0 < least <= most
    runs, *others = set(x.numpy().tolist())
    assert not others
    assert runs >= 4 * (3 * 7 + len(times))  # each: one, five to estimate, one to warm up, measured


@worlds(1)
def case_tuples(world):
    x = world.array(np.arange(8, dtype=np.int32))
    out = world.zeros(8, "int32")
    _from_tuples[(1,)](Outer(Inner(x, 7), 6), (x, 100), out, BLOCK=8)
    assert out.numpy().tolist() == [100 + 8 * i for i in range(6)] + [0, 0]


@worlds(1)
def case_tensor_descriptors(world):
    data = np.arange(96, dtype=np.float32).reshape(8, 12)
    x, out = world.array(data), world.zeros((12, 8), "float32")
    by_hand = TensorDescriptor(out, list(out.shape), list(out.stride()), [4, 4])
    _transpose_tiles[(2, 3)](TensorDescriptor.from_tensor(x, [4, 4]), by_hand, TILE=4)
    assert (out.numpy() == data.T).all()


@worlds(1)
def case_triton_library(world):
    x = np.array([3, 1, 2, 5], np.float32)
    out = world.empty((5, 4), "float32")
    _library[(1,)](world.array(x), out, N=4)
    found = out.numpy()
    exponent = np.exp(x - x.max())
    assert (found[0] == np.sort(x)[::-1]).all()
    assert found[1] == pytest.approx(exponent / exponent.sum())
    assert (found[2] == np.cumsum(x)).all()
    assert (found[3] == x[::-1] + 5 + 11).all()
    assert found[4] == pytest.approx(3 + np.exp(x) + 1 / (1 + np.exp(-x)), rel=1e-6)


@pytest.mark.smoke
@worlds(1, 2, 3, 4, 5)
def case_ring(world):
    out, signals = world.zeros(100, "int32"), world.zeros(1, "int32")
    world.barrier()
    _to_the_right[(1,)](out, signals, 1000 * world.rank, 100, world.handle, BLOCK=128)
    left = (world.rank - 1) % world.size
    assert (out.numpy() == 1000 * left + np.arange(100) + 1).all()
    world.barrier()


@worlds(1, 2, 3)
def case_channel_epochs_are_replay_safe(world):
    channel = world.channel(1)
    out = world.zeros(world.size + 1, "int32")
    world.barrier()
    _rounds[(1,)](out, channel, world.handle, 5)
    with tdx.graph(world) as graph:
        _rounds[(1,)](out, channel, world.handle, 5)
    for _ in range(3):
        graph.replay()
    assert out.numpy()[world.size] == 20
    world.barrier()


@worlds(2, 3)
def case_teams_number_their_own_ranks(world):
    members = list(range(world.size))[::-1][:2]
    team = world.team(members)
    out, signals = world.zeros(4, "int32"), world.zeros(1, "int32")
    world.barrier()
    if team:
        assert team.rank == members.index(world.rank)
        _to_the_right[(1,)](out, signals, 1000 * world.rank, 4, team.handle, BLOCK=4)
        other = members[1 - team.rank]
        assert (out.numpy() == 1000 * other + np.arange(4) + 1).all()
    else:
        assert (out.numpy() == 0).all()
    world.barrier()


@worlds(2, 4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def case_16_bit_atomics_between_ranks(world, dtype):
    x = world.zeros(1, dtype)
    world.barrier()
    _add_16_bit[(1,)](x, 20, world.handle)
    world.barrier()
    assert x.numpy().astype(np.float32) == [20.0 * world.size]


@worlds(1, 2)
def case_more_programs_than_blocks(world):
    """Would count beyond the channel: refused where a launch can look at its arguments."""
    if world.backend != "host":
        pytest.skip("a GPU's launch does not look at them")
    channel = world.channel(2)
    out = world.zeros(world.size + 1, "int32")
    for grid in ((3,), (2, 2)):
        with pytest.raises(InvalidArgument, match=r"programs, and channel is a channel for 2"):
            _rounds[grid](out, channel, world.handle, 1)
    world.barrier()
