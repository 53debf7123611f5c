"""Matrix product and reduce-scatter in one: C_r = act(rows r of the sum of all A . B + bias).

Every rank multiplies its A (M, K_local) by its B (K_local, N); the sum over ranks is scattered
along the rows. Persistent blocks compute the tiles of the peers' rows first and the own rows
last, push each tile into its owner's memory as it is finished, and signal it. A second kernel of
the owner adds the W partial tiles as they arrive, in rank order.

    W ranks: (W - 1) / W * M * N * partial itemsize bytes out of each rank, hidden behind
    2 * M * N * K_local operations but for the last tiles.

Partial sums travel in the output's dtype, or in float32 with partial_dtype="float32". Bits for
one Config are the same on every run: each partial is one block's sum over K, rounded once, and
the ranks' partials are added in float32 from rank 0 upwards. No atomics.

Ordering: two partial buffers are used in turn. A rank can only be in call n + 2 after every
other has added its partials of call n, because it waited for their tiles of call n + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.call import Call
from tdx.kernels.matmul import (
    Config,
    Epilogue,
    blocks_for,
    check_bias,
    check_fused,
    check_product,
    choose,
    grouped_tile,
    known,
    known_strides,
    no_scales,
    store_tile,
    tile_product,
)
from tdx.kernels.operand import elements, flattened, operand
from tdx.kernels.plan import Plan, plain_shape
from tdx.runtime import dtypes
from tdx.runtime.errors import DtypeError, InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["MatmulReduceScatter", "matmul_reduce_scatter"]

_SIZES = ["rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn"]


@triton.jit
def begin_kernel(epoch):
    """Begin the next call."""
    tl.store(epoch, tl.load(epoch) + 1)


@triton.jit(do_not_specialize=_SIZES)
def produce_kernel(
    a, b, partials, signals, epoch, world, rows, columns, depth,
    stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of all owners' `rows` rows, the next rank's first, and push them."""
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_am, stride_ak = known_strides(stride_am, stride_ak, A_UNIT, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    number = tl.load(epoch)
    ok = tdl.no_fault(world)
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(columns, BN)
    tiles = tiles_m * tiles_n
    for index in range(tl.program_id(0), tiles * ranks, tl.num_programs(0)):
        owner = (me + 1 + index // tiles) % ranks
        tile = index % tiles
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        own = a + owner.to(tl.int64) * rows * stride_am
        total = tile_product(
            own, b, row, col, rows, columns, depth, stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION,
        )  # fmt: skip
        slot = ((number & 1).to(tl.int64) * ranks + me) * rows * columns
        to = tdl.symm_at(partials + slot, owner, world)
        store_tile(to, total, to, row, col, rows, columns, columns, ok, BM, BN, False, "none")
        tdl.notify(signals + me * tiles + row * tiles_n + col, owner, world, number)


@triton.jit(do_not_specialize=["rows", "columns"])
def reduce_kernel(
    c, bias, partials, signals, epoch, world, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Add the ranks' partials of every own tile, in rank order, as they arrive."""
    columns = known(columns, EVEN)
    ranks = tdl.num_ranks(world)
    number = tl.load(epoch)
    tiles_n = tl.cdiv(columns, BN)
    tiles = tl.cdiv(rows, BM) * tiles_n
    slots = partials + (number & 1).to(tl.int64) * ranks * rows * columns
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // tiles_n
        col = tile % tiles_n
        first_row = tl.cast(row, tl.int64) * BM
        first_column = tl.cast(col, tl.int64) * BN
        part = slots + first_row * columns + first_column
        rm = tl.arange(0, BM)
        rn = tl.arange(0, BN)
        at = rm[:, None] * columns + rn[None, :]
        inside = (rm[:, None] < rows - first_row) & (rn[None, :] < columns - first_column)
        ok = tdl.wait(signals + tile, world, number, peer=0)
        total = tl.load(part + at, mask=inside & ok, other=0.0).to(tl.float32)
        for peer in range(1, ranks):
            ok = tdl.wait(signals + peer * tiles + tile, world, number, peer=peer) & ok
            part += tl.cast(rows, tl.int64) * columns
            total += tl.load(part + at, mask=inside & ok, other=0.0).to(tl.float32)
        store_tile(
            c, total, bias, row, col, rows, columns, columns, ok, BM, BN, HAS_BIAS, ACTIVATION
        )


class MatmulReduceScatter(Plan):
    """A matrix product and reduce-scatter of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape_a, shape_b : tuple
        (d0, ..., K_local) and (K_local, N) of this rank. d0 must be a multiple of the ranks.
        d0, ..., N are the same on every rank, K_local may differ. (Ranks must make plans together:
        with the one-line function, all change their shapes in the same call.)
    dtype
        float16, bfloat16 or float32.
    partial_dtype : {None, "float32"}
        In what partial sums travel; None: the output's dtype.
    bias, activation, out_dtype, allow_tf32, config, team, buffer
        See AllGatherMatmul. Bias and activation apply once, after the reduction.

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted.
    """

    operation = "matmul_reduce_scatter"

    def __init__(
        self,
        world: World,
        shape_a: Sequence[int],
        shape_b: Sequence[int],
        dtype: Any,
        *,
        partial_dtype: Any = None,
        bias: bool = False,
        activation: str | None = None,
        out_dtype: Any = None,
        allow_tf32: bool = False,
        config: Config | None = None,
        team: Group | None = None,
        buffer: bool = True,
    ):
        with self.agreement(world, team) as shared:
            self.shape_a, self.shape_b = plain_shape(shape_a), plain_shape(shape_b)
            self.dtype = dtypes.resolve(dtype)
            self.epilogue = Epilogue.make(dtype, bias, activation, out_dtype, allow_tf32)
            out = self.epilogue.out_dtype
            self.partial_dtype = out if partial_dtype is None else dtypes.resolve(partial_dtype)
            self._check()
            self._rows = elements(self.shape_a[:-1]) // self.group.size
            depth, self._columns = self.shape_b
            self.config = config or choose(
                world.backend, self._rows, self._columns, depth, self.dtype
            )
            shared.update(
                a=(*self.shape_a[:-1], "K"), n=self._columns, dtype=self.dtype,
                partial_dtype=self.partial_dtype, bias=bias, activation=activation, out_dtype=out,
                tile=(self.config.block_m, self.config.block_n),
            )  # fmt: skip
        with self.preparation():
            self._build(buffer)

    def _check(self) -> None:
        size, out = self.group.size, self.epilogue.out_dtype
        if self.partial_dtype not in (out, dtypes.resolve("float32")):
            raise DtypeError(f"partial_dtype {self.partial_dtype} must be float32 or {out}")
        if len(self.shape_b) != 2 or len(self.shape_a) < 2:
            raise InvalidArgument(
                f"a and b need shapes (d0, ..., K) and (K, N), got {self.shape_a} and "
                f"{self.shape_b}"
            )
        if self.shape_a[-1] != self.shape_b[0]:
            raise InvalidArgument(f"a {self.shape_a} and b {self.shape_b} differ in K")
        if self.shape_a[0] % size:
            raise InvalidArgument(
                f"a's first axis, {self.shape_a[0]}, is no multiple of the {size} ranks; pad it"
            )

    def _build(self, buffer: bool) -> None:
        size, config = self.group.size, self.config
        self._tiles = -(-self._rows // config.block_m) * -(-self._columns // config.block_n)
        slots = (2 * size, max(1, self._rows * self._columns))
        partials = self.workspace("partials", slots, self.partial_dtype)
        signals = self.workspace("tiles", (max(1, size * self._tiles),), "int32")
        epoch = self.world.zeros((1,), "int32", symmetric=False)
        self._shared = (partials, signals, epoch, self.group.handle, self._rows, self._columns)
        self.out_shape = (self.shape_a[0] // size, *self.shape_a[1:-1], self._columns)
        self._out = self.result_buffer(self.out_shape, self.epilogue.out_dtype, buffer)
        self._kernels: dict[Any, Callable[..., None]] = {}
        self._begin = self.bind(begin_kernel, 1, (), epoch, num_warps=1)
        self._producer((self.shape_a[-1], 1, self._columns, 1))
        self._reducer(self.dtype)

    def __call__(
        self, a: Any, b: Any, out: Any = None, stream: Any = None, *, bias: Any = None
    ) -> Any:
        """Queue the operation; returns `out`, or the plan's buffer when it is None."""
        x, y = operand(self.world, a, "a"), operand(self.world, b, "b")
        if x.shape != self.shape_a:
            raise InvalidArgument(f"a has shape {x.shape}, the plan takes {self.shape_a}")
        check_product(x, y, *self.shape_b, self.dtype)
        _, *strides = flattened(x)
        to = self.output(out, self._out, self.out_shape, self.epilogue.out_dtype)
        vector = check_bias(self.world, bias, self.epilogue.bias, self._columns, x)
        produce = self._producer((*strides, *y.strides))
        reduce = self._reducer(vector.dtype)
        handle = self.begin(stream, x, y, to, vector)
        if self._tiles:
            self._begin(handle)
            produce(handle, x, y)
            reduce(handle, to, vector)
        return self._out if out is None else out

    def _producer(self, strides: tuple[int, ...]) -> Callable[..., None]:
        """The product of operands of these strides, bound at first use."""
        if strides not in self._kernels:
            k, n = self.shape_b
            self._kernels[strides] = self.bind(
                produce_kernel, blocks_for(self.world, self._tiles * self.group.size),
                (self.dtype, self.dtype), *self._shared, k, *strides,
                **self.epilogue.product_constants(self.config, k, n, strides[:2], strides[2:]),
            )  # fmt: skip
        return self._kernels[strides]

    def _reducer(self, bias: np.dtype) -> Callable[..., None]:
        """The reduction with a bias of this type, bound at first use."""
        if bias not in self._kernels:
            config = self.config
            self._kernels[bias] = self.bind(
                reduce_kernel, blocks_for(self.world, self._tiles),
                (self.epilogue.out_dtype, bias), *self._shared, BM=config.block_m,
                BN=config.block_n, EVEN=self._columns % 16 == 0, num_warps=config.num_warps,
                **self.epilogue.constants,
            )  # fmt: skip
        return self._kernels[bias]


def matmul_reduce_scatter(
    a: Any,
    b: Any,
    *,
    partial_dtype: Any = None,
    bias: Any = None,
    activation: str | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: Any = None,
    out: Any = None,
    allow_tf32: bool = False,
    config: Config | None = None,
    algorithm: str | None = None,
    team: Group | None = None,
    stream: Any = None,
) -> Any:
    """This rank's rows of act(sum over ranks of a . b, + bias). Collective over `team`.

    Parameters
    ----------
    a : tdx array, or array of NumPy or a DLPack producer
        (d0, ..., K_local) of this rank, d0 a multiple of the ranks.
    b : array
        (K_local, N) of this rank, any strides.
    partial_dtype : {None, "float32"}
    bias : array, optional
        (N,), added once, after the reduction; then the activation.
    activation, out_dtype, out, allow_tf32, config
        See matmul.
    algorithm : {None, "fused"}
    team, stream : optional

    Returns (d0 / size, ..., N) in the framework of `a`.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    call = Call("matmul_reduce_scatter", a, b, out, team=team, stream=stream)
    with call:
        no_scales(scale_a, scale_b)
        check_fused(algorithm)
        x, y = call.operand(a, "a", strided=True), call.operand(b, "b", strided=True)
        vector = call.optional(bias, "bias")
        plan = call.plan(
            MatmulReduceScatter, x.shape, y.shape, x.dtype, partial_dtype=partial_dtype,
            bias=bias is not None, activation=activation, out_dtype=out_dtype,
            allow_tf32=allow_tf32, config=config,
        )  # fmt: skip
        target = call.target(out, plan.out_shape, plan.epilogue.out_dtype)
        plan(x, y, target, bias=vector, stream=call.stream)
    return call.finish(target)
