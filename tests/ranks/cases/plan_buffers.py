"""Buffers that plans show their users: who reads them, on any stream, sees the call it follows."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
import triton

import tdx
import tdx.language as tdl
from tdx.interop import numpy_arrays
from tdx.kernels.all_reduce import Config as AllReduceConfig
from tdx.kernels.matmul import Config
from tdx.kernels.select import MOVEMENT
from tdx.runtime.errors import InvalidArgument
from tests.helpers.blocks import many_blocks
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.reference import assert_same_bits

N = 64
PLANS = {
    "all_to_all": tdx.AllToAll,
    "broadcast": lambda world, n, dtype: tdx.Broadcast(world, n, dtype, 0),
    "two_shot": lambda world, n, dtype: tdx.AllReduce(
        world, n, dtype, algorithm="two_shot", op="max"
    ),
    "one_shot": lambda world, n, dtype: tdx.AllReduce(
        world, n, dtype, algorithm="one_shot", op="max"
    ),
    "engines": lambda world, n, dtype: tdx.AllReduce(
        world, n, dtype, algorithm="copy_engine", op="max"
    ),
    "push": lambda world, n, dtype: tdx.AllGather(world, n, dtype, algorithm="push"),
    "copy_engine": lambda world, n, dtype: tdx.AllGather(world, n, dtype, algorithm="copy_engine"),
}


@triton.jit
def hold_kernel(gate, world):
    tdl.wait(gate, world, 1)


class Gate:
    """Holds a stream until it is opened."""

    def __init__(self, world, stream):
        if world.backend != "host":
            pytest.skip("a gate is opened by a store to memory of the host tier")
        self._word = world.zeros(1, "int32")
        world.synchronize()
        with world.on(stream):
            hold_kernel[(1,)](self._word, world.handle)

    def open(self):
        ctypes.c_int32.from_address(self._word._address).value = 1

    def open_soon(self):
        threading.Timer(0.1, self.open).start()


def filled(world, value, n=N):
    return world.array(np.full(n, value, np.float32), symmetric=False)


@worlds(2)
@pytest.mark.parametrize("again", ["on its stream", "elsewhere", "with out", "recorded"])
@pytest.mark.parametrize("kind", PLANS)
def case_a_reader_elsewhere(world, kind, again):
    """A call on any stream, or its replay, waits for a reader of the buffer on another."""
    first, reads, third = (world.new_stream() for _ in range(3))
    plan = PLANS[kind](world, N, "float32")
    x, y = filled(world, 1), filled(world, 2)
    result = plan(x, stream=first)
    other = world.zeros(result.shape, "float32", symmetric=False)
    seen = world.zeros(result.shape, "float32", symmetric=False)
    copy = tdx.AllReduce(world, result.shape, "float32", algorithm="one_shot", op="max")
    with world.on(first), tdx.graph(world) as graph:
        plan(y, out=other)
    gate = Gate(world, reads)
    copy(result, out=seen, stream=reads)
    if again == "recorded":
        graph.replay(third)
    else:
        out = other if again == "with out" else None
        plan(y, out=out, stream=third if again == "elsewhere" else first)
    gate.open_soon()
    world.synchronize()
    assert_same_bits(seen.numpy(), np.full(result.shape, 1, np.float32))


@worlds(2)
@pytest.mark.parametrize("algorithm", ["fused", "one_kernel", "unfused"])
def case_a_reader_of_gathered_rows(world, algorithm):
    plan = tdx.AllGatherMatmul(world, (4, 8), (8, 3), "float32", algorithm=algorithm)
    first, reads, third = (world.new_stream() for _ in range(3))
    b = world.zeros((8, 3), "float32", symmetric=False)
    x, y = (filled(world, v, (4, 8)) for v in (1, 2))
    seen = world.zeros((8, 8), "float32", symmetric=False)
    copy = tdx.AllReduce(world, (8, 8), "float32", algorithm="one_shot", op="max")
    plan(x, b, stream=first)
    gate = Gate(world, reads)
    copy(plan.gathered(), out=seen, stream=reads)
    plan(y, b, stream=third)
    gate.open_soon()
    world.synchronize()
    assert_same_bits(seen.numpy(), np.full((8, 8), 1, np.float32))


@isolated
@worlds(1, 2)
@limit(60)
def case_what_was_warmed_up_can_be_recorded(comm, backend):
    """More plans than the first memory for them holds."""
    with tdx.init(comm, backend=backend) as world:
        xs = [world.zeros(n, "float32") for n in (50_000, 100_000, 150_000, 200_000, 400_000)]
        for x in xs:
            tdx.all_reduce(x, algorithm="one_shot")
        for x in xs:
            with tdx.graph(world) as graph:
                tdx.all_reduce(x, algorithm="one_shot")
            graph.replay()
        world.synchronize()


@worlds(2)
def case_counts_of_a_split_product_are_zero(world):
    """Also of a layout that comes with a call, on a stream that nothing orders."""
    inner = world.driver.alloc

    def alloc(nbytes, stream):  # memory holds anything
        address = inner(nbytes, stream)
        if world.backend == "host":
            ctypes.memset(address, 0x41, nbytes)
        return address

    m, k, n = 4, 64, 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.driver, "alloc", alloc)
        config = Config(16, 16, 16, split_k=2)
        plan = tdx.AllGatherMatmul(
            world, (m, k), (k, n), "float32", algorithm="unfused", config=config
        )
        x, w = filled(world, 1, (m, k)), filled(world, 1, (n, k))
        out = filled(world, -1, (m * world.size, n))
        world.barrier()
        side = world.new_stream()
        plan(x, w.T, out=out, stream=side)
        plan._kernels.clear()  # the layout is new once more
        with world.on(side):
            out.copy_from(filled(world, -1, out.shape))
        world.synchronize()
        gate = Gate(world, world.stream)
        plan(x, w.T, out=out, stream=side)
        side.synchronize()
        gate.open()
    assert_same_bits(out.numpy(), np.full((m * world.size, n), k, np.float32))


@worlds(2)
@pytest.mark.parametrize("algorithm", ["fused", "one_kernel"])
def case_a_rank_without_columns_waits_for_the_rows(world, algorithm):
    b = world.zeros((16, 4 if world.rank == 0 else 0), "float32", symmetric=False)
    for turn in range(3):
        x = filled(world, 10 * turn + world.rank, (4, 16))
        world.synchronize()
        gate = Gate(world, world.stream)
        if turn and world.rank == 0:
            gate.open_soon()
        else:
            gate.open()
        _, rows = tdx.all_gather_matmul(x, b, return_gathered=True, algorithm=algorithm)
        wanted = np.repeat([10.0 * turn, 10.0 * turn + 1], 4).astype(np.float32)
        assert_same_bits(rows.numpy()[:, 0], wanted, turn)
        world.barrier()


@worlds(3)
def case_memory_of_a_team(world):
    """Ranks beyond the team do not reach it: no operation writes there, and nothing shows it."""
    team = world.team((0, 1))
    shape = (6, 4)
    x = world.array(np.full(shape, world.rank, np.float32))
    mine = None if not team else tdx.AllToAll(world, shape, "float32", team=team)(x)
    gathers = {
        "all_to_all": tdx.AllToAll(world, shape, "float32", algorithm="push"),
        "all_gather": tdx.AllGather(world, (2, 4), "float32", algorithm="push"),
        "broadcast": tdx.Broadcast(world, shape, "float32", 1, algorithm="chain"),
    }
    rows = np.repeat(np.arange(3, dtype=np.float32), 2)
    for name, plan in gathers.items():
        result = plan(x[:2] if name == "all_gather" else x, out=mine).numpy()[:, 0]
        assert_same_bits(result, np.ones(6, np.float32) if name == "broadcast" else rows, name)
    if mine is not None:
        for use in (lambda: mine.peer(2), lambda: tdx.put(mine, x, 2), lambda: tdx.get(x, mine, 2)):
            with pytest.raises(InvalidArgument, match=r"a team, \[0, 1\], not on rank 2"):
                use()
    world.barrier()


@worlds(2)
@limit(60)
def case_a_foreign_operand_behind_a_tdx_array(world):
    """Is used on its framework's current stream: its maker comes first there."""
    if world.backend != "host":
        pytest.skip("NumPy stands in for a framework with streams")
    theirs = world.new_stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_arrays, "stream_of", lambda x: theirs.handle)
        x = world.array(np.ones((2, N), np.float32))
        ones, weight, out = np.ones(N, np.float32), np.zeros(N, np.float32), np.zeros((2, N), "f4")
        plan = tdx.AllReduceRmsNorm(world, (2, N), "float32")
        for call in (plan, tdx.all_reduce_rms_norm):
            call(x, weight, out=out)
            world.synchronize()
            weight[:], out[:] = 0, 0
            gate = Gate(world, theirs)
            world.driver.copy(weight.ctypes.data, ones.ctypes.data, weight.nbytes, theirs.handle)
            call(x, weight, out=out)
            gate.open()
            world.synchronize()
            assert np.abs(out - 1).max() < 1e-5


