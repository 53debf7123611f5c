"""What products and their plans refuse: with the value, the limit and the remedy, on every rank."""

from __future__ import annotations

import contextlib
import inspect
from functools import partial

import numpy as np
import pytest

import tdx
from tdx.kernels.matmul import Config
from tdx.runtime.errors import CollectiveMismatch, DtypeError, InvalidArgument
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.reference import assert_same_bits, values

FUNCTIONS = ("matmul", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
PLANS = ("AllGatherMatmul", "MatmulReduceScatter", "MatmulAllReduce")


@worlds(1, 2)
@pytest.mark.parametrize("kind", PLANS)
def case_plans_take_a_bool_where_calls_take_an_array(world, kind):
    make = partial(getattr(tdx, kind), world, (4, 8), (8, 16), "float32")
    x, y = world.zeros((4, 8), "float32"), world.zeros((8, 16), "float32")
    for bias, words in (
        (world.zeros(16, "float32"), r"bias=<array of shape \(16,\)> must be True or False"),
        (np.zeros(16, np.float32), r"bias=<array of shape \(16,\)>.* its calls take the array"),
        ("yes", "bias='yes' must be True or False"),
        (1, "bias=1 must be True or False"),
        (None, "bias=None must be True or False"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            make(bias=bias)
    make(bias=np.True_)(x, y, bias=world.zeros(16, "float32"))
    make(bias=np.False_)(x, y)


@worlds(1, 2)
def case_norms_take_a_bool_where_calls_take_an_array(world):
    make = partial(tdx.AllReduceRmsNorm, world, (4, 8), "float32")
    for name in ("bias", "residual"):
        for value in ("yes", 1, np.zeros(8, np.float32)):
            with pytest.raises(InvalidArgument, match=f"{name}=.* must be True or False"):
                make(**{name: value})
    x, weight = world.zeros((4, 8), "float32"), world.zeros(8, "float32")
    make(residual=np.True_)(x, weight, residual=x)


@worlds(1, 2)
def case_shapes_of_b(world):
    make = partial(tdx.AllGatherMatmul, world, (4, 8))
    x = world.zeros((4, 8), "float32")
    for shape in (8, None, 2.5):
        with pytest.raises(InvalidArgument, match=rf"shape {shape} of b must be \(K, N\)"):
            make(shape, "float32")
    for none in ([], ()):
        with pytest.raises(InvalidArgument, match="there is no b: pass one, or a sequence"):
            make(none, "float32")
        with pytest.raises(InvalidArgument, match="there is no b: pass one, or a sequence"):
            tdx.all_gather_matmul(x, none)


@worlds(1, 2)
def case_sequences_for_several_b(world):
    """One of each thing for every b, in any sequence; what is no sequence is named."""
    x, y = world.zeros((4, 8), "float32"), world.zeros((8, 2), "float32")
    call, z = partial(tdx.all_gather_matmul, x, [y, y]), np.zeros
    eight = [world.zeros(array.shape, "float8_e4m3fn") for array in (x, y)]
    scaled = partial(tdx.all_gather_matmul, eight[0], [eight[1]] * 2)
    for attempt, words in (
        (partial(call, bias=z(3, "f4")), r"^bias: expected a sequence of 2, one for each b, got "
         r"one array of shape \(3,\)"),
        (partial(call, bias=z(2, "f4")), r"got one array of shape \(2,\)"),
        (partial(call, bias=z((3, 2), "f4")), r"got one array of shape \(3, 2\)"),
        (partial(call, out=y), r"out: .* got one array of shape \(8, 2\)"),
        (partial(call, bias=[z(2, "f4")]), "bias: expected a sequence of 2.* got 1"),
        (partial(call, bias=[z(2, "f4"), None]), "^bias: 1 of 2 are None; pass one for each b, or"),
        (partial(call, bias=5), "bias: expected a sequence of 2.* got 5"),
        (partial(scaled, scale_b=np.array(2.0, "f4")), r"scale_b: .* one array of shape \(\)"),
        (partial(scaled, scale_b=2.0), "scale_b: expected a sequence of 2.* got 2.0"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=words):
            attempt()
    assert not any(out.numpy().any() for out in call(bias=[None, None]))
    plan = tdx.AllGatherMatmul(world, (4, 8), [(8, 2), (8, 2)], "float32", bias=True)
    for bias in (None, [world.zeros(2, "float32"), None]):
        with pytest.raises(InvalidArgument, match="with bias=True: pass one, or one for each of"):
            plan(x, [y, y], bias=bias)
    rows = np.arange(4, dtype=np.float32).reshape(2, 2)
    for bias in (rows, list(rows), tuple(rows)):
        for i, out in enumerate(call(bias=bias)):
            assert (out.numpy() == rows[i]).all()


@isolated
@worlds(2)
@limit(30)
@pytest.mark.parametrize("kind", ["AllGatherMatmul", "MatmulAllReduce"])
def case_peers_are_told_of_an_out_that_is_none(comm, backend, kind):
    world = tdx.init(comm, backend=backend, timeout_s=1.0)
    several = kind == "AllGatherMatmul"
    shapes = [(8, 16), (8, 16)] if several else (8, 16)
    plan = getattr(tdx, kind)(world, (4, 8), shapes, "float32")
    x, y = world.zeros((4, 8), "float32"), world.zeros((8, 16), "float32")
    b = [y, y] if several else y
    if world.rank == 0:
        with pytest.raises(InvalidArgument, match=r"out.* got (5|int)"):
            plan(x, b, out=5)
    else:
        plan(x, b)
        with pytest.raises(
            CollectiveMismatch, match="rank 0: refused call 1: InvalidArgument: out"
        ):
            world.synchronize()
    comm.barrier()
    with contextlib.suppress(CollectiveMismatch):
        world.close()


@worlds(2)
def case_out_is_any_sequence(world):
    """Also one that can be walked along only once."""
    x = world.array(np.ones((2, 4), np.float32), symmetric=False)
    y = world.array(np.ones((4, 3), np.float32), symmetric=False)
    plan = tdx.AllGatherMatmul(world, (2, 4), [(4, 3)] * 2, "float32")
    out = world.zeros((4, 3), "float32", symmetric=False)
    first, second = plan(x, [y, y], out=(each for each in (out, None)))
    assert first is out
    assert second is plan(x, [y, y])[1]
    assert (first.numpy() == 4).all()


@worlds(2)
@pytest.mark.parametrize("name", ["allow_tf32", "fast_accum", "return_gathered", "trace"])
def case_flags_are_true_or_false(world, name):
    x, y = world.zeros((4, 8), "float32"), world.zeros((8, 2), "float32")
    call = partial(tdx.all_gather_matmul, x, y)
    if name == "trace":
        call = partial(tdx.AllGatherMatmul, world, (4, 8), (8, 2), "float32")
    for wrong in ("no", 3, x):
        with pytest.raises(InvalidArgument, match=f"^{name}=.* must be True or False$"):
            call(**{name: wrong})
    call(**{name: np.bool_(True)})


@worlds(1, 2)
def case_leading_axes_that_do_not_lie_behind_one_another(world):
    """Of others they are copied, of tdx they are named."""
    a = values(world.rank, (4, 3, 8), "float32").swapaxes(0, 1)[:2].swapaxes(0, 1)
    b = values(9, (8, 5), "float32")
    x = world.array(values(0, (4, 3, 8), "float32"), symmetric=False)[:, :2]
    for call in (tdx.matmul, tdx.matmul_all_reduce, tdx.matmul_reduce_scatter):
        assert_same_bits(np.asarray(call(a, b)), np.asarray(call(a.copy(), b)))
        with pytest.raises(InvalidArgument, match="do not lie behind one another; "):
            call(x, b)


@worlds(1, 2)
def case_unknown_options(world):
    x, y = world.zeros((4, 8), "float32"), world.zeros((8, 3), "float32")
    for name in FUNCTIONS[1:]:
        function = getattr(tdx, name)
        known = [p.name for p in inspect.signature(function).parameters.values()][2:]
        words = rf"^{name}\(\) has no option 'foo'; it takes {', '.join(known)}$"
        with pytest.raises(TypeError, match=words):
            function(x, y, foo=1)
    for name in PLANS:
        with pytest.raises(TypeError, match=rf"^{name}\(\) has no option 'foo'; it takes .*config"):
            getattr(tdx, name)(world, (4, 8), (8, 3), "float32", foo=1)


@worlds(1, 2)
@pytest.mark.parametrize("name", FUNCTIONS)
def case_a_bias_is_of_a_floating_point_type(world, name):
    call = partial(getattr(tdx, name), np.zeros((4, 8), "f4"), np.zeros((8, 3), "f4"))
    for dtype in ("bool", "int8", "int64", "uint32", "complex64"):
        with pytest.raises(DtypeError, match=rf"bias has dtype {dtype}, .* float16, .* bfloat16"):
            call(bias=np.ones(3, dtype))
    for dtype in ("float16", "bfloat16", "float32", "float64", "float8_e5m2", "float8_e4m3fn"):
        bias = world.array(np.ones(3, np.float32)).numpy().astype(tdx.runtime.dtypes.resolve(dtype))
        assert (np.asarray(call(bias=bias)) == 1).all()


@worlds(1)
def case_rows_of_tiles_that_are_counted_in_32_bits(world):
    config = Config(16, 16, 16, group_m=(1 << 31) - 1, num_warps=4)
    a, b = np.ones((40, 8), "f4"), np.ones((8, 40), "f4")
    assert (tdx.matmul(a, b[:, :16], config=config) == 8).all()
    for name in FUNCTIONS:
        with pytest.raises(InvalidArgument, match=r"group_m=2147483647 with N=40: .* pass less"):
            getattr(tdx, name)(a, b, config=config)


@worlds(2)
def case_ranks_agree_on_what_they_use(world):
    make = partial(tdx.AllGatherMatmul, world, (48, 16), (16, 16), "float32")
    words = r"config: \[16 x 16 x 16,.* on rank 0, \[32 x 16 x 16,.* on rank 1$"
    with pytest.raises(CollectiveMismatch, match=words):
        make(config=Config(16 << world.rank, 16, 16, num_warps=4))
    with pytest.raises(CollectiveMismatch, match=r"chunks_per_rank: 1 on rank 0, 2 on rank 1$"):
        make(algorithm="fused", chunks_per_rank=1 + world.rank)
    with pytest.raises(CollectiveMismatch, match=r"They differ in trace: False on rank 0, True on"):
        make(trace=bool(world.rank))


@worlds(1)
def case_plans_document_their_parameters(world):
    for name in (*PLANS, "AllReduceRmsNorm"):
        kind = getattr(tdx, name)
        text = inspect.getdoc(kind)
        for parameter in list(inspect.signature(kind).parameters):
            assert parameter in text, (name, parameter)
        assert "ReducedProduct" not in text
        assert "See matmul" not in text


@worlds(1, 2)
def case_what_is_no_world_buffer_or_name(world):
    x = np.zeros((4, 8), np.float32)
    make = partial(tdx.MatmulAllReduce, shape_a=(4, 8), shape_b=(8, 16), dtype="float32")
    for attempt, words in (
        (partial(make, world.team(range(world.size))), "is no world; pass a team as team="),
        (partial(make, "world"), "'world' is no world"),
        (partial(make, world, buffer=x), r"buffer=<array of shape \(4, 8\)> must be True or False"),
        (partial(make, world, buffer=1), "buffer=1 must be True or False"),
        (partial(make, world, activation=x), "is not one of"),
        (partial(make, world, algorithm=x), "is not one of"),
        (partial(tdx.matmul_all_reduce, x, x.T.copy(), stream=-1), "stream=-1 is not a stream"),
        (
            partial(Config, 16, 16, 16, descriptors=0),
            "descriptors=0 must be True or False, or None",
        ),
    ):
        with pytest.raises(InvalidArgument, match=words):
            attempt()
    assert Config(16, 16, 16, descriptors=np.False_).descriptors is False
    for shape in (np.array([4, 8]), (np.int64(4), 8)):
        assert tdx.AllReduce(world, shape, "float32").result[0] == (4, 8)
    assert tdx.AllReduce(world, np.array(4), "float32").result[0] == (4,)


@worlds(2)
def case_an_unknown_option_of_one_rank(world):
    """Peers that would make a plan are told."""
    x = np.ones((2, 4 + 2 * world.size), np.float32)  # a shape that no other case has
    kind, words = CollectiveMismatch, "rank 1: refused: TypeError: .* has no option 'fast'"
    if world.rank == 1:
        kind, words = TypeError, "matmul_all_reduce.* has no option 'fast'"
    with pytest.raises(kind, match=words):
        tdx.matmul_all_reduce(x, x.T.copy(), **({"fast": 1} if world.rank == 1 else {}))
    world.barrier()


@isolated
@worlds(2)
@limit(30)
@pytest.mark.parametrize("columns", [((8, 9), (9, 9), (8, 10)), ((8, 9), (10, 11), (8, 11))])
def case_columns_that_do_not_go_together(comm, backend, columns):
    """A rank's N that comes again beside another N of its peer: the remedy is named."""
    world = tdx.init(comm, backend=backend, timeout_s=1)

    def multiply():
        for each in columns:
            b = np.ones((16, each[world.rank]), np.float32)
            tdx.all_gather_matmul(np.ones((4, 16), np.float32), b)
        world.synchronize()

    with pytest.raises(CollectiveMismatch, match="goes with one of every other rank"):
        multiply()
    with contextlib.suppress(CollectiveMismatch):
        world.close()
    comm.barrier()
