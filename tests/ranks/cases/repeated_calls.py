"""Calls like earlier ones skip checks, and small results nobody has any more come again."""

from __future__ import annotations

import sys
import threading
from functools import partial

import numpy as np
import pytest

import tdx
from tdx.runtime.errors import Closed, DtypeError, InvalidArgument
from tests.helpers.cases import worlds
from tests.helpers.reference import assert_same_bits, reduced, values

SHAPE = (6, 10)


def inputs(world, turn):
    return [values(rank, SHAPE, "float32", turn) for rank in range(world.size)]


def plans(world):
    """(plan, function of all inputs that gives the own result)"""
    size, rank = world.size, world.rank
    rows = SHAPE[0] // size

    def mine(blocks):
        return blocks[rank * rows : rank * rows + rows]

    yield tdx.AllReduce(world, SHAPE, "float32"), reduced
    yield tdx.AllReduce(world, SHAPE, "float32", algorithm="two_shot"), reduced
    yield tdx.ReduceScatter(world, SHAPE, "float32"), lambda given: mine(reduced(given))
    yield tdx.AllGather(world, SHAPE, "float32"), np.concatenate
    yield tdx.AllToAll(world, SHAPE, "float32"), lambda g: np.concatenate([mine(x) for x in g])
    yield tdx.Broadcast(world, SHAPE, "float32", 0), lambda given: given[0]
    yield tdx.Reduce(world, SHAPE, "float32", 0), lambda given: reduced(given) if not rank else None


@worlds(1, 2, 3)
def case_the_same_arrays_again(world):
    """New data in them, the plan's buffer and an array in turn, other streams between."""
    side = world.new_stream()
    for plan, expected in plans(world):
        x = world.empty(SHAPE, "float32")
        result = expected(inputs(world, 0))
        here = result is not None
        out = world.empty(result.shape if here else SHAPE, "float32")
        for turn in range(12):
            given = inputs(world, turn)
            x.copy_from(given[world.rank])
            to = out if here and turn % 4 < 2 else None
            result = plan(x, to, side if turn % 6 == 5 else None)
            assert (result is None) == (not here)
            if here:
                assert to is None or result is to
                assert_same_bits(result.numpy(), expected(given))
        world.barrier()


