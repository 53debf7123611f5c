"""Matrix product and all-reduce in one: C = act(sum over ranks of A . B, + bias) on all ranks.

Every rank multiplies its A (M, K_local) by its B (K_local, N).

one_shot     One kernel. Its persistent blocks push each partial tile to all ranks as soon as it is
             finished, with a signal, and add all ranks' partials of every tile as they arrive.
             (W - 1) * M * N elements out, one hop, for small results of two ranks.
two_shot     One kernel. Each tile has one owner. A rank computes the next ranks' tiles first, whose
             partials travel meanwhile, and its own last, which it sums as they are computed and
             pushes to all; then it takes what the other owners push. 2 * (W - 1) / W * M * N
             elements out, two hops.
copy_engine  Each rank owns rows. Partials go to their owners as in matmul_reduce_scatter.py, where
             an own tile is summed as it is computed; copy engines send a chunk of own rows to all
             as soon as its tiles are summed. A second kernel takes what the others send. As many
             elements. Where tiles of a chunk fill the blocks several peers compute one of each
             rank's rows after the other, so that only the last one's second hop is not hidden; else
             the own rows hide it, of two ranks half of the product.
unfused      The product, then an all-reduce, for the few rows of decoding: see product_first.py.

cuBLAS may multiply for "unfused" and, in part or all, for "copy_engine": see library_sums.py.

Partial sums travel in the output's dtype, or in float32 with partial_dtype="float32". Bits for one
Config are the same on every run, rank and for all algorithms: each partial is one block's sum over
K, rounded once, and the ranks' partials are added in float32 from rank 0 upwards. No atomics.

Ordering: see summed_tiles.py and owned_tiles.py. Copy engines write with the credit that a rank
gives as it enters a call.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.all_reduce import AllReduce
from tdx.kernels.copy_push import CopyPush
from tdx.kernels.copying import copy_share
from tdx.kernels.matmul_reduce_scatter import Fused
from tdx.kernels.operand import Operand, elements
from tdx.kernels.owned_tiles import OwnedTiles
from tdx.kernels.product import Config, least_us
from tdx.kernels.product_first import ProductFirst
from tdx.kernels.product_options import ProductOptions, options_of, takes_options
from tdx.kernels.reduced_product import ReducedProduct, Way, check_fused, reduced_product
from tdx.kernels.scattered_rows import fused_tile
from tdx.kernels.select import block_elements, cheapest, constants, engines_us, follows
from tdx.kernels.summed_tiles import SummedTiles
from tdx.kernels.tile_product import known
from tdx.kernels.tiles import splits
from tdx.language.signal import program_barrier
from tdx.runtime.agreement import unanimous
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Bound

__all__ = ["ALGORITHMS", "MatmulAllReduce", "matmul_all_reduce"]

ALGORITHMS = ("one_shot", "two_shot", "copy_engine", "unfused")
# As many times what copies to all take is the least time of products that copy engines are for: of
# two H200s, and of four, H100s and H200s, before own tiles were summed as they are computed.
_SHORT_OF_TWO, _SHORT = 2.7, 1.7
# Bytes of a result from which one kernel gains, of four; of two rows and columns up to which none
# does, and bytes up to which all sum all. Of float8: rows from which cuBLAS multiplies first.
_FEW_BYTES, _FEW_OF_TWO = 8 << 20, ((16, 1 << 20), (256, 4096))
_MOST_OF_ALL, _FIRST = 8 << 20, 512


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
    program_barrier()  # whoever finds the signals as they were has read all rows before
    before = me * chunks  # see copy_push.py
    behind = (ranks - 1 - me) * chunks
    tdl.wait_all(progress, before, world, number, first_peer=-before)
    tdl.wait_all(progress + before + chunks, behind, world, number, first_peer=-behind)


class MatmulAllReduce(ReducedProduct):
    """A matrix product and all-reduce of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape_a, shape_b : tuple
        (..., K_local) and (K_local, N) of this rank, any extents. All but K_local are the same on
        every rank.
    dtype
        Of a and b: float16, bfloat16, float32 or float8_e4m3fn.
    partial_dtype : {None, "float32"}
        In what partial sums travel; None: the output's dtype.
    algorithm : {"one_shot", "two_shot", "copy_engine", "unfused"}, optional
        None: chosen by the size. An error of "unfused" may name the all_reduce
        that it runs.
    config : tdx.kernels.matmul.Config, optional
        Pins the tile, and with it the bits of the result; for "copy_engine" with block_m <= 512.
        As all options alike on every rank.
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
        Whether cuBLAS multiplies, beside "copy_engine", or before "unfused", the same on every
        rank: see tdx.matmul. Whether a plan times its algorithms of equal bits, once; default:
        True.

    `out` of a call must not overlap a or b.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted.
    """

    operation = "matmul_all_reduce"
    algorithms = ALGORITHMS
    with_library = ("copy_engine", "unfused")

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
        if algorithm is None and splits(config):
            algorithm = "unfused"
        elif algorithm is None:
            owned = count * partial // size
            fits = config is None or config.block_m <= limits.gathered_rows
            few = follows(backend, -(-self._rows // size), owned, size)
            engines = size > 1 and fits and not few and owned >= limits.summed_bytes
            uneven = self.product.library and self._rows % size
            if engines and not uneven and not self._is_short(owned):
                algorithm = "copy_engine"
            elif self.product.library or self._is_first(owned * size):
                algorithm = "unfused"
            elif self._is_usual_of_two():
                algorithm = "one_shot" if owned * size <= _MOST_OF_ALL else "two_shot"
            else:
                algorithm = cheapest(backend, sent, size)
        self.same_tile = algorithm in sent
        if algorithm == "copy_engine":
            check_fused(config, algorithm, limits.gathered_rows)
            return fused_tile(self, config, -(-self._rows // size), whole=True), algorithm
        if self.same_tile:
            check_fused(config, algorithm)
            k = self._common_depth() if config is None else k
        tile = self.product.tile(config, self.world, self._rows, n, k, split=algorithm == "unfused")
        return tile, algorithm

    def _common_depth(self) -> int:
        """K_local, ragged if it is on any rank: the rows and columns of a tile depend on that."""
        k = self.shape_b[0]
        return k if unanimous(self.group, self.call, k % 16 == 0) else k | 1

    def _is_short(self, owned: int) -> bool:
        """Whether products hardly hide the copies of `owned` bytes to all peers, twice.

        Of several peers the products of a phase hide one hop of it, and the other of the phase
        before. Ranks vote: their K may differ.
        """
        backend, size, (k, n) = self.world.backend, self.group.size, self.shape_b
        if size == 2 and not self._is_usual_of_two():
            return False
        product_us = least_us(self.world, self.dtype.itemsize, self._rows, n, k)
        most = (_SHORT_OF_TWO if size == 2 else _SHORT) * engines_us(backend, (size - 1) * owned)
        short = product_us < most
        return unanimous(self.group, self.call, short)

    def _is_usual_of_two(self) -> bool:
        """Whether two ranks of GPUs sum 16 bits: no constants of other sums were measured."""
        kinds = (self.dtype, self.partial_dtype, self.product.out_dtype)
        two = self.group.size == 2 and self.world.backend != "host"
        return two and all(kind.itemsize == 2 for kind in kinds)

    def _is_first(self, nbytes: int) -> bool:
        """Whether a product, then an all-reduce of `nbytes` take less time than one kernel."""
        size, columns = self.group.size, self.shape_b[1]
        if size == 1 or self.world.backend == "host":
            return False
        few = nbytes < _FEW_BYTES
        if size == 2:
            few = any(self._rows <= rows and columns <= most for rows, most in _FEW_OF_TWO)
        if few:
            return True
        large = self.product.scaled and self._rows >= _FIRST and columns % 16 == 0
        return large and self.has_library()

    def _build(self) -> Way:
        if self.algorithm == "unfused":
            return ProductFirst(self, AllReduce)
        if self.algorithm == "copy_engine":
            return _CopyEngine(self)
        if self.algorithm == "two_shot":
            return OwnedTiles(self)
        return SummedTiles(self)


class _CopyEngine(Fused):
    """The reduce-scatter of matmul_reduce_scatter.py, and a gather of each chunk of own rows."""

    def __init__(self, plan: MatmulAllReduce):
        world, size, rank = plan.world, plan.group.size, plan.group.rank
        whole, columns, kind = plan._rows, plan.shape_b[1], plan.product.out_dtype
        rows, line = -(-whole // size), columns * kind.itemsize
        super().__init__(plan, rows, whole=True)
        counts, height = self.own_counts, self.parts.own_chunk
        results = plan.workspace("results", (size, max(1, rows * columns)), kind)
        self.progress = plan.workspace("summed", (size * len(counts),), "int32", len(counts))

        def pieces(peer: int, chunk: int) -> list[tuple[Array, int, Array | None, int, int]]:
            first = rank * rows + chunk * height
            count = min(height, rows - chunk * height, whole - first)
            return [(results, first * line, None, first * line, count * line)] if count > 0 else []

        if self.push is not None:
            CopyPush(
                plan, (self.progress, *self.meeting), len(counts), pieces, self.made, counts,
                self.phased, common=True, behind=self.push,
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
        (..., K_local) of this rank, copied where matmul copies it; (...) is the same on every rank.
        K_local may differ between ranks, each with one K_local of every other rank in all calls;
        other combinations need plans.
    b : array
        (K_local, N) of this rank, any strides.
    partial_dtype : {None, "float32"}
        In what partial sums travel; None: the output's dtype.
    algorithm : {"one_shot", "two_shot", "copy_engine", "unfused"}, optional
    bias : array, optional
        (N,), of any floating-point type, added once, after the reduction, then the activation; the
        same on every rank.
    scale_a, scale_b : optional
        Of this rank's a and b.
    activation, out_dtype, out, allow_tf32, fast_accum, library, config, team, stream
        See matmul. `out` must not overlap a or b.

    Returns (..., N) in the framework of `a`, the same bits on every rank.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    given = options_of(matmul_all_reduce, options)
    return reduced_product(MatmulAllReduce, a, b, partial_dtype, given)
