"""A gather and a product in one kernel, for few rows.

A few rows take as long as it takes to read b, so all ranks' are multiplied at once and b is read
once. Every block pushes pieces of the own rows to all ranks, with a signal for each piece; when all
pieces of all ranks have come, the blocks multiply. Compared with a gather before the product that
saves a launch, and storing and reading what had come.

Slots and signals are those of gathering_product.py, and need no credit for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copying import copy_share
from tdx.kernels.gathering_product import GatheringProduct
from tdx.kernels.matmul import multiply_rows
from tdx.kernels.operand import byte_units
from tdx.kernels.plan import Plan
from tdx.kernels.product import Config, Product, blocks_for
from tdx.kernels.select import block_elements
from tdx.kernels.split_matmul import multiply_shares
from tdx.kernels.tile_product import known, known_strides
from tdx.runtime.driver.base import Described

__all__ = ["LowLatencyGathering"]

_PIECES = tl.constexpr(64)
_SIZES = ["rows", "columns", "depth", "line_units", "stride_bk", "stride_bn"]


@triton.jit
def _push_pieces(
    x, slots, own_scales, scales, progress, number, rows, units, world,
    UNIT: tl.constexpr, SCALED: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's pieces of the `units` * UNIT words of the own rows, to every rank."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    own_row = ((number & 1) * ranks + me).to(tl.int64) * rows
    to = slots + ((number & 1) * ranks + me).to(tl.int64) * units * UNIT
    size = tl.cdiv(units, _PIECES)
    end = tl.where(tdl.no_fault(world), units, 0)
    for piece in range(tl.program_id(0), _PIECES, tl.num_programs(0)):
        first = tl.cast(piece, tl.int64) * size
        words = tl.maximum(tl.minimum(size, end - first), 0) * UNIT
        for hop in range(1, ranks + 1):
            peer = (me + hop) % ranks
            theirs = tdl.symm_at(to + first * UNIT, peer, world)
            copy_share(theirs, x + first * UNIT, words, 0, 1, BLOCK)
            if SCALED:  # noqa: SIM102  # this alone is known to the compiler
                if (piece == 0) & (end > 0):
                    there = tdl.symm_at(scales + own_row, peer, world)
                    copy_share(there, own_scales + me.to(tl.int64) * rows, rows, 0, 1, SCALES)
        for hop in range(1, ranks + 1):
            tdl.notify(progress + me * _PIECES + piece, (me + hop) % ranks, world, number)


@triton.jit(do_not_specialize=_SIZES)
def low_latency_gather_kernel(
    x, b, c, bias, scale_b, slots, gathered, own_scales, scales, progress, epoch, sums, arrived,
    channel, world, rows, columns, depth, line_units, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, PUSH: tl.constexpr, UNIT: tl.constexpr,
    SCALED: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Push the rows of x, as words; wait for all ranks'; multiply them, by SPLIT blocks a tile.

    Without PUSH both has been done for another b.
    """
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    ranks = tdl.num_ranks(world)
    if PUSH:
        number = tdl.epoch(channel)
        if tl.program_id(0) == 0:
            tl.store(epoch, number)
        _push_pieces(
            x, slots, own_scales, scales, progress, number, rows, rows * line_units, world,
            UNIT, SCALED, SCALES, BLOCK,
        )  # fmt: skip
        pieces = ranks * _PIECES
        ok = tdl.wait_all(progress, pieces, world, number, first_peer=-pieces)
        ok &= tdl.no_fault(world)
    else:
        number = tl.load(epoch)
        ok = tdl.no_fault(world)
    if DESCRIBED:
        tdl.fence_async_proxy()
    base = ((number & 1) * ranks).to(tl.int64) * rows
    if SPLIT == 1:
        multiply_rows(
            gathered, b, c, bias, scales, scale_b, base, 0, rows * ranks, columns, depth,
            depth, 1, stride_bk, stride_bn, 0, ok, epoch, 0, BM, BN, BK, GROUP_M, PRECISION,
            HAS_BIAS, ACTIVATION, B_UNIT, A_STEP, B_STEP, DESCRIBED, False,
        )  # fmt: skip
    else:
        multiply_shares(
            gathered, b, c, bias, scales, scale_b, sums, arrived, base, rows * ranks, columns,
            depth, depth, 1, stride_bk, stride_bn, ok, BM, BN, BK, GROUP_M, PRECISION, HAS_BIAS,
            ACTIVATION, B_UNIT, A_STEP, B_STEP, DESCRIBED, SPLIT,
        )  # fmt: skip


class LowLatencyGathering(GatheringProduct):
    """As GatheringProduct, for tiles of all ranks' rows."""

    pieces = _PIECES.value

    def bind(
        self, plan: Plan, product: Product, config: Config, i: int, sizes: Sequence[int],
        steps: tuple[int, int], described: bool, bias: np.dtype,
    ) -> Callable[..., None]:  # fmt: skip
        world, slots = self._world, self._slots
        rows, n, k, *strides = sizes
        kind, b = product.kinds(config, described, (len(slots), *sizes[1:]))
        gathered = kind.of(slots) if isinstance(kind, Described) else slots
        word, unit = byte_units(self._line or product.dtype.itemsize)
        pushing = i == self._pusher
        shares = config.tiles(rows, n) * config.split_k
        return plan.bind(
            low_latency_gather_kernel,
            blocks_for(world, max(shares, self.pieces if pushing else 1)),
            (word, b, product.out_dtype, bias, product.scale_dtype),
            slots.view(word), gathered, self._own_scales, self._scales, self._progress,
            self._epoch, *(plan._split or (self._epoch, self._epoch)), self._channel,
            plan.group.handle, self._rows, n, k, self._line // (word.itemsize * unit),
            *strides[2:], PUSH=pushing, UNIT=unit, SCALED=product.scaled,
            SCALES=block_elements(world.backend, self._rows),
            BLOCK=self._block(word.itemsize, config.num_warps), SPLIT=config.split_k,
            **product.constants, **product.product_constants(config, sizes, steps, described),
        )  # fmt: skip
