"""All-gather: bytes, alignment, progress signals."""

from __future__ import annotations

import time

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.kernels import all_gather as module
from tdx.runtime.errors import InvalidArgument
from tests.helpers.blocks import many_blocks
from tests.helpers.cases import worlds
from tests.helpers.reference import assert_same_bits, poisoned, values

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64", "uint16"]
SHAPES = [1, 2, 7, 1023, 4099, (0,), (0, 3), (3, 5), (2, 0), (2, 3, 4)]


def gathered(world, shape, dtype, salt=0, ranks=None):
    ranks = range(world.size) if ranks is None else ranks
    return np.concatenate([given(rank, shape, dtype, salt) for rank in ranks])


def given(rank, shape, dtype, salt=0):
    if dtype == "complex64":
        return values(rank, shape, "float32", salt).astype("complex64") * (1 + 1j)
    return values(rank, shape, dtype, salt)


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def case_values(world, dtype):
    for shape in SHAPES:
        mine = given(world.rank, shape, dtype)
        x = world.array(mine, symmetric=False)
        wanted = gathered(world, shape, dtype)
        out = world.array(poisoned(wanted.shape, dtype))
        assert tdx.all_gather(x, out=out) is out
        assert_same_bits(out.numpy(), wanted, shape)
        assert_same_bits(tdx.all_gather(x).numpy(), wanted, shape)
        assert_same_bits(x.numpy(), mine, "the input")


@worlds(8)
def case_eight_ranks(world):
    x = world.array(values(world.rank, 515, "float32"))
    assert_same_bits(tdx.all_gather(x).numpy(), gathered(world, 515, "float32"))


