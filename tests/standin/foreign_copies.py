"""Scenarios of copies of other libraries' arrays: by which description, and in which order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tdx.runtime.block import LocalBlock
from tests.helpers.vmm import Producer, allocated
from tests.standin.foreign import CupyArray, ShownArray, stand_in_for_cupy
from tests.standin.ranks import Rank, scenario
from tests.standin.sharing import destroy, foreign_stream, waits


def cupy_array(world: Any, memory: Any, transposed: bool = False) -> CupyArray:
    """What stands in for a CuPy array over memory of tdx."""
    x = CupyArray(world, memory)
    x.shape, x.strides, x.dtype = memory.shape, memory.strides, memory.dtype
    if transposed:
        x.shape, x.strides = x.shape[::-1], x.strides[::-1]
    return x


class HostOnly(ShownArray):
    """As Numba's arrays: NumPy would copy it through the host, without a word."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("it was copied through the host")


@scenario(1)
def copies_of_cupy_arrays(rank: Rank) -> None:
    """By their attributes, of every type; in the order of CuPy's stream, without a wait of the
    host where the copy goes there too."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        side, own = world.new_stream().handle, world.stream.handle
        stand_in_for_cupy(SimpleNamespace(ptr=side))
        values = np.arange(32).reshape(4, 8).astype(ml_dtypes.bfloat16)
        memory = world.array(values, symmetric=False)
        x, xt = cupy_array(world, memory), cupy_array(world, memory, transposed=True)
        y = world.zeros((8, 4), "bfloat16")
        with waits(world.driver) as seen:
            assert (world.array(x).numpy() == values).all()
            assert (y.copy_from(xt).numpy() == values.T).all()
        assert seen == [(own, side)] * 2, seen
        out = cupy_array(world, world.zeros((8, 4), "bfloat16", symmetric=False))
        assert tdx.all_reduce(xt, out=out) is out
        rank.fake.heal()
        with waits(world.driver) as seen:
            assert tdx.all_reduce(xt, out=out) is out
        assert not seen
        assert "cuStreamSynchronize" not in rank.fake.calls()
        with world.on(side):
            assert (world.array(xt).numpy() == values.T).all()
        del sys.modules["cupy"], x, xt, y, out, memory
        world.close()


@scenario(1)
def copies_in_a_recording_of_cupys(rank: Rank) -> None:
    """On the stream that is recorded they are part of the graph; elsewhere they are refused.
    The recording is as good as before."""
    with rank.leaves_modules():
        world = rank.init()
        stream = foreign_stream()
        stand_in_for_cupy(SimpleNamespace(ptr=stream))
        _record_copies(rank, world, stream)
        del sys.modules["cupy"]
        destroy(stream)
        world.close()


def _record_copies(rank: Rank, world: Any, stream: int) -> None:
    from cuda.bindings import driver as cu

    import tdx

    numbers = np.arange(32, dtype=np.int32).reshape(4, 8)
    memory = world.array(numbers, symmetric=False)
    x, xt = cupy_array(world, memory), cupy_array(world, memory, transposed=True)
    out = cupy_array(world, world.zeros((8, 4), "int32", symmetric=False))
    y, z = world.zeros((4, 8), "int32"), world.zeros((8, 4), "int32")
    tdx.all_reduce(xt, out=out)
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert not int(cu.cuStreamBeginCapture(stream, mode)[0])
    held = {*world.captured}
    assert tdx.all_reduce(xt, out=out) is out
    new = [kept for at, kept in world.captured.items() if at not in held]
    assert [kept.name for kept in new if isinstance(kept, LocalBlock)] == ["array"]  # the copy
    for call in (lambda: world.array(x), lambda: y.copy_from(x), lambda: z.copy_from(xt)):
        with rank.raises(f"records its stream {stream:#x}", "world.on", kind="InvalidArgument"):
            call()
    with world.on(stream):
        z.copy_from(xt)
        late = world.array(x, symmetric=False)
    assert not world.driver.capturing(world.stream.own)
    error, graph = cu.cuStreamEndCapture(stream)
    assert not int(error), error
    error, executable = cu.cuGraphInstantiate(graph, 0)
    assert not int(error), error
    assert not z.numpy().any()
    memory.copy_from(numbers + 1)
    assert not int(cu.cuGraphLaunch(executable, stream)[0])
    assert (z.numpy() == numbers.T + 1).all()
    assert (late.numpy() == numbers + 1).all()
    assert (y.copy_from(x).numpy() == numbers + 1).all()  # as ever afterwards
    cu.cuGraphDestroy(graph)
    cu.cuGraphExecDestroy(executable)


@scenario(1)
def copies_of_arrays_that_are_no_producers(rank: Rank) -> None:
    """They are read where they are, behind the stream that they name, and can be registered."""
    import tdx

    with rank.leaves_modules():
        world = rank.init()
        side, own = world.new_stream().handle, world.stream.handle
        values = np.arange(32, dtype=np.float32).reshape(4, 8)
        memory = world.array(values, symmetric=False)
        x = HostOnly(memory, stream=side)
        turned = HostOnly(memory, shape=(8, 4), strides=(4, 32), stream=side)
        y = world.zeros((8, 4), "float32")
        with waits(world.driver) as seen:
            assert (world.array(x).numpy() == values).all()
            assert (y.copy_from(turned).numpy() == values.T).all()
        assert seen == [(own, side)] * 2, seen
        tdx.all_reduce(turned, out=y)
        with rank.raises("has a mask", kind="InvalidArgument"):
            world.array(HostOnly(memory, mask=memory))
        with allocated(world.device.index, pieces=1) as allocator:
            theirs = allocator.array(0, 64)
            theirs.data_ptr = lambda: theirs.address
            with waits(world.driver) as seen:
                registered = world.register(HostOnly(theirs, stream=side))
            assert (own, side) in seen
            registered.copy_from(np.arange(64, dtype=np.int32))
            assert (world.array(theirs).numpy() == np.arange(64)).all()
            registered.free()
            fixed = HostOnly(theirs, data=(theirs.address, True))
            with rank.raises("read-only", kind="InvalidArgument"):
                world.register(fixed)
            del registered, fixed, theirs.data_ptr
        del x, y, turned, memory
        world.close()


class Particular(Producer):
    """Refuses to be exported while another GPU is current, as PyTorch's tensors do."""

    def __dlpack__(self, **named: Any) -> Any:
        from cuda.bindings import driver as cu

        error, current = cu.cuCtxGetDevice()
        if int(error) or int(current) != self.device[1]:
            raise BufferError("on a different CUDA device index")
        return super().__dlpack__(**named)


