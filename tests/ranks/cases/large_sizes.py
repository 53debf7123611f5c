"""More elements than 32 bits count: hashed from their index, checked where they are, and some of
them on the host."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.hashed import check_moved_kernel, fill_bytes_kernel, poison_bytes_kernel
from tests.helpers.movement import MOVES
from tests.helpers.reference import assert_same_bits
from tests.ranks.cases.random_operations import check_kernel, fill_kernel

CROSSED = 1 << 31
COUNT = CROSSED + 4097  # odd: no two elements can be moved as one word
GRID = (2048,)


def mixed(i, rank):
    """As in tests/helpers/hashed.py, of round 0, for uint64 arrays."""
    return ((i * 2654435761 + rank * 40503 & 0x7FFFFFFF) * 48271) >> 16


def hashed(i, rank):
    return (mixed(i, np.uint64(rank)) & 15).astype(np.int64) - 8


def samples(size):
    """A few indices from both ends, from around 2**31 and from the middle."""
    for first in sorted({0, CROSSED - 8, size // 2 - 8, size - 16}):
        yield np.arange(first, first + 16, dtype=np.uint64)


def check_samples(out, wanted):
    """Read through views, which do not share the arithmetic of kernels."""
    for i in samples(out.size):
        assert_same_bits(out[int(i[0]) : int(i[-1]) + 1].numpy(), wanted(i), int(i[0]))


def check_sums(world, out, first):
    """Sums over ranks of elements `first` and on; a single one that is wrong is seen."""
    ranks = world.size

    def wrong():
        count = world.zeros(1, "int32", symmetric=False)
        check_kernel[GRID](
            out, count, world.rank, ranks, 0, first, out.size, 1,
            OP="sum", HAS_BIAS=False, HAS_RESIDUAL=False, BLOCK=1024,
        )  # fmt: skip
        return count.numpy()[0]

    assert wrong() == 0
    check_samples(
        out, lambda i: sum(hashed(i + np.uint64(first), r) for r in range(ranks)).astype("float16")
    )
    out[-1:].copy_from(np.full(1, 99, np.float16))
    assert wrong() == 1


@pytest.mark.gpu
@isolated
@worlds(2)
@limit(300)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "copy_engine"])
def case_all_reduce_in_place(comm, backend, algorithm):
    with tdx.init(comm, backend=backend) as world:
        x = world.empty(COUNT, "float16")
        fill_kernel[GRID](x, x, world.rank, 0, COUNT, 0, BLOCK=1024)
        assert tdx.all_reduce(x, out=x, algorithm=algorithm) is x
        check_sums(world, x, 0)
        world.barrier()


@pytest.mark.gpu
@isolated
@worlds(2)
@limit(300)
def case_reduce_scatter(comm, backend):
    with tdx.init(comm, backend=backend) as world:
        x = world.empty(COUNT * world.size, "float16", symmetric=False)
        fill_kernel[GRID](x, x, world.rank, 0, x.size, 0, BLOCK=1024)
        check_sums(world, tdx.reduce_scatter(x, algorithm="push"), world.rank * COUNT)
        world.barrier()


def check_moved(world, move, part):
    """Each rank moves `part` bytes for every rank; results in memory of each kind."""
    x = world.empty(move.given_shape((part,), world.size), "int8", symmetric=False)
    fill_bytes_kernel[GRID](x, world.rank, 0, x.size, BLOCK=1024)
    root, whole = world.size - 1, part * world.size
    source = first = 0
    if move.operation == "broadcast":
        source, whole = root, part
    elif move.operation == "all_to_all":
        first = world.rank * part

    def wanted(i):
        given = mixed(i % part + np.uint64(first), i // part + np.uint64(source))
        return ((given % 255).astype(np.int64) - 127).astype(np.int8)

    def wrong(out):
        count = world.zeros(1, "int32", symmetric=False)
        check_moved_kernel[GRID](out, count, source, first, part, 0, out.size, BLOCK=1024)
        return count.numpy()[0]

    for symmetric in (True, False):
        out = world.empty(whole, "int8", symmetric)
        poison_bytes_kernel[GRID](out, out.size, BLOCK=1024)
        assert move(x, root, out=out) is out
        assert wrong(out) == 0, (str(move), part, symmetric)
        check_samples(out, wanted)
        out[-1:].copy_from(np.full(1, -128, np.int8))
        assert wrong(out) == 1
        world.barrier()


@pytest.mark.gpu
@isolated
@worlds(2)
@limit(300)
@pytest.mark.parametrize("move", [move for move in MOVES if "low_latency" not in move.algorithm])
def case_movements(comm, backend, move):
    """By single bytes, and as words."""
    with tdx.init(comm, backend=backend) as world:
        for part in (COUNT, COUNT - 1):
            check_moved(world, move, part)
