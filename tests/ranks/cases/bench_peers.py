"""What `tdx bench` compares products with: PyTorch on the CPU here, and peers that fail."""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import importlib.util
import socket
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import tdx
from tdx.tools import peers as peers_of
from tdx.tools.bench import Bench, _notes
from tdx.tools.comparison import Comparison, Way
from tdx.tools.cupy_peers import CupyPeers, unique_id
from tdx.tools.peers import TorchPeers, _without_torch
from tdx.tools.product_peers import CublasProducts, TorchProducts
from tdx.tools.reference import Summands
from tests.helpers.cases import limit, skip, worlds

PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def bench_of(world, operation, *shapes, dtype="float32"):
    words = {"operation": operation, "dtype": dtype, "no_peers": True, "sizes": None}
    words |= {"preset": None, "all_algorithms": False}
    return Bench(world, argparse.Namespace(**words, shapes=list(shapes)))


@contextlib.contextmanager
def torch_on_the_cpu(world):
    """What TorchProducts asks of TorchPeers, with Gloo instead of NCCL and no graphs."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1]).encode()
    port = int(world.channels.allgather(port, "port")[0])
    store = dist.TCPStore("127.0.0.1", port, world.size, world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)

    def queued(call):
        if world.recording is None:  # PyTorch computes at once
            world.synchronize()
        return call()

    def recorded(call, calls):
        return lambda: [queued(call) for _ in range(calls)]

    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for name in (
        "fused_all_gather_matmul", "fused_matmul_reduce_scatter", "fused_all_gather_scaled_matmul",
        "fused_scaled_matmul_reduce_scatter",
    ):  # fmt: skip
        library.impl(name, getattr(symm, f"_{name}_fallback"))
    try:
        yield SimpleNamespace(
            torch=torch, dist=dist, symm=symm, group=dist.group.WORLD, queued=queued,
            recorded=recorded, stream=lambda: None,
        )  # fmt: skip
    finally:
        library._destroy()
        dist.destroy_process_group()


@worlds(3)
@limit(120)  # PyTorch alone takes seconds to start
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def case_pytorch(world, backend, dtype):
    """Each way of PyTorch gives the right result, by the names of its columns."""
    if backend != "host":
        pytest.skip("on GPUs `tdx bench` itself shows it")
    if not importlib.util.find_spec("torch"):
        skip("torch is not installed")
    with torch_on_the_cpu(world) as stand_in:
        norm = ("all_reduce_rms_norm",) * (dtype == "float32")  # there is none of float8
        for operation in (*PRODUCTS, *norm):
            shape = "4,24" if operation in norm else "12,32,48"
            bench = bench_of(world, operation, shape, dtype=dtype)
            bench.peers.products = TorchProducts(stand_in)
            module = importlib.import_module(f"tdx.bench.{operation}")
            (row,) = module.rows(bench)
            assert "error" not in row, row
            failed = row.get("failed", {})
            wanted = {name for name in module.COLUMNS if "library" in name or name == "async_tp"}
            assert wanted == {name for name in wanted if row.get(name, 0) > 0} | set(failed), row
            cannot = {"symm+library"}  # it needs a GPU
            if operation == "all_gather_matmul" and dtype != "float32":
                cannot.add("async_tp")  # Gloo moves no float8
            assert set(failed) <= cannot, failed


@worlds(1, 3)
def case_peers_that_fail(world):
    """What fails on one rank is left out on all, and named with its reason; the rest is timed."""
    operands = Summands(world, (6, 70, 5), np.dtype("float32"))
    result = operands.product()
    right = operands.a.numpy().astype(np.float64) @ operands.b.numpy()
    last = world.size - 1
    wrong = right + (np.arange(70) == 69) * (world.rank == last)  # one column, on one rank

    def writes(values):
        call = partial(result.out.copy_from, values.astype(np.float32))
        return lambda: Way(call, lambda calls: lambda: None)

    def refuses(*_):
        if world.rank == last:
            raise RuntimeError("no\nsuch operation")

    row = {}
    compared = Comparison(world, row, 2)
    makers = {
        "right": writes(right),
        "wrong": writes(wrong),
        "nothing": lambda: Way(lambda: None),
        "not made": refuses,
        "not called": lambda: Way(refuses),
        "not recorded": lambda: Way(writes(right)().call, refuses),
    }
    compared.peers(makers, result)
    compared.ours("ours", partial(tdx.matmul, operands.a, operands.b, out=result.out), result)
    assert "error" not in row
    compared.time()
    failed = row.pop("failed")
    assert set(row) == {"right", "ours"}
    assert set(failed) == set(makers) - {"right"}
    where = f"rank {last}: " if last else ""
    assert failed["wrong"].startswith(f"{where}WrongResult: relative error")
    assert failed["nothing"] == "WrongResult: 420 of 420 elements were not written"
    for name in ("not made", "not recorded"):
        assert failed[name] == f"{where}RuntimeError: no such operation"


@worlds(1, 2)
def case_own_wrong_result(world):
    """On one rank: an error of the row on all."""
    operands = Summands(world, (6, 70, 5), np.dtype("bfloat16"))
    a, result = operands.a, operands.product()
    last = world.rank == world.size - 1
    b = world.zeros((5, 70), "bfloat16", symmetric=False) if last else operands.b
    row = {}
    Comparison(world, row, 2).ours("ours", partial(tdx.matmul, a, b, out=result.out), result)
    where = "" if world.size == 1 else "rank 1: "
    assert row["error"] == f"ours: {where}relative error 1.0e+00, bound 5e-03"


@worlds(1, 2)
def case_collectives_that_fail(world):
    """The others are timed all the same; the table has a star and a note below."""
    peers = object.__new__(TorchPeers)  # without PyTorch
    peers._world = world
    peers.recorded = lambda call, calls: call
    last = world.size - 1

    def fails():
        if world.rank == last:
            raise RuntimeError("no such operation")

    times = peers._times({"nccl": lambda: world.check, "other": fails}, 8)
    where = f"rank {last}: " if last else ""
    assert times["nccl"] >= 0
    assert times["failed"] == {"other": f"{where}RuntimeError: no such operation"}
    notes = _notes("", ("bytes", "nccl", "other"), [{"bytes": 8, **times}, {"bytes": 9, **times}])
    assert notes == [f"* other at 8 and 1 more: {where}RuntimeError: no such operation"]


@worlds(2)
def case_nccl_through_cupy(world):
    """What CuPy's communicator is asked for; a stand-in that moves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy := cupy_of(world))
        patch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
        number = world.channels.allgather(unique_id() if world.rank == 0 else b"", "id")[0]
        peers = CupyPeers(world, number, "no PyTorch")
        floats, numbers = np.ones(8, np.float32), np.arange(8, dtype=np.uint8)
        assert peers.names == "CuPy 14, NCCL 2.28.9 without NVLS"
        assert peers.all_reduce(floats.astype("bfloat16"))["nccl"] >= 0
        assert peers.reduce_scatter(floats)["nccl"] >= 0
        for kind in ("all_gather", "all_to_all", "broadcast"):
            assert getattr(peers, kind)(numbers)["nccl"] >= 0
        failed = peers.all_reduce(floats.astype("int16"))["failed"]["nccl"]
        assert "NCCL_INT16" in failed
        peers.close()
    calls = cupy.cuda.nccl.calls
    assert calls["allReduce"] == {(8, 9, 0)}
    assert calls["reduceScatter"] == {(4, 7, 0)}
    assert calls["allGather"] == {(8, 1)}
    assert calls["send"] == calls["recv"] == {(4, 1, 0), (4, 1, 1)}
    assert calls["broadcast"] == {(8, 1, 0)}
    assert calls["destroy"] == {()}
    columns, rows = ("bytes", "nccl"), [{"bytes": 8, "nccl": 1.0}]
    assert _notes("no PyTorch", columns, rows) == []
    assert _notes("no PyTorch", ("M", "nccl+library"), [{"M": 8}])


