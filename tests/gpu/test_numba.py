"""Numba's device arrays, which show `__cuda_array_interface__` and are no DLPack producers."""

from __future__ import annotations

import numpy as np
import pytest

import tdx
from tdx.errors import DtypeError
from tdx.runtime.backends import nvidia_gpus

pytestmark = pytest.mark.gpu

if not nvidia_gpus():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytest.importorskip("numba")


@pytest.fixture
def world():
    with tdx.init(backend="cuda") as world:
        yield world


@pytest.fixture
def cuda(world):
    from numba import cuda

    cuda.select_device(world.device.index)
    return cuda


@pytest.fixture
def compiling(cuda):
    """Numba's compiler, which some versions of NumPy break (2.5 has no row_stack)."""
    try:
        cuda.jit("void(float32[:])")(lambda values: None)
    except Exception as error:
        pytest.skip(f"Numba compiles nothing here: {type(error).__name__}: {error}")
    return cuda


def test_results_are_numbas(world, cuda):
    given = np.arange(1000, dtype=np.float32)
    x = cuda.to_device(given)
    result = tdx.all_reduce(x)
    assert cuda.is_cuda_array(result)
    assert type(result) is type(x)
    assert (result.copy_to_host() == given * world.size).all()
    out = cuda.device_array_like(x)
    assert tdx.all_reduce(x, out=out) is out
    assert (out.copy_to_host() == given * world.size).all()
    with pytest.raises(DtypeError, match="cannot express"):
        tdx.all_reduce(x, out_dtype="bfloat16")


def test_on_a_stream_of_numbas(world, cuda):
    """Behind what is queued there, without a wait of the host."""
    stream = cuda.stream()
    given = np.arange(1 << 22, dtype=np.int32)
    x = cuda.to_device(given, stream=stream)
    out = cuda.device_array(given.shape, given.dtype, stream=stream)
    for factor in (1, 2, 3):
        x.copy_to_device(given * factor, stream=stream)
        tdx.all_reduce(x, out=out)
        assert (out.copy_to_host(stream=stream) == given * factor * world.size).all()
        stream.synchronize()


def test_copies_of_numbas_arrays(world, compiling):
    """Where they are, in the order of their stream; also of what is not contiguous."""
    cuda = compiling  # which transposes by a kernel
    given = np.arange(12, dtype=np.float32).reshape(3, 4)
    stream = cuda.stream()
    x = cuda.to_device(given, stream=stream)
    assert (world.array(x).numpy() == given).all()
    y = world.zeros((4, 3), "float32")
    assert (y.copy_from(x.T).numpy() == given.T).all()
    assert (tdx.all_reduce(x.T).copy_to_host() == given.T * world.size).all()


def test_numba_reads_and_writes_arrays_of_tdx(world, compiling):
    cuda = compiling

    @cuda.jit
    def double(values):
        i = cuda.grid(1)
        if i < values.size:
            values[i] *= 2

    x = world.array(np.arange(100, dtype=np.float32))
    seen = cuda.as_cuda_array(x)
    assert seen.__cuda_array_interface__["data"][0] == x.data_ptr()
    double[1, 128](seen)
    cuda.synchronize()
    assert (x.numpy() == 2 * np.arange(100)).all()
