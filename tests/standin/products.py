"""Scenarios of products: what their kernels are launched with."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from tests.standin.foreign import ShownArray
from tests.standin.ranks import Rank, scenario
from tests.standin.sharing import destroy, foreign_stream


@scenario(2)
def products_of_float8(rank: Rank) -> None:
    """Scales of both kinds reach kernels of all products; GPUs that lack float8 are refused."""
    import tdx

    names = ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    with rank.leaves_modules():
        world = rank.init()
        a, b = (world.zeros(s, "float8_e4m3fn", symmetric=False) for s in ((32, 64), (64, 48)))
        each = world.zeros(32, "float32", symmetric=False)
        for name in names:
            for scale in (each, each[:1], 2.0):
                made = getattr(tdx, name)(a, b, scale_a=scale, scale_b=each[:1])
                assert made.dtype.name == "bfloat16"
        with tdx.graph(world) as graph:
            for name in names:
                made = getattr(tdx, name)(a, b, scale_a=each, scale_b=each[:1])
        graph.replay()
        world.close()
        del a, b, each, made, graph
    rank.fake.compute = 80
    world = rank.init()
    try:
        a, b = (world.zeros(s, "float8_e4m3fn") for s in ((32, 64), (64, 48)))
        for name in names:
            refused: Any = None
            try:
                getattr(tdx, name)(a, b)
            except tdx.errors.Unsupported as error:
                refused = error
            assert "need sm_89 or later, not sm_80; use bfloat16" in str(refused)
            world.barrier()
        assert np.isfinite(tdx.matmul(np.ones((4, 4), "f4"), np.ones((4, 4), "f4"))).all()
    finally:
        rank.fake.compute = 90
        world.close()


@scenario(2)
def products_through_descriptors(rank: Rank) -> None:
    """Encoded for each address, and only for operands that the hardware takes."""
    import tdx
    from tdx.kernels.matmul import Config

    described = Config(64, 64, 64, descriptors=True)
    with rank.leaves_modules():
        world = rank.init()
        b = world.zeros((64, 48), "bfloat16", symmetric=False)
        arrays = [world.zeros((32, 72), "bfloat16", symmetric=False)[:, :64] for _ in range(3)]
        for a in arrays * 2:
            tdx.matmul(a, b)
            assert (rank.fake.described, rank.fake.first_argument) == (1, a.data_ptr())
        weights = [world.zeros((64, 48), "bfloat16", symmetric=False) for _ in range(100)]
        for again in range(2):
            encoded = rank.fake.calls()["cuTensorMapEncodeTiled"]
            for weight in weights:
                tdx.matmul(a, weight)
            new = rank.fake.calls()["cuTensorMapEncodeTiled"] - encoded
            assert new == (0 if again else len(weights))
        tdx.matmul(a, b, config=Config(64, 64, 64, descriptors=False))
        assert (rank.fake.described, rank.fake.first_argument) == (0, a.data_ptr())
        odd = world.zeros((32, 72), "bfloat16", symmetric=False)[:, 1:65]
        tdx.matmul(odd, b)
        assert (rank.fake.described, rank.fake.first_argument) == (0, odd.data_ptr())
        with pytest.raises(
            tdx.errors.Unsupported, match="does not begin at a multiple of 16 bytes"
        ):
            tdx.matmul(odd, b, config=described)
        first, second = (world.zeros((32, 64), "bfloat16", symmetric=False) for _ in range(2))
        for name, algorithms in {
            "all_gather_matmul": ("fused", "one_kernel", "unfused"),
            "matmul_reduce_scatter": ("fused", "unfused"),
            "matmul_all_reduce": ("one_shot", "two_shot", "copy_engine", "unfused"),
        }.items():
            turned = world.zeros((48, 64), "bfloat16", symmetric=False).T
            for y, algorithm in itertools.product((b, turned), algorithms):
                call = functools.partial(
                    getattr(tdx, name), b=y, config=described, algorithm=algorithm
                )
                call(first)
                with tdx.graph(world) as graph:
                    call(second)
                graph.replay()
        rank.fake.fail("cuTensorMapEncodeTiled")
        fresh = world.zeros((32, 64), "bfloat16", symmetric=False)
        with pytest.raises(tdx.errors.DriverError, match="Failed to create tensor map descriptor"):
            tdx.matmul(fresh, b)
        rank.fake.heal()
        tdx.matmul(fresh, b)
        world.close()
        del a, b, y, turned, call, arrays, weights, weight, odd, first, second, fresh, graph
    rank.fake.compute = 80
    world = rank.init()
    try:
        a, b = (world.zeros(s, "bfloat16", symmetric=False) for s in ((32, 64), (64, 48)))
        tdx.matmul(a, b)
        assert (rank.fake.described, rank.fake.first_argument) == (0, a.data_ptr())
        with pytest.raises(tdx.errors.Unsupported, match="sm_80 has no tensor descriptors"):
            tdx.matmul(a, b, config=described)
    finally:
        rank.fake.compute = 90
        world.close()


@scenario(2)
def products_of_ranks_that_differ(rank: Rank) -> None:
    """N of a gather and K of a sum are each rank's own, and nothing that is agreed on."""
    import tdx

    world = rank.init()
    own = rank.rank
    for m in (16, 100, 4096):
        n = 1000 if own else 1024
        plan = tdx.AllGatherMatmul(world, (m, 256), (256, n), "bfloat16")
    assert (plan.algorithm, plan.config.block_m) == ("fused", 64 if own else 128)
    for k in (0, 64 * own + 64):
        for kind in (tdx.MatmulReduceScatter, tdx.MatmulAllReduce):
            kind(world, (2048, k * own), (k * own, 4096), "bfloat16")
    world.close()


