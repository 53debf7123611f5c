"""Scenarios of products by cuBLAS: what it is called with, over the stand-in for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.standin.ranks import Rank, scenario

F8 = "float8_e4m3fn"
_FIELDS = ("a", "b", "c", "bias", "scale_a", "scale_b", "workspace", "stream", "rows", "columns",
           "depth", "type")  # fmt: skip


class Library:
    """The stand-in for cuBLASLt, which this process has loaded."""

    def __init__(self) -> None:
        from tdx.runtime.driver.cuda_device import cu

        own = cu.CUDA_VERSION // 1000
        names = [f"libcublasLt.so.{release}" for release in (own, 25 - own)]
        self._library, self._other = map(ctypes.CDLL, names)

    def __getitem__(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, f"fakecublas_{name}").value

    def __setitem__(self, name: str, value: int) -> None:
        for library in (self._library, self._other):  # the other one is tried, too
            ctypes.c_int.in_dll(library, f"fakecublas_{name}").value = value

    def calls(self) -> Iterator[dict[str, int]]:
        """Those since it was asked last, but for those that only load code."""
        count = ctypes.c_int.in_dll(self._library, "fakecublas_count")
        log = (ctypes.c_uint64 * (256 * len(_FIELDS))).in_dll(self._library, "fakecublas_log")
        for i in range(count.value):
            entry = log[i * len(_FIELDS) : (i + 1) * len(_FIELDS)]
            call = dict(zip(_FIELDS, entry, strict=True))
            if call["a"] != call["c"]:
                yield call
        count.value = 0


@scenario(1)
def products_of_cublas(rank: Rank) -> None:
    """Right values in float32, however operands lie; nothing of it is left behind."""
    import tdx

    library = Library()
    with rank.leaves_modules():
        world = rank.init()
        rng = np.random.default_rng(0)
        a, b, bias = (rng.integers(-4, 5, s).astype(np.float32) for s in ((8, 12), (12, 20), (20,)))
        x, y, z = (world.array(v, symmetric=False) for v in (a, b, bias))
        x2, y2 = (world.array(v.T.copy(), symmetric=False).T for v in (a, b))
        world.synchronize()  # the stand-in computes while it is called
        for left, right in ((x, y), (x2, y), (x, y2), (x2, y2)):
            out = tdx.matmul(left, right, bias=z, library=True)
            assert (out.numpy() == a @ b + bias).all()
        part = tdx.matmul(x[4:], y, library=True)
        assert (part.numpy() == a[4:] @ b).all()
        handles = {call["stream"] for call in library.calls()}
        assert handles == {world.stream.handle}
        side = world.new_stream()
        with world.on(side):
            tdx.matmul(x, y, library=True)
        with tdx.graph(world) as graph:
            tdx.matmul(x, y, library=True)
        graph.replay()
        first, second = library.calls()
        assert (first["stream"], second["stream"]) != (world.stream.handle,) * 2
        assert first["workspace"] == second["workspace"] != 0
        assert library["handles"] == 1
        world.close()
        del x, y, z, x2, y2, out, part, left, right, graph, side
    assert (library["handles"], library["live"]) == (0, 0)


@scenario(1)
def when_cublas_is_chosen(rank: Rank) -> None:
    """Where the product is large enough, unless a config, the option or the setting says no."""
    import tdx
    from tdx.kernels.matmul import Config

    library = Library()
    world = rank.init()
    large, small = (world.zeros((n, n), "bfloat16", symmetric=False) for n in (1024, 128))
    chosen = tdx.config.cublas
    try:
        for setting, x, options, wanted in [
            (True, large, {}, 1), (True, small, {}, 0), (True, small, {"library": True}, 1),
            (True, large, {"library": False}, 0), (True, large, {"config": Config(64, 64, 64)}, 0),
            (True, large, {"activation": "relu"}, 0), (False, large, {}, 0),
            (False, large, {"library": True}, 1),
        ]:  # fmt: skip
            tdx.config.cublas = setting
            world.plans.clear()
            tdx.matmul(x, x, **options)
            assert len(list(library.calls())) == wanted, (setting, options)
        tdx.config.cublas = True
        few, wide = (
            world.zeros(s, "bfloat16", symmetric=False) for s in ((16, 8192), (8192, 4096))
        )
        tdx.all_gather_matmul(few, wide, algorithm="unfused")
        assert len(list(library.calls())) == 1
    finally:
        tdx.config.cublas = chosen
        world.close()


@scenario(1)
def algorithms_that_plans_compare(rank: Rank) -> None:
    """The fastest of those with the same bits, for products that are large."""
    import tdx

    library = Library()
    world = rank.init()
    library["named"] = 6  # of which the third and the sixth split K
    x, y = (world.zeros(s, "bfloat16", symmetric=False) for s in ((2048, 1024), (1024, 2048)))
    part = x[:1024]

    def algorithm_of(a: Any = x, **options: Any) -> int:
        plan = tdx.AllGatherMatmul(world, a.shape, y.shape, a.dtype, library=True, **options)
        library["last"] = -1
        plan(a, y)
        return library["last"]

    for fast, wanted in ((4, 4), (0, 0), (2, 0), (1, 1)):
        library["fast"] = fast
        world.plans.clear()
        assert algorithm_of() == wanted
    library["fast"] = 3
    assert algorithm_of() == 1  # known from before
    assert algorithm_of(part) == algorithm_of(tune=False) == 0
    for function in (tdx.all_gather_matmul, tdx.matmul):
        library["last"] = -1
        function(x, y, library=True)
        assert library["last"] == 0
    library["fast"] = 1
    world.plans.clear()
    library["refused"] = 1  # it names one that it does not run
    assert algorithm_of() == 0
    library["refused"] = 3
    world.plans.clear()
    assert algorithm_of() == 1
    assert {stream for _, stream in world.driver._spare} <= {world.stream.own}  # it leaves none
    across = world.zeros((2048, 1024), "bfloat16", symmetric=False).T
    plan = tdx.AllGatherMatmul(world, x.shape, y.shape, x.dtype, library=True)
    with tdx.graph(world):  # which may not wait for the device
        plan(x, across)
    assert library["last"] == 0
    with pytest.MonkeyPatch.context() as patch:
        whole = world.empty

        def short(shape: Any, dtype: Any, *others: Any, **options: Any) -> Any:
            if dtype == "int8" and shape > (1 << 20,):
                raise tdx.errors.HeapExhausted("no memory")
            return whole(shape, dtype, *others, **options)

        patch.setattr(world, "empty", short)
        world.plans.clear()
        assert algorithm_of() == 0
    with pytest.raises(tdx.errors.InvalidArgument, match="tune=3 must be True or False"):
        algorithm_of(tune=3)
    library["named"], library["fast"], library["refused"] = 1, -1, -1
    library["count"] = 0
    world.close()


@scenario(1)
def a_cublas_that_fails(rank: Rank) -> None:
    """Its errors name the call; one that does not start is told, and no product is wrong."""
    import tdx

    library = Library()
    world = rank.init()
    x = world.array(np.ones((16, 16), np.float32), symmetric=False)
    library["status"] = 14
    why = "library=True: cuBLAS: cublasLtCreate gives CUBLAS_STATUS_INTERNAL_ERROR"
    with pytest.raises(tdx.errors.Unsupported, match=why):
        tdx.matmul(x, x, library=True)
    large = world.zeros((1024, 1024), "bfloat16", symmetric=False)
    tdx.matmul(large, large)  # by a kernel of tdx
    library["status"] = 0
    world.plans.clear()
    tdx.matmul(x, x, library=True)
    library["status"] = 14
    with pytest.raises(tdx.errors.DriverError, match="cublasLtMatmul gives CUBLAS_STATUS_INTERNAL"):
        tdx.matmul(x, x, library=True)
    library["status"] = 0
    assert len(list(library.calls())) == 1
    world.close()


@scenario(1)
def what_cublas_is_not_asked_for(rank: Rank) -> None:
    """Releases without scales of rows; one rank has nothing to send; what has to be a kernel's."""
    import tdx
    from tdx.kernels.matmul import Config

    library = Library()
    world = rank.init()
    chosen, tdx.config.cublas = tdx.config.cublas, True
    try:
        a, b = (world.zeros((1024, 1024), F8, symmetric=False) for _ in range(2))
        each = world.zeros(1024, "float32", symmetric=False)
        scales = {"scale_a": each, "scale_b": each}
        for version, wanted in ((130100, 1), (120800, 0)):
            library["version"] = version
            world.plans.clear()
            tdx.matmul(a, b.T, **scales)
            assert len(list(library.calls())) == wanted
        with pytest.raises(tdx.errors.Unsupported, match=r"cuBLAS 12\.8\.0 has no scales of rows"):
            tdx.matmul(a, b.T, library=True, **scales)
        world.plans.clear()
        tdx.matmul(a, b.T, library=True)  # which has one scale for all
        library["version"] = 130100
        list(library.calls())
        for function in (tdx.all_gather_matmul, tdx.matmul_reduce_scatter, tdx.matmul_all_reduce):
            x, y = (world.zeros((64, 64), "float16", symmetric=False) for _ in range(2))
            function(x, y, library=True)
            assert len(list(library.calls())) == 1, function
        with pytest.raises(tdx.errors.InvalidArgument, match="trace is of a kernel of tdx"):
            tdx.AllGatherMatmul(world, (64, 64), (64, 64), "float16", trace=True, library=True)
        bias = world.zeros(72, "float16", symmetric=False)[4:68]  # not at a multiple of 16 bytes
        config = Config(64, 64, 64, descriptors=True)
        tdx.matmul_reduce_scatter(x, y, bias=bias, config=config)  # which does not matter there
    finally:
        tdx.config.cublas = chosen
        library["version"] = 130100
        world.close()


