"""What arrays and worlds refuse: an error of tdx with the value and the remedy, at once."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import tdx
from tdx.runtime import dlpack
from tdx.runtime.errors import (
    Closed,
    CollectiveMismatch,
    DtypeError,
    InvalidArgument,
    TdxError,
    Unsupported,
)
from tests.helpers.cases import isolated, skip, worlds


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
def case_a_name_where_another_argument_belongs(world):
    """Refused before the heap is touched, which peers would not do."""
    before = world.user_region.heap.digest
    make = {
        "empty": functools.partial(world.empty, 4, "int32"),
        "zeros": functools.partial(world.zeros, 4, "int32"),
        "array": functools.partial(world.array, np.zeros(4)),
        "array of tdx": functools.partial(world.array, world.zeros(4, "int32", symmetric=False)),
    }
    for call in make.values():
        with pytest.raises(InvalidArgument, match=r"^symmetric='arrived' must be .* is name="):
            call("arrived")
        for value in (0, 1, None, "no", np.array(True)):
            with pytest.raises(InvalidArgument, match=r"^symmetric=.* must be True or False"):
                call(symmetric=value)
        for name in (5, b"x", ("x",)):
            for symmetric in (True, False):
                with pytest.raises(InvalidArgument, match=r"^name=.* must be a str, or None"):
                    call(symmetric=symmetric, name=name)
        assert not call(symmetric=np.False_, name="x").symmetric
    assert world.user_region.heap.digest == before
    world.barrier()


@worlds(1, 2)
def case_what_belongs_to_its_process(world):
    """Pickled or copied, all of it says so, and what to do instead."""
    plan, stream = tdx.AllReduce(world, 4, "float32"), world.new_stream()
    with tdx.graph(world) as graph:
        plan(world.zeros(4, "float32", symmetric=False))
    everything = (
        world, world.team(range(world.size)), world.handle, world.channel(1), plan, stream,
        stream.record(), graph,
    )  # fmt: skip
    for thing in everything:
        text = rf"^a tdx {type(thing).__name__} belongs to its process .*tdx\.init; pass numbers"
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=text):
                copied(thing)
    world.barrier()


@worlds(1, 2)
def case_views_with_gaps(world):
    """An input may be copied; what is written to may not."""
    x = world.array(np.arange(24, dtype=np.float32).reshape(4, 6))
    y = world.zeros((6, 4), "float32")
    plan = tdx.AllReduce(world, (6, 4), "float32")
    remedy = r", symmetric=False\) makes a copy that is$"
    for call, text in (
        (lambda: tdx.all_reduce(x.T), rf"^x of shape .*: world\.array\(x{remedy}"),
        (lambda: tdx.broadcast(x.T, 0), rf"^x of shape .*: world\.array\(x{remedy}"),
        (lambda: plan(x.T), rf"^x of shape .*: world\.array\(x{remedy}"),
        (lambda: tdx.put(y, x.T, world.rank), rf"^src of shape .*: world\.array\(src{remedy}"),
        (lambda: tdx.matmul(y, x, bias=y[:, 0]), rf"^bias .*: world\.array\(bias{remedy}"),
        (
            lambda: x.T.reshape(24),
            r"without a copy, as world\.array\(x, symmetric=False\) makes one",
        ),
        (lambda: tdx.all_reduce(y, out=x.T), "^out of shape .*; pass a contiguous array$"),
        (lambda: tdx.put(x.T, y, world.rank), "^dst of shape .*; pass a contiguous array$"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            call()
    wanted = world.size * np.arange(24).reshape(4, 6).T
    assert (tdx.all_reduce(world.array(x.T, symmetric=False)).numpy() == wanted).all()
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
    for source in ("text", object(), {1: 2}, [["a", "b", "c"]] * 2, [[1, 2], [3]]):
        with pytest.raises(InvalidArgument, match=r"cannot be made an array: .*; pass numbers"):
            x.copy_from(source)
    freed = world.zeros((2, 3), "float32")
    freed.free()
    with pytest.raises(Closed):
        x.copy_from(freed)
    assert (x.numpy() == np.arange(6).reshape(2, 3)).all()
    world.barrier()


class Refusing:
    """A producer that tells why it is none."""

    shape, device = (4,), (1, 0)

    def __dlpack__(self, **_):
        raise BufferError("was donated")

    def __dlpack_device__(self):
        return self.device


class Elsewhere(Refusing):
    """Memory of a device that nobody has here."""

    device = (7, 3)

    def __dlpack__(self, **_):
        return dlpack.capsule(self, 256, (4,), (4,), "float32", self.device)


@worlds(1, 2)
def case_odd_sources_of_arrays(world):
    """Value and remedy are named, and nothing is allocated that peers would not have."""
    before = world.user_region.heap.digest
    for source, kind, words in (
        ("text", DtypeError, r"'text' would be an array of <U4.*pass numbers"),
        ({1: 2}, DtypeError, r"\{1: 2\} would be an array of object"),
        ([1 << 70], DtypeError, r"\[1180591620717411303424\] would be an array of object"),
        (np.array([object()]), DtypeError, r"objects and text are no numbers: convert"),
        ([[1, 2], [3]], InvalidArgument, r"\[\[1, 2\], \[3\]\] cannot be .* of equal lengths"),
        (np.ma.ones(3), InvalidArgument, r"has a mask, .*pass x.filled\(value\)"),
        (Refusing(), InvalidArgument, r"Refusing of shape \(4,\) .*was donated; pass a plain copy"),
        (Elsewhere(), Unsupported, r"DLPack device \(7, 3\).*copy it to the host first"),
    ):
        with pytest.raises(kind, match=words):
            world.array(source)
        with pytest.raises(kind if isinstance(source, np.ndarray | Refusing) else InvalidArgument):
            world.zeros(4, "float32", symmetric=False).copy_from(source)
    assert world.user_region.heap.digest == before
    world.barrier()


@worlds(1, 2)
def case_odd_tensors(world):
    try:
        import torch
    except ImportError:
        skip("PyTorch is not installed")
    grad = torch.ones(3, requires_grad=True)
    for source, words in (
        (grad, r"torch.Tensor of shape \(3,\) .*detach"),
        (torch.empty(3, device="meta"), r"torch.Tensor of shape \(3,\) .*meta.*a NumPy array"),
        (torch.ones(3).to_sparse(), r"torch.Tensor of shape \(3,\) .*layout"),
        ([grad], r"res_grad.*cannot be made an array: .*detach"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            world.array(source)
    assert (world.array(grad.detach()).numpy() == 1).all()
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


@worlds(2)
@pytest.mark.parametrize("what", ["config", "dtype", "priority"])
def case_peers_hear_of_errors_of_all_kinds(world, what):
    """Nobody waits for a rank whose call failed, and no later call is taken for it."""
    ones = np.ones((2, 2), np.float32)
    mine = world.rank == 1
    wrong = {"config": 3, "dtype": np.floating, "priority": "x"}[what]

    def call():
        if what == "config":
            return tdx.matmul_all_reduce(ones, ones, config=wrong if mine else None)
        if what == "dtype":
            return tdx.all_reduce(ones, out_dtype=wrong if mine else None)
        return world.new_stream(wrong)

    known = {"config": InvalidArgument, "dtype": DtypeError, "priority": InvalidArgument}[what]
    with pytest.raises(known if mine or what == "priority" else CollectiveMismatch):
        call()
    world.new_stream().synchronize()
    result = tdx.matmul_all_reduce(5 * ones, ones)
    assert (result == 20).all()


@worlds(2)
def case_arguments_that_no_key_holds(world):
    """A list as root or op is refused by name, and the peers hear of it."""
    mine, table = world.rank == 1, [
        ("reduce", "root", 0, [0]), ("reduce", "op", "sum", ["sum"]), ("reduce", "root", 0, {}),
        ("broadcast", "root", 1, np.array([1])), ("all_reduce", "op", "sum", ["sum"]),
        ("reduce_scatter", "op", "sum", {"sum"}), ("all_to_all", "algorithm", None, ["push"]),
    ]  # fmt: skip
    for size, (operation, name, right, wrong) in enumerate(table, 131):
        for ones in (np.ones((2, size), np.float32), world.array(np.ones((4, size), np.float32))):
            call = functools.partial(getattr(tdx, operation), ones)
            rest = {"root": 0} if operation in ("reduce", "broadcast") else {}
            with pytest.raises(InvalidArgument if mine else CollectiveMismatch) as caught:
                call(**rest | {name: wrong if mine else right})
            kind = type(wrong).__name__
            text = f"{operation}: {name}={wrong!r} is a {kind}, which no option takes"
            assert text in str(caught.value)
            call(**rest | {name: right})


@worlds(2)
def case_an_operand_that_fails_of_itself(world):
    """What a framework raises is told to the peers as well."""

    good = np.ones(4, np.float32)
    with pytest.raises(TdxError, match="was donated"):
        tdx.all_reduce(Refusing() if world.rank else good, op="max")
    assert (tdx.all_reduce(3 * good) == 6).all()


@isolated
@worlds(2)
def case_arrays_of_a_closed_world(comm, backend):
    """The open world's ranks are told of it, not only the one that has it."""
    first = tdx.init(comm, backend=backend, timeout_s=5)
    old = first.zeros(4, "float32")
    first.close()
    with pytest.raises(Closed):
        tdx.all_reduce(old)
    with tdx.init(comm, backend=backend, timeout_s=5) as world:
        x = world.zeros(4, "float32")
        start = time.monotonic()
        with pytest.raises(
            CollectiveMismatch if world.rank else Closed,
            match="x belongs to a world that was closed",
        ):
            tdx.all_reduce(x if world.rank else old)
        assert time.monotonic() - start < 4
        world.barrier()
        for call in (
            lambda: tdx.all_reduce(x, out=old),
            lambda: tdx.all_reduce(x, bias=old),
            lambda: tdx.put(x, old, 0),
        ):
            with pytest.raises((Closed, CollectiveMismatch), match="closed"):
                call()
            world.barrier()


@worlds(2)
def case_whether_calls_add_something(world):
    for given in (np.ones(4), "no", 1, None):
        for name in ("bias", "residual"):
            with pytest.raises(InvalidArgument, match=rf"all_reduce: {name}=.* True or False"):
                tdx.AllReduce(world, (4, 4), "float32", **{name: given})
    world.barrier()


@worlds(1)
def case_results_in_host_memory(world):
    """Refused alike wherever the world runs."""
    x, fixed = np.ones((4, 6), np.float32), np.zeros((4, 6), np.float32)
    fixed.flags.writeable = False
    for error, words, out in [
        (DtypeError, "out has dtype float64, expected float32", np.zeros((4, 6))),
        (InvalidArgument, r"out has shape \(24,\), expected \(4, 6\)", np.zeros(24, np.float32)),
        (InvalidArgument, "out .* contiguous", np.zeros((6, 4), np.float32).T),
        (InvalidArgument, "out is read-only", fixed),
    ]:
        with pytest.raises(error, match=words):
            tdx.all_reduce(x, out=out)
    assert (tdx.all_reduce(x, out=np.zeros((4, 6), np.float32)) == 1).all()
