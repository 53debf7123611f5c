"""Products and norms called again with the same arrays skip checks, and with others do not."""

from __future__ import annotations

import _thread
import time

import numpy as np
import pytest

import tdx
from tdx.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from tdx.runtime.errors import Closed, DtypeError, InvalidArgument
from tests.helpers.cases import worlds
from tests.helpers.reference import assert_same_bits, values

ROWS, DEPTH, COLUMNS = 12, 16, 32
NORMS = ("one_shot", "two_shot", "low_latency")
FUNCTIONS = {
    "AllGatherMatmul": "all_gather_matmul",
    "MatmulReduceScatter": "matmul_reduce_scatter",
    "MatmulAllReduce": "matmul_all_reduce",
    "AllReduceRmsNorm": "all_reduce_rms_norm",
}
WAYS = [
    *(("AllGatherMatmul", name) for name in all_gather_matmul.ALGORITHMS),
    *(("MatmulReduceScatter", name) for name in matmul_reduce_scatter.ALGORITHMS),
    *(("MatmulAllReduce", name) for name in matmul_all_reduce.ALGORITHMS),
    *(("AllReduceRmsNorm", name) for name in NORMS),
]


class Repeated:
    """A plan, arrays for its calls by name, and how often a call was checked."""

    def __init__(self, world, kind, algorithm, dtype="float32", extra=True):
        self.world, self.dtype, self.checked = world, dtype, 0
        norm = kind == "AllReduceRmsNorm"
        if norm:
            self.shapes = {"x": (ROWS, COLUMNS), "weight": (COLUMNS,)}
            more = {"bias": (COLUMNS,), "residual": (ROWS, COLUMNS)}
            options = {name: extra for name in more}
            layout = [(ROWS, COLUMNS)]
        else:
            self.shapes = {"a": (ROWS, DEPTH), "b": (DEPTH, COLUMNS)}
            more, options = {"bias": (COLUMNS,)}, {"bias": extra}
            layout = [(ROWS, DEPTH), (DEPTH, COLUMNS)]
        self.shapes |= more if extra else {}
        self.plan = getattr(tdx, kind)(world, *layout, dtype, algorithm=algorithm, **options)
        begin = self.plan._begin

        def counting(*args):
            self.checked += 1
            return begin(*args)

        self.plan._begin = counting

    def arrays(self, turn=0):
        """Those of a call, in the order of its arguments."""
        return {
            name: self.world.array(self.data(name, turn), symmetric=False) for name in self.shapes
        }

    def data(self, name, turn):
        salt = 10 * turn + list(self.shapes).index(name)
        rank = self.world.rank if name in "xab" else 0
        return values(rank, self.shapes[name], self.dtype, salt)

    def call(self, arrays, stream=None, **outs):
        named = {k: v for k, v in arrays.items() if k not in ("a", "b", "x", "weight")}
        first, second = (v for k, v in arrays.items() if k not in named)
        result = self.plan(first, second, stream=stream, **named, **outs)
        many = result if isinstance(result, tuple) else (result,)
        return [each.numpy() for each in many]


@worlds(1, 2)
@pytest.mark.parametrize(("kind", "algorithm"), WAYS)
def case_the_same_arrays_again(world, kind, algorithm):
    """New data in them gives what new arrays give; others, and other streams, between."""
    for extra in (True, False):
        repeated = Repeated(world, kind, algorithm, extra=extra)
        arrays, others, side = repeated.arrays(), repeated.arrays(50), world.new_stream()
        second = repeated.call(repeated.arrays(50))
        repeated.call(arrays)
        out = world.zeros(second[0].shape, "float32", symmetric=False)
        for turn in range(8):
            wanted = repeated.call(repeated.arrays(turn))
            for name, array in arrays.items():
                array.copy_from(repeated.data(name, turn))
            stream = side if turn % 4 == 3 else None
            to = {"out": out} if turn % 3 else {}
            for _ in range(2):
                found = repeated.call(arrays, stream, **to)
            before = repeated.checked
            found = repeated.call(arrays, stream, **to)
            assert repeated.checked == before
            for one, two in zip(found, wanted, strict=True):
                assert_same_bits(one, two)
            for one, two in zip(repeated.call(others), second, strict=True):
                assert_same_bits(one, two)
        world.barrier()


