"""all_gather, all_to_all and broadcast: refusals, disagreement, peers that never come."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

import tdx
from tdx.runtime.errors import (
    CollectiveMismatch,
    DtypeError,
    InvalidArgument,
    PeerTimeout,
    TdxError,
)
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.movement import MOVES, check_move
from tests.helpers.reference import assert_same_bits, poisoned

every_move = pytest.mark.parametrize("move", MOVES, ids=str)


@worlds(2, 3)
@every_move
def case_bad_arguments(world, move):
    x = world.zeros((6, 6), "float32")
    size = world.size
    wrong = [
        ("is not one of", lambda: dataclasses.replace(move, algorithm="fast")(x)),
        ("contiguous", lambda: move(x.T)),
        ("expected", lambda: move(x, out=world.zeros((5, 6), "float32"))),
        ("peer's array", lambda: move(x.peer((world.rank + 1) % size))),
    ]
    if move.operation == "broadcast":
        for root in (-1, size, 1.0, None, True):
            wrong.append(("root", lambda root=root: move(x, root)))
    else:
        wrong.append(("axis", lambda: move(x[0, 0])))
    if move.operation == "all_to_all":
        wrong.append(("multiple of", lambda: move(world.zeros(size + 1, "int8"))))
    if move.algorithm == "low_latency":  # low_latency_scatter goes in rounds
        wrong.append(
            (f"{move.algorithm} takes", lambda: move(world.zeros((6, 1 << 21), "float32")))
        )
    for words, call in wrong:
        with pytest.raises(InvalidArgument, match=words):
            call()
    with pytest.raises(DtypeError, match="expected"):
        move.plan(world, (4,), "int32")(world.zeros(move.given_shape((4,), size), "float32"))
    check_move(world, move, (6,), "float32", 0)


@worlds(2, 3)
@every_move
def case_ranks_that_disagree(world, move):
    """A rank that is refused, or asks for something else, makes all ranks raise."""
    shape = move.given_shape((4,), world.size)
    x, other = world.zeros(shape, "float32"), world.zeros(shape, "int32")
    odd = world.rank == 1
    with pytest.raises(InvalidArgument if odd else CollectiveMismatch):
        (dataclasses.replace(move, algorithm="fast") if odd else move)(x)
    with pytest.raises(CollectiveMismatch):
        move(other if odd else x)
    if move.operation == "broadcast":
        with pytest.raises(CollectiveMismatch):
            move(x, int(odd))
        with pytest.raises(TdxError):
            move(x, world.size if odd else 0)
    check_move(world, move, (4,), "float32", 0)


@isolated
@worlds(3)
@limit(60)
def case_a_peer_that_does_not_pass_words_on(comm, backend):
    """Is named by who waits for them, not the root."""
    world = tdx.init(comm, backend=backend, timeout_s=0.5)
    plan = tdx.Broadcast(world, 1000, "int32", 1, algorithm="low_latency_scatter")
    x, out = world.zeros(1000, "int32"), world.zeros(1000, "int32")
    world.barrier()
    if world.rank != 2:
        plan(x, out=out)
    if world.rank == 0:
        with pytest.raises(PeerTimeout, match="rank 2") as caught:
            world.synchronize()
        assert (caught.value.operation, caught.value.peer) == ("broadcast", 2)
    comm.barrier()
    with contextlib.suppress(TdxError):
        world.close()


@isolated
@worlds(2)
@limit(90)
@every_move
def case_a_peer_that_never_comes(comm, backend, move):
    """The others say so, and have not written into its result."""
    world = tdx.init(comm, backend=backend, timeout_s=0.5)
    shape, dtype = (1000,), "int32"
    plan = move.plan(world, shape, dtype, root=1)
    wanted = move.wanted(0, range(2), shape, dtype)
    x = world.array(move.given(world.rank, 2, shape, dtype))
    out = world.array(poisoned(wanted.shape, dtype))
    world.barrier()
    if world.rank == 1:
        # the root of a small broadcast waits for its peers two calls later
        calls = 3 if str(move).startswith("broadcast-low_latency") else 1
        for _ in range(calls):
            plan(x, out=out)
        with pytest.raises(PeerTimeout, match="rank 0") as caught:
            world.synchronize()
        assert (caught.value.operation, caught.value.peer) == (move.operation, 0)
        assert caught.value.call_number == 1  # which rank 0 has not made
    comm.barrier()
    if world.rank == 0:
        assert_same_bits(out.numpy(), poisoned(wanted.shape, dtype))
    comm.barrier()
    with contextlib.suppress(TdxError):
        world.close()
