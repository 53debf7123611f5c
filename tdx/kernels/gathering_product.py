"""A gather and a product in one kernel, for all but the fewest and the most rows.

Copy engines, or another kernel beside the product, take several microseconds to begin, and as many
to be joined. The first blocks of this kernel push the own rows, in pieces, to one peer after the
other, while the rest compute the own rows' tiles. These then take the peers' tiles, in the order in
which they come, and from a turn on the first blocks do, too. There is a signal for each rank and
piece; gathering_turns.py has how many push, and when they join.

Rows arrive in slots that are used in turn by calls' parity and need no credit: a rank in call n has
all rows of call n - 1 of every peer, and so they have left call n - 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copying import copy_share
from tdx.kernels.gathering import spread_kernels
from tdx.kernels.gathering_turns import PIECES, schedule
from tdx.kernels.operand import Operand, byte_units, elements, operand
from tdx.kernels.plan import Plan
from tdx.kernels.product import Config, Product, blocks_for
from tdx.kernels.select import block_bytes, block_elements, constants, power_of_two
from tdx.kernels.tile_product import (
    grouped_tile,
    known,
    known_strides,
    store_tile,
    tile_product,
)
from tdx.runtime.driver.base import Described

__all__ = ["GatheringProduct"]

_PIECES = tl.constexpr(PIECES)
_SIZES = [
    "rows", "columns", "depth", "line_units", "stride_bk", "stride_bn", "senders", "late",
]  # fmt: skip


@triton.jit
def _push_rows(
    x, slots, own_scales, scales, progress, number, index, senders, rows, line, world,
    SCALED: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A pushing program's pieces of the own rows, of `line` words each, to every peer.

    A single rank stores them at itself: where the next rank is.
    """
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    own_row = ((number & 1) * ranks + me).to(tl.int64) * rows
    mine = own_scales + me.to(tl.int64) * rows
    signals = progress + me * _PIECES
    height = tl.cdiv(rows, _PIECES)
    end = tl.where(tdl.no_fault(world), rows, 0)
    for hop in range(1, tl.maximum(ranks, 2)):
        peer = (me + hop) % ranks
        for piece in range(index, _PIECES, senders):
            first = tl.cast(piece * height, tl.int64)
            count = tl.maximum(tl.minimum(height, end - first), 0)
            to = tdl.symm_at(slots + (own_row + first) * line, peer, world)
            copy_share(to, x + first * line, count * line, 0, 1, BLOCK)
            if SCALED:
                theirs = tdl.symm_at(scales + own_row + first, peer, world)
                copy_share(theirs, mine + first, count, 0, 1, SCALES)
            tdl.notify(signals + piece, peer, world, number)
    for piece in range(index, _PIECES, senders):
        tdl.notify(signals + piece, me, world, number)


@triton.jit
def _turns_of(tiles, order, multipliers, late):
    """Turns of a program until its tile would be none of the first `tiles`; see _tile."""
    early = tl.cdiv(tl.maximum(tiles - order, 0), multipliers)
    rest = tl.maximum(tiles - late * multipliers - order, 0)
    return tl.minimum(early, late) + tl.cdiv(rest, tl.num_programs(0))


@triton.jit
def _tile(turn, order, multipliers, late):
    """A program's tile: `late` turns are shared by the multipliers, the others by all programs."""
    joined = tl.maximum(turn - late, 0)
    return order + (turn - joined) * multipliers + joined * tl.num_programs(0)


