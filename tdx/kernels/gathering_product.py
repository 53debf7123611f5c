"""A gather and a product in one kernel, for few rows: in parts along K.

A product of few rows is one wave of tiles: no block has another tile to compute until a peer's rows
are there. So the first blocks of the kernel push the own rows to all peers, not row by row but the
first columns of all rows, then the others. A block with a peer's tile starts with the sum over the
first columns; the others come meanwhile.

Parts begin at the same columns on every rank, multiples of the depth of every tile: a sum has the
bits of one that is not interrupted. There is a signal for each rank, part and pushing block.

Rows arrive in slots that are used in turn by calls' parity and need no credit: a rank in call n has
all parts of call n - 1 of every peer, and so they have left call n - 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copying import copy_share
from tdx.kernels.few_rows import GROWTH, Parts
from tdx.kernels.gathering import spread_kernels
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

_GROWTH = tl.constexpr(GROWTH)
_SIZES = ["rows", "columns", "depth", "line_units", "first", "parts", "stride_bk", "stride_bn"]


@triton.jit
def _push(
    x, to, begin, end, index, senders, rows, line, world,
    WHOLE: tl.constexpr, PM: tl.constexpr, PK: tl.constexpr,
):  # fmt: skip
    """Store this program's share of words `begin` to `end` of each row at all peers.

    A single rank stores them at itself: where the next rank is. WHOLE: each rank does.
    """
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    sound = tdl.no_fault(world, uniform=False)
    rm = tl.arange(0, PM)
    rk = tl.arange(0, PK)
    across = tl.cdiv(end - begin, PK)
    for block in range(index, tl.cdiv(rows, PM) * across, senders):
        row = block // across * PM
        word = begin + block % across * PK
        inside = (rm[:, None] < rows - row) & (rk[None, :] < end - word)
        at = tl.cast(row, tl.int64) * line + word
        lanes = rm[:, None] * line + rk[None, :]
        value = tl.load(x + at + lanes, mask=inside)
        for hop in range(1, ranks + 1 if WHOLE else tl.maximum(ranks, 2)):
            theirs = tdl.symm_at(to, (me + hop) % ranks, world) + at
            tl.store(theirs + lanes, value, mask=inside & sound)


@triton.jit
def _notify_all(signal, number, world):
    """Set a signal at all ranks."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    lanes = tl.arange(0, 32)
    for first in range(0, ranks, 32):
        hop = first + lanes
        tdl.notify(signal, (me + hop) % ranks, world, number, when=hop < ranks)


