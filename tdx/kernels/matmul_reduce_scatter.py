"""Matrix product and reduce-scatter in one: C_r = act(rows r of the sum of all A . B + bias).

Every rank multiplies its A (M, K_local) by its B (K_local, N); the sum over ranks is scattered
along the rows.

fused    Persistent blocks compute the tiles of the next rank's rows first and the own rows last.
         Copy engines send a chunk of a peer's rows as soon as its tiles are finished, while the
         next are computed; see copy_push.py. Who has computed an own tile adds the W partials of
         it, when those of the peers are there.
         W ranks: (W - 1) / W * M * N * partial itemsize bytes out of each rank, hidden behind
         2 * M * N * K_local operations but for the last rows.
unfused  The product, then a reduce-scatter (product_first.py), where copy engines begin too late.
one_kernel
         For few rows, of two ranks: blocks push each tile's rows to their owners as soon as it is
         finished, with a signal, and add all ranks' own rows of it. See summed_tiles.py.
low_latency
         The same for the fewest rows, as words of data and flag: see low_latency_product.py. Up to
         16 ranks, 4 MiB of partial sums for a rank; chosen for two.

cuBLAS may multiply for "unfused" and, in part or all, for "fused": see library_sums.py.

Partial sums travel in the output's dtype, or in float32 with partial_dtype="float32". Bits for
one Config are the same on every run and for all algorithms: each partial is one block's sum over
K, rounded once, and the ranks' partials are added in float32, without atomics, from rank 0 upwards.

Ordering: peers write into a rank's buffer for partials with its credit for a call, given as it
enters that call ("fused"), or into slots used in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copy_push import CopyPush, enter_kernel
from tdx.kernels.library_sums import LibrarySums, bind_library_sums
from tdx.kernels.low_latency_product import LowLatencyProduct, sends_words
from tdx.kernels.operand import Operand, elements
from tdx.kernels.product import Config, blocks_for
from tdx.kernels.product_first import ProductFirst
from tdx.kernels.product_options import ProductOptions, options_of, takes_options
from tdx.kernels.reduce_scatter import ReduceScatter
from tdx.kernels.reduced_product import ReducedProduct, Way, check_fused, reduced_product
from tdx.kernels.scattered_rows import (
    Parts,
    chunk_tiles,
    fused_tile,
    is_short,
    sum_tile,
    wait_each,
)
from tdx.kernels.select import follows
from tdx.kernels.summed_tiles import SummedTiles
from tdx.kernels.tile_product import (
    grouped_tile,
    known,
    known_strides,
    quarters,
    store_tile,
    tile_product,
)
from tdx.kernels.tiles import splits
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Bound

__all__ = ["ALGORITHMS", "Fused", "MatmulReduceScatter", "matmul_reduce_scatter"]

ALGORITHMS = ("fused", "one_kernel", "low_latency", "unfused")
_PUSHED_BYTES = 4 << 20  # most partial sums of one of two ranks that one kernel pushes
_LONG = 1 << 16
_FIRST = 256  # rows of a rank from which float8 is multiplied first, by cuBLAS; on two H100s
_SIZES = [
    "rows", "whole", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn",
    "chunks", "first", "last",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def fused_kernel(
    a, b, scale_a, scale_b, c, bias, partials, outgoing, finished, made, signals, credit, epoch,
    world, rows, whole, columns, depth, stride_am, stride_ak, stride_bk, stride_bn, chunks, first,
    last, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, CHUNK: tl.constexpr, PIECES: tl.constexpr,
    OWN_CHUNK: tl.constexpr, PHASED: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of all owners' `rows` rows, the next rank's first, and sum the own ones.

    Tiles from `first` to `last`; cuBLAS has the others, see library_sums.py. Peers' tiles go to
    `outgoing`, and are counted in `finished`, for each CHUNK of rows, which are computed one after
    the other, as near as GROUP_M allows, like those of own rows. Tiles are put away in 1 or 4
    PIECES. If OWN_CHUNK is 0, c has the own rows. Else it has the `whole` rows of all owners, of
    which the last may have fewer, and the own tiles are counted in `made`, for each OWN_CHUNK of
    rows, which are computed one after the other. PHASED, all owners' tiles of a chunk come before
    those of the next; the chunks are the same. They are multiples of BM.
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
    own = c + me.to(tl.int64) * rows * columns if OWN_CHUNK > 0 else c
    phase = tl.minimum(CHUNK // BM, tiles_m) * tiles_n * ranks  # tiles of all owners
    GROUP: tl.constexpr = CHUNK // BM if CHUNK < GROUP_M * BM else GROUP_M
    OWN_GROUP: tl.constexpr = OWN_CHUNK // BM if OWN_CHUNK < GROUP * BM else GROUP
    for index in range(first + tl.program_id(0), last, tl.num_programs(0)):
        above = index // phase * (CHUNK // BM) if PHASED else 0  # rows of tiles, in phases before
        height = tl.minimum(tiles_m - above, CHUNK // BM) if PHASED else tiles_m
        number = index % phase if PHASED else index
        owner = (me + 1 + number // (height * tiles_n)) % ranks
        row, col = grouped_tile(number % (height * tiles_n), height, tiles_n, GROUP)
        part = owner.to(tl.int64) * rows
        count = rows
        if OWN_CHUNK > 0:
            if owner == me:
                row, col = grouped_tile(number % (height * tiles_n), height, tiles_n, OWN_GROUP)
            count = tl.minimum(rows, whole - part).to(tl.int32)
        row += above
        total = tile_product(
            a, b, scale_a, scale_b, part, row, col, count, columns, depth,
            stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
        )  # fmt: skip
        ok = sound
        if owner == me:
            ok = tdl.wait_all(credit, ranks, world, tl.load(epoch)) & ok  # to name who is late
            ok = wait_each(signals + row * BM // CHUNK, ranks, chunks, world, epoch, ok)
        pieces = quarters(total, BM, BN) if PIECES == 4 else (total,)
        for i in tl.static_range(PIECES):  # with as much fewer registers
            _put(
                own, bias, pieces[i], partials, outgoing, row, col * PIECES + i, rows, count,
                columns, owner, world, ok, BM, BN // PIECES, HAS_BIAS, ACTIVATION,
            )  # fmt: skip
        if owner != me:
            signal = finished + owner * chunks + row * BM // CHUNK
            tdl.notify(signal, me, world, 1, op="add")
        elif OWN_CHUNK > 0:
            tdl.notify(made + row * BM // OWN_CHUNK, me, world, 1, op="add")
    tdl.wait_all(credit, ranks, world, tl.load(epoch))
    begin = first // phase if PHASED else 0
    for chunk in range(begin, tl.cdiv(last, phase) if PHASED else chunks):
        wait_each(signals + chunk, ranks, chunks, world, epoch, sound)  # see copy_push.py


@triton.jit
def _put(
    c, bias, own, partials, outgoing, row, col, rows, count, columns, owner, world, ok,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store a partial of a peer's tile; of an own one the sum with the peers', in rank order."""
    me = tdl.rank(world)
    size = tl.cast(rows, tl.int64) * columns
    if owner != me:
        store_tile(
            outgoing + owner * size, own, bias, row, col, count, columns, columns, ok, BM, BN,
            False, "none",
        )  # fmt: skip
    else:
        sum_tile(
            c, bias, own, partials, row, col, rows, count, columns, world, ok, BM, BN, HAS_BIAS,
            ACTIVATION,
        )  # fmt: skip