@triton.jit
def _multiply(
    own, b, c, bias, scale_b, gathered, own_scales, scales, progress, number, senders, late,
    rows, columns, depth, stride_bk, stride_bn, world,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """A program's tiles: of the own rows, then of the previous rank's, and so on.

    The first `senders` programs begin at turn `late`, behind the others; see gathering_turns.py.
    """
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    sound = tdl.no_fault(world)
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(columns, BN)
    tiles = tiles_m * tiles_n
    own_row = me.to(tl.int64) * rows
    index = tl.program_id(0)
    multipliers = tl.num_programs(0) - senders
    order = tl.where(index < senders, index + multipliers, index - senders)
    begin = tl.where(index < senders, late, 0)
    turns = tl.maximum(_turns_of(tiles, order, multipliers, late), begin)
    for turn in range(begin, turns):
        tile = _tile(turn, order, multipliers, late)
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        total = tile_product(
            own, b, own_scales + own_row, scale_b, 0, row, col, rows, columns, depth,
            depth, 1, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
        )  # fmt: skip
        store_tile(
            c + own_row * columns, total, bias, row, col, rows, columns, columns, sound,
            BM, BN, HAS_BIAS, ACTIVATION, DESCRIBED and BN > 128,
        )  # fmt: skip
    height = tl.cdiv(rows, _PIECES)
    for turn in range(turns, _turns_of(tiles * ranks, order, multipliers, late)):
        tile = _tile(turn, order, multipliers, late)
        peer = (me + ranks - tile // tiles) % ranks
        row, col = grouped_tile(tile % tiles, tiles_m, tiles_n, GROUP_M)
        first = row * BM // height
        count = (tl.minimum((row + 1) * BM, rows) - 1) // height + 1 - first
        signals = progress + peer * _PIECES + first
        ok = tdl.wait_all(signals, count, world, number, first_peer=-count) & sound
        if DESCRIBED:
            tdl.fence_async_proxy()
        base = ((number & 1) * ranks + peer).to(tl.int64) * rows
        total = tile_product(
            gathered, b, scales, scale_b, base, row, col, rows, columns, depth,
            depth, 1, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
        )  # fmt: skip
        store_tile(
            c + peer.to(tl.int64) * rows * columns, total, bias, row, col, rows, columns, columns,
            ok, BM, BN, HAS_BIAS, ACTIVATION, DESCRIBED and BN > 128,
        )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def gather_multiply_kernel(
    x, own, b, c, bias, scale_b, slots, gathered, own_scales, scales, progress, epoch, channel,
    world, rows, columns, depth, line_units, stride_bk, stride_bn, senders, late,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, PUSH: tl.constexpr, UNIT: tl.constexpr,
    SCALED: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`senders` programs push the rows of x, as words, before they multiply.

    Programs start in order, so those that others wait for are there. Without PUSH it has been done
    for another b, and `senders` is 0.
    """
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    number = tdl.epoch(channel) if PUSH else tl.load(epoch)
    if PUSH:
        index = tl.program_id(0)
        if index < senders:
            if index == 0:
                tl.store(epoch, number)
            _push_rows(
                x, slots, own_scales, scales, progress, number, index, senders, rows,
                line_units * UNIT, world, SCALED, SCALES, BLOCK,
            )  # fmt: skip
    _multiply(
        own, b, c, bias, scale_b, gathered, own_scales, scales, progress, number, senders, late,
        rows, columns, depth, stride_bk, stride_bn, world, BM, BN, BK, GROUP_M, PRECISION,
        HAS_BIAS, ACTIVATION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
    )  # fmt: skip
    if PUSH and tl.program_id(0) == 0:  # also where no tile waits for the rows
        expected = tdl.num_ranks(world) * _PIECES
        tdl.wait_all(progress, expected, world, number, first_peer=-expected)


@triton.jit(do_not_specialize=["row_units"])
def take_kernel(
    out, slots, epoch, world, row_units, UNIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy the rows of all ranks out of the last call's slot; the own ones are at the next rank."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    words = tl.cast(row_units, tl.int64) * UNIT
    slot = slots + ((tl.load(epoch) & 1) * ranks).to(tl.int64) * words
    for source in range(0, ranks):
        at = tl.where(source == me, (me + 1) % ranks, me)
        part = tl.cast(source, tl.int64) * words
        copy_share(
            out + part, tdl.symm_at(slot + part, at, world), words, tl.program_id(0),
            tl.num_programs(0), BLOCK,
        )  # fmt: skip


class GatheringProduct:
    """Slots for the rows of all ranks, and the kernels that fill and use them. Part of a plan.

    Attributes
    ----------
    buffer : Array
        (W, *shape): the gathered data after `take`.
    chunks, chunk_rows : int
        One chunk of all rows of a rank.
    """

    def __init__(self, plan: Plan, shape: tuple[int, ...], product: Product, pusher: int):
        """The kernel of b number `pusher` pushes; it is launched first."""
        world, size, rows = plan.world, plan.group.size, shape[0]
        dtype = product.dtype
        self._rows, self._pusher = rows, pusher
        self._world, self._rank = world, plan.group.rank
        self.chunks, self.chunk_rows = 1, max(1, rows)
        self._nbytes, self._line = elements(shape) * dtype.itemsize, shape[1] * dtype.itemsize
        self.buffer = world.zeros((size, *shape), dtype, symmetric=False, name="gathered")
        self._slots = plan.workspace("slots", (2 * size * rows, shape[1]), dtype)
        pieces = _PIECES.value
        self._progress = plan.workspace("progress", (size * pieces,), np.int32, pieces)
        self._epoch = world.zeros((1,), np.int32, symmetric=False)
        self._channel = plan.channel(world.driver.resident_blocks() + 1)
        # some array has to stand in where a kernel has no use for one
        self._scales = self._own_scales = self._epoch
        self._spread: list[Callable[..., None]] = []
        if product.scaled:
            self._scales = plan.workspace("scales", (2 * size, rows), np.float32)
            self._own_scales = world.zeros((size, rows), np.float32, symmetric=False)
            self._spread = spread_kernels(plan, self._own_scales, rows)
        self._word, unit = byte_units(self._nbytes)
        width, block = self._word.itemsize, block_bytes(world.backend, self._nbytes)
        self._take = plan.bind(
            take_kernel, plan.blocks_for(-(-self._nbytes // block)), (self._word, self._word),
            self._epoch, plan.group.handle, self._nbytes // (width * unit), UNIT=unit,
            BLOCK=block // width, num_warps=8,
        )  # fmt: skip

    def start(
        self, plan: Plan, x: Operand, stream: int, scale: Operand | None = None, step: int = 0,
        first: bool = False,
    ) -> Operand:  # fmt: skip
        """Queue what has to precede the kernels; returns what they read, as Gathering.start."""
        if first and self._nbytes:
            own = operand(self._world, self.buffer[self._rank], "gathered")
            self._world.driver.copy(own.address, x.address, self._nbytes, stream, x.owner)
            x = own
        if scale is not None:
            self._spread[step](stream, scale)
        return x

    def bind(
        self, plan: Plan, product: Product, config: Config, i: int, sizes: Sequence[int],
        steps: tuple[int, int], described: bool, bias: np.dtype,
    ) -> Callable[..., None]:  # fmt: skip
        """The kernel for b number `i`, of what start returned, b, c, bias and scales of b.

        `sizes`, `steps`: see Product, with the rows of all ranks.
        """
        world, slots = self._world, self._slots
        _, n, k, *strides = sizes
        senders, late = 0, 0
        if i == self._pusher:
            tile = (config.block_m, config.block_n)
            _, senders, late = schedule(world, self._rows, n, plan.group.size, *tile)
        own, b = product.kinds(config, described, (self._rows, *sizes[1:]))
        rows, _ = product.kinds(config, described, (len(slots), *sizes[1:]))
        gathered = rows.of(slots) if isinstance(rows, Described) else slots
        word, unit = byte_units(self._line or product.dtype.itemsize)
        width = word.itemsize
        blocks = senders + blocks_for(world, config.tiles(self._rows, n) * plan.group.size, senders)
        run = plan.bind(
            gather_multiply_kernel, blocks,
            (word, own, b, product.out_dtype, bias, product.scale_dtype),
            slots.view(word), gathered, self._own_scales, self._scales, self._progress,
            self._epoch, self._channel, plan.group.handle, self._rows, n, k,
            self._line // (width * unit), *strides[2:], senders, late, PUSH=senders > 0, UNIT=unit,
            SCALED=product.scaled,
            SCALES=block_elements(world.backend, self._rows),
            BLOCK=self._block(width, config.num_warps), **product.constants,
            **product.product_constants(config, sizes, steps, described),
        )  # fmt: skip
        return lambda stream, x, *ops: run(stream, x, x, *ops)

    def _block(self, width: int, warps: int) -> int:
        """Words of `width` bytes that a program pushes at a time."""
        share = power_of_two(-(-self._nbytes // (width * _PIECES.value)))
        most = constants(self._world.backend).block_elements[1]
        if self._world.backend != "host":  # each word takes registers
            most = min(most, 32 * warps * (64 if self._world.backend == "hip" else 32))
        return min(most, share)

    def take(self, stream: int) -> None:
        """Queue the copy of the last call's rows into the buffer."""
        if self._nbytes:
            whole, slots = (operand(self._world, x, "gathered") for x in (self.buffer, self._slots))
            whole.enter(stream)
            self._epoch._block.note(stream)  # which it reads, too, and may outlive the plan's
            self._take(stream, whole, slots)

    def join(self, stream: int) -> None:
        """Nothing is left to wait for."""

    def confirm(self, stream: int, read: bool = True) -> None:
        """Kernels look for faults before they write."""