class OnTheHost:
    """NCCL's collectives, as CublasProducts asks for them, at once."""

    def __init__(self, world):
        self.world = world

    def everybody(self, x):
        self.world.synchronize()
        told = self.world.channels.allgather(x.numpy().tobytes(), "operands")
        return [np.frombuffer(each, x.dtype).reshape(x.shape) for each in told]

    def gathered(self, x, out):
        if self.world.recording is None:
            out.copy_from(np.concatenate(self.everybody(x)))

    def reduced(self, x, out):
        if self.world.recording is None:
            out.copy_from(np.sum(self.everybody(x), axis=0))

    def scattered(self, x, out):
        if self.world.recording is None:
            total = np.sum(self.everybody(x), axis=0)
            out.copy_from(np.split(total, self.world.size)[self.world.rank])


@worlds(2)
@pytest.mark.parametrize("nccl", [True, False])
def case_products_of_cublas(world, nccl):
    """Without PyTorch: the library's product, and sequences with it, with NCCL if CuPy has that."""
    if world.backend != "host":
        pytest.skip("on GPUs `tdx bench` itself shows it")
    there = OnTheHost(world)

    def multiply(a, b, out):
        if world.recording is None:
            world.synchronize()
            out.copy_from(a.numpy() @ b.numpy())

    for operation in PRODUCTS:
        bench = bench_of(world, operation, "8,12,16")
        bench.peers.products = CublasProducts(world, there if nccl else None)
        bench.peers.products.multiply = multiply
        (row,) = importlib.import_module(f"tdx.bench.{operation}").rows(bench)
        assert not row.keys() & {"error", "failed"}, row
        names = {"library", "tdx+library"} | ({"nccl+library"} if nccl else set())
        assert {name for name in row if "library" in name} == names
        notes = _notes("no CuPy", ("library", "nccl+library"), [row])
        said = "no collectives to compare with (no CuPy): those columns are empty"
        assert notes == ([] if nccl else [said])
    bench.peers.close()


