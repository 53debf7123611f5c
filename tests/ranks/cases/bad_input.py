"""What arrays and worlds refuse: an error of tdx with the value and the remedy, at once."""

from __future__ import annotations

import gc
import os
import threading

import ml_dtypes
import numpy as np
import pytest

import tdx
from tdx.runtime.errors import Closed, DtypeError, InvalidArgument, TdxError, Unsupported
from tests.helpers.cases import isolated, worlds


def resources():
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@worlds(1, 2)
def case_shapes_and_dtypes(world):
    before = resources()
    for shape in (-1, (2, -3), (2.5,), 2.5, "ab", (True,), None, [None]):
        for symmetric in (True, False):
            with pytest.raises(InvalidArgument, match="shape"):
                world.empty(shape, "float32", symmetric=symmetric)
    for dtype in ("float31", object, np.dtype("datetime64[s]"), "S4", None, [("a", int)]):
        with pytest.raises(DtypeError):
            world.zeros(4, dtype)
    for source in (np.array([object()]), np.array(["text"])):
        with pytest.raises(DtypeError):
            world.array(source)
    with pytest.raises(DtypeError, match="byte order"):
        world.array(np.zeros(3, ">i4"))
    assert resources() == before
    world.barrier()


@worlds(1, 2)
def case_sources_of_copies(world):
    x = world.array(np.arange(6, dtype=np.float32).reshape(2, 3))
    for source in (np.zeros((3, 2), np.float32), np.zeros(6, np.float32), np.float32(0), []):
        with pytest.raises(InvalidArgument, match=r"has shape \(2, 3\), the source \("):
            x.copy_from(source)
    for source in (
        np.zeros((2, 3)), np.zeros((2, 3), np.int32), np.zeros((2, 3), ml_dtypes.bfloat16),
        world.zeros((2, 3), "int32"),
    ):  # fmt: skip
        with pytest.raises(DtypeError, match=r"has dtype float32, the source .*; convert it first"):
            x.copy_from(source)
    for source in ("text", object(), {1: 2}, [["a", "b", "c"]] * 2):
        with pytest.raises((TdxError, ValueError, TypeError)):
            x.copy_from(source)
    freed = world.zeros((2, 3), "float32")
    freed.free()
    with pytest.raises(Closed):
        x.copy_from(freed)
    assert (x.numpy() == np.arange(6).reshape(2, 3)).all()
    world.barrier()


@worlds(1, 2)
def case_views(world):
    x = world.zeros((2, 3), "float32")
    for index in (2, -3, (0, 3), (0, 0, 0), (slice(None), 5)):
        with pytest.raises(IndexError):
            x[index]
    for index in ([0, 1], np.array([True, False]), "a", 1.5, True, (0, [1])):
        with pytest.raises(InvalidArgument, match="integers, slices"):
            x[index]
    for shape in ((5,), (-1, -1), (4, -1), (2, -3), (2.0, 3), ("a",)):
        with pytest.raises(InvalidArgument, match=r"shape|reshaped"):
            x.reshape(*shape)
    with pytest.raises(InvalidArgument, match="not contiguous"):
        x.T.reshape(6)
    with pytest.raises(InvalidArgument, match="12 bytes a multiple of 8"):
        x.view("float64")
    with pytest.raises(InvalidArgument, match="contiguous"):
        x.T.view("int8")
    with pytest.raises(InvalidArgument, match="contiguous"):
        world.zeros((), "float32").view("int8")
    with pytest.raises(DtypeError):
        x.view("text")
    with pytest.raises(TypeError, match="0-dimensional"):
        len(world.zeros((), "int8"))
    with pytest.raises(Unsupported, match="truth"):
        bool(x)
    world.barrier()


@worlds(1, 2)
def case_peers(world):
    x, local = world.zeros(3, "int8"), world.zeros(3, "int8", symmetric=False)
    for rank in (-1, world.size, 1.0, "0", None, True):
        with pytest.raises(InvalidArgument, match="rank"):
            x.peer(rank)
    with pytest.raises(InvalidArgument, match="local; only symmetric arrays have peers"):
        local.peer(0)
    with pytest.raises(Unsupported):
        world.register(np.zeros(3))
    world.barrier()


@isolated
@worlds(1, 2)
def case_arrays_of_another_world(comm, backend):
    with tdx.init(comm, backend=backend) as first:
        x = first.zeros(4, "float32")
    with tdx.init(comm, backend=backend) as second:
        y = second.zeros(4, "float32")
        for use in (x.numpy, x.data_ptr, x.free, lambda: x.peer(0), lambda: y.copy_from(x)):
            with pytest.raises(Closed, match="its world is closed"):
                use()
        with pytest.raises(TdxError):
            tdx.AllReduce(second, (4,), "float32")(x)
        second.barrier()
    for use in (
        lambda: second.empty(1, "int8"), second.barrier, second.check, second.synchronize,
        lambda: second.team([0]), lambda: second.channel(1), second.new_stream,
        lambda: second.on(second.stream).__enter__(), lambda: tdx.graph(second).__enter__(),
    ):  # fmt: skip
        with pytest.raises(Closed, match=r"closed; call tdx.init"):
            use()
    second.close()
