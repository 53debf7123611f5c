"""Arrays: making, viewing, copying, exporting them, and reading a peer's."""

from __future__ import annotations

import gc
import operator

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
from tdx.interop import numpy_arrays
from tdx.runtime.errors import Closed, DtypeError, InvalidArgument, TdxError
from tests.helpers.cases import host_only, worlds

DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


@pytest.mark.smoke
@worlds(1, 2)
def case_every_dtype_comes_back(world):
    for name in DTYPES:
        data = (np.arange(24).reshape(2, 3, 4) % 3).astype(ml_dtypes.bfloat16).astype(name)
        for symmetric in (True, False):
            x = world.array(data, symmetric=symmetric)
            assert (x.dtype, x.shape, x.symmetric) == (data.dtype, data.shape, symmetric)
            assert (x.ndim, x.size, x.itemsize, x.nbytes) == (
                3, 24, data.itemsize, data.nbytes,
            )  # fmt: skip
            assert (x.strides, len(x)) == (data.strides, 2)
            found = x.numpy()
            assert found.dtype == data.dtype
            assert found.tobytes() == data.tobytes()


@worlds(2, 3)
def case_peers_see_each_other(world):
    x = world.array(np.full((3, 5), world.rank, np.int32))
    world.barrier()
    for rank in range(world.size):
        view = x.peer(rank)
        assert (view.owner_rank, view.shape) == (rank, x.shape)
        assert (view.numpy() == rank).all()
        assert (view[1:, ::2].peer(world.rank).numpy() == world.rank).all()
    world.barrier()
    x.peer((world.rank + 1) % world.size)[0].copy_from(np.full(5, 10 + world.rank, np.int32))
    world.barrier()
    left = (world.rank - 1) % world.size
    assert (x.numpy()[0] == 10 + left).all()
    assert (x.numpy()[1:] == world.rank).all()
    world.barrier()


INDICES = [
    0, -1, slice(None), slice(1, None), slice(None, None, -1), slice(4, 1, -2), ..., None,
    (0, 1), (0, 1, 2), (..., 2), (slice(None), 1), (None, 0, ..., None), (0, slice(2, 2)),
    (slice(None, None, 2), slice(1, None), slice(None, None, -1)), (-1, -1, -1), (0, 1, 2, None),
    (np.int64(1), slice(0, 1)), (),
]  # fmt: skip


@worlds(1)
def case_indexing_is_numpys(world):
    data = np.arange(3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5)
    x = world.array(data)
    for index in INDICES:
        wanted = data[index]
        view = x[index]
        assert view.shape == np.shape(wanted), index
        assert (view.numpy() == wanted).all(), index
        if np.size(wanted):
            view[...] = np.ones(view.shape, np.float32)
            data[index] = 1
            assert (x.numpy() == data).all(), index
            fresh = np.arange(data.size, dtype=np.float32).reshape(data.shape)
            data[...] = fresh
            x[...] = fresh
    assert (x[np.array(1)].numpy() == data[1]).all()
    assert (x.T.numpy() == data.T).all()
    assert (x.T[1:].numpy() == data.T[1:]).all()
    assert [int(row.numpy()) for row in world.array(np.arange(3))] == [0, 1, 2]


