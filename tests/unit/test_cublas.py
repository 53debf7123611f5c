"""cuBLAS as the bench calls it, over a library in C that has its functions and computes float32."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from tdx.runtime.errors import DriverError, InvalidArgument
from tdx.tools.cublas import Cublas, load
from tests.helpers.cases import skip

STREAM = 0x7F0012345678  # more than 32 bits, as handles and addresses have
SOURCE = """
#include <stddef.h>
static char *const handle = (char *)0x7f0087654321;
static char *stream, *workspace;
static size_t size;
int status;
int ended;
int cublasCreate_v2(void **given) { *given = handle; return status; }
int cublasDestroy_v2(void *h) { ended++; return h != handle; }
int cublasGetVersion_v2(void *h, int *version) { *version = 131000; return h != handle; }
int cublasSetStream_v2(void *h, void *s) { stream = s; workspace = NULL; return h != handle; }
int cublasSetWorkspace_v2(void *h, void *memory, size_t n) {
    workspace = memory, size = n;
    return h != handle;
}
const char *cublasGetStatusName(int number) {
    return number == 14 ? "CUBLAS_STATUS_INTERNAL_ERROR" : NULL;
}
int cublasGemmEx(void *h, int ta, int tb, int m, int n, int k, const float *alpha,
                 const float *a, int type_a, int lda, const float *b, int type_b, int ldb,
                 const float *beta, float *c, int type_c, int ldc, int compute, int algorithm) {
    if (status) return status;
    if (h != handle || stream != (char *)0x7f0012345678 || !workspace || size < 32 << 20) return 1;
    if (ta || tb || type_a || type_b || type_c || compute != 68 || algorithm != -1) return 7;
    if (lda < m || ldb < k || ldc < m || *beta != 0) return 7;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int l = 0; l < k; l++) sum += a[i + l * lda] * b[l + j * ldb];
            c[i + j * ldc] = *alpha * sum;
        }
    return 0;
}
"""


class Memory:
    """An array as far as cuBLAS asks."""

    is_contiguous = True

    def __init__(self, values):
        self.values = values
        self.shape, self.dtype, self.nbytes = values.shape, values.dtype, values.nbytes

    def data_ptr(self):
        return self.values.ctypes.data


@pytest.fixture
def folder(tmp_path):
    """Where wheels lie, with the library of CUDA 13."""
    compiler = shutil.which("cc") or shutil.which("gcc") or skip("no C compiler")
    source = tmp_path / "cublas.c"
    source.write_text(SOURCE)
    library = tmp_path / "nvidia" / "cu13" / "lib" / "libcublas.so.13"
    library.parent.mkdir(parents=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return str(tmp_path / "nvidia")


@pytest.fixture
def world():
    return SimpleNamespace(
        stream=SimpleNamespace(handle=STREAM),
        empty=lambda n, dtype, symmetric: Memory(np.empty(n, dtype)),
    )


def test_products(folder, world):
    """Of arrays that lie row by row, by a library for which they lie column by column."""
    cublas = Cublas(world, load(13, [folder]))
    assert cublas.name == "cuBLAS 13.10.0"
    rng = np.random.default_rng(1)
    for m, n, k in [(3, 5, 7), (1, 4, 2), (4, 1, 1)]:
        a, b = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((m, k), (k, n)))
        out = np.full((m, n), np.nan, np.float32)
        cublas.matmul(Memory(a), Memory(b), Memory(out))
        assert (out == a @ b).all()
    cublas.close()
    cublas.close()
    assert _variable(cublas, "ended").value == 1


def test_what_it_does_not_take(folder, world):
    cublas = Cublas(world, load(13, [folder]))
    x, y = (Memory(np.ones((4, 4), dtype)) for dtype in ("float32", "float16"))
    with pytest.raises(InvalidArgument, match="not with float16, float32"):
        cublas.matmul(x, x, y)
    with pytest.raises(InvalidArgument, match="one type of float32, float16, bfloat16"):
        cublas.matmul(*[Memory(np.ones((4, 4), "int8"))] * 3)
    y = Memory(np.ones((4, 4), "float32"))
    y.is_contiguous = False
    with pytest.raises(InvalidArgument, match="contiguous"):
        cublas.matmul(x, y, x)


def test_errors_have_number_and_name(folder, world):
    cublas = Cublas(world, load(13, [folder]))
    x = Memory(np.ones((4, 4), "float32"))
    status = _variable(cublas, "status")
    for number, text in ((14, r"CUBLAS_STATUS_INTERNAL_ERROR \(14\)"), (99, r"unknown .* \(99\)")):
        status.value = number
        with pytest.raises(DriverError, match=rf"\(4, 4\): cublasGemmEx gives .*{text}"):
            cublas.matmul(x, x, x)
        with pytest.raises(DriverError, match=f"cublasCreate_v2 gives .*{text}"):
            Cublas(world, load(13, [folder]))
    status.value = 0


@pytest.mark.parametrize(
    ("release", "wheel"), [(12, "nvidia-cublas-cu12==12"), (13, "nvidia-cublas==13")]
)
def test_no_library(tmp_path, release, wheel):
    """Said with the extra and the wheel that bring one, within what the bench prints of it."""
    with pytest.raises(DriverError) as caught:
        load(release, [str(tmp_path)])
    assert (
        f"no libcublas.so.{release}: install the extra cublas{release}" in str(caught.value)[:200]
    )
    assert wheel in str(caught.value)[:200]


def _variable(cublas, name):
    return ctypes.c_int.in_dll(cublas._library, name)