@scenario(2)
def plans_with_cublas(rank: Rank) -> None:
    """Every rank's rows where they lie, in the order in which they come or are sent."""
    import tdx

    library = Library()
    world = rank.init()
    size, me, n, k = world.size, world.rank, 64, 4096
    rows, order = 1024, [(rank.rank + hop) % rank.size for hop in range(rank.size)]

    def run(
        kind: Any, m: int, algorithm: str, dtype: str, n: int = n
    ) -> tuple[Any, Any, list[dict[str, int]]]:
        given = {"scale_a": 2.0, "scale_b": 3.0} if dtype == F8 else {}
        x = world.zeros((m, k), dtype, symmetric=False)
        y = world.zeros((n, k), dtype, symmetric=False).T
        plan = kind(world, x.shape, y.shape, dtype, algorithm=algorithm, library=True)
        for _ in range(2):
            plan(x, y, **given)
        calls = list(library.calls())
        half = len(calls) // 2
        assert calls[:half] == calls[half:]
        assert all(call["b"] == y.data_ptr() for call in calls)
        return plan, x, calls[:half]

    for dtype, width in ((F8, 1), ("bfloat16", 2)):
        plan, x, calls = run(tdx.AllGatherMatmul, rows, "fused", dtype)
        gathered, out = plan._gathering.buffer.data_ptr(), plan._outs[0].data_ptr()
        assert [c["rows"] for c in calls] == [rows] * size
        places = [gathered + r * rows * k * width for r in order]
        assert [c["a"] for c in calls] == [x.data_ptr(), *places[1:]]
        assert [c["c"] for c in calls] == [out + r * rows * n * 2 for r in order]
        if dtype == F8:
            scales = plan._gathering.scales.data_ptr()
            assert [c["scale_a"] for c in calls] == [scales + 4 * r * rows for r in order]
        else:
            _, x, (call,) = run(tdx.AllGatherMatmul, 16, "unfused", dtype)
            assert (call["rows"], call["depth"], call["columns"]) == (16 * size, k, n)
        for kind, algorithm, columns, parts, ours in (
            (tdx.MatmulReduceScatter, "fused", n, 1, False),
            (tdx.MatmulReduceScatter, "fused", 4096, 2, True),  # which adds as it multiplies
            (tdx.MatmulAllReduce, "copy_engine", n, 1, False),
        ):
            plan, x, calls = run(kind, 2 * rows * size, algorithm, dtype, columns)
            outgoing = plan._way.shared[1].data_ptr()
            if dtype == F8:
                parts, ours = 1, False
            owners = order[1:] if ours else [*order[1:], me]
            owned = [r * parts + part for r in owners for part in range(parts)]
            each = 2 * rows // parts
            assert [c["a"] for c in calls] == [x.data_ptr() + r * each * k * width for r in owned]
            assert [c["c"] for c in calls] == [outgoing + r * each * columns * 2 for r in owned]
        for kind in (tdx.MatmulReduceScatter, tdx.MatmulAllReduce):
            plan, x, (call,) = run(kind, 16, "unfused", dtype)
            assert (call["a"], call["c"]) == (x.data_ptr(), plan._way._sums.data_ptr())
        for kind, m, words in (
            (tdx.AllGatherMatmul, 16, "no copy engine sends parts so short"),
            (tdx.MatmulAllReduce, 2047, "2047 rows are no multiple of the 2 ranks"),
        ):  # fmt: skip
            algorithm = "fused" if m == 16 else "copy_engine"
            with pytest.raises(tdx.errors.Unsupported, match=words):
                run(kind, m, algorithm, dtype)
            world.barrier()
        for kind, algorithm in ((tdx.AllGatherMatmul, "one_kernel"),
                                (tdx.MatmulAllReduce, "two_shot")):  # fmt: skip
            words = f'library=True: "{algorithm}" multiplies in the kernel that communicates'
            with pytest.raises(tdx.errors.Unsupported, match=words):
                kind(world, (32, k), (k, n), dtype, algorithm=algorithm, library=True)
            world.barrier()
    x, y = world.zeros((1026, k), F8, symmetric=False), world.zeros((n, k), F8, symmetric=False).T
    scales = {"scale_a": world.zeros(1026, "float32", symmetric=False),
              "scale_b": world.zeros(n, "float32", symmetric=False)}  # fmt: skip
    tdx.all_gather_matmul(x, y, algorithm="fused", **scales)
    assert not list(library.calls())  # scales of the second rank's rows lie at no multiple of 16
    # its own kernel would leave blocks idle: for all ranks, or it runs on all
    chosen, tdx.config.cublas = tdx.config.cublas, True
    for columns, activation, algorithm, counts in (
        ((3072, 3072), None, "fused", 2), ((3072, 7168), None, "one_kernel", 0),
        ((3072, 3072), "gelu", "one_kernel", 0),  # which is no part of cuBLAS's products
    ):  # fmt: skip
        shapes = (1024, k), (k, columns[me])
        x, y = (world.zeros(shape, "bfloat16", symmetric=False) for shape in shapes)
        plan = tdx.AllGatherMatmul(world, *shapes, "bfloat16", activation=activation)
        plan(x, y)
        found = (plan.algorithm, len(list(library.calls())))
        assert found == (algorithm, counts), found
    for depths, algorithm in (((2048, 2048), "unfused"), ((2048, 7168), "fused")):
        shapes = (1024, depths[me]), (depths[me], 4096)
        plan = tdx.MatmulReduceScatter(world, *shapes, "bfloat16")
        assert plan.algorithm == algorithm, depths
    for rows, depth, calls in ((1024, 4096, 0), (2048, 1024, 0), (2048, 4096, 2)):
        shapes = (2 * rows, depth), (depth, 4096)
        found = _multiplied(library, world, tdx.MatmulReduceScatter, "fused", *shapes)
        assert found == calls, (rows, depth)
    tdx.config.cublas = chosen
    world.close()


