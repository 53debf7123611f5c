"""Capsules out and in: what consumers see, and when memory is given back."""

from __future__ import annotations

import ctypes
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

from tdx.runtime import dlpack, dtypes
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported

VERSIONED = pytest.mark.skipif(not dlpack._NUMPY_VERSIONED, reason="needs numpy >= 2.1")


class Producer:
    """A DLPack producer over a NumPy array, as tdx arrays are over a heap."""

    def __init__(self, array, dtype=None, device=(dlpack.CPU, 0), readonly=False):
        self.array = array
        self.dtype = dtype or array.dtype
        self.device = device
        self.readonly = readonly
        self.released = 0
        self.asked = []

    def done(self):
        self.released += 1

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.asked.append((stream, max_version))
        dlpack.check_request(self.device, dl_device, copy)
        a = self.array
        return dlpack.capsule(
            a,
            a.ctypes.data,
            a.shape,
            a.strides,
            self.dtype,
            self.device,
            max_version,
            self.readonly,
            self.done,
        )


class OldProducer(Producer):
    """From before DLPack 1.0."""

    def __dlpack__(self, *, stream=None):
        return super().__dlpack__(stream=stream)


def test_numpy_shares_the_memory():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    producer = Producer(array)
    taken = np.from_dlpack(producer)
    taken[1, 2] = -1
    assert array[1, 2] == -1
    assert taken.ctypes.data == array.ctypes.data
    assert producer.released == 0
    del taken
    gc.collect()
    assert producer.released == 1


@pytest.mark.parametrize("dtype", dtypes.SUPPORTED, ids=str)
@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_every_type_out_and_in(dtype, kind):
    array = np.zeros((2, 3), f"V{dtype.itemsize}")
    taken = dlpack.import_array(kind(array, dtype))
    assert taken.dtype is dtypes.resolve(dtype)
    assert taken.address == array.ctypes.data
    assert taken.shape == (2, 3)
    assert taken.strides == array.strides
    assert taken.nbytes == array.nbytes
    assert taken.device == (dlpack.CPU, 0)
    assert taken.contiguous


@pytest.mark.parametrize(
    "index",
    [np.s_[:, ::2], np.s_[::-1], np.s_[2, 3], np.s_[:0], np.s_[1:2, :]],
    ids=["columns", "reversed", "scalar", "empty", "row"],
)
def test_strided_views(index):
    array = np.arange(24, dtype=np.int16).reshape(4, 6)[index]
    array = np.asarray(array)
    taken = dlpack.import_array(Producer(array))
    assert (taken.shape, taken.contiguous) == (array.shape, array.flags.c_contiguous)
    if array.size:
        assert taken.address == array.ctypes.data
        np.testing.assert_array_equal(np.from_dlpack(Producer(array)), array)


def test_null_address_of_an_empty_array():
    held = dlpack.capsule(None, 0, (0, 3), (6, 2), "bf16", (dlpack.CUDA, 1), (1, 0))
    taken = dlpack._parse(held, (dlpack.CUDA, 1))
    assert (taken.address, taken.shape, taken.size) == (0, (0, 3), 0)
    assert taken.device == (dlpack.CUDA, 1)


def test_unconsumed_capsule_gives_the_memory_back():
    producer = Producer(np.zeros(4))
    held = producer.__dlpack__(max_version=(1, 0))
    assert producer.released == 0
    del held
    assert producer.released == 1


def test_import_holds_the_memory_as_long_as_it_lives():
    array = np.zeros(4)
    alive = weakref.ref(array)
    producer = Producer(array)
    taken = dlpack.import_array(producer)
    owner = taken.owner
    producer.array = array = None
    del taken
    gc.collect()
    assert alive() is not None
    assert producer.released == 0
    del owner
    gc.collect()
    assert alive() is None
    assert producer.released == 1


def test_refusing_consumer_gives_the_memory_back():
    producer = Producer(np.zeros(4, np.uint16), "bf16")
    with pytest.raises((RuntimeError, BufferError)):
        np.from_dlpack(producer)
    gc.collect()
    assert producer.released == 1


def test_no_callback_when_the_export_fails():
    producer = Producer(np.zeros(4), readonly=True)
    with pytest.raises(BufferError, match="read-only"):
        producer.__dlpack__()
    with pytest.raises(DtypeError):
        Producer(np.zeros(4), "float31").__dlpack__()
    assert producer.released == 0


@VERSIONED
def test_read_only():
    producer = Producer(np.zeros(4), readonly=True)
    assert dlpack.import_array(producer).readonly
    assert not np.from_dlpack(producer).flags.writeable
    assert not dlpack.import_array(Producer(np.zeros(4))).readonly


def test_requests_that_need_a_copy_are_refused():
    producer = Producer(np.zeros(4))
    with pytest.raises(BufferError, match="zero-copy"):
        producer.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="device"):
        producer.__dlpack__(dl_device=(dlpack.CUDA, 0))
    producer.__dlpack__(copy=False, dl_device=(dlpack.CPU, 0))