class MatmulReduceScatter(ReducedProduct):
    """A matrix product and reduce-scatter of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape_a, shape_b : tuple
        (d0, ..., K_local), d0 a multiple of the ranks, and (K_local, N) of this rank, any extents.
        All but K_local are the same on every rank.
    dtype
        Of a and b: float16, bfloat16, float32 or float8_e4m3fn.
    partial_dtype : {None, "float32"}
        In what partial sums travel; None: the output's dtype.
    algorithm : {"fused", "one_kernel", "low_latency", "unfused"}, optional
        None: chosen by the size. An error of "unfused" may name the
        reduce_scatter that it runs.
    config : tdx.kernels.matmul.Config, optional
        Pins the tile, and with it the bits; for "fused" with block_m <= 512. Alike on every rank.
    team : Team, optional
        The ranks that take part; None: all of the world.
    buffer : bool
        Whether the plan has a result buffer, for calls without `out`. Default: True.
    bias : bool
        Whether calls pass a vector of N elements. Default: False. Bias and activation apply once,
        after the reduction.
    activation : {"relu", "silu", "gelu", "gelu_tanh"}, optional
    out_dtype, optional
        Of the result: float16, bfloat16 or float32. None: `dtype`, of float8 bfloat16.
    allow_tf32, fast_accum : bool
        Round float32 inputs to tf32; sum float8 products less precisely. Default: False. See
        tdx.matmul.
    library, tune : bool, optional
        Whether cuBLAS multiplies, beside "fused", or before "unfused", the same on every rank: see
        tdx.matmul. Whether a plan times its algorithms of equal bits, once; default: True.

    `out` of a call must not overlap a or b.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted.
    """

    operation = "matmul_reduce_scatter"
    algorithms = ALGORITHMS
    with_library = ("fused", "unfused")
    splits_rows = True

    def _choose(self, config: Config | None, algorithm: str | None) -> tuple[Config, str]:
        first, rows, size = self.shape_a[0], elements(self.shape_a[:-1]), self.group.size
        self._rows = rows // size
        depth, columns = self.shape_b
        self.out_shape = (first // size, *self.shape_a[1:-1], columns)
        tile = partial(self.product.tile, config, self.world, rows, columns)
        if algorithm is None and splits(config):
            algorithm = "unfused"
        elif algorithm is None:  # whatever K_local is, which may differ between ranks
            algorithm = self._usual(splits(tile(_LONG, split=True)))
            large = self.product.scaled and self._rows >= _FIRST and columns % 16 == 0
            gains = algorithm != "fused" and (large and self.has_library())
            if gains or (self.product.library and (algorithm != "fused" or size == 1)):
                algorithm = "unfused"
        self.same_tile = algorithm == "one_kernel"
        if algorithm == "fused":
            check_fused(config, algorithm, Parts.of(self, self._rows, whole=False).chunk)
            return fused_tile(self, config, self._rows), algorithm
        if algorithm == "unfused":
            return tile(depth, split=True), algorithm
        check_fused(config, algorithm)
        if self.same_tile:  # whatever the ranks' K_local
            depth = -(-depth // 16) * 16
        return tile(depth), algorithm

    def _usual(self, split: bool) -> str:
        """The algorithm if none is asked for; `split`: products alone would share tiles along K."""
        backend, size, columns = self.world.backend, self.group.size, self.shape_b[1]
        nbytes = self._rows * columns * self.partial_dtype.itemsize
        if not follows(backend, self._rows, nbytes, size):
            return "unfused" if is_short(self, self._rows) else "fused"
        if split or size > 2:
            return "unfused"
        if sends_words(nbytes, size):
            return "low_latency"
        return "one_kernel" if nbytes <= _PUSHED_BYTES else "unfused"

    def _build(self) -> Way:
        if self.algorithm == "unfused":
            return ProductFirst(self, ReduceScatter)
        if self.algorithm == "low_latency":
            return LowLatencyProduct(self)
        if self.algorithm == "one_kernel":
            return SummedTiles(self, scattered=True)
        return Fused(self, self._rows)


class Fused:
    """Workspaces, kernels and copies of the fused algorithm. A Way.

    Every rank owns `rows` rows, the last ones as many as there are. The result has the own rows, or
    the `whole` ones of all.

    Attributes
    ----------
    rows, parts : int, Parts
        Rows of a rank, and those that are computed, and sent, at a time.
    phased : bool
        Whether there are phases; then they are what is sent.
    counts, own_counts, phases : list[int]
        Tiles of each chunk of partial sums, of finished rows, of each phase and rank.
    shared : tuple
        Partials from peers and for them, tiles that are finished and made, signals, credit, epoch,
        the group's handle.
    push : CopyPush or None
        The copies to peers.
    """

    def __init__(self, plan: ReducedProduct, rows: int, whole: bool = False):
        world, size, config = plan.world, plan.group.size, plan.config
        columns, kind = plan.shape_b[1], plan.partial_dtype
        self.rows, parts = rows, Parts.of(plan, rows, whole)
        self.parts, self.phased = parts, parts.phase < rows
        counts = self.counts = chunk_tiles(config, rows, columns, parts.chunk)
        self.phases = counts if self.phased else [sum(counts)]
        chunks, part = len(counts), max(1, rows * columns)
        partials = plan.workspace("partials", (size, part), kind)
        self.signals = plan.workspace("sent", (size * chunks,), "int32", chunks)
        credit = plan.workspace("credit", (size,), "int32")
        steps = max(1, *counts)
        finished = plan.workspace("finished_tiles", (size * chunks,), "int32", steps=steps)
        self.made = finished
        if parts.own_chunk:
            own = self.own_counts = chunk_tiles(config, rows, columns, parts.own_chunk)
            self.made = plan.workspace("own_tiles", (len(own),), "int32", steps=max(1, *own))
        epoch = world.zeros((1,), "int32", symmetric=False)
        outgoing = world.empty((size, part), kind, symmetric=False)
        plan._memory.append(outgoing._block)
        self.meeting = (credit, epoch, plan.group.handle)
        meeting = (self.signals, *self.meeting)
        self._enter = plan.bind(enter_kernel, 1, (), *meeting, chunks, num_warps=1)
        self.shared = (partials, outgoing, finished, self.made, *meeting)
        rank, line = plan.group.rank, columns * kind.itemsize

        def pieces(peer: int, chunk: int) -> list[tuple[Array, int, Array | None, int, int]]:
            first = chunk * parts.chunk
            nbytes = min(parts.chunk, rows - first) * line
            to, at = (rank * rows + first) * line, (peer * rows + first) * line
            return [(partials, to, outgoing, at, nbytes)]

        self.push: CopyPush | None = None
        if size > 1 and sum(counts):
            self.push = CopyPush(plan, meeting, chunks, pieces, finished, counts, self.phased)

    def run(self, plan: Any, multiply: Bound, handle: int, ops: tuple[Operand, ...]) -> None:
        """Queue a call."""
        multiply.prepare(*ops)  # while nobody waits for it yet
        self._enter(handle)
        if self.push is not None and not isinstance(multiply, LibrarySums):
            self.push.start(handle, ops[4])
        multiply(handle, *ops)
        if self.push is not None:
            self._follow(handle, ops[4])
            self.push.join(handle)

    def _follow(self, handle: int, c: Operand) -> None:
        """Queue what follows the product, beside the last copies."""

    def bind(self, plan: Any, *layout: Any) -> Bound:
        """The product for operands so laid out."""
        return bind_library_sums(plan, self, layout) or self.kernel(plan, layout)

    def kernel(self, plan: Any, layout: Sequence[Any], phase: int | None = None) -> Bound:
        """fused_kernel; for a `phase` it computes the own tiles only."""
        strides, steps, bias, aligned, _ = layout
        world, product, config = plan.world, plan.product, plan.config
        sizes, first, last = plan._sizes(strides), 0, sum(self.phases) * plan.group.size
        if phase is not None:
            last = sum(self.phases[: phase + 1]) * plan.group.size
            first = last - self.phases[phase]
        described = product.described(world, config, sizes, aligned)
        scale, out = product.scale_dtype, product.out_dtype
        kinds = (*product.kinds(config, described, sizes), scale, scale, out, bias)
        beside = 0 if self.push is None else self.push.blocks
        return plan.bind(
            fused_kernel, blocks_for(world, last - first, beside), kinds, *self.shared,
            self.rows, *sizes, len(self.counts), first, last, CHUNK=self.parts.chunk,
            OWN_CHUNK=self.parts.own_chunk, PHASED=self.phased,
            PIECES=4 if world.backend != "host" and config.block_n >= 64 else 1,
            **product.constants, **product.product_constants(config, sizes, steps, described),
        )  # fmt: skip


@takes_options(ProductOptions)
def matmul_reduce_scatter(a: Any, b: Any, *, partial_dtype: Any = None, **options: Any) -> Any:
    """This rank's rows of act(sum over ranks of a . b, + bias). Collective over `team`.

    Parameters
    ----------
    a : tdx array, or array of NumPy or a DLPack producer
        (d0, ..., K_local) of this rank, d0 a multiple of the ranks. K_local may differ; see
        matmul_all_reduce.
    b : array
        (K_local, N) of this rank, any strides.
    partial_dtype : {None, "float32"}
        In what partial sums travel; None: the output's dtype.
    algorithm : {"fused", "one_kernel", "low_latency", "unfused"}, optional
    bias : array, optional
        (N,), of any floating-point type, added once, after the reduction; then the activation.
    scale_a, scale_b : optional
        Of this rank's a and b.
    activation, out_dtype, out, allow_tf32, fast_accum, library, config, team, stream
        See matmul. `out` must not overlap a or b.

    Returns (d0 / size, ..., N) in the framework of `a`.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    given = options_of(matmul_reduce_scatter, options)
    return reduced_product(MatmulReduceScatter, a, b, partial_dtype, given)
