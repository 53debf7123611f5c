"""Matrix product and all-reduce in one: C = act(sum over ranks of A . B, + bias) on all ranks.

Every rank multiplies its A (M, K_local) by its B (K_local, N).

one_shot     One kernel. Its persistent blocks push each partial tile to all ranks as soon as it is
             finished, with a signal, and add all ranks' partials of every tile as they arrive.
             (W - 1) * M * N elements out, one hop, for the few rows of decoding.
two_shot     One kernel. Each tile has one owner. A rank computes the next ranks' tiles first and
             its own last, then adds the partials of its own tiles, pushes the finished tiles to
             all, and takes what the other owners push. 2 * (W - 1) / W * M * N elements out, two
             hops.
copy_engine  Each rank owns rows. Partials go to their owners as in matmul_reduce_scatter.py, where
             an own tile is summed as soon as it is computed; copy engines send a chunk of own rows
             to all as soon as its tiles are summed. A second kernel takes what the others send.
             As many elements: half of them hidden behind the product of the others' rows, half
             behind that of the own rows, which takes 1 / W of the time.
low_latency  One kernel, for the fewest rows: partial sums go to all ranks as words of data and
             flag, see low_latency_product.py. Twice the bytes of one_shot, and no signals. Up to 16
             ranks, 4 MiB of partial sums.
unfused      The product, then an all-reduce: see product_first.py.

Partial sums travel in the output's dtype, or in float32 with partial_dtype="float32". Bits for one
Config are the same on every run, rank and for all algorithms: each partial is one block's sum over
K, rounded once, and the ranks' partials are added in float32 from rank 0 upwards. No atomics.

Ordering: in one kernel, places for partials are used in turn by calls' parity. A rank in call n + 2
has finished call n + 1, for which every owner of a tile had left call n. One place is enough for
finished tiles: an owner has then a partial of this call from every rank, all of which have left the
call before. Copy engines write with the credit that a rank gives as it enters a call.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.all_reduce import AllReduce
from tdx.kernels.copy_push import CopyPush
from tdx.kernels.copying import copy_share
from tdx.kernels.low_latency_product import LowLatencyProduct, sends_words
from tdx.kernels.matmul_reduce_scatter import Fused, chunk_rows, fused_tile
from tdx.kernels.operand import Operand, elements
from tdx.kernels.product import Config, ProductOptions, takes_options
from tdx.kernels.product_first import ProductFirst
from tdx.kernels.reduced_product import ReducedProduct, Way, check_fused, reduced_product
from tdx.kernels.select import block_elements, cheapest, constants, follows
from tdx.kernels.tile_product import finish_tile, grouped_tile, known, known_strides, tile_product
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Bound

__all__ = ["ALGORITHMS", "MatmulAllReduce", "matmul_all_reduce"]

ALGORITHMS = ("low_latency", "one_shot", "two_shot", "copy_engine", "unfused")
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


@triton.jit(do_not_specialize=["rows", "whole", "columns", "chunks"])
def take_kernel(
    c, results, progress, epoch, world, rows, whole, columns, chunks,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Copy the rows of other owners to c, CHUNK rows at a time as they arrive."""
    columns = known(columns, EVEN)
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    number = tl.load(epoch)
    for chunk in range(0, chunks):
        for hop in range(1, ranks):
            peer = (me + ranks - hop) % ranks
            ok = tdl.wait(progress + peer * chunks + chunk, world, number, peer=peer)
            first = peer.to(tl.int64) * rows + chunk * CHUNK
            count = tl.minimum(tl.minimum(CHUNK, rows - chunk * CHUNK), whole - first)
            if ok & (count > 0):
                at = first * columns
                copy_share(
                    c + at, results + at, count * columns, tl.program_id(0), tl.num_programs(0),
                    BLOCK,
                )  # fmt: skip
    before = me * chunks  # see copy_push.py
    behind = (ranks - 1 - me) * chunks
    tdl.wait_all(progress, before, world, number, first_peer=-before)
    tdl.wait_all(progress + before + chunks, behind, world, number, first_peer=-behind)