@worlds(1, 2)
def case_numbers_fill_a_view(world):
    for name in (*DTYPES, "complex64", "complex128"):
        x = world.zeros((3, 4), name)
        number = name == "bool" or 3
        x[:] = number
        assert (x.numpy() == np.full((3, 4), number).astype(x.dtype)).all()
        x[1, ::2] = x.dtype.type(2)
        x[2, 3] = 0
        wanted = np.full((3, 4), number).astype(x.dtype)
        wanted[1, ::2], wanted[2, 3] = 2, 0
        assert x.numpy().tobytes() == wanted.tobytes()
    x = world.zeros(4, "float32", symmetric=False)
    x[1:] = 0.5
    x[2:2] = 7
    assert x.numpy().tolist() == [0, 0.5, 0.5, 0.5]
    half = ml_dtypes.bfloat16(0.5)
    for number in (np.float64(1.5), np.int64(2), np.True_, half, np.array(2.5), np.array(3)):
        x[1:] = number
        assert x.numpy().tolist() == [0, number, number, number]
    for wrong in (1j, np.complex64(1), np.array(1j)):
        with pytest.raises(InvalidArgument, match="cannot be made"):
            x[:] = wrong
    for wrong in (np.ones(1), np.ones((1, 1), np.float32), np.datetime64(1, "ns"), np.str_("1")):
        with pytest.raises(TdxError, match=r"convert it first|not a dtype|tdx does not|shape"):
            x[:] = wrong
    with pytest.raises(InvalidArgument, match="300 cannot be made an array"):
        world.zeros(4, "uint8")[:] = 300
    ints = world.zeros(4, "int32")
    for fraction in (2.7, [1.0, 1.9], np.float64(1.5), np.float32(1.5), np.array(1.5)):
        with pytest.raises(DtypeError, match="is not of int32: pass whole numbers"):
            ints[:2] = fraction
    ints[:2] = [1.0, 3]
    assert ints.numpy().tolist() == [1, 3, 0, 0]
    ints[2:] = np.float64(4)  # as Python's 4.0
    assert ints.numpy().tolist() == [1, 3, 4, 4]
    with pytest.raises(InvalidArgument, match=f"{1 << 40} cannot be made an array"):
        ints[:] = np.int64(1 << 40)
    world.barrier()
    y = world.zeros(4, "int64")
    world.barrier()
    y.peer((world.rank + 1) % world.size)[:2] = 9
    world.barrier()
    assert y.numpy().tolist() == [9, 9, 0, 0]


class Producer:
    """An array of some library."""

    def __dlpack__(self, **_):
        raise AssertionError("nobody asks for the memory")


@worlds(1, 2)
def case_arrays_do_not_compare(world):
    x, y = (world.array(np.full(4, 5, np.float32)) for _ in range(2))
    for other in (5, 5.0, 5j, True, np.float32(5), x, y, x[:2], y.numpy(), Producer(), [5.0], (5,)):
        for compare in (operator.eq, operator.ne):
            with pytest.raises(TypeError, match=r"x\.numpy\(\) == y .*, and x is y asks"):
                compare(x, other)
        with pytest.raises(TypeError, match=r"do not search .*: ask `value in x\.numpy\(\)`"):
            other in x  # noqa: B015
    with pytest.raises(TypeError, match="do not compare"):
        y in [x]  # noqa: B015
    for other in (None, "text", b"text", {}, object(), np.ndarray, world):
        assert (x == other) is False
        assert x != other
    assert x in [x, y]
    assert {x: 1, y: 2} == {y: 2, x: 1}
    assert (x, 3) == (x, 3)
    world.barrier()


@worlds(1)
def case_what_messages_call_an_array(world):
    x = world.zeros((2, 3), "float32", name="grid")
    text = (
        r"array grid has shape \(2, 3\), the source \(3,\): shapes must be equal, there is no "
        r"broadcasting; pass np\.broadcast_to\(source, \(2, 3\)\)$"
    )
    row = np.arange(3, dtype=np.float32)
    with pytest.raises(InvalidArgument, match=text):
        x[:] = row
    x[:] = np.broadcast_to(row, (2, 3))
    assert (x.numpy() == row).all()
    with pytest.raises(InvalidArgument, match=r"the source \(2,\): .* no broadcasting$"):
        x[:] = row[:2]
    for symmetric in (True, False):
        unnamed = world.zeros(4, "int32", symmetric)
        with pytest.raises(InvalidArgument, match=r"^the array has shape \(4,\)"):
            unnamed[:] = np.zeros(3, np.int32)
        unnamed.free()
        with pytest.raises(Closed, match=r"^the array was freed"):
            unnamed.numpy()
    x.free()
    with pytest.raises(Closed, match=r"^array grid was freed"):
        x.numpy()


