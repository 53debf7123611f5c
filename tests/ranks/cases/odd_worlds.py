"""Values on worlds of five to seven ranks, with odd counts of elements."""

from __future__ import annotations

import pytest

import tdx
from tests.helpers.cases import worlds
from tests.helpers.movement import MOVES, check_move
from tests.helpers.reference import assert_same_bits, poisoned, reduced, values

SHAPES = [(37, 7), (1023,)]
DTYPE = "bfloat16"


def inputs(world, shape):
    return [values(rank, shape, DTYPE) for rank in range(world.size)]


def given_and_out(world, given, shape):
    return world.array(given[world.rank]), world.array(poisoned(shape, DTYPE), symmetric=False)


@worlds(5, 6, 7)
@pytest.mark.parametrize(
    "algorithm", ["low_latency", "low_latency_two_shot", "one_shot", "two_shot", "copy_engine"]
)
def case_all_reduce(world, algorithm):
    for shape in SHAPES:
        given = inputs(world, shape)
        x, out = given_and_out(world, given, shape)
        tdx.all_reduce(x, "avg", out=out, algorithm=algorithm)
        assert_same_bits(out.numpy(), reduced(given, "avg"), shape)


@worlds(5, 6, 7)
@pytest.mark.parametrize("algorithm", ["low_latency", "push"])
def case_reduce_scatter(world, algorithm):
    for rows, *rest in SHAPES:
        given = inputs(world, (world.size * rows, *rest))
        x, out = given_and_out(world, given, (rows, *rest))
        tdx.reduce_scatter(x, out=out, algorithm=algorithm)
        mine = slice(world.rank * rows, (world.rank + 1) * rows)
        assert_same_bits(out.numpy(), reduced(given)[mine], rows)


@worlds(5, 6, 7)
@pytest.mark.parametrize("algorithm", ["low_latency", "two_shot"])
def case_reduce(world, algorithm):
    for root, shape in enumerate(SHAPES, world.size - len(SHAPES)):
        given = inputs(world, shape)
        x, out = given_and_out(world, given, shape)
        here = world.rank == root
        result = tdx.reduce(x, root, "max", out=out if here else None, algorithm=algorithm)
        assert (result is None) != here
        if here:
            assert_same_bits(out.numpy(), reduced(given, "max"), shape)


@worlds(5, 6, 7)
@pytest.mark.parametrize("move", MOVES, ids=str)
def case_movement(world, move):
    check_move(world, move, (37, 7), "int8", root=4)
