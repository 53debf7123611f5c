"""Scenarios of arrays of other frameworks, and of what stands in for CuPy."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import numpy as np
import pytest

from tests.standin.ranks import Rank, scenario


class CupyArray:
    """As much of a CuPy array as is asked for."""

    shape, strides, dtype = (64,), (4,), np.dtype(np.int32)

    def __init__(self, world: Any, memory: Any):
        self.data = types.SimpleNamespace(ptr=memory.data_ptr(), device_id=world.device.index)
        self.device = contextlib.nullcontext()
        self.device.id = world.device.index  # type: ignore[attr-defined]

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("it is described by its attributes")


def stand_in_for_cupy(current: Any) -> Any:
    """What stands in for CuPy, with `current` as its current stream."""
    runtime = types.SimpleNamespace(is_hip=False)
    cuda = types.SimpleNamespace(get_current_stream=lambda index=-1: current, runtime=runtime)
    cupy: Any = types.SimpleNamespace(ndarray=CupyArray, cuda=cuda)
    CupyArray.__module__, sys.modules["cupy"] = "cupy", cupy
    return cupy


@scenario(1)
def frameworks_with_a_stream(rank: Rank) -> None:
    """A plan goes to the current stream of its operand's framework, the default one too."""
    current = types.SimpleNamespace(ptr=0)
    stand_in_for_cupy(current)
    with rank.leaves_modules():
        world = rank.init()
        _follow(rank, world, current)
        world.close()
    del sys.modules["cupy"]


def _follow(rank: Rank, world: Any, current: Any) -> None:
    import tdx

    side = world.new_stream()
    memory, y = world.zeros(64, np.int32, symmetric=False), world.zeros(64, np.int32)
    x = CupyArray(world, memory)
    plan = tdx.AllReduce(world, 64, np.int32)
    for ptr, stream in ((side.handle, side.handle), (0, 1), (side.handle, side.handle)):
        current.ptr = ptr
        for call in (lambda: plan(x, y), lambda: tdx.put(y, x, 0)):
            y._block.stream = world.stream.own
            rank.fake.heal()
            call()
            assert y._block.stream == stream
            assert rank.fake.calls()["cuStreamWaitEvent"] >= 1
        rank.fake.heal()
        assert y.__dlpack__(stream=world.stream.own)
        assert rank.fake.calls()["cuStreamWaitEvent"] == 1
    plan(x, y, stream=world.stream)
    assert y._block.stream == world.stream.handle
    with tdx.graph(world) as graph:
        plan(x, y)  # on the graph's stream
    graph.replay()


@scenario(2)
def calls_like_earlier_ones_go_straight(rank: Rank) -> None:
    """On arrays of a framework with streams too; what is unlike them is looked at in full."""
    import tdx
    from tdx.kernels import call

    with rank.leaves_modules():
        world = rank.init()
        side = world.new_stream()
        x, y = (CupyArray(world, world.zeros(64, np.int32, symmetric=False)) for _ in range(2))
        fresh = CupyArray(world, world.zeros(64, np.int32, symmetric=False))
        cupy = stand_in_for_cupy(types.SimpleNamespace(ptr=side.handle))
        cupy.empty = lambda shape, dtype: fresh
        assert tdx.all_reduce(x, out=y) is y
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call, "Call", None)
            for _ in range(2):
                assert tdx.all_reduce(x, out=y) is y
                assert tdx.all_reduce(x) is fresh
            unlike = CupyArray(world, world.zeros(128, np.int32, symmetric=False))
            for name, value in (("strides", (8,)), ("shape", (32,)), ("dtype", np.dtype("f4"))):
                setattr(unlike, name, value)
                with pytest.raises(TypeError):  # there is no Call
                    tdx.all_reduce(unlike)
                delattr(unlike, name)
        y.shape = (31,)
        with pytest.raises(tdx.errors.InvalidArgument, match=r"out has shape \(31,\)"):
            tdx.all_reduce(x, out=y)
        world.barrier()
        world.close()
    del sys.modules["cupy"]