@worlds(1)
def case_reshape_and_view(world):
    data = np.arange(24, dtype=np.float32)
    x = world.array(data)
    assert (x.reshape(2, -1, 3).numpy() == data.reshape(2, 4, 3)).all()
    assert x.reshape((24, 1)).shape == (24, 1)
    assert x.reshape([4, 6]).strides == (24, 4)
    assert world.empty((0, 4), "int8").reshape(4, 0).shape == (4, 0)
    assert (x.view("int32").numpy() == data.view(np.int32)).all()
    assert (x.view("uint8").numpy() == data.view(np.uint8)).all()
    assert (x.reshape(6, 4).view("float64").numpy() == data.reshape(6, 4).view(np.float64)).all()
    assert x.view("bfloat16").shape == (48,)
    assert x.stride() == (1,)
    assert x.reshape(4, 6)[:, ::2].stride() == (6, 2)


@worlds(1)
def case_copies_between_layouts(world):
    data = np.arange(4 * 6 * 5, dtype=np.int16).reshape(4, 6, 5)
    target = world.zeros((4, 6, 5), "int16")
    sources = [
        data,
        np.asfortranarray(data),
        data[::-1, :, ::-1],
        np.copy(data.swapaxes(1, 2)).swapaxes(1, 2),
        np.broadcast_to(data[:1], data.shape),
        world.array(data),
        world.array(data, symmetric=False),
        world.array(data.T.copy()).T,
    ]
    for source in sources:
        target[...] = np.zeros_like(data)
        assert target.copy_from(source) is target
        right = source.numpy() if isinstance(source, tdx.Array) else source
        assert (target.numpy() == right).all()
        target.T.copy_from(source.T)
        assert (target.numpy() == right).all()
    wide = world.zeros((8, 6, 10), "int16")
    wide[::2, :, 1::2].copy_from(data)
    assert (wide.numpy()[::2, :, 1::2] == data).all()
    assert wide.numpy().sum() == data.sum()
    readonly = data.copy()
    readonly.setflags(write=False)
    assert (target.copy_from(readonly).numpy() == data).all()
    source = data.copy()
    target.copy_from(source)
    source[:] = 0  # the call has taken what it needs
    assert (target.numpy() == data).all()
    assert world.array([1, 2, 3]).dtype == np.int64
    scalar = world.zeros((), "float32").copy_from(2.5)
    assert (scalar.shape, float(scalar.numpy())) == ((), 2.5)


@worlds(1)
@pytest.mark.parametrize("symmetric", [True, False])
def case_copies_within_an_array(world, backend, symmetric):
    """What is read is what was there before, as with NumPy."""
    data = np.arange(36, dtype=np.float32).reshape(6, 6)
    moves = {
        "transposed": lambda x: x.__setitem__(..., x.T),
        "onto itself": lambda x: x.__setitem__(..., x),
        "down": lambda x: x.__setitem__(slice(1, None), x[:-1]),
        "up": lambda x: x.__setitem__(slice(None, -1), x[1:]),
        "reversed": lambda x: x.__setitem__(..., x[::-1, ::-1]),
        "column": lambda x: x.__setitem__((slice(None), 3), x[2]),
    }
    for name, move in moves.items():
        x, expected = world.array(data, symmetric), data.copy()
        with tdx.graph(world) as graph:
            move(x)
        assert (x.numpy() == data).all()
        for _ in range(2):
            move(expected)
        graph.replay()
        move(x)
        assert (x.numpy() == expected).all(), name
    if backend == "host":
        x = world.array(data, symmetric)
        x.T.copy_from(np.asarray(x))
        assert (x.numpy() == data.T).all()


@triton.jit
def _count_kernel(x, turns):
    for _ in range(turns):
        tl.store(x, tl.load(x) + 1)


