"""tdx and CuPy arrays on one GPU: shared without a copy, ordered by events."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest

import tdx
from tdx.runtime.backends import nvidia_gpus

pytestmark = pytest.mark.gpu

if not nvidia_gpus():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
cupy = pytest.importorskip("cupy")

_DTYPES = ["int8", "uint8", "int32", "int64", "float16", "float32", "float64"]
_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;);
}
"""


@pytest.fixture(scope="module")
def world():
    with tdx.init(backend="cuda") as world:
        yield world


@pytest.fixture(scope="module")
def slow():
    """Occupies CuPy's current stream for tens of milliseconds."""
    kernel = cupy.RawKernel(_SPIN, "spin")
    return lambda: kernel((1,), (1,), (np.int64(50_000_000),))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_to_cupy_is_the_same_memory(world, dtype, symmetric):
    values = np.arange(60).astype(dtype).reshape(3, 4, 5)
    x = world.array(values, symmetric=symmetric)
    for exported in (cupy.from_dlpack(x), cupy.asarray(x)):
        assert exported.data.ptr == x.data_ptr()
        assert exported.dtype == values.dtype
        assert exported.strides == x.strides
        np.testing.assert_array_equal(exported.get(), values)
    view = x[:, 1:3, ::2]
    np.testing.assert_array_equal(cupy.from_dlpack(view).get(), values[:, 1:3, ::2])
    np.testing.assert_array_equal(cupy.from_dlpack(x.T).get(), values.T)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_from_cupy(world, dtype):
    values = np.arange(24).astype(dtype).reshape(4, 6)
    theirs = cupy.asarray(values)
    x = world.array(theirs)
    np.testing.assert_array_equal(x.numpy(), values)
    x.copy_from(theirs[::-1])
    np.testing.assert_array_equal(x.numpy(), values[::-1])
    y = world.empty((6, 4), dtype)
    y.copy_from(theirs.T)
    np.testing.assert_array_equal(y.numpy(), values.T)


def test_import_waits_for_the_producer(world, slow):
    with cupy.cuda.Stream(non_blocking=True):
        source = cupy.zeros(1 << 20, np.int32)
        slow()
        source += 7
        x = world.array(source)
    assert (x.numpy() == 7).all()


@pytest.mark.parametrize("through", ["dlpack", "interface"])
def test_export_waits_for_pending_work(world, slow, through):
    stream = cupy.cuda.Stream(non_blocking=True)
    x = world.zeros(1 << 20, np.int32)
    source = world.array(np.full(1 << 20, 5, np.int32))
    with cupy.cuda.ExternalStream(world.stream.handle):
        slow()
    x.copy_from(source)  # queued behind the slow kernel
    with stream:
        y = cupy.from_dlpack(x) if through == "dlpack" else cupy.asarray(x)
        assert int((y == 5).sum()) == 1 << 20  # on this stream, as the sum


def test_one_line_function_returns_cupy(world, slow):
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.zeros(1000, np.float32)
        slow()
        x += 3
        y = tdx.all_reduce(x)
        z = y * 2
        stream.synchronize()
    assert isinstance(y, cupy.ndarray)
    np.testing.assert_array_equal(z.get(), np.full(1000, 6.0 * world.size, np.float32))


def test_what_cupy_cannot_hold_says_so(world):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = world.zeros(8, ml_dtypes.float8_e4m3fn)
    with pytest.raises((BufferError, TypeError, ValueError, RuntimeError, NotImplementedError)):
        cupy.from_dlpack(x)
    with pytest.raises(AttributeError, match="use DLPack"):
        x.__cuda_array_interface__  # noqa: B018


def test_large_copies_through_pinned_memory(world):
    values = np.random.default_rng(0).integers(0, 256, (40 << 20) + 3, np.uint8)
    x = world.array(values, symmetric=False)
    assert (x.numpy() == values).all()


def test_exported_memory_outlives_its_array(world):
    x = world.array(np.arange(100), symmetric=False)
    exported = cupy.from_dlpack(x)
    del x
    gc.collect()
    others = [world.zeros(100, np.int64, symmetric=False) for _ in range(100)]
    np.testing.assert_array_equal(exported.get(), np.arange(100))
    del others


def test_exported_memory_outlives_its_world(world):
    world.close()  # the last test of the module
    with tdx.init(backend="cuda") as own:
        x = own.array(np.arange(100))
        y = own.array(np.arange(100), symmetric=False)
        kept = [cupy.from_dlpack(x), cupy.from_dlpack(y)]
        del x, y
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            own.close()
    for exported in kept:
        np.testing.assert_array_equal(exported.get(), np.arange(100))
    del exported
    kept.clear()
    gc.collect()
    with tdx.init(backend="cuda") as again:
        assert (again.array(np.arange(5)).numpy() == np.arange(5)).all()
