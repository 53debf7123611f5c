"""Graphs that PyTorch and CuPy record, with tdx's calls in them."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest

import tdx
from tdx.runtime.backends import nvidia_gpus
from tdx.runtime.errors import InvalidArgument
from tests.helpers.frameworks import missing

pytestmark = pytest.mark.gpu

if not nvidia_gpus():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

N = 1000
_VALUES = (2.0, 3.0, -5.0, 3.0)  # inputs of replays


@pytest.fixture(scope="module")
def world():
    with tdx.init(backend="cuda") as world:
        yield world


@pytest.fixture
def torch(world):
    if why := missing("torch", "cuda"):
        pytest.skip(why)
    import torch

    torch.cuda.set_device(world.device.index)
    return torch


@pytest.fixture
def cupy(world):
    cupy = pytest.importorskip("cupy")
    cupy.cuda.Device(world.device.index).use()
    return cupy


def filled(value):
    return np.full(N, value, np.float32)


def test_torch_records_a_function(world, torch):
    """Between kernels of PyTorch; warmed up by one call, as the tutorial says."""
    given, x, y, z = (torch.zeros(N, device="cuda") for _ in range(4))
    tdx.all_reduce(x, out=y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(given, 1, out=x)
        tdx.all_reduce(x, out=y)
        torch.mul(y, 2, out=z)
    for value in _VALUES:
        given.fill_(value)
        graph.replay()
        np.testing.assert_array_equal(z.cpu().numpy(), filled(2 * value + 2))
        tdx.all_reduce(given, out=y)  # calls between replays
        np.testing.assert_array_equal(y.cpu().numpy(), filled(value))


def test_torch_records_a_function_in_place(world, torch):
    t = torch.zeros(N, device="cuda")
    tdx.all_reduce(t, out=t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tdx.all_reduce(t, out=t)
        t += 1
    for value in _VALUES:
        t.fill_(value)
        graph.replay()
        graph.replay()
        np.testing.assert_array_equal(t.cpu().numpy(), filled(value + 2))


def test_torch_records_a_fresh_result(world, torch):
    """It is in the graph's own memory, and each replay overwrites it."""
    x = torch.zeros(N, device="cuda")
    tdx.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tdx.all_reduce(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for value in _VALUES:
            x.fill_(value)
            graph.replay()
            np.testing.assert_array_equal(y.cpu().numpy(), filled(value))


def test_torch_records_a_plan(world, torch):
    """A plan needs no call before; with `out=`, and into its own buffer."""
    x, y = (torch.zeros(N, device="cuda") for _ in range(2))
    plan = tdx.AllReduce(world, N, "float32")
    other = tdx.AllReduce(world, N, "float32", op="max")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(x, out=y)
        buffer = other(y)
    seen = torch.from_dlpack(buffer)
    for value in _VALUES:
        x.fill_(value)
        graph.replay()
        np.testing.assert_array_equal(y.cpu().numpy(), filled(value))
        np.testing.assert_array_equal(seen.cpu().numpy(), filled(value))
    del plan, other, buffer
    gc.collect()
    x.fill_(11)
    graph.replay()  # the world holds what was recorded
    np.testing.assert_array_equal(seen.cpu().numpy(), filled(11))


def test_torch_records_arrays_of_tdx(world, torch):
    """They follow PyTorch's current stream, and are held until the world is closed."""
    x, y = (world.zeros(N, "float32", symmetric=False) for _ in range(2))
    tdx.all_reduce(x, out=y)
    theirs, result = torch.from_dlpack(x), torch.from_dlpack(y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tdx.all_reduce(x, out=y)
    for value in _VALUES:
        theirs.fill_(value)
        graph.replay()
        np.testing.assert_array_equal(result.cpu().numpy(), filled(value))
    np.testing.assert_array_equal(y.numpy(), filled(_VALUES[-1]))
    del theirs, result
    gc.collect()
    for array in (x, y):
        with pytest.raises(InvalidArgument, match="recorded graph"):
            array.free()


def test_torch_records_a_product_of_cublas(world, torch, monkeypatch):
    """Of a plan that was made before and not called: nothing is left to load."""
    monkeypatch.setattr(tdx.config, "cublas", True)
    m, k, n = 256, 1024, 1536  # large enough for it
    x, y = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n)))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    plan = tdx.AllGatherMatmul(world, (m, k), (k, n), "bfloat16", algorithm="unfused")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(x, y, out)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(out, tdx.matmul(x, y, library=True))
        assert not torch.equal(out, torch.zeros_like(out))