@worlds(1, 2)
def case_copies_of_a_view_come_after_pending_work(world, backend):
    """Of overlapping memory too, which goes through other memory."""
    side, turns = world.new_stream(), 3000
    with world.on(side):
        x = world.zeros(4, "float32")
    world.synchronize()
    seen = numpy_arrays.adopt(x, None) if backend == "host" else x[:3]
    with world.on(side):
        _count_kernel[(1,)](x, turns)
    x[1:].copy_from(seen[:3])
    assert (x.numpy() == [turns, turns, 0, 0]).all()


@worlds(1, 2)
def case_copies_between_parts_need_no_other_memory(world):
    """Columns of one matrix lie in one range, but apart; and nothing is to be done for itself."""
    data = np.arange(48, dtype=np.float32).reshape(4, 12)
    x = world.array(data, symmetric=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(world, "local", None)
        x[:, :5] = x[:, 5:10]
        x[...] = x
        x[1:, 10] = x[:-1, 11]
    data[:, :5] = data[:, 5:10]
    data[1:, 10] = data[:-1, 11]
    assert (x.numpy() == data).all()


@worlds(1, 2)
def case_exports_share_the_memory(world, backend):
    host_only(backend)
    x = world.array(np.arange(6, dtype=np.float32).reshape(2, 3))
    for view in (np.from_dlpack(x), np.asarray(x)):
        view[0, 0] = 7
        assert x.numpy()[0, 0] == 7
        x[0, 0] = np.float32(0)
        assert view[0, 0] == 0
    assert np.asarray(x, dtype=np.int32).dtype == np.int32
    assert np.array(x).base is None
    with pytest.raises(ValueError, match="copied"):
        np.asarray(x, dtype=np.int32, copy=False)
    assert not hasattr(x, "__cuda_array_interface__")
    assert (np.asarray(world.zeros(3, "bfloat16")) == 0).all()
    again = world.array(np.from_dlpack(x[:, 1]))
    assert again.numpy().tolist() == [1, 4]


@worlds(1)
def case_memory_lives_as_long_as_an_export(world, backend):
    host_only(backend)
    for symmetric in (True, False):
        x = world.array(np.arange(4, dtype=np.int32), symmetric=symmetric)
        view = np.asarray(x)[1:]
        with pytest.raises(tdx.errors.InvalidArgument, match="exported to 1 consumer"):
            x.free()
        del x
        gc.collect()
        others = [world.array(np.full(4, 9, np.int32), symmetric=symmetric) for _ in range(50)]
        assert view.tolist() == [1, 2, 3]
        del view, others


@worlds(1)
def case_local_memory_waits_for_its_last_use(world):
    """An array whose last reference goes while another stream still reads it."""
    target = world.zeros(1 << 20, "uint8")
    world.synchronize()
    side = world.new_stream()
    for value in range(1, 20):
        with world.on(side):
            target.copy_from(np.zeros(1 << 20, np.uint8))
            target.copy_from(world.array(np.full(1 << 20, value, np.uint8), symmetric=False))
        assert (target.numpy() == value).all()


@worlds(1)
def case_empty_arrays(world):
    for shape in (0, (0,), (3, 0, 2)):
        for symmetric in (True, False):
            x = world.zeros(shape, "float32", symmetric=symmetric)
            assert x.size == x.nbytes == x.numpy().size == 0
            x.copy_from(np.zeros(x.shape, np.float32))
            assert x[..., :0].shape[-1] == 0
            x.free()


@worlds(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def case_types_that_numpy_lacks(world, backend, dtype):
    """What docs/tutorials/frameworks.md says of them."""
    x = world.array(np.ones(3, dtype))
    assert x.numpy().dtype == dtype
    if backend == "host":
        with pytest.raises(
            (RuntimeError, BufferError), match=r"[Uu]nsupported dtype|not supported"
        ):
            np.from_dlpack(x)
        view = np.asarray(x)
        view[0] = 2
        assert view.dtype == dtype
        assert float(x.numpy()[0]) == 2