class Tensor(Particular):
    """As much of a PyTorch tensor as is asked for, of 8 x 8 int32."""

    layout, requires_grad, is_cuda = "strided", False, True

    def __init__(self, address: int, device: int, turned: bool = False):
        super().__init__(address, (8, 8), np.int32, device)
        self._strides = (1, 8) if turned else (8, 1)
        self.device = SimpleNamespace(index=device)  # type: ignore[assignment]

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("it is described by its attributes")

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, int]:
        return self._strides


def _stand_in_for_torch(stream: int) -> None:
    """`stream`: its current one. Nothing of it is on a GPU but `Tensor`."""
    Tensor.__module__ = "torch"
    sys.modules["torch"] = SimpleNamespace(  # type: ignore[assignment]
        Tensor=Tensor,
        nn=SimpleNamespace(Parameter=Tensor),
        strided="strided",
        version=SimpleNamespace(hip=None),
        cuda=SimpleNamespace(is_initialized=lambda: False),
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: stream),
    )


@scenario(1)
def imports_while_another_gpu_is_current(rank: Rank) -> None:
    """The calls make their own current, and put the other back; an array of the other is copied
    when that has made it."""
    from cuda.bindings import driver as cu

    with rank.leaves_modules():
        world = rank.init()
        other = cu.cuDevicePrimaryCtxRetain(3)[1]
        with allocated(world.device.index, pieces=1) as allocator:
            stand_in_for_cupy(SimpleNamespace(ptr=0))
            _stand_in_for_torch(world.new_stream().handle)
            for call in _imports(world, allocator.base):
                cu.cuCtxSetCurrent(other)
                call()
                assert int(cu.cuCtxGetCurrent()[1]) == int(other), call.__code__.co_firstlineno
            del call
            x = cupy_array(world, world.array(np.arange(64, dtype=np.int32), symmetric=False))
            x.data.device_id = x.device.id = 3
            cu.cuCtxSetCurrent(0)
            world.driver.bind_thread()
            rank.fake.device_used = -1
            found = world.array(x)
            assert rank.fake.device_used == 3  # its default stream was waited for
            assert world.driver.is_current()
            assert (found.numpy() == np.arange(64)).all()
            x.shape, x.strides = (8, 8), (4, 32)
            with rank.raises("is on GPU 3, this rank's world on GPU 0", kind="Unsupported"):
                _all_reduce(x)
            del sys.modules["cupy"], sys.modules["torch"], x, found
        world.close()
        cu.cuCtxSetCurrent(0)
        cu.cuDevicePrimaryCtxRelease(3)


def _all_reduce(x: Any, **options: Any) -> Any:
    import tdx

    return tdx.all_reduce(x, **options)


def _imports(world: Any, address: int) -> list[Callable[[], Any]]:
    import tdx

    x, y = Particular(address, (64,), "int32", world.device.index), world.zeros(64, "int32")
    turned = cupy_array(world, world.zeros((8, 8), "int32", symmetric=False), transposed=True)
    target = cupy_array(world, world.zeros((8, 8), "int32", symmetric=False))
    index = world.device.index
    tensor, turned_tensor = (Tensor(address, index, turned=turn) for turn in (False, True))
    plan = tdx.AllReduce(world, 64, "int32")
    with tdx.graph(world) as graph:
        plan(x, y)
    side = world.new_stream()
    return [
        lambda: world.array(x),
        lambda: y.copy_from(x),
        lambda: world.register(x).free(),
        lambda: tdx.all_reduce(x, out=y),
        lambda: plan(x, y),
        lambda: graph.replay(side),  # on another stream: the producer is asked again
        lambda: tdx.all_reduce(turned, out=target),
        lambda: world.array(tensor),
        lambda: world.register(tensor).free(),
        lambda: tdx.all_reduce(turned_tensor, out=tensor),
    ]
