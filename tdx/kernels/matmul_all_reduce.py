"""Matrix product and all-reduce in one kernel: C = act(sum over ranks of A . B, + bias) on all.

Every rank multiplies its A (M, K_local) by its B (K_local, N). Persistent blocks compute partial
tiles and push each to the rank that owns it as soon as it is finished, with a signal:

two_shot  Each tile has one owner. A rank computes the next ranks' tiles first and its own last,
          then adds the partials of its own tiles as they arrive, in rank order, pushes the finished
          tiles to all, and takes what the other owners push: 2 * (W - 1) / W * M * N elements out,
          two hops.
one_shot  Every rank owns every tile: it pushes its partials to all and adds all ranks' itself.
          (W - 1) * M * N elements out, one hop, for the few rows of decoding.

Partial sums travel in the output's dtype, or in float32 with partial_dtype="float32". Bits for one
Config are the same on every run, rank and for both algorithms: each partial is one block's sum over
K, rounded once, and the ranks' partials are added in float32 from rank 0 upwards. No atomics.

Ordering: places for partials are used in turn by calls' parity. A rank in call n + 2 has finished
call n + 1, for which every owner of a tile had left call n. One place is enough for finished tiles:
an owner has then a partial of this call from every rank, all of which have left the call before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.matmul import (
    finish_tile,
    grouped_tile,
    known,
    known_strides,
    tile_product,
)
from tdx.kernels.operand import elements
from tdx.kernels.product import Config, ProductOptions, takes_options
from tdx.kernels.reduced_product import ReducedProduct, reduced_product
from tdx.kernels.select import cheapest, constants

__all__ = ["ALGORITHMS", "MatmulAllReduce", "matmul_all_reduce"]

ALGORITHMS = ("one_shot", "two_shot")
_SIZES = [
    "owned", "rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn",
]  # fmt: skip


@triton.jit
def _place(row, col, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """Where the elements of a tile are in a buffer of tiles, and which are in the matrix."""
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    inside = (rm[:, None] < rows - row * BM) & (rn[None, :] < columns - col * BN)
    return rm[:, None] * BN + rn[None, :], inside


@triton.jit
def _store(c, value, row, col, columns, mask, BM: tl.constexpr, BN: tl.constexpr):
    """Store a tile of the result."""
    c_tile = c + tl.cast(row, tl.int64) * BM * columns + tl.cast(col, tl.int64) * BN
    at = tl.arange(0, BM)[:, None] * columns + tl.arange(0, BN)[None, :]
    tl.store(c_tile + at, value, mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def fused_kernel(
    a, b, scale_a, scale_b, c, bias, partials, results, arrived, finished, channel, world, owned,
    rows, columns, depth, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, RANKS: tl.constexpr, ONE_SHOT: tl.constexpr,
):  # fmt: skip
    """Push partials, reduce the own tiles and push them, take the others'.

    Rank r owns tiles r * owned to (r + 1) * owned - 1 in grouped order; ONE_SHOT: all of them.
    `arrived` counts calls for each rank and own tile, `finished` for each tile.
    """
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_am, stride_ak = known_strides(stride_am, stride_ak, A_UNIT, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    TILE: tl.constexpr = BM * BN
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)
    number = tdl.epoch(channel)
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(columns, BN)
    tiles = tiles_m * tiles_n
    stride = tl.cast(owned, tl.int64) * TILE  # from one rank's partials to the next one's
    slots = partials + (number & 1) * RANKS * stride
    begin = 0 if ONE_SHOT else ((me + 1) % RANKS) * owned
    begin = tl.where(begin < tiles, begin, 0)  # the last ranks may own nothing
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = (begin + index) % tiles
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        total = tile_product(
            a, b, scale_a, scale_b, 0, row, col, rows, columns, depth,
            stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
        )  # fmt: skip
        at, inside = _place(row, col, rows, columns, BM, BN)
        value = total.to(partials.dtype.element_ty)
        to = slots + me * stride + (tile % owned).to(tl.int64) * TILE
        signal = arrived + me * owned + tile % owned
        if ONE_SHOT:
            for hop in range(1, RANKS + 1):
                peer = (me + hop) % RANKS
                tl.store(tdl.symm_at(to, peer, world) + at, value, mask=inside & sound)
                tdl.notify(signal, peer, world, number)
        else:
            owner = tile // owned
            tl.store(tdl.symm_at(to, owner, world) + at, value, mask=inside & sound)
            tdl.notify(signal, owner, world, number)
    first = 0 if ONE_SHOT else me * owned
    for local in range(tl.program_id(0), tl.minimum(owned, tiles - first), tl.num_programs(0)):
        tile = first + local
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        at, inside = _place(row, col, rows, columns, BM, BN)
        part = slots + tl.cast(local, tl.int64) * TILE
        ok = tdl.wait(arrived + local, world, number, peer=0)
        total = tl.load(part + at, mask=inside & ok, other=0.0).to(tl.float32)
        for peer in range(1, RANKS):
            ok = tdl.wait(arrived + peer * owned + local, world, number, peer=peer) & ok
            part += stride
            total += tl.load(part + at, mask=inside & ok, other=0.0).to(tl.float32)
        total = finish_tile(total, bias, col, columns, BN, HAS_BIAS, ACTIVATION)
        value = total.to(c.dtype.element_ty)
        if not ONE_SHOT:
            to = results + tl.cast(tile, tl.int64) * TILE
            for hop in range(1, RANKS):
                peer = (me + hop) % RANKS
                tl.store(tdl.symm_at(to, peer, world) + at, value, mask=inside & ok)
                tdl.notify(finished + tile, peer, world, number, when=ok)
        _store(c, value, row, col, columns, inside & ok, BM, BN)
    if not ONE_SHOT:
        for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
            tile = (begin + index) % tiles
            owner = tile // owned
            if owner != me:
                row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
                at, inside = _place(row, col, rows, columns, BM, BN)
                ok = tdl.wait(finished + tile, world, number, peer=owner)
                source = results + tl.cast(tile, tl.int64) * TILE
                value = tl.load(source + at, mask=inside & ok)
                _store(c, value, row, col, columns, inside & ok, BM, BN)


class MatmulAllReduce(ReducedProduct):
    """A matrix product and all-reduce of one shape and dtype, ready to be called.

    Without `config` K_local is a multiple of 16 on all ranks, or on none. `algorithm` is "one_shot"
    or "two_shot"; the other parameters, and the errors, are those of ReducedProduct.
    """

    operation = "matmul_all_reduce"
    algorithms = ALGORITHMS

    def _choose(self, config: Config | None, algorithm: str | None) -> tuple[Config, str]:
        self._rows = elements(self.shape_a[:-1])
        count, size, backend = self._rows * self.shape_b[1], self.group.size, self.world.backend
        partial, result = self.partial_dtype.itemsize, self.product.out_dtype.itemsize
        sent = {
            "one_shot": (size - 1) * count * partial,
            "two_shot": (size - 1) * count * (partial + result) / size,
        }
        if algorithm is None:
            algorithm = "one_shot" if size == 1 else cheapest(backend, sent)
        k, n = self.shape_b
        return self.product.tile(config, self.world, self._rows, n, k), algorithm

    def _build(self, buffer: bool) -> None:
        size, config, whole = self.group.size, self.config, self.algorithm == "one_shot"
        tile, columns = config.block_m * config.block_n, self.shape_b[1]
        self._tiles = -(-self._rows // config.block_m) * -(-columns // config.block_n)
        owned = max(1, self._tiles if whole else -(-self._tiles // size))
        partials = self.workspace("partials", (2 * size * owned * tile,), self.partial_dtype)
        kept = 1 if whole else max(1, self._tiles)  # finished tiles of other owners
        results = self.workspace("results", (kept * tile,), self.product.out_dtype)
        arrived = self.workspace("partial_tiles", (size * owned,), "int32")
        finished = self.workspace("finished_tiles", (kept,), "int32")
        most = constants(self.world.backend).matmul_blocks
        self._blocks = self.blocks_for(max(1, self._tiles), most)
        self._shared = (
            partials, results, arrived, finished, self.channel(self._blocks), self.group.handle,
            owned, self._rows, columns,
        )  # fmt: skip
        self.out_shape = (*self.shape_a[:-1], columns)
        self._out = self.result_buffer(self.out_shape, self.product.out_dtype, buffer)
        self._kernels: dict[Any, Callable[..., None]] = {}
        usual = (self.shape_a[-1], 1, columns, 1)
        if self.product.prepares(config, self._sizes(usual)):
            self._kernel(usual, (0, 0), self.dtype, True)

    def __call__(self, a: Any, b: Any, out: Any = None, stream: Any = None, **extras: Any) -> Any:
        """Queue the operation; returns `out`, or the plan's buffer when it is None.

        `out` must not overlap a or b. `extras`: bias, scale_a and scale_b, as matmul has them.
        """
        ops, strides, steps = self._operands(a, b, out, **extras)
        aligned = not (ops[0].address | ops[1].address) % 16
        run = self._kernel(strides, steps, ops[-1].dtype, aligned)
        handle = self.begin(stream, *ops)
        if self._tiles:
            run(handle, *ops)
        return self._out if out is None else out

    def _kernel(
        self, strides: tuple[int, ...], steps: tuple[int, int], bias: Any, aligned: bool
    ) -> Callable[..., None]:
        """The kernel for operands so laid out, bound at first use."""
        key = (strides, steps, bias, aligned)
        if key not in self._kernels:
            product, k = self.product, self.shape_b[0]
            sizes = self._sizes(strides)
            described = product.described(self.world, self.config, sizes, aligned)
            scale = product.scale_dtype
            a, b = product.kinds(self.config, described, sizes)
            self._kernels[key] = self.bind(
                fused_kernel, self._blocks,
                (a, b, scale, scale, product.out_dtype, bias),
                *self._shared, k, *strides, **product.constants, RANKS=self.group.size,
                ONE_SHOT=self.algorithm == "one_shot",
                **product.product_constants(self.config, sizes, steps, described),
            )  # fmt: skip
        return self._kernels[key]


@takes_options(ProductOptions)
def matmul_all_reduce(a: Any, b: Any, *, partial_dtype: Any = None, **options: Any) -> Any:
    """act(sum over ranks of a . b, + bias), on every rank. Collective over `team`.

    Parameters
    ----------
    a : tdx array, or array of NumPy or a DLPack producer
        (..., K_local) of this rank; (...) is the same on every rank.
    b : array
        (K_local, N) of this rank, any strides.
    partial_dtype : {None, "float32"}
        In what partial sums travel; None: the output's dtype.
    algorithm : {"one_shot", "two_shot"}, optional
    bias : array, optional
        (N,), added once, after the reduction, then the activation; the same on every rank.
    scale_a, scale_b : optional
        Of this rank's a and b.
    activation, out_dtype, out, allow_tf32, config, team, stream
        See matmul. `out` must not overlap a or b.

    Returns (..., N) in the framework of `a`, the same bits on every rank.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    return reduced_product(MatmulAllReduce, a, b, partial_dtype, ProductOptions(**options))
