"""tdx loads no framework by itself, though all of them can be imported."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import triton
import triton.language as tl

import tdx
from tdx.kernels.plan import Plan
from tests.helpers.cases import isolated, limit, worlds

FRAMEWORKS = ("torch", "jax", "cupy")


@triton.jit
def add_kernel(x, n, amount, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) * scale + amount, mask=i < n)


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Frameworks that are not installed can be imported as well: as empty modules."""
    with tempfile.TemporaryDirectory() as folder:
        for name in FRAMEWORKS:
            if importlib.util.find_spec(name) is None:
                Path(folder, f"{name}.py").touch()
        sys.path.append(folder)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)


def loaded() -> set[str]:
    """The frameworks that are in sys.modules, with modules of theirs."""
    return {module.partition(".")[0] for module in list(sys.modules)} & set(FRAMEWORKS)


def launch(world: tdx.World) -> None:
    """A user's kernel, on a whole array, a part of it and a side stream."""
    x = world.zeros(100, "float32")
    for array, stream in ((x, world.stream), (x[3:], world.stream), (x, world.new_stream())):
        with world.on(stream):
            add_kernel[(2,)](array, array.size, 1, 0.5, BLOCK=64)
    world.synchronize()


def every_plan(world: tdx.World) -> None:
    """Make and call a plan of each operation, then record each call and replay it."""
    size, dtype = world.size, "float32"
    x, a, b, weight = (
        world.array(np.ones(shape, dtype), symmetric=False)
        for shape in ((size, 16), (16 * size, 16), (16, 16), (16,))
    )
    plans = {
        "AllGather": (tdx.AllGather(world, x.shape, dtype), (x,)),
        "AllGatherMatmul": (tdx.AllGatherMatmul(world, b.shape, b.shape, dtype), (b, b)),
        "AllReduce": (tdx.AllReduce(world, x.shape, dtype), (x,)),
        "AllReduceRmsNorm": (tdx.AllReduceRmsNorm(world, x.shape, dtype), (x, weight)),
        "AllToAll": (tdx.AllToAll(world, x.shape, dtype), (x,)),
        "Barrier": (tdx.Barrier(world), ()),
        "Broadcast": (tdx.Broadcast(world, x.shape, dtype, 0), (x,)),
        "MatmulAllReduce": (tdx.MatmulAllReduce(world, a.shape, b.shape, dtype), (a, b)),
        "MatmulReduceScatter": (tdx.MatmulReduceScatter(world, a.shape, b.shape, dtype), (a, b)),
        "Reduce": (tdx.Reduce(world, x.shape, dtype, 0), (x,)),
        "ReduceScatter": (tdx.ReduceScatter(world, x.shape, dtype), (x,)),
    }
    public = {name: getattr(tdx, name) for name in dir(tdx)}
    classes = {name for name, what in public.items() if isinstance(what, type)}
    assert {name for name in classes if issubclass(public[name], Plan)} == set(plans)
    for plan, args in plans.values():
        plan(*args)
    with tdx.graph(world) as graph:
        for plan, args in plans.values():
            plan(*args)
    graph.replay()
    world.barrier()


def call_functions(world: tdx.World) -> None:
    """Functions on tdx arrays and on NumPy's, with results of each kind."""
    x = np.ones((16, 16), np.float32)
    assert (tdx.all_reduce(world.array(x)).numpy().shape) == x.shape
    assert isinstance(tdx.all_reduce(x), np.ndarray)
    tdx.matmul(world.array(x), world.array(x))
    target = world.zeros((16, 16), "float32")
    tdx.put(target, world.array(x), (world.rank + 1) % world.size)
    tdx.get(target, world.array(x), world.rank)
    world.barrier()
    if world.backend == "host":
        assert (np.from_dlpack(world.array(x)) == x).all()


@isolated
@worlds(1, 2)
@limit(120)
def case_no_framework_is_loaded(comm, backend):
    assert not loaded(), "before tdx was used"
    with importable():
        assert all(importlib.util.find_spec(name) for name in FRAMEWORKS)
        with tdx.init(comm, backend=backend) as world:
            launch(world)
            every_plan(world)
            call_functions(world)
            assert not loaded()
        assert not loaded()
