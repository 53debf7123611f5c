"""all_gather, all_to_all and broadcast: bytes of any type, size and alignment, each algorithm."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import InvalidArgument
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.movement import MOVES, check_move, many_rounds
from tests.helpers.reference import assert_same_bits, poisoned, values

SHAPES = [(1,), (2,), (7,), (1023,), (4099,), (0,), (0, 3), (3, 5), (2, 0), (2, 3, 4)]
DTYPES = ["bfloat16", "float8_e4m3fn", "int64", "bool", "complex64", "uint16", "float64"]
every_move = pytest.mark.parametrize("move", MOVES, ids=str)
PUSHED = [move for move in MOVES if move.algorithm in ("push", "scatter", "chain")]
every_pushed_move = pytest.mark.parametrize("move", PUSHED, ids=str)


@worlds(1, 2, 3, 4)
@limit(120)
@every_move
def case_shapes(world, move):
    for index, shape in enumerate(SHAPES):
        check_move(world, move, shape, ("float32", "int8")[index % 2], root=index % world.size)


@worlds(3)
@every_move
def case_dtypes(world, move):
    for root, dtype in enumerate(DTYPES):
        check_move(world, move, (257,), dtype, root=root % world.size)


@worlds(8)
@every_move
def case_eight_ranks(world, move):
    check_move(world, move, (515,), "float32", root=5)


@worlds(2, 3)
@every_move
def case_any_alignment(world, move):
    """Addresses that differ between x, out and ranks, so that words of many widths meet."""
    size = 1000  # a multiple of 8 bytes in all types
    wide = world.size if move.operation == "all_to_all" else 1
    for dtype in ("int8", "bfloat16", "float32"):
        for turn, begin in enumerate((1, 2, 3, 4, 8)):
            first = (begin + world.rank * turn) % 9
            padded = move.given(world.rank, world.size, (size + 16,), dtype)
            x = world.array(padded)[first : first + wide * size]
            ranks = range(world.size)
            firsts = [(begin + rank * turn) % 9 for rank in ranks]
            mine = [
                move.given(r, world.size, (size + 16,), dtype)[f : f + wide * size]
                for r, f in zip(ranks, firsts, strict=True)
            ]
            if move.operation == "broadcast":
                wanted = mine[1]
            elif move.operation == "all_to_all":
                part = slice(world.rank * size, (world.rank + 1) * size)
                wanted = np.concatenate([m[part] for m in mine])
            else:
                wanted = np.concatenate(mine)
            whole = world.array(poisoned(wanted.size + 32, dtype), symmetric=bool(turn % 2))
            after = 5 * world.rank + begin
            move(x, 1, out=whole[after : after + wanted.size])
            expected = poisoned(wanted.size + 32, dtype)
            expected[after : after + wanted.size] = wanted
            assert_same_bits(whole.numpy(), expected, (dtype, begin))


@worlds(1, 2, 3)
@limit(120)
@every_move
def case_many_blocks_and_rounds(world, move):
    """Results in symmetric memory on all ranks, on some and on none, in several rounds."""
    for shape, dtype in (((1803,), "int8"), ((512,), "float32"), ((333, 3), "bfloat16")):
        with many_rounds():
            plan = move.plan(world, shape, dtype, root=world.size - 1)
        wanted_shape = move.wanted(0, range(world.size), shape, dtype).shape
        for salt in range(5):
            mine = move.given(world.rank, world.size, shape, dtype, salt)
            x = world.array(mine, symmetric=False)
            where = (shape, dtype, salt)
            symmetric = [True, False, world.rank == 0, world.rank % 2 == 1, None][salt]
            out = None
            local = world.array(poisoned(wanted_shape, dtype), symmetric=False)
            shared = world.array(poisoned(wanted_shape, dtype))
            if symmetric is not None:
                out = shared if symmetric else local
            got = plan(x, out=out)
            wanted = move.wanted(
                world.rank, range(world.size), shape, dtype, salt, root=world.size - 1
            )
            assert_same_bits(got.numpy(), wanted, where)


@worlds(2, 4)
@limit(120)
@every_move
def case_back_to_back(world, move):
    """Inputs change from call to call and nothing is waited for in between."""
    shape, dtype, calls = (257,), "float32", 20
    with many_rounds(staging=1 << 12):
        plan = move.plan(world, shape, dtype)
    xs = [
        world.array(move.given(world.rank, world.size, shape, dtype, i), symmetric=False)
        for i in range(calls)
    ]
    wanted = [move.wanted(world.rank, range(world.size), shape, dtype, i) for i in range(calls)]
    outs = [
        world.array(poisoned(wanted[0].shape, dtype), symmetric=i % 3 == 0) for i in range(calls)
    ]
    x = world.empty(xs[0].shape, dtype)
    for source, out in zip(xs, outs, strict=True):
        x.copy_from(source)  # the one input is overwritten as soon as the call before is done
        plan(x, out=out)
    for i, out in enumerate(outs):
        assert_same_bits(out.numpy(), wanted[i], i)


@worlds(2, 3)
@every_move
def case_results_stay(world, move):
    """What is written into a result after a call is not overwritten by a peer that is slower."""
    shape, dtype = (1501,), "int8"
    with many_rounds():
        plan = move.plan(world, shape, dtype)
    wanted = move.wanted(world.rank, range(world.size), shape, dtype)
    x = world.array(move.given(world.rank, world.size, shape, dtype))
    poison = world.array(poisoned(wanted.shape, dtype), symmetric=False)
    for turn in range(10):
        out, copy = world.empty(wanted.shape, dtype), world.empty(wanted.shape, dtype)
        if turn % world.size == world.rank:
            time.sleep(0.005)
        plan(x, out=out)
        copy.copy_from(out)
        out.copy_from(poison)
        world.barrier()
        assert_same_bits(copy.numpy(), wanted, turn)
        assert_same_bits(out.numpy(), poisoned(wanted.shape, dtype), turn)


@worlds(2, 3)
@every_move
def case_late_ranks(world, move):
    """Ranks run ahead of each other by as many calls as they can."""
    shape, dtype, calls = (300,), "int16", 12
    plan = move.plan(world, shape, dtype)
    outs = []
    for turn in range(calls):
        if turn in (0, 5) and world.rank == turn % 2:
            time.sleep(0.1)
        x = world.array(move.given(world.rank, world.size, shape, dtype, turn), symmetric=False)
        out = world.empty(plan.out_shape if hasattr(plan, "out_shape") else plan.shape, dtype,
                          symmetric=False)  # fmt: skip
        outs.append(plan(x, out=out))
    for turn, out in enumerate(outs):
        wanted = move.wanted(world.rank, range(world.size), shape, dtype, turn)
        assert_same_bits(out.numpy(), wanted, turn)


@worlds(2, 3)
@pytest.mark.parametrize("staged", ["all", "some", "none"])
@pytest.mark.parametrize("shift", [0, 1])
def case_broadcast_of_many_rounds(world, staged, shift):
    """More rounds than staging slots, of several blocks; each rank is late once.

    Calls are queued one behind the other. With `shift` ranks move words of different widths.
    """
    broadcast_in_rounds(world, staged, shift)


@worlds(5)
def case_broadcast_of_many_rounds_to_five(world):
    broadcast_in_rounds(world, "some", 1)


def broadcast_in_rounds(world, staged, shift):
    limit, root = 4096 if world.size < 5 else 8192, 1
    count = 6 * limit + 425 - shift
    for algorithm, blocks in (("low_latency_scatter", 4), ("scatter", 4), ("chain", 8)):
        with many_rounds(rounds=(limit, limit)):
            plan = tdx.Broadcast(world, count, "int8", root, algorithm=algorithm)
        assert plan._rounds > 6
        assert plan._blocks >= blocks
        broadcast_late(world, plan, count, root, staged, shift)


def broadcast_late(world, plan, count, root, staged, shift):
    symmetric = {"all": False, "some": world.rank == 0, "none": True}[staged]
    begin = shift * world.rank
    shared = [world.array(poisoned(count + world.size, "int8")) for _ in range(world.size + 2)]
    outs = [out if symmetric else world.array(out.numpy(), symmetric=False) for out in shared]
    for turn, out in enumerate(outs):
        if turn == world.rank:
            time.sleep(0.02)
        mine = values(world.rank, count, "int8", turn)
        plan(world.array(mine, symmetric=False), out=out[begin : begin + count])
    for turn, out in enumerate(outs):
        got = out.numpy()[begin : begin + count]
        assert_same_bits(got, values(root, count, "int8", turn), turn)


@worlds(2, 3)
@every_move
def case_graph_replays_changing_inputs(world, move):
    shape, dtype, root = (5, 7), "bfloat16", world.size - 1
    with many_rounds():
        plan = move.plan(world, shape, dtype, root)
    x = world.empty(move.given_shape(shape, world.size), dtype)
    ranks = range(world.size)
    out = world.empty(move.wanted(0, ranks, shape, dtype).shape, dtype)
    with tdx.graph(world) as graph:
        plan(x, out=out)
        again = plan(x)
    for turn in range(12):
        x.copy_from(move.given(world.rank, world.size, shape, dtype, turn))
        graph.replay()
        wanted = move.wanted(world.rank, ranks, shape, dtype, turn, root)
        assert_same_bits(out.numpy(), wanted, turn)
        assert_same_bits(again.numpy(), wanted, turn)
        if turn % 4 == 0:
            assert_same_bits(plan(x).numpy(), wanted, turn)


@worlds(2, 3)
@every_move
def case_two_plans_on_two_streams(world, move):
    shape, dtype = (400,), "float32"
    ranks = range(world.size)
    streams = [world.stream, world.new_stream()]
    plans = [move.plan(world, shape, dtype, root) for root in (0, 1)]
    wanted = [
        [move.wanted(world.rank, ranks, shape, dtype, salt, root) for salt in range(8)]
        for root in (0, 1)
    ]
    xs = [
        world.array(move.given(world.rank, world.size, shape, dtype, salt), symmetric=False)
        for salt in range(8)
    ]
    world.synchronize()
    outs = [[world.empty(wanted[0][0].shape, dtype) for _ in xs] for _ in plans]
    for salt, x in enumerate(xs):
        for which in (0, 1):
            plans[which](x, out=outs[which][salt], stream=streams[which])
    for which in (0, 1):
        for salt in range(8):
            assert_same_bits(outs[which][salt].numpy(), wanted[which][salt], (which, salt))


@worlds(2, 3)
@every_move
def case_in_place(world, move):
    """x is out, or for all_gather the own part of it."""
    shape, dtype, n = (2053,), "int16", 2053
    with many_rounds():
        plan = move.plan(world, shape, dtype)
    for salt, symmetric in enumerate((True, False, True)):
        mine = move.given(world.rank, world.size, shape, dtype, salt)
        wanted = move.wanted(world.rank, range(world.size), shape, dtype, salt)
        out = world.array(poisoned(wanted.shape, dtype), symmetric=symmetric)
        x = out[world.rank * n : (world.rank + 1) * n] if move.operation == "all_gather" else out
        x.copy_from(mine)
        assert_same_bits(plan(x, out=out).numpy(), wanted, symmetric)
    whole = world.empty(2 * wanted.size, dtype)
    with pytest.raises(InvalidArgument, match="overlaps"):
        plan(whole[1 : 1 + mine.size], out=whole[: wanted.size])
    world.barrier()


@worlds(1, 2, 3)
@every_move
def case_numpy(world, move):
    """Arrays of another framework, also such that are not contiguous."""
    shape, dtype, root = (6, 10), "float32", world.size - 1
    mine = move.given(world.rank, world.size, shape, dtype)
    wanted = move.wanted(world.rank, range(world.size), shape, dtype, root=root)
    for x in (mine, np.asfortranarray(mine), mine[::-1].copy()[::-1]):
        got = move(x, root)
        assert type(got) is np.ndarray
        assert_same_bits(got, wanted)
    out = poisoned(wanted.shape, dtype)
    assert move(mine, root, out=out) is out
    assert_same_bits(out, wanted)


@isolated
@worlds(2, 3, 5)
@limit(120)
def case_teams(comm, backend):
    shape, dtype = (3, 35), "float32"
    with tdx.init(backend=backend) as world:
        groups = [tuple(range(world.size))[::-1], (world.size - 1, 0), (1,)]
        for ranks in groups:
            team = world.team(ranks)
            if not team:
                continue
            for move in MOVES:
                root = len(ranks) - 1
                mine = move.given(world.rank, len(ranks), shape, dtype)
                wanted = move.wanted(team.rank, ranks, shape, dtype, root=root)
                x = world.array(mine, symmetric=False)
                assert_same_bits(move(x, root, team=team).numpy(), wanted, (ranks, str(move)))
                plan = move.plan(world, shape, dtype, root, team)
                for _ in range(2):
                    assert_same_bits(plan(x).numpy(), wanted, (ranks, str(move)))


@worlds(2, 3)
@limit(180)
def case_random(world, rng):
    """Many operations in a row, each of random kind, size, type, root and alignment."""
    known = {}
    pending = []
    for turn in range(60):
        move = MOVES[rng.integers(len(MOVES))]
        shape = (int(rng.choice([0, 1, 3, 64, 1000, 2049])),)
        dtype = str(rng.choice(["int8", "bfloat16", "float32", "float64"]))
        root, skew, symmetric = (int(v) for v in rng.integers((world.size, 5, 2)))
        key = (move, shape, dtype, root)
        if key not in known:
            with many_rounds(staging=2048):
                known[key] = move.plan(world, shape, dtype, root)
        mine = move.given(world.rank, world.size, shape, dtype, turn)
        x = world.empty(mine.size + 8, dtype, symmetric=False)[skew : skew + mine.size]
        x.copy_from(mine)
        wanted = move.wanted(world.rank, range(world.size), shape, dtype, turn, root)
        room = world.array(poisoned(wanted.size + 8, dtype), symmetric=bool(symmetric))
        out = room[4 - skew : 4 - skew + wanted.size]
        known[key](x, out=out)
        pending.append((out, wanted, (turn, str(move), shape, dtype, root)))
    for out, wanted, where in pending:
        assert_same_bits(out.numpy(), wanted, where)


@worlds(2, 4)
@every_pushed_move
def case_peers_write_straight_into_symmetric_results(world, move):
    """A large result in symmetric memory never goes through the staging slots."""
    plan = move.plan(world, (3000,), "int8")
    stage = getattr(plan, "_movement", plan)._stage
    x = world.array(move.given(world.rank, world.size, (3000,), "int8"), symmetric=False)
    wanted = move.wanted(world.rank, range(world.size), (3000,), "int8")
    world.barrier()
    assert_same_bits(plan(x).numpy(), wanted)
    world.barrier()
    assert not stage.numpy().any()
    out = world.empty(wanted.shape, "int8", symmetric=False)
    assert_same_bits(plan(x, out=out).numpy(), wanted)
    world.barrier()
    assert stage.numpy().any() == (move.operation != "broadcast" or world.rank != 0)
