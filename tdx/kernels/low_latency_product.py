"""A product whose partial sums travel as words of data and flag, for the fewest rows.

One kernel: who has computed a tile pushes each row to its owner. Then every block adds the ranks'
words of its share of the own rows as they arrive, in float32 from rank 0 upwards. W ranks, P bytes
of partial sums for each peer: 2 * (W - 1) * P bytes out, one hop, no signals and no meeting. Two
slots are used in turn, see low_latency.py, which a rank waits in for words of everybody.

Words lie in groups of 8 rows and 8 columns, row by row: as tensor cores leave a tile to the threads
of a warp, which so store to neighbouring addresses. The order has nothing to do with tiles; those
of the ranks may differ.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.operand import elements
from tdx.kernels.plan import check_low_latency
from tdx.kernels.product import blocks_for
from tdx.kernels.reduced_product import OneKernel, ReducedProduct
from tdx.kernels.reduction import from_words, to_words
from tdx.kernels.select import power_of_two, takes_low_latency
from tdx.kernels.tile_product import activate, grouped_tile, known, known_strides, tile_product
from tdx.language.signal import program_barrier

__all__ = ["LowLatencyProduct", "sends_words"]

_SIZES = [
    "owned", "rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn",
]  # fmt: skip
_MOST_BYTES = 256 << 10  # of partial sums that a rank sends: as words they are twice as many
_SIDE = 8  # rows and columns of a group
_GROUP = tl.constexpr(_SIDE)


@triton.jit
def _place(row, col, columns):
    """The number of element (row, col) in its slot."""
    group = row // _GROUP * tl.cdiv(columns, _GROUP) + col // _GROUP
    return (group * _GROUP + row % _GROUP) * _GROUP + col % _GROUP


@triton.jit
def _row_and_column(place, columns):
    """The inverse of _place."""
    group = place // (_GROUP * _GROUP)
    across = tl.cdiv(columns, _GROUP)
    row = group // across * _GROUP + place // _GROUP % _GROUP
    return row, group % across * _GROUP + place % _GROUP


@triton.jit
def _sum_of_words(
    slots, stride, at, owned, columns, flag, world,
    PARTIAL: tl.constexpr, RANKS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """What all ranks have sent as words `at`, added in rank order, and which words are there."""
    KIND: tl.constexpr = tl.int32 if PAIRS else PARTIAL
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    row, col = _row_and_column(at * PER_WORD, columns)
    arrived = (row < owned) & (col < columns)
    total = tl.full((at.shape[0] * PER_WORD,), -0.0, tl.float32)  # which adds nothing
    for peer in tl.static_range(RANKS):
        words, there = tdl.load_ll(
            slots + peer * stride + at, flag, world, arrived, peer, KIND, False
        )
        total += from_words(words, PARTIAL, PAIRS).to(tl.float32)
        arrived = arrived & there
    return total, arrived


@triton.jit(do_not_specialize=_SIZES)
def low_latency_kernel(
    a, b, scale_a, scale_b, c, bias, slots, channel, world, owned,
    rows, columns, depth, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Push the words of partial tiles, then add those of the `owned` rows, BLOCK at a time.

    WIDE: partial sums travel in float32, else as c has them, in PAIRS if those have 2 bytes.
    """
    PARTIAL: tl.constexpr = tl.float32 if WIDE else c.dtype.element_ty
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_am, stride_ak = known_strides(stride_am, stride_ak, A_UNIT, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    size = tl.cdiv(owned, _GROUP) * tl.cdiv(columns, _GROUP) * (_GROUP * _GROUP)
    stride = size // PER_WORD  # from one rank's words to the next one's
    slots += (flag & 1) * RANKS * stride
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(columns, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_row, tile_col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        total = tile_product(
            a, b, scale_a, scale_b, 0, tile_row, tile_col, rows, columns, depth,
            stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
        )  # fmt: skip
        words = to_words(tl.reshape(total.to(PARTIAL), (BM * BN,)), PAIRS)
        index = tl.arange(0, BM * BN // PER_WORD) * PER_WORD
        row = tile_row * BM + index // BN
        col = tile_col * BN + index % BN
        mask = (row < rows) & (col < columns) & sound
        owner = tl.minimum(row // owned, RANKS - 1)
        to = slots + me * stride + _place(row - owner * owned, col, columns) // PER_WORD
        tdl.store_ll(to, words, flag, owner, world, mask)
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, stride, step):
        if SAMPLES < BLOCK:  # a thread polls for its words one after the other: first for one
            at = start + tl.arange(0, SAMPLES) * (BLOCK // SAMPLES)
            _sum_of_words(slots, stride, at, owned, columns, flag, world, PARTIAL, RANKS, PAIRS)
            program_barrier()
        at = start + tl.arange(0, BLOCK)
        total, arrived = _sum_of_words(
            slots, stride, at, owned, columns, flag, world, PARTIAL, RANKS, PAIRS
        )
        if PAIRS:
            arrived = tl.interleave(arrived, arrived)
        row, col = _row_and_column(start * PER_WORD + tl.arange(0, BLOCK * PER_WORD), columns)
        mask = (row < owned) & (col < columns) & arrived
        if HAS_BIAS:
            total += tl.load(bias + col, mask=mask, other=0.0).to(tl.float32)
        total = activate(total, ACTIVATION)
        tl.store(c + row * columns + col, total.to(c.dtype.element_ty), mask=mask)


class LowLatencyProduct(OneKernel):
    """Workspace and kernels of "low_latency". A Way."""

    kernel = low_latency_kernel

    def __init__(self, plan: ReducedProduct):
        owned = elements(plan.shape_a[:-1]) // plan.group.size
        size, columns, kind = plan.group.size, plan.shape_b[1], plan.partial_dtype
        check_low_latency(plan.operation, owned * columns * kind.itemsize, size, (kind,))
        pairs, host = kind.itemsize == 2, plan.world.backend == "host"
        area = -(-owned // _SIDE) * -(-columns // _SIDE) * _SIDE**2
        words = area // 2 if pairs else area
        slots = plan.workspace("words", (2 * size * max(1, words),), np.int64)
        sizes = plan._sizes((0, 0, 0, 0))
        tiles = max(1, plan.config.tiles(*sizes[:2]))
        self._blocks = blocks_for(plan.world, tiles)
        most = blocks_for(plan.world, 1 << 30)  # ranks may have different tiles
        self._shared = (slots, plan.channel(most), plan.group.handle, owned)
        # a thread has the words of all ranks in its registers
        threads = 1 << 16 if host else plan.config.num_warps * 32
        block = min(threads if host else 16 * threads, power_of_two(-(-words // self._blocks)))
        self._named = {
            "RANKS": size, "WIDE": kind != plan.product.out_dtype, "PAIRS": pairs,
            "BLOCK": block, "SAMPLES": min(block, threads),
        }  # fmt: skip


def sends_words(nbytes: int, ranks: int) -> bool:
    """Whether partial sums of `nbytes` for each peer are best sent so."""
    return takes_low_latency(nbytes, ranks) and (ranks - 1) * nbytes <= _MOST_BYTES