@worlds(1, 2, 3)
@pytest.mark.parametrize("names", [("bias",), ("residual",), ("bias", "residual")])
def case_the_same_bias_and_residual_again(world, names):
    """Each in turn with others, in place too; and none is taken for the other."""
    columns = (7,)  # of a vector, a bias fits where a residual does
    plan = tdx.AllReduce(world, columns, "float32", **dict.fromkeys(names, True))
    x, out = (world.empty(columns, "float32") for _ in range(2))
    added = [{name: world.empty(columns, "float32") for name in names} for _ in range(2)]
    for turn in range(16):
        given = [values(rank, columns, "float32", turn) for rank in range(world.size)]
        x.copy_from(given[world.rank])
        operands = added[turn // 2 % 2]
        numbers = {name: values(9 + i, columns, "float32", turn) for i, name in enumerate(names)}
        for name, operand in operands.items():
            operand.copy_from(numbers[name])
        to = (None, out, x)[turn // 4 % 3]
        if turn == 15 and "residual" in names:
            to = operands["residual"]
        result = plan(x, to, **operands)
        assert_same_bits(result.numpy(), reduced(given, **numbers))
    world.barrier()
    for name in {"bias", "residual"}.difference(names):
        swapped = {name: operands[names[0]]}
        with pytest.raises(InvalidArgument, match="the plan was made with"):
            plan(x, to, **swapped)
    world.barrier()


@worlds(2)
def case_what_was_checked_is_checked_again_of_others(world):
    """Arrays change places, are freed, or belong to a call that another plan has checked."""
    plan = tdx.AllReduce(world, SHAPE, "float32")
    widened = tdx.AllReduce(world, SHAPE, "float32", out_dtype="float64")
    x, out = world.zeros(SHAPE, "float32"), world.zeros(SHAPE, "float32")
    wide = world.zeros(SHAPE, "float64")
    for _ in range(3):
        plan(x, out)
        widened(x, wide)
    for other in (world.zeros((5, 12), "float32"), world.zeros(SHAPE, "int32"), wide):
        with pytest.raises((InvalidArgument, DtypeError), match="expected"):
            plan(other, out)
    whole = world.zeros((7, 10), "float32")
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="overlaps"):
            plan(whole[:6], whole[1:])
    for _ in range(2):
        with pytest.raises(DtypeError, match="dtype"):
            widened(x, out)
    out.copy_from(np.full(SHAPE, 3, "float32"))
    for _ in range(2):
        assert (plan(out, x).numpy() == 6).all()
    out.free()
    with pytest.raises(Closed, match="was freed"):
        plan(x, out)
    with pytest.raises(Closed, match="was freed"):
        plan(out, x)
    x.free()
    with pytest.raises(Closed, match="was freed"):
        plan(x)


@worlds(2)
def case_a_repeated_call_is_told_by_its_line(world):
    """Where the same code calls from another line, messages name that one."""
    plan = tdx.AllReduce(world, SHAPE, "float32")
    x = world.zeros(SHAPE, "float32")
    lines = []
    for turn in range(3):
        plan(x)
        if turn == 2:
            lines.append(plan._usage.location)
            plan(x)
            lines.append(plan._usage.location)
    first, second = (int(line.rsplit(":", 1)[1]) for line in lines)
    assert second == first + 3
    assert lines[0].startswith(__file__)


@worlds(2)
def case_a_call_is_told_by_the_first_line_outside_of_tdx(world):
    """However deep that lies: of plans, of functions, and of functions that call functions."""
    x, out = world.zeros(SHAPE, "float32"), world.zeros(SHAPE, "float32")
    tdx.all_reduce(x, out=out)
    plan = list(world.plans[0].values())[-1]  # the last one used
    function = partial(tdx.all_reduce, x, out=out)

    def called(call, *args):
        """The line that the call is told by, and the one here."""
        line = sys._getframe().f_lineno + 1
        call(*args)
        name, told = plan._usage.location.rsplit(":", 1)
        assert name == __file__
        return int(told) - line

    def within(call):
        call()

    def deeper(call):
        within(call)

    first = within.__code__.co_firstlineno + 1
    for call in (function, partial(plan, x, out), function, function, partial(plan, x, out)):
        for _ in range(2):
            assert called(call) == 0
        for way in (within, within, deeper):
            called(way, call)
            assert plan._usage.location == f"{__file__}:{first}"
            assert called(function) == 0
        assert called(call) == 0


@worlds(1, 2)
def case_a_result_comes_again_once_nobody_has_it(world, backend):
    x = world.empty(SHAPE, "float32")

    def call(turn):
        given = inputs(world, turn)
        x.copy_from(given[world.rank])
        result = tdx.all_reduce(x)
        assert_same_bits(result.numpy(), reduced(given))
        return result

    result, seen = None, set()
    for turn in range(10):
        result = call(turn)  # the one before is there until this one is
        seen.add(result._address)
    assert len(seen) <= 3
    held = [call(turn) for turn in range(5)]
    assert len({each._address for each in held}) == 5
    contents = [each.numpy() for each in held]
    views = [each[1:3] for each in held]
    exports = [np.from_dlpack(each) for each in held] if backend == "host" else []
    del held
    for turn in range(5, 10):
        call(turn)
    for view, content in zip(views, contents, strict=True):
        assert_same_bits(view.numpy(), content[1:3])
    for export, content in zip(exports, contents, strict=backend == "host"):
        assert_same_bits(export, content)
    freed = call(0)
    freed.free()
    assert call(1)._address
    with pytest.raises(Closed):
        freed.numpy()


@worlds(1)
def case_a_result_in_a_graph_does_not_come_again(world):
    x = world.zeros(SHAPE, "float32")
    x.copy_from(np.full(SHAPE, 2, "float32"))
    tdx.all_reduce(x)
    with tdx.graph(world) as recorded:
        result = tdx.all_reduce(x)
    del result
    later = [tdx.all_reduce(x) for _ in range(4)]
    x.copy_from(np.full(SHAPE, 5, "float32"))
    recorded.replay()
    for each in later:
        assert (each.numpy() == 2).all()


@worlds(1)
def case_threads_do_not_share_results(world):
    """Each finds in its result what it has put in."""
    wrong, inputs_of = [], [world.array(np.full(64, i, "float32")) for i in range(4)]

    def work(i):
        for _ in range(50):
            kept = [tdx.all_reduce(inputs_of[i]) for _ in range(2)]
            wrong.extend(i for each in kept if not (each.numpy() == i).all())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