def test_torch_records_nothing_that_was_not_called_before(world, torch):
    """The call says what to do, and the world goes on."""
    x = torch.ones(N + 1, device="cuda")
    y = torch.zeros_like(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's, of an empty graph
        with (
            pytest.raises(InvalidArgument, match="call it once before"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            tdx.all_reduce(x, out=y)
    tdx.all_reduce(x, out=y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tdx.all_reduce(x, out=y)
    x.fill_(4)
    graph.replay()
    np.testing.assert_array_equal(y.cpu().numpy(), np.full(N + 1, 4, np.float32))


def test_cupy_records_a_function(world, cupy):
    """Between kernels of CuPy, all of them called once before."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        given, x, y, z = (cupy.zeros(N, cupy.float32) for _ in range(4))

        def step():
            cupy.add(given, given, out=x)
            tdx.all_reduce(x, out=y)
            cupy.add(y, x, out=z)

        step()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        for value in _VALUES:
            given.fill(value)
            graph.launch(stream)
            np.testing.assert_array_equal(z.get(), filled(4 * value))
            tdx.all_reduce(given, out=y)  # calls between replays
            np.testing.assert_array_equal(y.get(), filled(value))


def test_cupy_records_a_plan(world, cupy):
    """A plan needs no call before; on the stream that is named, too."""
    plan = tdx.AllReduce(world, N, "float32")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, y, z = (cupy.zeros(N, cupy.float32) for _ in range(3))
        stream.begin_capture()
        plan(x, out=y)
        plan(y, out=z, stream=stream)
        graph = stream.end_capture()
        for value in _VALUES:
            x.fill(value)
            graph.launch(stream)
            np.testing.assert_array_equal(z.get(), filled(value))
        del plan
        gc.collect()
        x.fill(11)
        graph.launch(stream)  # the world holds what was recorded
        np.testing.assert_array_equal(z.get(), filled(11))


def test_cupy_records_copies(world, cupy):
    """Of a transposed operand, and inside `world.on`; elsewhere they are refused, and the recording
    stays good."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x, y = cupy.asarray(values), cupy.zeros((4, 3), cupy.float32)
        z = world.zeros((4, 3), "float32")
        tdx.all_reduce(x.T, out=y)
        stream.begin_capture()
        tdx.all_reduce(x.T, out=y)
        for call in (lambda: world.array(x), lambda: z.copy_from(x.T)):
            with pytest.raises(InvalidArgument, match="records its stream"):
                call()
        with world.on(stream):
            z.copy_from(x.T)
        graph = stream.end_capture()
        for value in _VALUES:
            x.fill(value)
            graph.launch(stream)
            np.testing.assert_array_equal(y.get(), np.full((4, 3), value, np.float32))
            stream.synchronize()
            np.testing.assert_array_equal(z.numpy(), np.full((4, 3), value, np.float32))


def test_cupy_replays_on_another_stream(world, cupy):
    """The graph goes where it is launched; what CuPy does elsewhere is the caller's to order."""
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with first:
        x, y = (cupy.zeros(N, cupy.float32) for _ in range(2))
        tdx.all_reduce(x, out=y)
        first.begin_capture()
        tdx.all_reduce(x, out=y)
        graph = first.end_capture()
    first.synchronize()
    with second:
        for value in _VALUES:
            x.fill(value)
            graph.launch(second)
            np.testing.assert_array_equal(y.get(), filled(value))
