"""Matrix product and reduce-scatter in one: C_r = act(rows r of the sum of all A . B + bias).

Every rank multiplies its A (M, K_local) by its B (K_local, N); the sum over ranks is scattered
along the rows.

fused    Persistent blocks compute the tiles of the next rank's rows first and the own rows last.
         Copy engines send a chunk of a peer's rows as soon as its tiles are finished, while the
         next are computed; see copy_push.py. Who has computed an own tile adds the W partials of
         it, when those of the peers are there.
         W ranks: (W - 1) / W * M * N * partial itemsize bytes out of each rank, hidden behind
         2 * M * N * K_local operations but for the last rows.
unfused  The product, then a reduce-scatter, for few rows: those take less time to send than copy
         engines take to begin.

Partial sums travel in the output's dtype, or in float32 with partial_dtype="float32". Bits for
one Config are the same on every run and for both algorithms: each partial is one block's sum over
K, rounded once, and the ranks' partials are added in float32, without atomics, from rank 0 upwards.

Ordering: peers write into a rank's buffer for partials with its credit for a call, given as it
enters that call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copy_push import CopyPush, enter_kernel
from tdx.kernels.matmul import (
    bind_matmul,
    grouped_tile,
    known,
    known_strides,
    store_tile,
    tile_product,
)
from tdx.kernels.operand import Operand, elements, operand, overlap
from tdx.kernels.product import Config, ProductOptions, blocks_for, takes_options
from tdx.kernels.reduce_scatter import ReduceScatter
from tdx.kernels.reduced_product import ReducedProduct, reduced_product
from tdx.kernels.select import constants, follows, power_of_two
from tdx.runtime.array import Array
from tdx.runtime.errors import InvalidArgument

__all__ = ["ALGORITHMS", "MatmulReduceScatter", "matmul_reduce_scatter"]

ALGORITHMS = ("fused", "unfused")
_SIZES = [
    "rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn", "chunks",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def fused_kernel(
    a, b, scale_a, scale_b, c, bias, partials, outgoing, finished, signals, credit, epoch, world,
    rows, columns, depth, stride_am, stride_ak, stride_bk, stride_bn, chunks,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of all owners' `rows` rows, the next rank's first, and sum the own ones.

    Peers' tiles go to `outgoing`, and are counted in `finished`, for each CHUNK of rows. Tiles are
    put away in 1 or 4 PIECES.
    """
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_am, stride_ak = known_strides(stride_am, stride_ak, A_UNIT, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    sound = tdl.no_fault(world)
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(columns, BN)
    tiles = tiles_m * tiles_n
    for index in range(tl.program_id(0), tiles * ranks, tl.num_programs(0)):
        owner = (me + 1 + index // tiles) % ranks
        row, col = grouped_tile(index % tiles, tiles_m, tiles_n, GROUP_M)
        part = owner.to(tl.int64) * rows
        total = tile_product(
            a, b, scale_a, scale_b, part, row, col, rows, columns, depth,
            stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
        )  # fmt: skip
        ok = sound
        if owner == me:
            signal = signals + row * BM // CHUNK
            ok = _wait_each(signal, credit, ranks, chunks, world, epoch) & ok
        pieces = _quarters(total, BM, BN) if PIECES == 4 else (total,)
        for i in tl.static_range(PIECES):  # with as much fewer registers
            _put(
                c, bias, pieces[i], partials, outgoing, row, col * PIECES + i, rows, columns, owner,
                world, ok, BM, BN // PIECES, HAS_BIAS, ACTIVATION,
            )  # fmt: skip
        if owner != me:
            signal = finished + owner * chunks + row * BM // CHUNK
            tdl.notify(signal, me, world, 1, op="add")
    for chunk in range(0, chunks):
        _wait_each(signals + chunk, credit, ranks, chunks, world, epoch)  # see copy_push.py


@triton.jit
def _wait_each(signal, credit, ranks, step, world, epoch):
    """Wait for every rank's signal, `step` words apart; for credit first, to name who is late."""
    ok = tdl.wait_all(credit, ranks, world, tl.load(epoch))
    for first in range(0, ranks, 32):
        peers = tl.minimum(first + tl.arange(0, 32), ranks - 1)
        ok = tdl.wait(signal + peers * step, world, tl.load(epoch), peer=peers) & ok
    return ok


@triton.jit
def _quarters(x, BM: tl.constexpr, BN: tl.constexpr):
    """Columns of a tile, from left to right."""
    left, right = _halves(x, BM, BN)
    return _halves(left, BM, BN // 2) + _halves(right, BM, BN // 2)


@triton.jit
def _halves(x, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _put(
    c, bias, own, partials, outgoing, row, col, rows, columns, owner, world, ok,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store a partial of a peer's tile; of an own one the sum with the peers', in rank order."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    size = tl.cast(rows, tl.int64) * columns
    if owner != me:
        store_tile(
            outgoing + owner * size, own, bias, row, col, rows, columns, columns, ok, BM, BN,
            False, "none",
        )  # fmt: skip
    else:
        rm = tl.arange(0, BM)
        rn = tl.arange(0, BN)
        first_row = tl.cast(row, tl.int64) * BM
        first_column = tl.cast(col, tl.int64) * BN
        at = rm[:, None] * columns + rn[None, :]
        inside = (rm[:, None] < rows - first_row) & (rn[None, :] < columns - first_column) & ok
        part = partials + first_row * columns + first_column
        own = own.to(partials.dtype.element_ty).to(tl.float32)
        total = tl.full((BM, BN), -0.0, tl.float32)  # with which a sum is the other summand
        for first in range(0, ranks, 2):
            for rank in tl.static_range(2):  # as many loads at a time
                peer = first + rank
                there = (peer < ranks) & (peer != me)
                value = tl.load(part + at, mask=inside & there, other=-0.0).to(tl.float32)
                total += tl.where(peer == me, own, value)
                part += size
        store_tile(
            c, total, bias, row, col, rows, columns, columns, ok, BM, BN, HAS_BIAS, ACTIVATION
        )


@triton.jit(do_not_specialize=["rows", "columns"])
def finish_kernel(
    total, c, bias, world, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """c = act(total + bias), rounded once."""
    columns = known(columns, EVEN)
    ok = tdl.no_fault(world)
    tiles_n = tl.cdiv(columns, BN)
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BM) * tiles_n, tl.num_programs(0)):
        row, col = tile // tiles_n, tile % tiles_n
        at = (row * BM + rm).to(tl.int64)[:, None] * columns + col * BN + rn[None, :]
        inside = (rm[:, None] < rows - row * BM) & (rn[None, :] < columns - col * BN)
        value = tl.load(total + at, mask=inside, other=0.0)
        store_tile(
            c, value, bias, row, col, rows, columns, columns, ok, BM, BN, HAS_BIAS, ACTIVATION
        )


class MatmulReduceScatter(ReducedProduct):
    """A matrix product and reduce-scatter of one shape and dtype, ready to be called.

    `shape_a` is (d0, ..., K_local), d0 a multiple of the ranks; `algorithm` is "fused", with a
    `config` of block_m <= 1024, or "unfused", of which errors may name the reduce_scatter. The
    other parameters, and the errors, are those of ReducedProduct.
    """

    operation = "matmul_reduce_scatter"
    algorithms = ALGORITHMS
    same_tile = False

    def _choose(self, config: Config | None, algorithm: str | None) -> tuple[Config, str]:
        first, size = self.shape_a[0], self.group.size
        if first % size:
            raise InvalidArgument(
                f"a's first axis, {first}, is no multiple of the {size} ranks; pad it"
            )
        rows = elements(self.shape_a[:-1])
        self._rows = rows // size
        depth, columns = self.shape_b
        if algorithm is None:
            nbytes = self._rows * columns * self.partial_dtype.itemsize
            later = follows(self.world.backend, self._rows, nbytes, size)
            algorithm = "unfused" if later else "fused"
        most = constants(self.world.backend).scattered_rows
        if config is not None and algorithm == "fused" and config.block_m > most:
            raise InvalidArgument(f'block_m={config.block_m} must be <= {most} for "fused"')
        m, parts = (self._rows, size) if algorithm == "fused" else (rows, 1)
        return self.product.tile(config, self.world, m, columns, depth, parts), algorithm

    def _build(self, buffer: bool) -> None:
        columns, out = self.shape_b[1], self.product.out_dtype
        self.out_shape = (self.shape_a[0] // self.group.size, *self.shape_a[1:-1], columns)
        self._out = self.result_buffer(self.out_shape, out, buffer)
        self._way = (_Fused if self.algorithm == "fused" else _Unfused)(self)
        usual = (self.shape_a[-1], 1, columns, 1)
        if self._rows and columns and self.product.prepares(self.config, self._sizes(usual)):
            self._way.kernel(self, usual, (0, 0), self.dtype, True)

    def __call__(self, a: Any, b: Any, out: Any = None, stream: Any = None, **extras: Any) -> Any:
        """Queue the operation; returns `out`, or the plan's buffer when it is None.

        `extras`: bias, scale_a and scale_b, as matmul has them.
        """
        ops, strides, steps = self._operands(a, b, out, **extras)
        x, y, _, _, to, vector = ops
        if overlap(x, to) or overlap(y, to):
            raise InvalidArgument("out overlaps a or b, read while it is written: pass another")
        empty, aligned = 0 in to.shape, not (x.address | y.address) % 16
        run = None if empty else self._way.kernel(self, strides, steps, vector.dtype, aligned)
        handle = self.begin(stream, *ops)
        if run is not None:
            self._way.run(self, run, handle, ops)
        return self._out if out is None else out


class _Fused:
    """Workspaces, kernels and copies of the fused algorithm. Part of a plan, not held."""

    def __init__(self, plan: MatmulReduceScatter):
        world, size, config = plan.world, plan.group.size, plan.config
        rows, columns, kind = plan._rows, plan.shape_b[1], plan.partial_dtype
        part = max(1, rows * columns)
        self._tiles = -(-rows // config.block_m) * -(-columns // config.block_n)
        least = constants(world.backend).scattered_rows
        self._chunk = max(least, power_of_two(-(-rows // 16)))  # a queue takes about 1000 entries
        chunks = self._chunks = max(1, -(-rows // self._chunk))
        counts = [
            -(-min(self._chunk, rows - first) // config.block_m) * -(-columns // config.block_n)
            for first in range(0, rows, self._chunk)
        ]
        partials = plan.workspace("partials", (size, part), kind)
        signals = plan.workspace("sent", (size * chunks,), "int32", chunks)
        credit = plan.workspace("credit", (size,), "int32")
        steps = max([1, *counts])
        finished = plan.workspace("finished_tiles", (size * chunks,), "int32", steps=steps)
        epoch = world.zeros((1,), "int32", symmetric=False)
        outgoing = world.empty((size, part), kind, symmetric=False)
        plan._memory.append(outgoing._block)
        meeting = (signals, credit, epoch, plan.group.handle)
        self._enter = plan.bind(enter_kernel, 1, (), *meeting, chunks, num_warps=1)
        self._shared = (partials, outgoing, finished, signals, credit, epoch, plan.group.handle)
        rank, line = plan.group.rank, columns * kind.itemsize

        def pieces(peer: int, chunk: int) -> list[tuple[Array, int, Array | None, int, int]]:
            first = chunk * self._chunk
            nbytes = min(self._chunk, rows - first) * line
            to, at = (rank * rows + first) * line, (peer * rows + first) * line
            return [(partials, to, outgoing, at, nbytes)]

        self._push: CopyPush | None = None
        if size > 1 and self._tiles:
            self._push = CopyPush(plan, meeting, chunks, pieces, finished, counts)
        self._kernels: dict[Any, Callable[..., None]] = {}

    def run(self, plan: Any, multiply: Any, handle: int, ops: tuple[Operand, ...]) -> None:
        """Queue a call."""
        self._enter(handle)
        if self._push is not None:
            self._push.start(handle)
        multiply(handle, *ops)
        if self._push is not None:
            self._push.join(handle)

    def kernel(self, plan: MatmulReduceScatter, *key: Any) -> Callable[..., None]:
        """That for operands with such (strides, steps, bias, aligned), bound at first use."""
        if key not in self._kernels:
            strides, steps, bias, aligned = key
            world, product, config = plan.world, plan.product, plan.config
            sizes, size = plan._sizes(strides), plan.group.size
            described = product.described(world, config, sizes, aligned)
            scale = product.scale_dtype
            kinds = (
                *product.kinds(config, described, sizes),
                scale,
                scale,
                product.out_dtype,
                bias,
            )
            beside = 0 if self._push is None else self._push.blocks
            self._kernels[key] = plan.bind(
                fused_kernel, blocks_for(world, self._tiles * size, beside), kinds, *self._shared,
                plan._rows, *sizes[1:], self._chunks, CHUNK=self._chunk, **product.constants,
                PIECES=4 if world.backend != "host" and config.block_n >= 64 else 1,
                **product.product_constants(config, sizes, steps, described),
            )  # fmt: skip
        return self._kernels[key]


class _Unfused:
    """The product, the reduce-scatter and what follows it. Part of a plan."""

    def __init__(self, plan: MatmulReduceScatter):
        world, product, columns = plan.world, plan.product, plan.shape_b[1]
        self._own = replace(product, out_dtype=plan.partial_dtype, bias=False, activation=None)
        shape = (*plan.shape_a[:-1], columns)
        self._sums = world.empty(shape, plan.partial_dtype, symmetric=False)
        plan._memory.append(self._sums._block)
        self._later = product.bias or product.activation is not None
        self._scatter = ReduceScatter(
            world, shape, plan.partial_dtype, team=plan.group, buffer=self._later,
            out_dtype="float32" if self._later else product.out_dtype,
        )  # fmt: skip
        self._kernels: dict[Any, Callable[..., None]] = {}

    def run(self, plan: Any, multiply: Any, handle: int, ops: tuple[Operand, ...]) -> None:
        """Queue a call."""
        a, b, scale_a, scale_b, c, bias = ops
        sums = operand(plan.world, self._sums, "sums")
        multiply(handle, a, b, sums, a, scale_a, scale_b)
        if not self._later:
            self._scatter(sums, c, handle)
        else:
            total = operand(plan.world, self._scatter(sums, stream=handle), "total")
            self._finish(plan, bias.dtype)(handle, total, c, bias)

    def kernel(self, plan: MatmulReduceScatter, *key: Any) -> Callable[..., None]:
        """The product, as that of _Fused."""
        if key not in self._kernels:
            product, (strides, steps, bias, aligned) = self._own, key
            sizes, scale = plan._sizes(strides), product.scale_dtype
            described = product.described(plan.world, plan.config, sizes, aligned)
            others = (product.out_dtype, plan.dtype, scale, scale)
            self._kernels[key] = bind_matmul(
                plan.world, product, plan.config, sizes, steps, described, others
            )
            if self._later:
                self._finish(plan, bias)
        return self._kernels[key]

    def _finish(self, plan: MatmulReduceScatter, bias: np.dtype) -> Callable[..., None]:
        """What adds a bias of this type, bound at first use."""
        if bias not in self._kernels:
            config, columns = plan.config, plan.shape_b[1]
            height, width = min(config.block_m, 64), min(config.block_n, 64)
            tiles = -(-plan._rows // height) * -(-columns // width)
            self._kernels[bias] = plan.bind(
                finish_kernel, plan.blocks_for(tiles),
                (np.dtype("float32"), plan.product.out_dtype, bias), plan.group.handle,
                plan._rows, columns, BM=height, BN=width, EVEN=columns % 16 == 0,
                num_warps=config.num_warps, **plan.product.constants,
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
    algorithm : {"fused", "unfused"}, optional
    bias : array, optional
        (N,), added once, after the reduction; then the activation.
    scale_a, scale_b : optional
        Of this rank's a and b.
    activation, out_dtype, out, allow_tf32, config, team, stream
        See matmul. `out` must not overlap a or b.

    Returns (d0 / size, ..., N) in the framework of `a`.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    return reduced_product(MatmulReduceScatter, a, b, partial_dtype, ProductOptions(**options))
