"""Arrays of other frameworks: whose they are, their memory, and results for them."""

from __future__ import annotations

import subprocess
import sys
import types
from contextlib import contextmanager, nullcontext

import ml_dtypes
import numpy as np
import pytest

from tdx.interop import cupy_arrays, generic, jax_arrays, numpy_arrays, owner_of, torch_tensors
from tdx.runtime import dlpack, dtypes
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported


class Producer:
    """Host memory, aligned as a heap is, exported as a tdx array would be."""

    def __init__(self, shape, dtype, device=(dlpack.CPU, 0)):
        self.shape = shape
        self.dtype = dtypes.resolve(dtype)
        self.device = device
        size = int(np.prod(shape)) * self.dtype.itemsize
        self.raw = np.zeros(size + 256, np.uint8)
        start = -self.raw.ctypes.data % 256
        self.array = self.raw[start : start + size].view(self.dtype).reshape(shape)
        self.released = 0

    def done(self):
        self.released += 1

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        a = self.array
        return dlpack.capsule(
            self.raw,
            a.ctypes.data,
            a.shape,
            a.strides,
            a.dtype,
            self.device,
            max_version,
            released=self.done,
        )


def values(imported):
    return dlpack.numpy_view(
        imported, imported.address, imported.shape, imported.strides, imported.dtype
    )


def test_importing_interop_loads_no_framework():
    code = (
        "import sys, tdx.interop as i, numpy; i.owner_of(numpy.zeros(1));"
        "sys.exit(any(m in sys.modules for m in ('torch', 'jax', 'cupy', 'mpi4py')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_world_knows_the_frameworks():
    """Without one of the library's functions, which import this package."""
    code = (
        "import tdx, numpy; from tdx.runtime import foreign; tdx.init;"
        "assert foreign._owner_of(numpy.zeros(1)).name == 'numpy'"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("thing", [None, [1.0], 3, np.float32(3), np.ndarray, "x"], ids=repr)
def test_things_without_an_owner(thing):
    assert owner_of(thing) is None


# -- NumPy


class Matrix(np.ndarray):
    """A class derived by the user."""


def test_numpy():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert owner_of(array) is numpy_arrays
    assert owner_of(array.view(Matrix)) is numpy_arrays
    assert numpy_arrays.stream_of(array) is None
    result = numpy_arrays.empty((4, 5), np.dtype(ml_dtypes.bfloat16), array)
    memory = numpy_arrays.describe(result)
    values(memory)[...] = 2
    assert (result == 2).all()
    assert memory.contiguous


@pytest.mark.parametrize("dtype", dtypes.SUPPORTED, ids=str)
def test_numpy_adopts_every_type(dtype):
    producer = Producer((3, 2), dtype)
    array = numpy_arrays.adopt(producer, None)
    assert array.dtype == dtype
    array[1, 1] = 1
    assert producer.array[1, 1] == 1
    view = array[1:]
    del array
    assert producer.released == 0
    del view
    assert producer.released == 1


def test_numpy_refuses_device_memory():
    with pytest.raises(BufferError, match=r"numpy\(\)"):
        numpy_arrays.adopt(Producer((2,), "f4", (dlpack.CUDA, 0)), None)


# -- JAX

JAX_TYPES = [d for d in dtypes.SUPPORTED if d.name not in ("int64", "uint64", "float64")]
JAX_TYPES.remove(np.dtype("complex128"))


def test_jax_arrays_are_read_only_and_complete():
    jax = pytest.importorskip("jax")
    x = jax.numpy.full((500, 500), 2.0)
    assert owner_of(x) is jax_arrays
    assert jax_arrays.stream_of(x) is None
    y = jax.jit(lambda a: a @ a @ a)(x)  # still running when it is described
    memory = jax_arrays.describe(y)
    assert memory.readonly
    assert memory.device == (dlpack.CPU, 0)
    assert (values(memory) == 2.0**3 * 500**2).all()
    assert memory.address == y.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", JAX_TYPES, ids=str)
def test_jax_round_trip(dtype):
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((3, 2), dtype)
    memory = jax_arrays.describe(x)
    assert memory.dtype == dtype
    assert (values(memory) == 1).all()
    assert jax_arrays.empty((3, 2), dtype, x) is None
    producer = Producer((3, 2), dtype)
    producer.array[...] = 1
    result = jax_arrays.adopt(producer, x)
    assert owner_of(result) is jax_arrays
    assert result.dtype == dtype
    assert result.unsafe_buffer_pointer() == producer.array.ctypes.data
    assert bool((result == x).all())
    assert producer.released == 0
    del result
    assert producer.released == 1


def test_jax_would_narrow():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones(3)
    with pytest.raises(DtypeError, match="jax_enable_x64"):
        jax_arrays.empty((3,), np.dtype(np.int64), x)
    with pytest.raises(DtypeError, match="jax_enable_x64"):
        jax_arrays.adopt(Producer((3,), "float64"), x)


def test_jax_tracers_are_refused():
    jax = pytest.importorskip("jax")

    def traced(x):
        assert owner_of(x) is jax_arrays
        with pytest.raises(InvalidArgument, match=r"jax\.jit"):
            jax_arrays.describe(x)
        return x

    jax.jit(traced)(jax.numpy.ones(3))


# -- PyTorch


@pytest.mark.parametrize("dtype", dtypes.SUPPORTED, ids=str)
def test_torch_round_trip(dtype):
    torch = pytest.importorskip("torch")
    x = torch.zeros((3, 4), dtype=getattr(torch, dtype.name)).T
    assert owner_of(x) is torch_tensors
    assert torch_tensors.stream_of(x) is None
    memory = torch_tensors.describe(x)
    through_dlpack = dlpack.import_array(x)
    for field in ("address", "shape", "strides", "dtype", "device", "readonly"):
        assert getattr(memory, field) == getattr(through_dlpack, field)
    result = torch_tensors.empty((2, 5), dtype, x)
    values(torch_tensors.describe(result))[...] = 1
    assert bool((result.to(torch.complex64) == 1).all())
    producer = Producer((2, 5), dtype)
    adopted = torch_tensors.adopt(producer, x)
    adopted.copy_(result)
    assert (producer.array == 1).all()
    assert adopted.dtype == x.dtype
    del adopted
    assert producer.released == 1


def test_torch_gradients_are_not_lost_silently():
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(3))
    assert owner_of(weight) is torch_tensors
    with pytest.raises(InvalidArgument, match="detach"):
        torch_tensors.describe(weight)
    with torch.no_grad():
        assert torch_tensors.describe(weight).address == weight.data_ptr()
    assert torch_tensors.describe(weight.detach()).address == weight.data_ptr()


def test_torch_tensors_without_plain_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArgument, match="to_dense"):
        torch_tensors.describe(torch.eye(3).to_sparse())
    with pytest.raises(InvalidArgument, match="resolve_conj"):
        torch_tensors.describe(torch.ones(3, dtype=torch.complex64).conj())