@scenario(1, 2)
def full_beside_frameworks(rank: Rank) -> None:
    """Out of memory names the settings of the frameworks that are loaded, on the rank and others'
    errors, and of no others."""
    settings = {
        "jax": ("XLA_PYTHON_CLIENT_PREALLOCATE=false", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
        "torch": ("torch.cuda.empty_cache()", "PYTORCH_CUDA_ALLOC_CONF"),
        "cupy": ("get_default_memory_pool().free_all_blocks()", "CUPY_GPU_MEMORY_LIMIT"),
    }
    whole, absent = rank.fake.memory, {name: sys.modules.pop(name, None) for name in settings}
    with rank.leaves_nothing():
        world = rank.init()
        if rank.last:
            rank.fake.memory = 128 << 20
        for loaded in ((), ("jax",), ("torch", "cupy"), tuple(settings)):
            sys.modules.update((name, types.ModuleType(name)) for name in loaded)
            _fill_up(rank, world, loaded, settings)
            for name in loaded:
                del sys.modules[name]
        rank.fake.memory = whole
        world.close()
    sys.modules.update((name, module) for name, module in absent.items() if module)


def _fill_up(rank: Rank, world: Any, loaded: Any, settings: dict[str, tuple[str, ...]]) -> None:
    from tdx.runtime.errors import HeapExhausted

    tries = [lambda: world.empty(512 << 20, np.int8)]
    if rank.last:
        tries.append(lambda: world.empty(512 << 20, np.int8, symmetric=False))
    for attempt in tries:
        with pytest.raises(HeapExhausted) as caught:
            attempt()
        for name, words in settings.items():
            for word in words:
                assert (word in str(caught.value)) == (name in loaded), caught.value
        assert ("nvidia-smi" in str(caught.value)) == (not loaded)
    rank.meet()


class ShownArray:
    """What has `__cuda_array_interface__` alone, over memory of tdx."""

    def __init__(self, memory: Any, **named: Any):
        shown = {"shape": memory.shape, "typestr": memory.dtype.str, "version": 3}
        self.__cuda_array_interface__ = shown | {"data": (memory.data_ptr(), False)} | named


@scenario(1)
def arrays_that_are_no_producers(rank: Rank) -> None:
    """Work on them goes to the stream that they name, else to the default one."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        side = world.new_stream()
        memory, other, y = (world.zeros(64, "int32", symmetric=False) for _ in range(3))
        plan = tdx.AllReduce(world, 64, "int32")
        for named, stream in (({"stream": side.handle}, side.handle), ({}, 1), ({"stream": 1}, 1)):
            plan(ShownArray(memory, **named), y)
            assert y._block.stream == stream
        x, out = ShownArray(memory, strides=(4,)), ShownArray(other, strides=None)
        assert tdx.all_reduce(x, out=out) is out
        with rank.raises("ShownArray for the result: pass out=", kind="Unsupported"):
            tdx.all_reduce(x)
        fixed = ShownArray(other, data=(other.data_ptr(), True))
        for kind, words, given in (
            ("InvalidArgument", "has a mask", (ShownArray(memory, mask=memory), out)),
            ("DtypeError", "V2", (ShownArray(memory, typestr="|V2"), out)),
            ("InvalidArgument", "read-only", (x, fixed)),
        ):
            with rank.raises(words, kind=kind):
                tdx.all_reduce(given[0], out=given[1])
        with pytest.MonkeyPatch.context() as patch:
            made = types.SimpleNamespace(as_cuda_array=lambda producer: ("made", producer))
            patch.setitem(sys.modules, "numba", types.SimpleNamespace(cuda=made))
            patch.setattr(ShownArray, "__module__", "numba.cuda")
            word, producer = tdx.all_reduce(x)
            assert word == "made"
            assert producer.__cuda_array_interface__["shape"] == (64,)
            with rank.raises("cannot express the bfloat16 result", kind="DtypeError"):
                tdx.all_reduce(ShownArray(memory, typestr="<f4"), out_dtype="bfloat16")
        del x, out, y, memory, other, plan, producer, given, fixed
        world.close()


@scenario(1)
def arrays_of_another_gpu(rank: Rank) -> None:
    """Refused with both numbers, as operand and as result, by plans and by functions."""
    stand_in_for_cupy(types.SimpleNamespace(ptr=0))
    with rank.leaves_modules():
        world = rank.init()
        _pass_from_another_gpu(rank, world)
        world.close()
    del sys.modules["cupy"]


def _pass_from_another_gpu(rank: Rank, world: Any) -> None:
    import tdx

    x, there = (CupyArray(world, world.zeros(64, "int32", symmetric=False)) for _ in range(2))
    there.data.device_id = there.device.id = world.device.index + 1
    plan = tdx.AllReduce(world, 64, "int32")
    for call in (
        lambda: plan(there),
        lambda: plan(x, there),
        lambda: tdx.all_reduce(there),
        lambda: tdx.all_reduce(x, out=there),
        lambda: tdx.put(world.zeros(64, "int32"), there, 0),
    ):
        with rank.raises("is on GPU 1", "this rank's world on GPU 0", kind="Unsupported"):
            call()
    assert plan(x) is not None  # nothing is out of step