@worlds(1, 2)
def case_without_pytorch(world):
    """cuBLAS is taken if it is there; what is not there is said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        patch.setattr(peers_of, "start_library", lambda world: world.no_such_library)
        peers = _without_torch(world, "no PyTorch")
        assert (peers.missing, peers.names) == ("no PyTorch; CuPy is not installed", "")
        assert "no_such_library" in peers.products.missing
        assert peers.products.matmul(None, None, None) == {}
        patch.setattr(peers_of, "start_library", lambda world: SimpleNamespace(name="cuBLAS 13"))
        peers = _without_torch(world, "no PyTorch")
        assert peers.names == "cuBLAS 13"
        assert set(peers.products.matmul(None, None, None)) == {"library"}


def cupy_of(world):
    """As much of CuPy as there is to call; what was called, without addresses and streams."""
    calls = collections.defaultdict(set)
    stream, addresses = world.stream.handle, {"allReduce": 2, "reduceScatter": 2, "allGather": 2}

    def verb(name):
        def call(*words):
            assert name == "destroy" or words[-1] == stream
            calls[name].add(tuple(words[addresses.get(name, 2 if name == "broadcast" else 1) : -1]))

        return call

    names = ("allReduce", "reduceScatter", "allGather", "send", "recv", "broadcast", "destroy")

    def communicator(size, number, rank):
        assert (size, number, rank) == (world.size, (1, -2), world.rank)
        return SimpleNamespace(**{name: verb(name) for name in names})

    nccl = SimpleNamespace(
        NCCL_SUM=0, NCCL_UINT8=1, NCCL_FLOAT32=7, NcclCommunicator=communicator, calls=calls,
        get_unique_id=lambda: (1, -2), get_version=lambda: 22809,
        groupStart=lambda: None, groupEnd=lambda: None,
    )  # fmt: skip
    device = SimpleNamespace(use=lambda: None)
    cuda = SimpleNamespace(nccl=nccl, Device=lambda index: device)
    return SimpleNamespace(cuda=cuda, __version__="14")