def test_torch_subclass():
    torch = pytest.importorskip("torch")

    class Mine(torch.Tensor):
        pass

    x = torch.ones(3).as_subclass(Mine)
    assert owner_of(x) is torch_tensors
    assert torch_tensors.describe(x).address == x.data_ptr()


def test_torch_subclass_on_another_gpu_than_the_current(monkeypatch):
    """PyTorch exports from the current one only."""
    torch = pytest.importorskip("torch")
    entered = []

    class Mine(torch.Tensor):
        def __dlpack__(self, **named):
            assert entered == ["in"]
            return super().__dlpack__(**named)

    @contextmanager
    def device_of(x):
        entered.append("in")
        yield
        entered.append("out")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x = torch.ones(3).as_subclass(Mine)
    assert torch_tensors.describe(x).address == x.data_ptr()
    assert entered == ["in", "out"]


# -- CuPy, played by a module with the attributes that are used


@pytest.fixture
def cupy(monkeypatch):
    module = types.ModuleType("cupy")

    class Device(nullcontext):
        id = 3

    class ndarray:
        def __init__(self, shape, dtype):
            self.shape, self.dtype, self.strides = shape, dtype, (dtype.itemsize,)
            self.data = types.SimpleNamespace(ptr=4096, device_id=3)
            self.device = Device()

    def empty(shape, dtype):
        if dtype.name.startswith("float8"):
            raise TypeError("unsupported")
        return ndarray(shape, dtype)

    ndarray.__module__ = "cupy._core.core"
    module.ndarray, module.empty, module.__version__ = ndarray, empty, "13.0"
    module.cuda = types.SimpleNamespace(
        get_current_stream=lambda: types.SimpleNamespace(ptr=77),
        runtime=types.SimpleNamespace(is_hip=False),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_cupy(cupy):
    x = cupy.ndarray((5,), np.dtype("f4"))
    assert owner_of(x) is cupy_arrays
    assert cupy_arrays.stream_of(x) == 77
    memory = cupy_arrays.describe(x)
    assert (memory.address, memory.device, memory.strides) == (4096, (dlpack.CUDA, 3), (4,))
    assert cupy_arrays.empty((2,), np.dtype("f8"), x).dtype == np.float64
    with pytest.raises(DtypeError, match="out="):
        cupy_arrays.empty((2,), np.dtype(ml_dtypes.float8_e5m2), x)


# -- anything else


def test_unknown_producers_go_through_dlpack():
    producer = Producer((2, 2), "f4")
    assert owner_of(producer) is generic
    assert owner_of(Producer) is None
    assert generic.stream_of(producer) is None
    assert generic.describe(producer).shape == (2, 2)
    with pytest.raises(Unsupported, match="out="):
        generic.empty((2,), np.dtype("f4"), producer)


def test_unknown_frameworks_adopt_through_their_namespace():
    class Array(Producer):
        def __array_namespace__(self):
            return types.SimpleNamespace(from_dlpack=lambda p: ("adopted", p))

    like, result = Array((2,), "f4"), Producer((2,), "f4")
    assert generic.empty((2,), np.dtype("f4"), like) is None
    assert generic.adopt(result, like) == ("adopted", result)