@worlds(2)
@pytest.mark.parametrize(("kind", "algorithm"), WAYS)
def case_other_arrays_are_checked(world, kind, algorithm):
    repeated = Repeated(world, kind, algorithm)
    arrays = repeated.arrays()
    for _ in range(2):
        wanted = repeated.call(arrays)
    for name, shape in repeated.shapes.items():
        wrong = world.zeros((*shape, 1), "float32", symmetric=False)
        with pytest.raises(InvalidArgument, match=r"shape|axes"):
            repeated.call({**arrays, name: wrong})
        if name != "bias" or kind == "AllReduceRmsNorm":
            with pytest.raises(DtypeError):
                repeated.call({**arrays, name: world.zeros(shape, "int32", symmetric=False)})
        if name in ("bias", "residual"):
            with pytest.raises(InvalidArgument, match="the plan was made with"):
                repeated.call({**arrays, name: None})
    with pytest.raises(DtypeError):
        repeated.call(arrays, out=world.zeros((ROWS, COLUMNS), "int32", symmetric=False))
    for one, two in zip(repeated.call(arrays), wanted, strict=True):
        assert_same_bits(one, two)
    for name in arrays:
        gone = repeated.arrays()
        repeated.call(gone)
        repeated.call(gone)
        gone[name].free()
        with pytest.raises(Closed, match="was freed"):
            repeated.call(gone)
    world.barrier()


@worlds(2)
def case_scales_of_float8_again(world):
    """Arrays are remembered; numbers, which may change, are not."""
    a, b = (values(0, shape, "float8_e4m3fn") for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS)))
    for kind in (tdx.AllGatherMatmul, tdx.MatmulReduceScatter, tdx.MatmulAllReduce):
        plan = kind(world, a.shape, b.shape, a.dtype)
        x, y = (world.array(v, symmetric=False) for v in (a, b))
        one, two = (world.array(np.array([v], "float32"), symmetric=False) for v in (1, 2))
        plain = plan(x, y).numpy()

        def check(factor, **scales):
            wanted = (factor * plain.astype("float32")).astype(plain.dtype)  # noqa: B023
            assert_same_bits(plan(x, y, **scales).numpy(), wanted)  # noqa: B023

        for _ in range(3):
            check(2, scale_a=two, scale_b=one)
        one.copy_from(np.array([4], "float32"))
        check(8, scale_a=two, scale_b=one)
        for number in (0.5, 2, 0.25):
            check(number**2, scale_a=number, scale_b=number)
        check(1)
        check(2, scale_a=two)
    world.barrier()


@worlds(1, 2)
@pytest.mark.parametrize(("kind", "algorithm"), WAYS)
def case_functions_again(world, kind, algorithm):
    """With new data, results given and fresh: results that are still there stay as they were."""
    repeated = Repeated(world, kind, algorithm)
    function = getattr(tdx, FUNCTIONS[kind])
    arrays, kept = repeated.arrays(), []
    out = world.zeros(repeated.call(arrays)[0].shape, "float32", symmetric=False)
    for turn in range(7):
        wanted = repeated.call(repeated.arrays(turn))
        for name, array in arrays.items():
            array.copy_from(repeated.data(name, turn))
        for to in (None, out):
            result = function(**arrays, out=to, algorithm=algorithm)
            many = result if isinstance(result, tuple) else (result,)
            assert to is None or many[0] is out
            for one, two in zip(many, wanted, strict=True):
                assert_same_bits(one.numpy(), two)
            if to is None and turn % 2:
                kept.append((many, wanted))
    for many, wanted in kept:
        for one, two in zip(many, wanted, strict=True):
            assert_same_bits(one.numpy(), two)
    for name in arrays:
        gone = repeated.arrays()
        for _ in range(2):
            function(**gone, algorithm=algorithm)
        gone[name].free()
        with pytest.raises(Closed, match="was freed"):
            function(**gone, algorithm=algorithm)
    world.barrier()