@worlds(1, 2)
def case_overlaps_are_refused(world):
    """An out that is neither x nor apart from it, and an x in the buffer that is overwritten."""
    size, n = world.size, 1000
    memory = world.array(np.zeros(4 * n, np.float32), symmetric=False)
    x, near = memory[:n], memory[8 : n + 8]
    narrow = memory.view("bfloat16")[:n]
    gather = tdx.AllGather(world, n, "float32", algorithm="copy_engine")
    whole = gather(x)
    norm = (memory[: 2 * N].reshape(2, N), filled(world, 1))
    for call in (
        *(partial_reduce(world, x, near, name) for name in AllReduceConfig.algorithms),
        lambda: tdx.all_reduce(x, out=narrow, out_dtype="bfloat16"),
        *([lambda: tdx.reduce(x, 0, out=near)] if size == 1 else []),  # others would wait for it
        lambda: tdx.reduce_scatter(memory[:n], out=memory[n // size - 8 : 2 * n // size - 8]),
        lambda: tdx.all_reduce_rms_norm(*norm, out=memory[8 : 2 * N + 8].reshape(2, N)),
        *([lambda: gather(whole[n // 2 :][:n], out=memory[: n * size])] if size > 1 else []),
    ):
        with pytest.raises(InvalidArgument, match="overlaps x"):
            call()
    world.barrier()


def partial_reduce(world, x, out, algorithm):
    plan = tdx.AllReduce(world, x.shape, x.dtype, algorithm=algorithm)
    return lambda: plan(x, out=out)


@worlds(3)
def case_a_part_of_the_gathered_rows_as_input(world):
    m, k, n = 16, 256, 16
    wanted = np.repeat([(r + 1) % world.size + 1 for r in range(world.size)], m)[:, None]
    push = {**vars(MOVEMENT["host"]), "low_latency_bytes": 0, "gather": "push"}
    for algorithm in ("fused", "one_kernel", "unfused"):
        with many_blocks(), pytest.MonkeyPatch.context() as patch:
            if world.backend == "host":
                patch.setitem(MOVEMENT, "host", type(MOVEMENT["host"])(**push))
            plan = tdx.AllGatherMatmul(world, (m, k), (k, n), "float32", algorithm=algorithm)
        b = world.array(np.eye(k, n, dtype=np.float32), symmetric=False)
        x, peer = filled(world, world.rank + 1, (m, k)), (world.rank + 1) % world.size
        for _ in range(5):
            plan(x, b)
            world.barrier()
            got = plan(plan.gathered()[peer * m : (peer + 1) * m], b).numpy()
            assert (got == wanted).all()
            world.barrier()


@worlds(1, 2)
def case_out_over_an_operand(world):
    """Products and sums refuse an out that they would read while they write it."""
    square = [world.array(np.ones((32, 32), np.float32), symmetric=False) for _ in range(3)]
    a, b, out = square
    row, bias = out[5], filled(world, 1, 32)
    gather = tdx.AllGatherMatmul(world, (16, 32), [(32, 32)] * 2, "float32")
    outs = [world.empty((16 * world.size, 32), "float32", symmetric=False) for _ in range(2)]
    near = world.array(np.ones(80, np.float32), symmetric=False)
    x, residual, shifted = filled(world, 1), near[:64], near[8:72]
    added = tdx.AllReduce(world, N, "float32", residual=True)
    for call in (
        lambda: tdx.matmul(a, b, out=a),
        lambda: tdx.matmul(a, b, out=b),
        lambda: tdx.matmul(a, b, bias=row, out=out),
        lambda: tdx.matmul_all_reduce(a, b, bias=row, out=out),
        lambda: gather(a[:16], [b, b], [outs[0], b[: 16 * world.size]]),
        lambda: added(x, shifted, residual=residual),
    ):
        with pytest.raises(InvalidArgument, match="overlaps an operand"):
            call()
    with pytest.raises(InvalidArgument, match=r"out 1 \(shape .* overlaps another out: "):
        gather(a[:16], [b, b], [outs[0], outs[0]])
    tdx.matmul(a, b, bias=bias, out=out)
    added(x, residual, residual=residual)
    assert_same_bits(residual.numpy(), np.full(64, world.size + 1, np.float32))
    world.barrier()