@triton.jit
def _push_parts(
    x, slots, own_scales, scales, progress, number, index, senders, rows, line, first, parts, world,
    WORDS: tl.constexpr, FIRST_PM: tl.constexpr, FIRST_PK: tl.constexpr, PM: tl.constexpr,
    PK: tl.constexpr, SCALED: tl.constexpr, SCALES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A pushing program's work. `first` columns are a multiple of 16, which are WORDS words."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    own_row = ((number & 1) * ranks + me).to(tl.int64) * rows
    to = slots + own_row * line
    signal = progress + me * senders + index
    if SCALED:
        first_hop = tl.where((index == 0) & tdl.no_fault(world), 1, ranks + 1)
        for hop in range(first_hop, ranks + 1 if WHOLE else tl.maximum(ranks, 2)):
            theirs = tdl.symm_at(scales + own_row, (me + hop) % ranks, world)
            copy_share(theirs, own_scales + me.to(tl.int64) * rows, rows, 0, 1, SCALES)
    end = tl.where(parts == 1, line, first // 16 * WORDS)
    _push(x, to, 0, end, index, senders, rows, line, world, WHOLE, FIRST_PM, FIRST_PK)
    _notify_all(signal, number, world)
    begin = first
    for part in range(1, parts):
        end = tl.where(part == parts - 1, line, begin * _GROWTH // 16 * WORDS)
        _push(x, to, begin // 16 * WORDS, end, index, senders, rows, line, world, WHOLE, PM, PK)
        _notify_all(signal + part * ranks * senders, number, world)
        begin *= _GROWTH
    if index == 0:  # also where no tile waits for the rows
        count = ranks * parts * senders
        tdl.wait_all(progress, count, world, number, first_peer=-count)


@triton.jit
def _multiply(
    own, b, c, bias, scale_b, gathered, own_scales, scales, progress, number, block, blocks,
    senders, rows, columns, depth, first, parts, stride_bk, stride_bn, world,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr, EVEN: tl.constexpr,
    DESCRIBED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A multiplying program's tiles: of the own rows, then of the previous rank's, and so on.

    WHOLE: tiles of all ranks' rows together.
    """
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    sound = tdl.no_fault(world)
    height = rows * ranks if WHOLE else rows
    tiles_m = tl.cdiv(height, BM)
    tiles_n = tl.cdiv(columns, BN)
    tiles = tiles_m * tiles_n
    own_row = me.to(tl.int64) * rows
    own_tiles = 0 if WHOLE else tiles
    for tile in range(block, own_tiles, blocks):
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
    late = block + tl.cdiv(tl.maximum(own_tiles - block, 0), blocks) * blocks
    count = senders * (ranks if WHOLE else 1)
    for tile in range(late, tiles * (1 if WHOLE else ranks), blocks):
        peer = 0 if WHOLE else (me + ranks - tile // tiles) % ranks
        row, col = grouped_tile(tile % tiles, tiles_m, tiles_n, GROUP_M)
        base = ((number & 1) * ranks + peer).to(tl.int64) * rows
        total = tl.zeros((BM, BN), tl.float32)
        ok = sound
        begin = 0
        for part in range(0, parts):
            signals = progress + (part * ranks + peer) * senders
            ok = tdl.wait_all(signals, count, world, number, first_peer=-count) & ok
            if DESCRIBED:
                tdl.fence_async_proxy()
            # no variable of this loop takes over another one's value: Triton 3.6 loses both then
            end = tl.where(part == 0, first, begin * _GROWTH)
            end = known(tl.where(part == parts - 1, depth, end), EVEN)
            total = tile_product(
                gathered, b, scales, scale_b, base, row, col, height, columns, end,
                depth, 1, stride_bk, stride_bn, BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP,
                DESCRIBED, begin // 16 * 16, total, part == parts - 1,
            )  # fmt: skip
            begin = end
        store_tile(
            c + tl.cast(peer, tl.int64) * rows * columns, total, bias, row, col, height, columns,
            columns, ok, BM, BN, HAS_BIAS, ACTIVATION, DESCRIBED and BN > 128,
        )  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def gather_multiply_kernel(
    x, own, b, c, bias, scale_b, slots, gathered, own_scales, scales, progress, epoch, channel,
    world, rows, columns, depth, line_units, first, parts, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, PUSH: tl.constexpr, SENDERS: tl.constexpr,
    UNIT: tl.constexpr, WORDS: tl.constexpr, FIRST_PM: tl.constexpr, FIRST_PK: tl.constexpr,
    PM: tl.constexpr, PK: tl.constexpr, SCALED: tl.constexpr, SCALES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """SENDERS programs push the rows of x, as words; the others multiply.

    Programs start in order, so those that others wait for are there. Without PUSH it has been done
    for another b, and all programs multiply.
    """
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    PUSHING: tl.constexpr = SENDERS if PUSH else 0
    index = tl.program_id(0)
    number = tdl.epoch(channel) if PUSH else tl.load(epoch)
    if index < PUSHING:
        if index == 0:
            tl.store(epoch, number)
        _push_parts(
            x, slots, own_scales, scales, progress, number, index, SENDERS, rows,
            line_units * UNIT, first, parts, world, WORDS, FIRST_PM, FIRST_PK, PM, PK, SCALED,
            SCALES, WHOLE,
        )  # fmt: skip
    else:
        _multiply(
            own, b, c, bias, scale_b, gathered, own_scales, scales, progress, number,
            index - PUSHING, tl.num_programs(0) - PUSHING, SENDERS, rows, columns, depth, first,
            parts, stride_bk, stride_bn, world, BM, BN, BK, GROUP_M, PRECISION, HAS_BIAS,
            ACTIVATION, B_UNIT, A_STEP, B_STEP, EVEN, DESCRIBED, WHOLE,
        )  # fmt: skip


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

    def __init__(
        self, plan: Plan, shape: tuple[int, ...], product: Product, parts: Parts, pusher: int
    ):
        """The kernel of b number `pusher` pushes; it is launched first."""
        world, size, rows = plan.world, plan.group.size, shape[0]
        dtype = product.dtype
        self._rows, self._parts, self._pusher = rows, parts, pusher
        self._world, self._rank = world, plan.group.rank
        self.chunks, self.chunk_rows = 1, max(1, rows)
        self._nbytes, self._line = elements(shape) * dtype.itemsize, shape[1] * dtype.itemsize
        self.buffer = world.zeros((size, *shape), dtype, symmetric=False, name="gathered")
        self._slots = plan.workspace("slots", (2 * size * rows, shape[1]), dtype)
        words = parts.count * parts.senders
        self._progress = plan.workspace("progress", (size * words,), np.int32, words)
        self._epoch = world.zeros((1,), np.int32, symmetric=False)
        self._channel = plan.channel(max(world.driver.resident_blocks(), parts.senders + 1))
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
        world, parts, slots = self._world, self._parts, self._slots
        _, n, k, *strides = sizes
        own, b = product.kinds(config, described, (self._rows, *sizes[1:]))
        rows, _ = product.kinds(config, described, (len(slots), *sizes[1:]))
        gathered = rows.of(slots) if isinstance(rows, Described) else slots
        word, unit = byte_units(self._line or product.dtype.itemsize)
        width = word.itemsize
        line, first = self._line // width, parts.first * product.dtype.itemsize // width
        pushing = parts.senders if i == self._pusher else 0
        height = self._rows * plan.group.size
        whole = height <= config.block_m
        tiles = config.tiles(height, n) if whole else config.tiles(self._rows, n) * plan.group.size
        blocks = pushing + blocks_for(world, tiles, pushing)
        threads = config.num_warps * (64 if world.backend == "hip" else 32)
        pm, pk = self._tile(min(first, line), threads)
        rest = self._tile(line - first, threads) if parts.count > 1 else (1, 1)
        run = plan.bind(
            gather_multiply_kernel, blocks,
            (word, own, b, product.out_dtype, bias, product.scale_dtype),
            slots.view(word), gathered, self._own_scales, self._scales, self._progress,
            self._epoch, self._channel, plan.group.handle, self._rows, n, k, line // unit,
            parts.first, parts.count, *strides[2:], PUSH=pushing > 0, SENDERS=parts.senders,
            UNIT=unit, WORDS=16 * product.dtype.itemsize // width, FIRST_PM=pm, FIRST_PK=pk,
            PM=rest[0], PK=rest[1], SCALED=product.scaled, WHOLE=whole,
            SCALES=block_elements(world.backend, self._rows), **product.constants,
            **product.product_constants(config, sizes, steps, described),
        )  # fmt: skip
        return lambda stream, x, *ops: run(stream, x, x, *ops)

    def _tile(self, width: int, threads: int) -> tuple[int, int]:
        """Rows and words that a program pushes at a time, of rows of `width` words."""
        backend = self._world.backend
        share = power_of_two(-(-self._rows * width // self._parts.senders))
        most = constants(backend).block_elements[1]
        if backend != "host":  # each word takes registers
            most = min(most, 32 * threads)
        block = min(most, share)
        across = min(block, power_of_two(width))
        return block // across, across

    def take(self, stream: int) -> None:
        """Queue the copy of the last call's rows into the buffer."""
        if self._nbytes:
            whole, slots = (operand(self._world, x, "gathered") for x in (self.buffer, self._slots))
            whole.enter(stream)
            self._take(stream, whole, slots)

    def join(self, stream: int) -> None:
        """Nothing is left to wait for."""

    def confirm(self, stream: int, read: bool = True) -> None:
        """Kernels look for faults before they write."""
