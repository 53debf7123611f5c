"""Matrix product and reduce-scatter in one: C_r = act(rows r of the sum of all A . B + bias).

Every rank multiplies its A (M, K_local) by its B (K_local, N); the sum over ranks is scattered
along the rows. Persistent blocks compute the tiles of the peers' rows first and the own rows last.
A second kernel of the owner adds the W partials of each tile, in rank order. How partials travel:

tile by tile  Each block stores its tile in the owner's memory and signals it. Where all owners'
              rows fit into one tile they are computed together, so that B is read once, and each
              row goes to its owner.
by engines    Large parts: blocks store tiles in local memory, so that they need not wait for the
              links, and copy engines send an owner's rows once all of its tiles are finished, while
              the next owner's are computed. See copy_push.py.

    W ranks: (W - 1) / W * M * N * partial itemsize bytes out of each rank, hidden behind
    2 * M * N * K_local operations but for the last tiles.

Partial sums travel in the output's dtype, or in float32 with partial_dtype="float32". Bits for
one Config are the same on every run: each partial is one block's sum over K, rounded once, and
the ranks' partials are added in float32 from rank 0 upwards. No atomics on them.

Ordering: tile by tile, two partial buffers are used in turn. A rank can only be in call n + 2 after
every other has added its partials of call n, because it waited for their tiles of call n + 1. By
engines there is one buffer, into which peers write with the owner's credit for a call, given as it
enters that call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copy_push import CopyPush, enter_kernel
from tdx.kernels.matmul import (
    grouped_tile,
    known,
    known_strides,
    store_tile,
    tile_product,
)
from tdx.kernels.operand import elements
from tdx.kernels.product import Config, ProductOptions, blocks_for, takes_options
from tdx.kernels.reduced_product import ReducedProduct, reduced_product
from tdx.kernels.select import constants, power_of_two
from tdx.runtime.array import Array
from tdx.runtime.errors import InvalidArgument

__all__ = ["MatmulReduceScatter", "matmul_reduce_scatter"]

_SIZES = ["rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn"]


@triton.jit
def begin_kernel(epoch):
    """Begin the next call of tiles that travel one by one."""
    tl.store(epoch, tl.load(epoch) + 1)


@triton.jit
def _spread(part, total, col, rows, columns, when, world, BM: tl.constexpr, BN: tl.constexpr):
    """Store a tile that has `rows` rows of every rank: each rank's at its own `part`."""
    ranks = tdl.num_ranks(world)
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    first_column = tl.cast(col, tl.int64) * BN
    owner = rm // rows
    to = tdl.symm_at(part, tl.minimum(owner, ranks - 1), world)
    to += (rm - owner * rows).to(tl.int64) * columns + first_column
    inside = (rm[:, None] < rows * ranks) & (rn[None, :] < columns - first_column) & when
    tl.store(to[:, None] + rn[None, :], total.to(part.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def produce_kernel(
    a, b, scale_a, scale_b, partials, signals, epoch, world, outgoing, finished, rows, columns,
    depth, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, A_UNIT: tl.constexpr, B_UNIT: tl.constexpr,
    A_STEP: tl.constexpr, B_STEP: tl.constexpr, EVEN: tl.constexpr, DESCRIBED: tl.constexpr,
    TOGETHER: tl.constexpr, ENGINES: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of all owners' `rows` rows, the next rank's first, and send them.

    TOGETHER: a tile has the rows of all owners. ENGINES: peers' tiles stay in `outgoing`, and are
    counted in `finished`.
    """
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
    turn = 0 if ENGINES else (number & 1).to(tl.int64)
    slot = (turn * ranks + me.to(tl.int64)) * rows * columns
    if TOGETHER:
        for col in range(tl.program_id(0), tiles_n, tl.num_programs(0)):
            total = tile_product(
                a, b, scale_a, scale_b, 0, 0, col, rows * ranks, columns, depth,
                stride_am, stride_ak, stride_bk, stride_bn,
                BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
            )  # fmt: skip
            _spread(partials + slot, total, col, rows, columns, ok, world, BM, BN)
            for hop in range(1, ranks + 1):
                tdl.notify(signals + me * tiles_n + col, (me + hop) % ranks, world, number)
    else:
        for index in range(tl.program_id(0), tiles * ranks, tl.num_programs(0)):
            owner = (me + 1 + index // tiles) % ranks
            tile = index % tiles
            row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            total = tile_product(
                a, b, scale_a, scale_b, owner.to(tl.int64) * rows, row, col, rows, columns, depth,
                stride_am, stride_ak, stride_bk, stride_bn,
                BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
            )  # fmt: skip
            if ENGINES:
                to = outgoing + owner.to(tl.int64) * rows * columns
                if owner == me:
                    to = partials + slot
            else:
                to = tdl.symm_at(partials + slot, owner, world)
            store_tile(
                to, total, to, row, col, rows, columns, columns, ok, BM, BN, False, "none",
                DESCRIBED and BN > 128,
            )  # fmt: skip
            if ENGINES:
                tdl.notify(finished + owner, me, world, 1, op="add")
            else:
                tdl.notify(signals + me * tiles + row * tiles_n + col, owner, world, number)


@triton.jit(do_not_specialize=["rows", "columns"])
def reduce_kernel(
    c, bias, partials, signals, epoch, world, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, ENGINES: tl.constexpr,
):  # fmt: skip
    """Add the ranks' partials of every own tile, in rank order, as they arrive."""
    columns = known(columns, EVEN)
    ranks = tdl.num_ranks(world)
    number = tl.load(epoch)
    tiles_n = tl.cdiv(columns, BN)
    tiles = tl.cdiv(rows, BM) * tiles_n
    each = 1 if ENGINES else tiles  # signals of a rank
    turn = 0 if ENGINES else (number & 1).to(tl.int64)
    slots = partials + turn * ranks * rows * columns
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
        signal = signals + tl.minimum(tile, each - 1)
        ok = tdl.wait(signal, world, number, peer=0)
        total = tl.load(part + at, mask=inside & ok, other=0.0).to(tl.float32)
        for peer in range(1, ranks):
            ok = tdl.wait(signal + peer * each, world, number, peer=peer) & ok
            part += tl.cast(rows, tl.int64) * columns
            total += tl.load(part + at, mask=inside & ok, other=0.0).to(tl.float32)
        store_tile(
            c, total, bias, row, col, rows, columns, columns, ok, BM, BN, HAS_BIAS, ACTIVATION
        )
    if ENGINES:  # see copy_push.py
        tdl.wait_all(signals, ranks, world, number)


class MatmulReduceScatter(ReducedProduct):
    """A matrix product and reduce-scatter of one shape and dtype, ready to be called.

    `shape_a` is (d0, ..., K_local), d0 a multiple of the ranks; the other parameters, and the
    errors, are those of ReducedProduct.
    """

    operation = "matmul_reduce_scatter"

    def _choose(self, config: Config | None, algorithm: str | None) -> tuple[Config, str]:
        first, size = self.shape_a[0], self.group.size
        if first % size:
            raise InvalidArgument(
                f"a's first axis, {first}, is no multiple of the {size} ranks; pad it"
            )
        rows = elements(self.shape_a[:-1])
        self._rows = rows // size
        depth, columns = self.shape_b
        for m, parts in ((rows, 1), (self._rows, size)):
            tile = self.product.tile(config, self.world, m, columns, depth, parts)
            self._together = rows <= tile.block_m
            if self._together:
                break
        return tile, algorithm or "fused"

    def _build(self, buffer: bool) -> None:
        world, size, config, columns = self.world, self.group.size, self.config, self.shape_b[1]
        self._tiles = -(-self._rows // config.block_m) * -(-columns // config.block_n)
        part = self._rows * columns
        nbytes = part * self.partial_dtype.itemsize
        self._engines = (
            size > 1 and not self._together and nbytes >= constants(world.backend).engine_bytes
        )
        slots, each = (size, 1) if self._engines else (2 * size, max(1, self._tiles))
        partials = self.workspace("partials", (slots, max(1, part)), self.partial_dtype)
        signals = self.workspace("tiles", (size * each,), "int32")
        epoch = world.zeros((1,), "int32", symmetric=False)
        self._shared = (partials, signals, epoch, self.group.handle)
        # some arrays have to stand in where a kernel has no use for one
        outgoing, finished = partials, signals
        self._push: CopyPush | None = None
        if self._engines:
            outgoing = world.empty((size, part), self.partial_dtype, symmetric=False)
            finished = self.workspace("finished_tiles", (size,), "int32", steps=self._tiles)
            credit = self.workspace("credit", (size,), "int32")
            meeting = (signals, credit, epoch, self.group.handle)
            self._begin = self.bind(enter_kernel, 1, (), *meeting, 1, num_warps=1)
            place = self.group.rank * nbytes

            def pieces(peer: int, chunk: int) -> list[tuple[Array, int, int, int]]:
                return [(partials, place, outgoing._address + peer * nbytes, nbytes)]

            self._push = CopyPush(self, meeting, 1, pieces, finished, self._tiles)
        else:
            self._begin = self.bind(begin_kernel, 1, (), epoch, num_warps=1)
        self._sent = (outgoing, finished)
        self.out_shape = (self.shape_a[0] // size, *self.shape_a[1:-1], columns)
        self._out = self.result_buffer(self.out_shape, self.product.out_dtype, buffer)
        self._kernels: dict[Any, Callable[..., None]] = {}
        usual = (self.shape_a[-1], 1, columns, 1)
        if self.product.prepares(config, self._sizes(usual)):
            self._producer(usual, (0, 0), True)
        self._reducer(self.dtype)

    def __call__(self, a: Any, b: Any, out: Any = None, stream: Any = None, **extras: Any) -> Any:
        """Queue the operation; returns `out`, or the plan's buffer when it is None.

        `extras`: bias, scale_a and scale_b, as matmul has them.
        """
        ops, strides, steps = self._operands(a, b, out, **extras)
        *inputs, to, vector = ops
        produce = self._producer(strides, steps, not (inputs[0].address | inputs[1].address) % 16)
        reduce = self._reducer(vector.dtype)
        handle = self.begin(stream, *ops)
        if self._tiles:
            self._begin(handle)
            if self._push is not None:
                self._push.start(handle)
            produce(handle, *inputs)
            reduce(handle, to, vector)
            if self._push is not None:
                self._push.join(handle)
        return self._out if out is None else out

    def _producer(
        self, strides: tuple[int, ...], steps: tuple[int, int], aligned: bool
    ) -> Callable[..., None]:
        """The product of operands so laid out, bound at first use."""
        key = (strides, steps, aligned)
        if key not in self._kernels:
            product, k = self.product, self.shape_b[0]
            sizes = self._sizes(strides)
            described = product.described(self.world, self.config, sizes, aligned)
            size = self.group.size
            kinds = (
                *product.kinds(self.config, described, sizes),
                product.scale_dtype, product.scale_dtype,
            )  # fmt: skip
            tiles = self._tiles * (1 if self._together else size)
            beside = 0 if self._push is None else self._push.blocks
            self._kernels[key] = self.bind(
                produce_kernel, blocks_for(self.world, tiles, beside), kinds, *self._shared,
                *self._sent, self._rows, self.shape_b[1], k, *strides, TOGETHER=self._together,
                ENGINES=self._engines,
                **product.product_constants(self.config, sizes, steps, described),
            )  # fmt: skip
        return self._kernels[key]

    def _reducer(self, bias: np.dtype) -> Callable[..., None]:
        """The reduction with a bias of this type, bound at first use."""
        if bias not in self._kernels:
            config = self.config
            height = power_of_two(self._rows) if self._together else config.block_m
            self._kernels[bias] = self.bind(
                reduce_kernel, blocks_for(self.world, self._tiles),
                (self.product.out_dtype, bias), *self._shared, self._rows, self.shape_b[1],
                BM=height, BN=config.block_n, EVEN=self.shape_b[1] % 16 == 0,
                ENGINES=self._engines, num_warps=config.num_warps,
                **self.product.constants,
            )  # fmt: skip
        return self._kernels[bias]


@takes_options(ProductOptions)
def matmul_reduce_scatter(a: Any, b: Any, *, partial_dtype: Any = None, **options: Any) -> Any:
    """This rank's rows of act(sum over ranks of a . b, + bias). Collective over `team`.

    Parameters
    ----------
    a : tdx array, or array of NumPy or a DLPack producer
        (d0, ..., K_local) of this rank, d0 a multiple of the ranks.
    b : array
        (K_local, N) of this rank, any strides.
    partial_dtype : {None, "float32"}
        In what partial sums travel; None: the output's dtype.
    algorithm : {None, "fused"}
    bias : array, optional
        (N,), added once, after the reduction; then the activation.
    scale_a, scale_b : optional
        Of this rank's a and b.
    activation, out_dtype, out, allow_tf32, config, team, stream
        See matmul.

    Returns (d0 / size, ..., N) in the framework of `a`.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    return reduced_product(MatmulReduceScatter, a, b, partial_dtype, ProductOptions(**options))