@pytest.mark.parametrize(
    ("device_type", "stream", "expected"),
    [
        (dlpack.CPU, 77, None),
        (dlpack.CUDA, None, 1),
        (dlpack.CUDA, 0, 1),
        (dlpack.CUDA, 77, 77),
        (dlpack.CUDA, -1, -1),
        (dlpack.ROCM, None, 0),
        (dlpack.ROCM, 77, 77),
    ],
)
def test_stream_as_the_protocol_spells_it(device_type, stream, expected):
    producer = Producer(np.zeros(4), device=(device_type, 0))
    taken = dlpack.import_array(producer, stream)
    assert producer.asked == [(expected, (1, 3))]
    assert taken.device == (device_type, 0)


def test_numpy_arrays_are_described_directly():
    array = np.zeros((2, 3), ml_dtypes.bfloat16)
    array.flags.writeable = False
    taken = dlpack.import_array(array[:, 1:])
    assert taken.address == array.ctypes.data + 2
    assert (taken.strides, taken.readonly, taken.contiguous) == ((6, 2), True, False)
    assert taken.dtype.name == "bfloat16"
    with pytest.raises(DtypeError, match="byte order"):
        dlpack.import_array(np.zeros(2, ">f4"))


@pytest.mark.parametrize("thing", [None, [1, 2], 3.0, "x", ...], ids=repr)
def test_things_that_are_no_arrays(thing):
    with pytest.raises(InvalidArgument, match="DLPack producer"):
        dlpack.import_array(thing)


class Failing:
    def __init__(self, error):
        self.error = error
        self.calls = 0

    def __dlpack_device__(self):
        return (dlpack.CPU, 0)

    def __dlpack__(self, **kwargs):
        self.calls += 1
        raise self.error


@pytest.mark.parametrize("error", [BufferError("mine"), ValueError("mine"), TypeError("mine")])
def test_the_refusal_of_a_producer_is_quoted(error):
    said = rf"Failing cannot be read: {type(error).__name__}: mine; pass a plain copy"
    with pytest.raises(InvalidArgument, match=said) as caught:
        dlpack.import_array(Failing(error))
    assert caught.value.__cause__ is error


def test_errors_of_tdx_are_left_alone():
    with pytest.raises(Unsupported, match="mine"):
        dlpack.import_array(Failing(Unsupported("mine")))


class Returning:
    def __init__(self, held):
        self.held = held

    def __dlpack_device__(self):
        return (dlpack.CPU, 0)

    def __dlpack__(self, **kwargs):
        return self.held


def fresh(versioned=True):
    return Producer(np.zeros(4)).__dlpack__(max_version=(1, 0) if versioned else None)


def test_what_is_no_fresh_capsule():
    with pytest.raises(InvalidArgument, match="fresh DLPack capsule"):
        dlpack.import_array(Returning(3))
    held = fresh(versioned=False)
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
    rename(held, b"used_dltensor")
    with pytest.raises(InvalidArgument, match="fresh DLPack capsule"):
        dlpack.import_array(Returning(held))
    rename(held, b"dltensor")


@VERSIONED
def test_unknown_versions_and_types():
    held = fresh()
    managed = dlpack._ManagedVersioned.from_address(
        dlpack._get_pointer(held, b"dltensor_versioned")
    )
    managed.flags |= 2
    assert dlpack.import_array(Returning(held)).copied
    managed.tensor.dtype.lanes = 2
    with pytest.raises(DtypeError, match="lanes"):
        dlpack.import_array(Returning(held))
    managed.major = 2
    with pytest.raises(Unsupported, match=r"DLPack 2\."):
        dlpack.import_array(Returning(held))
    managed.major = 1


def test_missing_strides_mean_row_major():
    held = fresh(versioned=False)
    managed = dlpack._Managed.from_address(dlpack._get_pointer(held, b"dltensor"))
    managed.tensor.strides = None
    managed.tensor.byte_offset = 8
    before = managed.tensor.data
    taken = dlpack.import_array(Returning(held))
    assert (taken.strides, taken.address) == ((8,), before + 8)
    assert dlpack.row_major((2, 0, 3), 4) == (12, 12, 4)
    assert dlpack.row_major((), 4) == ()


def test_numpy_view_of_types_numpy_does_not_know():
    raw = np.zeros(8, np.uint16)
    done = []
    view = dlpack.numpy_view(
        raw, raw.ctypes.data, (2, 2), (8, 2), "bf16", released=lambda: done.append(1)
    )
    view[1, 0] = 1.0
    assert raw[4] == 0x3F80
    assert view.dtype.name == "bfloat16"
    column = view[:, 0]
    del view
    assert done == []
    del column
    assert done == [1]
    fixed = dlpack.numpy_view(raw, raw.ctypes.data, (1,), (2,), "u2", readonly=True)
    assert not fixed.flags.writeable