def _multiplied(
    library: Library, world: Any, kind: Any, algorithm: str, *shapes: tuple[int, int]
) -> int:
    """How many products of a call are by cuBLAS."""
    x, y = (world.zeros(shape, "bfloat16", symmetric=False) for shape in shapes)
    kind(world, *shapes, "bfloat16", algorithm=algorithm)(x, y)
    return len(list(library.calls()))


@scenario(3)
def sums_of_several_peers(rank: Rank) -> None:
    """By cuBLAS, but the own rows where the product hides what is sent: as each rank's K says."""
    import tdx

    library = Library()
    world = rank.init()
    chosen, tdx.config.cublas = tdx.config.cublas, True
    rows, n = 3 * 1024, 4096
    for depths in ((1024, 1024, 1024), (1024, 4096, 1024), (4096, 4096, 4096)):
        k = depths[world.rank]
        found = _multiplied(library, world, tdx.MatmulReduceScatter, "fused", (rows, k), (k, n))
        assert found == (2 if k == 4096 else 3), depths
        world.barrier()
    for k, calls in ((4096, 2), (1024, 0)):  # our kernel gathers while the last rows are multiplied
        found = _multiplied(library, world, tdx.MatmulAllReduce, "copy_engine", (rows, k), (k, n))
        assert found == calls, k
    tdx.config.cublas = chosen
    world.close()
