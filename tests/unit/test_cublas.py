"""cuBLASLt as tdx calls it, over a library in C that has its functions and computes float32."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

from tdx.runtime.driver.cublas import Cublas, Gemm, Layout, Unfit, load
from tdx.runtime.errors import DriverError
from tests.helpers.cases import skip
from tests.standin.fake import CUBLAS, compile_library

STREAM = 0x7F0012345678  # more than 32 bits, as handles and addresses have


@pytest.fixture
def folder(tmp_path):
    """Where wheels lie, with the library of CUDA 13."""
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13"
    library.parent.mkdir(parents=True)
    try:
        compile_library(library, [CUBLAS])
    except FileNotFoundError as error:
        skip(str(error))
    return str(tmp_path / "nvidia")


@pytest.fixture
def cublas(folder):
    return Cublas(load(13, [folder]))


def variable(cublas, name):
    return ctypes.c_int.in_dll(cublas.library, f"fakecublas_{name}")


def aligned(shape):
    """An array of float32 that begins at a multiple of 16 bytes."""
    count = int(np.prod(shape))
    memory = np.full(count + 4, np.nan, np.float32)
    first = -memory.ctypes.data % 16 // 4
    return memory[first : first + count].reshape(shape)


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("bias", [True, False])
def test_products(cublas, turned, bias):
    """Of arrays that lie row by row, by a library for which they lie column by column."""
    assert cublas.name == "cuBLAS 13.1.0"
    rng = np.random.default_rng(1)
    workspace = np.zeros(4096, np.int8).ctypes.data
    for m, n, k in [(3, 5, 7), (1, 4, 2), (4, 1, 1)]:
        a, b = aligned((k, m) if turned[0] else (m, k)), aligned((n, k) if turned[1] else (k, n))
        for x in (a, b):
            x[:] = rng.integers(-8, 8, x.shape)
        vector, out = np.arange(n, dtype=np.float32), aligned((m, n))
        strides = (1, m) if turned[0] else (k, 1), (1, k) if turned[1] else (n, 1)
        layout = Layout(
            m, n, k, "float32", "float32", (*strides[0], *strides[1]), "float32" if bias else None
        )
        gemm = Gemm(cublas, layout)
        assert gemm.workspace == 4096
        places = (x.ctypes.data for x in (a, b, out, vector))
        gemm(STREAM, *places, 0, 0, workspace)
        wanted = (a.T if turned[0] else a) @ (b.T if turned[1] else b)
        assert (out == wanted + (vector if bias else 0)).all()
    del gemm
    gc.collect()
    assert variable(cublas, "live").value == 0
    for _ in range(2):
        cublas.close()
        assert variable(cublas, "handles").value == 0


def test_scales_go_to_the_other_side(cublas):
    """b comes first there."""
    layout = Layout(16, 32, 48, "float8_e4m3fn", "bfloat16", (48, 1, 1, 48), None, "one")
    gemm = Gemm(cublas, layout)
    log = (ctypes.c_uint64 * 36).in_dll(cublas.library, "fakecublas_log")
    for i, scales in enumerate([(1001, 1002), (1001, 1002), (2001, 1002)]):
        gemm(STREAM, 16, 32, 48, 0, *scales, 64)
        entry = log[12 * i : 12 * i + 12]
        assert entry == [16, 32, 48, 0, *scales, 64, STREAM, 16, 32, 48, 28]


def test_what_it_does_not_take(cublas):
    given = (16, 32, 48, "float8_e4m3fn", "bfloat16")
    with pytest.raises(Unfit, match=r"cuBLAS 13\.1\.0 has no algorithm for Layout\(rows=16"):
        Gemm(cublas, Layout(*given, (48, 1, 32, 1), None, "one"))  # b along N
    variable(cublas, "refuses").value = 1
    with pytest.raises(Unfit):
        Gemm(cublas, Layout(*given, (48, 1, 1, 48), None, "one"))
    gc.collect()
    assert variable(cublas, "live").value == 0


def test_alternatives(cublas):
    """Those that split K as the first one does, of types of which bits are known to be the same."""
    variable(cublas, "named").value = 7
    given = (16, 32, 48, "float8_e4m3fn", "bfloat16", (48, 1, 1, 48), None, "one")
    for layout, wanted in [
        (Layout(16, 32, 48, "bfloat16", "bfloat16", (48, 1, 32, 1)), [0, 1, 3, 4]),
        (Layout(*given), [0]), (Layout(4, 4, 4, "float32", "float32", (4, 1, 4, 1)), [0]),
    ]:  # fmt: skip
        gemm = Gemm(cublas, layout)
        found = gemm.alternatives(6)
        assert [one.algorithm.data[2] for one in found] == wanted
        for one in (found[-1], found[0]):
            gemm.take(one)
            if layout.dtype != "float32":  # of which it reads the operands
                gemm(STREAM, 16, 32, 48, 0, 16, 16, 64)
                assert variable(cublas, "last").value == one.algorithm.data[2]
        gemm.take(found[-1])
        assert gemm.alternatives(6)[0] is found[-1]


def test_errors_have_number_and_name(cublas):
    gemm = Gemm(cublas, Layout(4, 4, 4, "float32", "float32", (4, 1, 4, 1)))
    status = variable(cublas, "status")
    for number, text in ((14, r"CUBLAS_STATUS_INTERNAL_ERROR \(14\)"), (99, r"unknown .* \(99\)")):
        status.value = number
        with pytest.raises(DriverError, match=f"cublasLtMatmul gives .*{text}"):
            gemm(STREAM, 16, 16, 16, 0, 0, 0, 16)
        with pytest.raises(DriverError, match=f"cublasLtCreate gives .*{text}"):
            Cublas(cublas.library)
    status.value = 0


@pytest.mark.parametrize(
    ("release", "wheel"), [(12, "nvidia-cublas-cu12==12"), (13, "nvidia-cublas==13")]
)
def test_no_library(tmp_path, release, wheel):
    """Said with the extra and the wheel that bring one, within what the bench prints of it."""
    with pytest.raises(DriverError) as caught:
        load(release, [str(tmp_path)])
    name = f"libcublasLt.so.{release}"
    assert f"no {name}: install the extra cublas{release}" in str(caught.value)[:200]
    assert wheel in str(caught.value)[:200]
