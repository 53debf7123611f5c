"""Names and facts of element types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tdx.runtime import dtypes
from tdx.runtime.errors import DtypeError

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)


class Named:
    """Stands for a dtype object of a framework, which prints as its name."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


@pytest.mark.parametrize("dtype", dtypes.SUPPORTED, ids=str)
def test_every_form_of_a_type_resolves_to_it(dtype):
    for form in (dtype, dtype.type, dtype.name, Named(f"torch.{dtype.name}"), f"x.{dtype.name}"):
        assert dtypes.resolve(form) is dtypes.resolve(dtype)
        assert dtypes.resolve(form) == dtype


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (bool, np.bool_),
        (int, np.int64),
        (float, np.float64),
        (complex, np.complex128),
        ("bf16", BF16),
        ("fp16", np.float16),
        ("half", np.float16),
        ("fp32", np.float32),
        ("fp64", np.float64),
        ("fp8e4nv", E4M3),
        ("fp8e5", E5M2),
        ("int1", np.bool_),
        ("<f4", np.float32),
        ("i8", np.int64),
        (np.intc, np.int32),
        (np.dtype("q"), np.int64),
    ],
)
def test_other_names(form, expected):
    assert dtypes.resolve(form) == np.dtype(expected)


@pytest.mark.parametrize(
    "form",
    [
        None,
        ">f4",
        np.dtype(">i8"),
        "O",
        object,
        str,
        "U3",
        "f4,i4",
        np.dtype([("a", "f4")]),
        "M8[s]",
        np.longdouble,
        ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.int4,
        "float31",
        "",
        "fp8e4b8",
        3,
        np.zeros(3),
        Named("torch.qint8"),
        Named("pointer<fp32>"),
        Named("<f4"),
    ],
    ids=repr,
)
def test_refusals_list_what_is_taken(form):
    with pytest.raises(DtypeError, match="bfloat16, float8_e4m3fn"):
        dtypes.resolve(form)


def test_other_byte_order_is_named():
    with pytest.raises(DtypeError, match="byte order"):
        dtypes.resolve(np.dtype(">f4"))


def test_types_of_triton_are_taken():
    language = pytest.importorskip("triton.language")
    for name in ("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        numpy_name = "bool" if name == "int1" else name
        assert dtypes.resolve(getattr(language, name)) == np.dtype(numpy_name)
    for name, dtype in (
        ("float16", "float16"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("bfloat16", BF16),
        ("float8e4nv", E4M3),
        ("float8e5", E5M2),
    ):
        assert dtypes.resolve(getattr(language, name)) == np.dtype(dtype)


def test_complex_types_are_moved_only():
    for dtype in ("complex64", "complex128"):
        assert not dtypes.is_kernel_dtype(dtype)
        with pytest.raises(DtypeError, match="complex"):
            dtypes.accumulator(dtype)


def test_accumulators():
    for dtype in (np.float16, np.float32, BF16, E4M3, E5M2):
        assert dtypes.accumulator(dtype) == np.float32
        assert dtypes.is_float(dtype)
    for dtype in (np.float64, np.int8, np.uint64, np.bool_):
        assert dtypes.accumulator(dtype) == np.dtype(dtype)
    assert not dtypes.is_float("int32")
    assert not dtypes.is_float("complex64")


@pytest.mark.parametrize("dtype", dtypes.SUPPORTED, ids=str)
def test_dlpack_types_round_trip(dtype):
    assert dtypes.from_dlpack_type(*dtypes.dlpack_type(dtype)) is dtypes.resolve(dtype)


def test_dlpack_codes():
    assert dtypes.dlpack_type("bf16") == (4, 16)
    assert dtypes.dlpack_type("float8_e4m3fn") == (10, 8)
    assert dtypes.dlpack_type("float8_e5m2") == (12, 8)
    assert dtypes.dlpack_type(bool) == (6, 8)
    assert dtypes.dlpack_type("complex64") == (5, 64)


@pytest.mark.parametrize("kind", [(2, 32, 4), (2, 80, 1), (3, 64, 1), (11, 8, 1), (0, 4, 1)])
def test_unknown_dlpack_types(kind):
    with pytest.raises(DtypeError, match="DLPack type"):
        dtypes.from_dlpack_type(*kind)


def test_types_of_jax():
    jnp = pytest.importorskip("jax.numpy")
    assert dtypes.resolve(jnp.bfloat16) == BF16
    assert dtypes.resolve(jnp.float32) == np.float32
    assert dtypes.resolve(jnp.zeros(1, jnp.float8_e4m3fn).dtype) == E4M3


def test_types_of_torch():
    torch = pytest.importorskip("torch")
    for dtype in dtypes.SUPPORTED:
        assert dtypes.resolve(getattr(torch, dtype.name)) == dtype