@worlds(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def case_any_alignment(world, dtype):
    size = 1023
    for begin in (1, 2, 5):
        x = world.array(values(world.rank, size + begin, dtype))[begin:]
        total = size * world.size
        whole = world.array(poisoned(total + 8, dtype))
        tdx.all_gather(x, out=whole[3 : 3 + total])
        wanted = poisoned(total + 8, dtype)
        parts = [values(rank, size + begin, dtype)[begin:] for rank in range(world.size)]
        wanted[3 : 3 + total] = np.concatenate(parts)
        assert_same_bits(whole.numpy(), wanted, begin)


@worlds(2, 3)
@pytest.mark.parametrize("size", [7000, 8192, 9999])
def case_many_blocks_and_other_alignment_on_each_rank(world, size):
    """A block stages the bytes that its peers' block reads, however wide their words are."""
    with many_blocks():
        plan = tdx.AllGather(world, size, "int8", algorithm="pull")
    for begins in ([0] * world.size, range(world.size), range(2, 8 * world.size + 2, 8)):
        begin = begins[world.rank]
        x = world.array(values(world.rank, size + 64, "int8"), symmetric=False)
        out = world.array(poisoned(size * world.size + 64, "int8"), symmetric=False)
        for _ in range(3):
            plan(x[begin : begin + size], out=out[begin : begin + size * world.size])
        parts = [values(r, size + 64, "int8")[b : b + size] for r, b in enumerate(begins)]
        got = out.numpy()[begin : begin + size * world.size]
        assert_same_bits(got, np.concatenate(parts), begin)


@worlds(2, 4)
def case_back_to_back(world):
    plan = tdx.AllGather(world, 257, "float32")
    xs = [world.array(values(world.rank, 257, "float32", i), symmetric=False) for i in range(100)]
    outs = [world.empty(257 * world.size, "float32", symmetric=False) for _ in xs]
    for x, out in zip(xs, outs, strict=True):
        plan(x, out=out)
    for i, out in enumerate(outs):
        assert_same_bits(out.numpy(), gathered(world, 257, "float32", i), i)


@worlds(3)
def case_graph_replays_changing_inputs(world):
    plan = tdx.AllGather(world, (5, 7), "bfloat16")
    x = world.empty((5, 7), "bfloat16")
    out = world.empty((5 * world.size, 7), "bfloat16")
    with tdx.graph(world) as graph:
        plan(x, out=out)
    for turn in range(20):
        x.copy_from(values(world.rank, (5, 7), "bfloat16", turn))
        graph.replay()
        assert_same_bits(out.numpy(), gathered(world, (5, 7), "bfloat16", turn), turn)


@triton.jit
def copy_in_order_kernel(
    buffer, out, progress, epoch, world, rows, columns, chunk_rows, chunks, BLOCK: tl.constexpr
):
    """Each program waits for its chunks and copies them."""
    number = tl.load(epoch)
    for unit in range(tl.program_id(0), tdl.num_ranks(world) * chunks, tl.num_programs(0)):
        ok = tdl.wait(progress + unit, world, number, peer=unit // chunks)
        begin = (unit % chunks) * chunk_rows
        end = tl.minimum(begin + chunk_rows, rows)
        first = (unit // chunks) * rows * columns
        for start in range(begin * columns, end * columns, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            mask = (lanes < end * columns) & ok
            tl.store(out + first + lanes, tl.load(buffer + first + lanes, mask=mask), mask=mask)


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def case_progress(world, dtype):
    """A consumer kernel on the same stream gets every call's data, chunk by chunk."""
    for shape, chunks in [((8, 5), 1), ((8, 5), 4), ((7, 3), 3), ((1, 1), 2), ((5, 33), 8)]:
        with many_blocks():
            plan = tdx.AllGather(world, shape, dtype, progress=True, chunks_per_rank=chunks)
        whole = (world.size * shape[0], shape[1])
        outs = [world.array(poisoned(whole, dtype), symmetric=False) for _ in range(6)]
        for turn, out in enumerate(outs):
            x = world.array(values(world.rank, shape, dtype, turn), symmetric=False)
            buffer = plan(x)
            copy_in_order_kernel[(2,)](
                buffer, out, plan.progress, plan.epoch, world.handle, *shape,
                plan.chunk_rows, plan.chunks, BLOCK=16,
            )  # fmt: skip
        for turn, out in enumerate(outs):
            assert_same_bits(out.numpy(), gathered(world, shape, dtype, turn), (shape, turn))


@worlds(2, 3)
def case_progress_is_read_on_another_stream(world):
    """The next call lets peers write when that has been read; its reader waits for the call."""
    shape = (6, 4)
    plan = tdx.AllGather(world, shape, "float32", progress=True, chunks_per_rank=2)
    side = world.new_stream()
    outs = [world.empty((6 * world.size, 4), "float32", symmetric=False) for _ in range(6)]
    for turn, out in enumerate(outs):
        buffer = plan(world.array(values(world.rank, shape, "float32", turn), symmetric=False))
        assert side.handle not in buffer._block.last
        side.wait(world.stream)
        with world.on(side):
            copy_in_order_kernel[(1,)](
                buffer, out, plan.progress, plan.epoch, world.handle, *shape,
                plan.chunk_rows, plan.chunks, BLOCK=16,
            )  # fmt: skip
        assert side.handle in buffer._block.last
    for turn, out in enumerate(outs):
        assert_same_bits(out.numpy(), gathered(world, shape, "float32", turn), turn)


@worlds(2, 3)
def case_progress_in_a_graph(world):
    shape = (6, 4)
    plan = tdx.AllGather(world, shape, "float32", progress=True, chunks_per_rank=2)
    x = world.empty(shape, "float32", symmetric=False)
    out = world.empty((6 * world.size, 4), "float32", symmetric=False)
    with tdx.graph(world) as graph:
        buffer = plan(x)
        copy_in_order_kernel[(1,)](
            buffer, out, plan.progress, plan.epoch, world.handle, *shape,
            plan.chunk_rows, plan.chunks, BLOCK=16,
        )  # fmt: skip
        plan.join()
    for turn in range(20):
        x.copy_from(values(world.rank, shape, "float32", turn))
        graph.replay()
        assert_same_bits(out.numpy(), gathered(world, shape, "float32", turn), turn)


@worlds(3)
def case_progress_of_a_late_rank(world, comm):
    """Only the late rank's chunks are late: the others' arrive before it enters the call."""
    if world.backend != "host":
        pytest.skip("looks at signals from the host")
    plan = tdx.AllGather(world, 64, "float32", progress=True)
    x = world.array(values(world.rank, 64, "float32"))
    signals = np.asarray(plan.progress)  # a live view
    late = world.size - 1
    for turn in (1, 2, 3):
        if world.rank != late:
            plan(x)
            limit = time.monotonic() + 20
            while (signals[:late] < turn).any() and time.monotonic() < limit:
                time.sleep(0.01)
            assert signals.tolist() == [turn] * late + [turn - 1]
        comm.Barrier()
        if world.rank == late:
            plan(x)
        world.barrier()


@worlds(2)
def case_bad_arguments(world):
    x = world.zeros((4, 8), "float32")
    for words, call in [
        ("at least one axis", lambda: tdx.all_gather(x[0, 0])),
        ("contiguous", lambda: tdx.all_gather(x.T)),
        ("expected", lambda: tdx.all_gather(x, out=world.zeros((4, 8), "float32"))),
        ("is for progress", lambda: tdx.AllGather(world, 4, "int8", chunks_per_rank=2)),
        ("must be an int >= 1",
         lambda: tdx.AllGather(world, 4, "int8", progress=True, chunks_per_rank=0)),
        ("not for plans with progress",
         lambda: tdx.AllGather(world, (4, 8), "float32", progress=True)(x, out=x)),
    ]:  # fmt: skip
        with pytest.raises(InvalidArgument, match=words):
            call()
    assert tdx.all_gather(x).shape == (8, 8)


@worlds(2)
def case_large_arrays_pass_through_bounded_slots(world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STAGING_BYTES", 1 << 18)
        for nbytes in (1 << 17, 1 << 19):
            plan = tdx.AllGather(world, nbytes, "int8", buffer=False)
            assert plan.algorithm != "pull" or 2 * nbytes <= 1 << 18
            x, out = np.full(nbytes, world.rank, np.int8), np.empty(2 * nbytes, np.int8)
            tdx.all_gather(x, out=out)
            assert (out.reshape(2, -1) == np.arange(2)[:, None]).all()