@scenario(2)
def products_are_loaded_before_kernels_wait_for_them(rank: Rank) -> None:
    """Also for operands that are aligned unlike the usual ones."""
    import tdx
    from tdx.kernels.copy_push import CopyPush

    def loaded() -> int:
        return rank.fake.calls()["cuModuleLoadData"]

    def noting(begin: Any) -> Any:
        def noted(push: Any, *args: Any) -> Any:
            loads.append(loaded())
            return begin(push, *args)

        return noted

    loads: list[int] = []
    with rank.leaves_modules(), pytest.MonkeyPatch.context() as patch:
        for name in ("start", "begin"):
            patch.setattr(CopyPush, name, noting(getattr(CopyPush, name)))
        world = rank.init()
        a, b = (world.zeros(s, "bfloat16", symmetric=False) for s in ((2048, 64), (64, 48)))
        for make, algorithm, rows, kernels in (
            (tdx.MatmulReduceScatter, "fused", 1024, 1),
            (tdx.MatmulAllReduce, "copy_engine", 2048, 2),
        ):
            plan = make(world, a.shape, b.shape, "bfloat16", algorithm=algorithm)
            memory = world.zeros((rows * 48 + 1,), "bfloat16", symmetric=False)
            asked = make(world, a.shape, b.shape, "bfloat16", algorithm=algorithm, library=True)
            for out in (memory[:-1], memory[1:]):
                before = loaded()
                plan(a, b, out=out.reshape((rows, 48)))
                assert loads.pop() == loaded() == before + kernels * (out.data_ptr() % 16 > 0)
                asked(a, b, out=out.reshape((rows, 48)))
                assert loads.pop() == loaded() > 0
        world.close()
        del a, b, plan, asked, memory, out


@scenario(1, 2)
def products_in_a_recording_of_another_library(rank: Rank) -> None:
    """Operands that a plan has a kernel for are recorded; for others none can be loaded: refused
    before anything is queued, and the peers are told."""
    from tdx.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

    with rank.leaves_modules(), pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr("tdx.kernels.plan.Plan.refuse", lambda plan, error: told.append(str(error)))
        world = rank.init()
        for kind, module in (
            ("AllGatherMatmul", all_gather_matmul),
            ("MatmulReduceScatter", matmul_reduce_scatter),
            ("MatmulAllReduce", matmul_all_reduce),
        ):
            for algorithm in module.ALGORITHMS:
                _record_products(rank, world, kind, algorithm, told)
        world.close()


def _record_products(rank: Rank, world: Any, kind: str, algorithm: str, told: list[str]) -> None:
    from cuda.bindings import driver as cu

    import tdx

    def local(shape: Any, dtype: str = "bfloat16") -> Any:
        return world.zeros(shape, dtype, symmetric=False)

    plan = getattr(tdx, kind)(world, (32, 64), (64, 48), "bfloat16", algorithm=algorithm, bias=True)
    x, y, bias = local((32, 64)), local((64, 48)), local(48)
    unlike = (
        (x, local((48, 64)).T, bias), (x, y, local(48, "float32")),
        (x, local(64 * 48 + 1)[1:].reshape((64, 48)), bias),
    )  # fmt: skip
    stream = foreign_stream()
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert not int(cu.cuStreamBeginCapture(stream, mode)[0])
    plan(x, y, bias=bias, stream=stream)
    shown = ShownArray(bias, stream=stream, typestr="<f2")
    for a, b, c, named in (  # the last time the owner of the bias, not the caller, tells the stream
        *((*each, {"stream": stream}) for each in unlike), (x, unlike[0][1], shown, {}),
    ):  # fmt: skip
        before, calls = rank.fake.launches, plan.calls
        with rank.raises(f"{plan.operation} would load a kernel", kind="InvalidArgument"):
            plan(a, b, bias=c, **named)
        assert (rank.fake.launches, plan.calls) == (before, calls)
        assert "would load a kernel" in told.pop()
        assert not told
    error, graph = cu.cuStreamEndCapture(stream)
    assert not int(error), error
    for a, b, c in unlike:
        plan(a, b, bias=c)
    assert not int(cu.cuStreamBeginCapture(stream, mode)[0])
    for a, b, c in unlike:  # there is a kernel now
        plan(a, b, bias=c, stream=stream)
    error, again = cu.cuStreamEndCapture(stream)
    assert not int(error), error
    for made in (graph, again):
        cu.cuGraphDestroy(made)
    destroy(stream)