class MatmulAllReduce(ReducedProduct):
    """A matrix product and all-reduce of one shape and dtype, ready to be called.

    `algorithm` is "low_latency", "one_shot", "two_shot", "copy_engine", with a `config` of
    block_m <= 512, or "unfused", of which errors may name the all_reduce. With one_shot and
    two_shot, and no `config`, K_local is a multiple of 16 on all ranks, or on none. `out` must not
    overlap a or b. The other parameters, and the errors, are those of ReducedProduct.
    """

    operation = "matmul_all_reduce"
    algorithms = ALGORITHMS

    def _choose(self, config: Config | None, algorithm: str | None) -> tuple[Config, str]:
        self._rows = elements(self.shape_a[:-1])
        k, n = self.shape_b
        self.out_shape = (*self.shape_a[:-1], n)
        count, size, backend = self._rows * n, self.group.size, self.world.backend
        partial, result = self.partial_dtype.itemsize, self.product.out_dtype.itemsize
        sent = {
            "one_shot": (size - 1) * count * partial,
            "two_shot": (size - 1) * count * (partial + result) / size,
        }
        limits = constants(backend)
        if algorithm is None:
            owned = count * partial // size
            fits = config is None or config.block_m <= limits.gathered_rows
            few = follows(backend, -(-self._rows // size), owned, size)
            if size > 1 and fits and not few and owned >= limits.summed_bytes:
                algorithm = "copy_engine"
            elif size > 1 and sends_words(backend, count * partial, size):
                algorithm = "low_latency"
            else:
                algorithm = "one_shot" if size == 1 else cheapest(backend, sent)
        self.same_tile = algorithm in sent
        if algorithm == "copy_engine":
            check_fused(config, algorithm, limits.gathered_rows)
            return fused_tile(self, config, -(-self._rows // size), passes=2), algorithm
        if algorithm != "unfused":
            check_fused(config, algorithm)
        tile = self.product.tile(config, self.world, self._rows, n, k, split=algorithm == "unfused")
        return tile, algorithm

    def _build(self) -> Way:
        if self.algorithm == "unfused":
            return ProductFirst(self, AllReduce)
        if self.algorithm == "low_latency":
            return LowLatencyProduct(self, self._rows, scattered=False)
        return (_CopyEngine if self.algorithm == "copy_engine" else _OneKernel)(self)


class _OneKernel:
    """Workspaces and the kernel of one_shot and two_shot. A Way."""

    def __init__(self, plan: MatmulAllReduce):
        size, config, whole = plan.group.size, plan.config, plan.algorithm == "one_shot"
        rows, columns = plan._rows, plan.shape_b[1]
        tile = config.block_m * config.block_n
        tiles = config.tiles(rows, columns)
        owned = max(1, tiles if whole else -(-tiles // size))
        partials = plan.workspace("partials", (2 * size * owned * tile,), plan.partial_dtype)
        kept = 1 if whole else max(1, tiles)  # finished tiles of other owners
        results = plan.workspace("results", (kept * tile,), plan.product.out_dtype)
        arrived = plan.workspace("partial_tiles", (size * owned,), "int32")
        finished = plan.workspace("finished_tiles", (kept,), "int32")
        most = constants(plan.world.backend).matmul_blocks
        self._blocks = plan.blocks_for(max(1, tiles), most)
        self._shared = (
            partials, results, arrived, finished, plan.channel(self._blocks), plan.group.handle,
            owned,
        )  # fmt: skip
        self._named = {"RANKS": size, "ONE_SHOT": whole}
        self._kernels: dict[Any, Bound] = {}

    def run(self, plan: Any, multiply: Bound, handle: int, ops: tuple[Operand, ...]) -> None:
        """Queue a call."""
        multiply(handle, *ops)

    def kernel(self, plan: Any, *layout: Any) -> Bound:
        """The kernel for operands so laid out, bound at first use."""
        if layout not in self._kernels:
            strides, steps, bias, aligned = layout
            product, config, sizes = plan.product, plan.config, plan._sizes(strides)
            described = product.described(plan.world, config, sizes, aligned)
            scale, kinds = product.scale_dtype, product.kinds(config, described, sizes)
            self._kernels[layout] = plan.bind(
                fused_kernel, self._blocks, (*kinds, scale, scale, product.out_dtype, bias),
                *self._shared, *sizes, **product.constants, **self._named,
                **product.product_constants(config, sizes, steps, described),
            )  # fmt: skip
        return self._kernels[layout]


class _CopyEngine(Fused):
    """The reduce-scatter of matmul_reduce_scatter.py, and a gather of each chunk of own rows."""

    def __init__(self, plan: MatmulAllReduce):
        world, size, rank = plan.world, plan.group.size, plan.group.rank
        whole, columns, kind = plan._rows, plan.shape_b[1], plan.product.out_dtype
        rows, line = -(-whole // size), columns * kind.itemsize
        least = constants(world.backend).gathered_rows
        height = chunk_rows(rows, least, size - 1, passes=2)
        super().__init__(plan, rows, height)
        counts = self.own_counts
        results = plan.workspace("results", (size, max(1, rows * columns)), kind)
        self.progress = plan.workspace("summed", (size * len(counts),), "int32", len(counts))

        def pieces(peer: int, chunk: int) -> list[tuple[Array, int, Array | None, int, int]]:
            first = rank * rows + chunk * height
            count = min(height, rows - chunk * height, whole - first)
            return [(results, first * line, None, first * line, count * line)] if count > 0 else []

        if self.push is not None:
            CopyPush(
                plan, (self.progress, *self.meeting), len(counts), pieces, self.made, counts,
                common=True, behind=self.push,
            )  # fmt: skip
            block = block_elements(world.backend, min(height, rows) * columns)
            self._take = plan.bind(
                take_kernel, plan.blocks_for(-(-rows * columns // block)), (kind,), results,
                self.progress, *self.meeting[1:], rows, whole, columns, len(counts),
                CHUNK=height, BLOCK=block, EVEN=columns % 16 == 0, num_warps=8,
            )  # fmt: skip

    def run(self, plan: Any, multiply: Bound, handle: int, ops: tuple[Operand, ...]) -> None:
        """Queue a call."""
        if self.push is not None:
            self._take.prepare(ops[4])
        super().run(plan, multiply, handle, ops)

    def _follow(self, handle: int, c: Operand) -> None:
        self._take(handle, c)


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
    algorithm : {"low_latency", "one_shot", "two_shot", "copy_engine", "unfused"}, optional
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