@worlds(2)
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("held", [True, False])
def case_calls_for_fresh_results_are_not_checked_for_ever(world, kind, held):
    """Whether or not the last results are still there when the next are asked for."""
    repeated = Repeated(world, kind, None)
    function, arrays = getattr(tdx, FUNCTIONS[kind]), repeated.arrays()
    function(**arrays)
    plan = list(world.plans[0].values())[-1]  # the last one used
    begin, checked, result = plan._begin, [], None

    def counting(*args):
        checked.append(1)
        return begin(*args)

    plan._begin = counting
    for turn in range(12):
        result = function(**arrays)
        if turn == 5:
            del checked[:]
        if not held:
            result = None
        world.synchronize()  # the host tier holds operands until then
    assert not checked
    del result
    world.barrier()


@worlds(2)
def case_one_b_in_a_sequence_is_one_b(world):
    """Ranks may pass it either way: the plan is one."""
    repeated = Repeated(world, "AllGatherMatmul", None, extra=False)
    a, b = repeated.arrays().values()
    (wanted,) = repeated.call({"a": a, "b": b})
    plans = []
    for turn in range(6):
        listed = (world.rank + turn // 2) % 2
        result = tdx.all_gather_matmul(a, [b] if listed else b)
        if listed:
            (result,) = result
        assert_same_bits(result.numpy(), wanted)
        plans.append(list(world.plans[0].values())[-1])
    assert len(set(plans)) == 1


@worlds(2)
def case_results_come_from_an_iterator(world):
    repeated = Repeated(world, "AllGatherMatmul", None, extra=False)
    a, b = repeated.arrays().values()
    (wanted,) = repeated.call({"a": a, "b": b})
    plan = tdx.AllGatherMatmul(world, a.shape, [b.shape, b.shape], "float32")
    outs = [world.empty(wanted.shape, "float32", symmetric=False) for _ in range(2)]
    for _ in range(3):
        results = plan(a, [b, b], out=iter(outs))
        assert all(one is two for one, two in zip(results, outs, strict=True))
        for out in outs:
            assert_same_bits(out.numpy(), wanted)


@worlds(2)
@pytest.mark.parametrize("kind", FUNCTIONS)
def case_replays_between(world, kind):
    """Recorded with the same arrays, which calls go on to use."""
    repeated = Repeated(world, kind, None)
    arrays = repeated.arrays()
    repeated.call(arrays)
    with tdx.graph(world) as graph:
        first, second, *rest = arrays.values()
        names = list(arrays)[2:]
        recorded = repeated.plan(first, second, **dict(zip(names, rest, strict=True)))
    many = recorded if isinstance(recorded, tuple) else (recorded,)
    for turn in range(6):
        wanted = repeated.call(repeated.arrays(turn))
        for name, array in arrays.items():
            array.copy_from(repeated.data(name, turn))
        for _ in range(2):
            for one, two in zip(repeated.call(arrays), wanted, strict=True):
                assert_same_bits(one, two)
        graph.replay()
        for one, two in zip(many, wanted, strict=True):
            assert_same_bits(one.numpy(), two)
    world.barrier()


@worlds(2)
def case_a_thread_may_begin_with_a_call(world):
    """There is no frame of a caller then."""
    repeated = Repeated(world, "MatmulAllReduce", None, extra=False)
    arrays = tuple(repeated.arrays().values())
    (wanted,) = repeated.call(dict(zip("ab", arrays, strict=True)))
    reduce, x = tdx.AllReduce(world, (4,), "int32"), world.array(np.arange(4, dtype=np.int32))
    running = _thread._count()
    for call, given in 3 * [(repeated.plan, arrays), (reduce, (x,))]:
        made = call.calls
        _thread.start_new_thread(call, given)
        while call.calls == made or _thread._count() > running:
            time.sleep(0.001)
    assert_same_bits(repeated.plan(*arrays).numpy(), wanted)
    world.synchronize()
    assert (reduce._out.numpy() == world.size * np.arange(4)).all()
    world.barrier()
