"""All-gather and product in one: values, shapes, overlap."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest

import tdx
from tdx.kernels.all_gather_matmul import ALGORITHMS
from tdx.kernels.matmul import ACTIVATIONS, Config
from tdx.runtime.errors import DtypeError, InvalidArgument
from tests.helpers.blocks import copy_engines, many_blocks
from tests.helpers.cases import limit, worlds
from tests.helpers.reference import (
    activated,
    assert_same_bits,
    error_bound,
    poisoned,
    product,
    values,
)

# rows a rank, depth, columns
SHAPES = [(1, 1, 1), (2, 16, 3), (7, 33, 20), (16, 16, 16), (40, 65, 50), (17, 8, 129)]
SMALL = Config(32, 32, 32, num_warps=4)


def whole_a(world, shape, dtype, salt=0):
    return np.concatenate([values(rank, shape, dtype, salt) for rank in range(world.size)])


def close(got, wanted, depth, *kinds):
    got = np.asarray(got.numpy() if hasattr(got, "numpy") else got).astype(np.float64)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    bound = error_bound(depth, *kinds)
    assert not got.size or np.abs(got - wanted).max() <= bound, (np.abs(got - wanted).max(), bound)


@worlds(1, 2, 3, 4)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def case_values(world, dtype, algorithm):
    for m, k, n in SHAPES if world.size < 3 else SHAPES[2::2]:
        b = values(100 + world.rank, (k, n), dtype)
        wanted = product(whole_a(world, (m, k), dtype), b)
        x = world.array(values(world.rank, (m, k), dtype), symmetric=False)
        y = world.array(b, symmetric=False)
        turned = world.array(np.ascontiguousarray(b.T), symmetric=False)
        for config in (None, SMALL):
            out = world.array(poisoned((world.size * m, n), dtype), symmetric=False)
            given = {"config": config, "algorithm": algorithm}
            assert tdx.all_gather_matmul(x, y, out=out, **given) is out
            close(out, wanted, k, dtype)
            again = tdx.all_gather_matmul(x, turned.T, **given)
            assert_same_bits(again.numpy(), out.numpy())


@worlds(5)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_values_on_five_ranks(world, algorithm):
    case_values(world, "bfloat16", algorithm)


@worlds(8)
def case_eight_ranks(world):
    a, b = values(world.rank, (3, 20), "float32"), values(99, (20, 17), "float32")
    result = tdx.all_gather_matmul(world.array(a, symmetric=False), world.array(b, symmetric=False))
    close(result, product(whole_a(world, (3, 20), "float32"), b), 20, "float32")


@worlds(2, 3)
def case_several_b_of_different_widths(world):
    """One gather for all; N differs between them and between ranks."""
    m, k = 19, 24
    widths = [7 + world.rank, 33, 16 * (1 + world.rank)]
    bs = [values(50 + i, (k, n), "float32") for i, n in enumerate(widths)]
    ys = [world.array(b, symmetric=False) for b in bs]
    biases = [values(60 + i, n, "float32") for i, n in enumerate(widths)]
    zs = [world.array(z, symmetric=False) for z in biases]
    whole = whole_a(world, (m, k), "float32")
    x = world.array(values(world.rank, (m, k), "float32"), symmetric=False)
    for config in (None, SMALL):
        *results, gathered = tdx.all_gather_matmul(
            x, ys, bias=zs, activation="relu", return_gathered=True, config=config
        )
        assert_same_bits(gathered.numpy(), whole)
        for result, b, bias in zip(results, bs, biases, strict=True):
            close(result, activated(product(whole, b) + bias, "relu"), k, "float32")
    out = [world.array(poisoned((world.size * m, n), "float32"), False) for n in widths]
    results = tdx.all_gather_matmul(x, tuple(ys), out=out)
    for result, given, b in zip(results, out, bs, strict=True):
        assert result is given
        close(result, product(whole, b), k, "float32")


@worlds(2)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def case_bias_activation_and_types(world, activation):
    m, k, n = 18, 40, 29
    for dtype, out_dtype in [("float32", None), ("bfloat16", "float32"), ("float32", "bfloat16")]:
        b, bias = values(7, (k, n), dtype), values(8, n, dtype)
        result, gathered = tdx.all_gather_matmul(
            world.array(values(world.rank, (m, k), dtype), symmetric=False),
            world.array(b, symmetric=False), bias=world.array(bias, symmetric=False),
            activation=activation, out_dtype=out_dtype, return_gathered=True,
        )  # fmt: skip
        whole = whole_a(world, (m, k), dtype)
        assert_same_bits(gathered.numpy(), whole)
        assert result.dtype.name == (out_dtype or dtype)
        wanted = activated(product(whole, b) + bias.astype(np.float64), activation)
        close(result, wanted, k, out_dtype or dtype, "float32")


@worlds(1, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_leading_axes_and_empty(world, algorithm):
    call = partial(tdx.all_gather_matmul, algorithm=algorithm)
    shape = (4, 3, 8)
    b = values(9, (8, 5), "float32")
    x = world.array(values(world.rank, shape, "float32"), symmetric=False)
    y = world.array(b, symmetric=False)
    result, gathered = call(x, y, return_gathered=True)
    whole = whole_a(world, shape, "float32")
    close(result, product(whole, b), 8, "float32")
    assert_same_bits(gathered.numpy(), whole)
    assert call(x[:0], y).shape == (0, 3, 5)
    assert call(x, y[:, :0]).shape == (4 * world.size, 3, 0)
    zero = call(world.empty((2, 0), "float32"), world.empty((0, 5), "float32"))
    assert_same_bits(zero.numpy(), np.zeros((2 * world.size, 5), np.float32))


@worlds(2, 3)
@pytest.mark.parametrize("engines", [False, True])
@pytest.mark.parametrize("chunks", [None, 1, 2, 5])
def case_chunks_and_repetition(world, chunks, engines):
    """Many calls without the host, each with other inputs; then in a graph. The same bits."""
    m, k, n = 37, 20, 24
    algorithm = "unfused" if chunks is None else "fused"
    with copy_engines(engines):
        plan = tdx.AllGatherMatmul(
            world, (m, k), (k, n), "float32", chunks_per_rank=chunks, algorithm=algorithm,
            config=SMALL,
        )  # fmt: skip
    b = values(3, (k, n), "float32")
    y = world.array(b, symmetric=False)
    xs = [world.array(values(world.rank, (m, k), "float32", i), symmetric=False) for i in range(12)]
    outs = [world.empty((m * world.size, n), "float32", symmetric=False) for _ in xs]
    for x, out in zip(xs, outs, strict=True):
        plan(x, y, out=out)
    for i, out in enumerate(outs):
        close(out, product(whole_a(world, (m, k), "float32", i), b), k, "float32")
    x = world.empty((m, k), "float32", symmetric=False)
    with tdx.graph(world) as graph:
        result = plan(x, y)
    for i, out in enumerate(outs):
        x.copy_from(values(world.rank, (m, k), "float32", i))
        graph.replay()
        assert_same_bits(result.numpy(), out.numpy(), i)
        if i % 3 == 0:
            assert_same_bits(plan(x, y).numpy(), out.numpy(), i)


@worlds(2, 3)
def case_gathered_by_copy_engines(world):
    x = world.array(values(world.rank, (33, 24), "float32"), symmetric=False)
    b = values(7, (24, 18), "float32")
    y = world.array(b, symmetric=False)
    with copy_engines():
        for _ in range(2):
            result, gathered = tdx.all_gather_matmul(
                x, y, return_gathered=True, algorithm="fused", config=SMALL
            )
            assert_same_bits(gathered.numpy(), whole_a(world, (33, 24), "float32"))
            close(result, product(gathered.numpy(), b), 24, "float32")


@worlds(2, 3)
def case_many_blocks(world):
    m, k, n = 130, 24, 70
    with many_blocks():
        plan = tdx.AllGatherMatmul(world, (m, k), (k, n), "float32")
        x = world.array(values(world.rank, (m, k), "float32"), symmetric=False)
        y = world.array(values(5, (k, n), "float32"), symmetric=False)
        wanted = product(whole_a(world, (m, k), "float32"), values(5, (k, n), "float32"))
        for _ in range(4):
            close(plan(x, y), wanted, k, "float32")


@worlds(3)
def case_ranks_have_the_same_bits(world, comm):
    """The same b on every rank gives the same result on every rank."""
    x = world.array(values(world.rank, (37, 64), "float32"), symmetric=False)
    y = world.array(values(5, (64, 48), "float32"), symmetric=False)
    mine = tdx.all_gather_matmul(x, y).numpy()
    for theirs in comm.allgather(mine):
        assert_same_bits(mine, theirs)


@worlds(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_rows_do_not_depend_on_their_number(world, algorithm):
    """With a Config a row has the same bits whatever else is in the batch, by each algorithm."""
    m, k, n = 70, 48, 40
    x = world.array(values(world.rank, (m, k), "bfloat16"), symmetric=False)
    y = world.array(values(5, (k, n), "bfloat16"), symmetric=False)
    whole = tdx.all_gather_matmul(x, y, config=SMALL, algorithm="unfused").numpy()
    whole = whole.reshape(world.size, m, n)
    for rows in (70, 1, 5, 33):
        part = tdx.all_gather_matmul(x[:rows], y, config=SMALL, algorithm=algorithm).numpy()
        assert_same_bits(part, whole[:, :rows].reshape(-1, n), rows)


@worlds(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def case_gathered_rows_come_after_a_call_on_another_stream(world, algorithm):
    plan = tdx.AllGatherMatmul(world, (4, 8), (8, 3), "float32", algorithm=algorithm)
    x, y = world.zeros((4, 8), "float32", symmetric=False), world.zeros((8, 3), "float32")
    stream = world.new_stream()
    for turn in range(1, 3):
        x.copy_from(np.full((4, 8), turn, np.float32))
        world.barrier()
        if world.rank:
            time.sleep(0.2)
        plan(x, y, stream=stream)
        assert plan.gathered()._block.last == [stream.handle]  # what reads it waits for just that
        assert_same_bits(plan.gathered().numpy(), np.full((8, 8), turn, np.float32), turn)


@worlds(2, 4)
@pytest.mark.parametrize("engines", [False, True])
def case_overlap_with_a_late_sender(world, engines):
    """One rank enters late: by then all tiles are finished whose data can be there.

    Copy engines send to the next rank first, then to the one after it: what has to go to ranks
    behind the late one waits.
    """
    m, k, n = 96, 16, 64
    with copy_engines(engines):
        plan = tdx.AllGatherMatmul(
            world, (m, k), (k, n), "float32", trace=True, config=SMALL, chunks_per_rank=1
        )
    x = world.array(values(world.rank, (m, k), "float32"), symmetric=False)
    y = world.array(values(5, (k, n), "float32"), symmetric=False)
    late = world.size - 1
    for _ in range(2):
        plan(x, y)
        world.barrier()
        if world.rank == late:
            time.sleep(0.4)
        plan(x, y)
        world.synchronize()
        if world.rank != late:
            early, remote = plan.overlap()
            tiles = plan._tiles(n)
            missing = list(range(world.rank + 1, late + 1)) if engines else [late]
            there = world.size - len(missing)  # ranks, with the own one
            assert remote == tiles * (world.size - 1)
            assert tiles * (there - 1) <= early <= tiles * (world.size - 2), (early, tiles)
            counts = plan._traces[0].numpy().reshape(world.size, -1)
            counts = np.roll(counts, world.rank, axis=0)  # the own ones come first
            assert (np.delete(counts, missing, axis=0) <= there).all(), counts
            assert (counts[missing] > there).all(), counts
            assert counts[missing].max() == world.size
        world.barrier()


@worlds(1, 2, 3)
@pytest.mark.parametrize(
    ("algorithm", "engines"), [("fused", False), ("fused", True), ("one_kernel", False)]
)
def case_a_that_is_written_to(world, algorithm, engines):
    """`a` may overlap results and the gathered buffer, and begin anywhere."""
    m, k, size, rank = 40, 32, world.size, world.rank
    b = values(5, (k, k), "float32") / 8
    y = world.array(b, symmetric=False)
    with many_blocks(), copy_engines(engines):
        plan = tdx.AllGatherMatmul(world, (m, k), (k, k), "float32", algorithm=algorithm)
        other = tdx.AllGatherMatmul(world, (m, k), (k, k), "float32", algorithm=algorithm)
    whole = whole_a(world, (m, k), "float32")
    x = world.array(whole[rank * m : (rank + 1) * m], symmetric=False)
    once = plan(x, y).numpy()
    again = other(world.array(once[rank * m : (rank + 1) * m], symmetric=False), y).numpy()
    own = slice(rank * m, (rank + 1) * m)
    assert_same_bits(plan(plan(x, y)[own], y).numpy(), again)
    out = world.array(once, symmetric=False)
    assert_same_bits(plan(out[own], y, out=out).numpy(), again)
    plan(x, y)
    peer = (rank + 1) % size
    turned = plan(plan.gathered()[peer * m : (peer + 1) * m], y)
    close(turned, product(np.roll(whole, -m, axis=0), b), k, "float32")
    line = world.zeros(m * k + 1, "float32", symmetric=False)
    shifted = line[1:].reshape((m, k))
    shifted.copy_from(x)
    assert_same_bits(plan(shifted, y).numpy(), once)


@worlds(3)
def case_two_streams(world):
    streams = [world.new_stream(), world.new_stream()]
    plans = [tdx.AllGatherMatmul(world, (9, 16), (16, 12), "float32") for _ in streams]
    b = values(3, (16, 12), "float32")
    y = world.array(b, symmetric=False)
    xs = [world.array(values(world.rank, (9, 16), "float32", s), symmetric=False) for s in range(2)]
    outs = [world.empty((27, 12), "float32", symmetric=False) for _ in range(10)]
    for i, out in enumerate(outs):
        plans[i % 2](xs[i % 2], y, out=out, stream=streams[i % 2])
    for i, out in enumerate(outs):
        close(out, product(whole_a(world, (9, 16), "float32", i % 2), b), 16, "float32")


@worlds(2)
def case_bad_arguments(world):
    x, y = world.zeros((4, 8), "float32"), world.zeros((8, 5), "float32")
    call = tdx.all_gather_matmul
    for kind, words, attempt in [
        (InvalidArgument, "does not fit", lambda: call(x, y.T)),
        (InvalidArgument, "2 or more axes", lambda: call(x[0], y)),
        (DtypeError, "float32", lambda: call(x, world.zeros((8, 5), "float16"))),
        (DtypeError, "products take .* and give", lambda: call(x.view("int32"), y.view("int32"))),
        (InvalidArgument, "contiguous", lambda: call(world.zeros((8, 4), "float32").T, y)),
        (InvalidArgument, "activation='tanh'", lambda: call(x, y, activation="tanh")),
        (InvalidArgument, "bias", lambda: call(x, y, bias=x[0])),
        (InvalidArgument, "algorithm='ring'", lambda: call(x, y, algorithm="ring")),
        (InvalidArgument, "scale_b is for", lambda: call(x, y, scale_b=1.0)),
        (InvalidArgument, "shape", lambda: call(x, y, out=x)),
        (InvalidArgument, "sequence of 2", lambda: call(x, [y, y], out=[x])),
        (InvalidArgument, "sequence of 2", lambda: call(x, [y, y], bias=[y[0]])),
        (InvalidArgument, "for algorithm=\"fused\"",
         lambda: tdx.AllGatherMatmul(
             world, (4, 8), (8, 5), "float32", algorithm="one_kernel", trace=True)),
        (InvalidArgument, "chunks_per_rank",
         lambda: tdx.AllGatherMatmul(world, (4, 8), (8, 5), "float32", chunks_per_rank=0)),
    ]:  # fmt: skip
        with pytest.raises(kind, match=words):
            attempt()
        assert call(x, y).shape == (8, 5)


@limit(120)
@worlds(4)
def case_speed(world):
    """256 x 256 x 256 float32 at 4 ranks; the limit is for busy cores."""
    m = 256 // world.size
    x = world.array(values(world.rank, (m, 256), "float32"))
    y = world.array(values(5, (256, 256), "float32"), symmetric=False)
    plan = tdx.AllGatherMatmul(world, (m, 256), (256, 256), "float32")
    for _ in range(2):
        plan(x, y)
    times = []
    for _ in range(5):
        world.barrier()
        start = time.perf_counter()
        plan(x, y)
        world.synchronize()
        times.append(time.perf_counter() - start)
    if world.rank == 0:
        print(f"all_gather_matmul 256^3 float32, 4 ranks: {sorted(times)[2] * 1e3:.1f} ms")  # noqa: T201
    assert sorted(times)[2] < 1.0


@worlds(1, 2)
def case_overlap_of_a_b_without_columns(world):
    x = world.array(values(world.rank, (4, 16), "float32"))
    y = world.array(values(5, (16, 8), "float32"))
    plan = tdx.AllGatherMatmul(world, (4, 16), [(16, 8), (16, 0)], "float32", trace=True)
    plan(x, [y, y[:, :0]])
    assert plan.overlap()[1] == (world.size - 1) * plan._tiles(8)
    plan = tdx.AllGatherMatmul(world, (4, 16), (16, 0), "float32", trace=True)
    plan(x, y[:, :0])
    assert plan.overlap() == (0, 0)
