"""Tiles of packed words of data and flag: what the low-latency kernels share.

A tile is what a block sends or takes at a time: LANES lanes of 28 bytes, which as four words with
flags take 32 (see tdx/language/words.py). The data is its own signal, as in NCCL's LL. Value j of
lane i is word j * LANES + i of 4 bytes, so that loads and stores of data are contiguous; and so are
the pairs of words of all lanes. A program holds a tile as packed_blocks() blocks.

Slots hold a place for every rank's tiles, and are used in turn by calls' parity. All words that are
read in a call are written in each: so a word holds the flag of two calls before, never the one
waited for, also where flags wrap to the 0 of fresh memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.reduction import finish, load_added, reduce_words, to_words
from tdx.kernels.select import MOST_WARPS, constants, power_of_two
from tdx.language._intrinsic import is_block, is_host
from tdx.language.words import load_packed, load_packed_all, packed_blocks, store_packed

__all__ = [
    "VALUES", "finish_tile", "get_tile", "get_tiles", "load_added_tile", "load_packable",
    "load_tile", "low_latency_elements", "low_latency_lanes", "others", "packed_bytes",
    "part_of_tile", "per_element", "per_word", "put_tile", "slot_words", "store_tile", "sum_tile",
    "tiles_of",
]  # fmt: skip

VALUES = 7  # of 4 bytes in a lane
_VALUES = tl.constexpr(VALUES)


def tile_bytes(lanes: int) -> int:
    """Bytes of data in a tile."""
    return 4 * VALUES * lanes


def tiles_of(nbytes: int, lanes: int) -> int:
    """How many tiles hold `nbytes`, at least one."""
    return max(1, -(-nbytes // tile_bytes(lanes)))


def slot_words(nbytes: int, lanes: int) -> int:
    """Words of 64 bits of a slot for `nbytes`."""
    return 4 * lanes * tiles_of(nbytes, lanes)


def packed_bytes(nbytes: float) -> float:
    """Bytes on the wire of data that travels as packed words of data and flag."""
    return nbytes * 8 / 7


def low_latency_lanes(backend: str, nbytes: int) -> tuple[int, int]:
    """Lanes of a tile of packed words, and warps of a block, for `nbytes` of each rank."""
    limits = constants(backend)
    fewest, most = limits.low_latency_lanes
    lanes = min(most, max(fewest, power_of_two(-(-nbytes // (28 * limits.blocks)))))
    return lanes, min(MOST_WARPS, max(1, lanes // (64 if backend == "hip" else 32)))


def low_latency_elements(backend: str, numel: int, itemsize: int) -> tuple[int, int]:
    """The same for a reduction: elements of a block of such words, and its warps."""
    lanes, warps = low_latency_lanes(backend, numel * itemsize)
    return max(2, lanes * 4 // itemsize), warps  # wider types are refused by who asks


@triton.jit
def part_of_tile(
    first, end, j: tl.constexpr, BLOCK: tl.constexpr, LANES_FIRST: tl.constexpr = False
):
    """Offsets of block number `j` of the tile that begins at `first`, and which are before `end`.

    BLOCK: offsets of each of the VALUES values. LANES_FIRST: how the offsets are summed up, which
    decides what a compiler keeps in registers.
    """
    first = tl.cast(first, tl.int64)
    if is_host():
        within = tl.arange(0, 8 * BLOCK)
        at = first + within
        mask = (within < _VALUES * BLOCK) & (at < end)
    else:
        if LANES_FIRST:
            at = (first + tl.arange(0, BLOCK)) + j * BLOCK
        else:
            at = (first + j * BLOCK) + tl.arange(0, BLOCK)
        mask = at < end
    return at, mask


@triton.jit
def load_tile(x, tile, count, PIECES: tl.constexpr, LANES: tl.constexpr):
    """Tile number `tile` of `count` elements, of which PIECES make a word; zeros behind the end."""
    first = tl.cast(tile, tl.int64) * (_VALUES * LANES)
    words = (count + PIECES - 1) // PIECES
    BITS: tl.constexpr = 32 // PIECES
    values = ()
    for j in tl.static_range(packed_blocks()):
        at, mask = part_of_tile(first, words, j, LANES, True)
        if PIECES == 1:
            value = tl.load(x + at, mask=mask, other=0)
        else:
            value = tl.zeros(at.shape, tl.int32)
            for piece in tl.static_range(PIECES):
                element = at * PIECES + piece
                part = tl.load(x + element, mask=mask & (element < count), other=0).to(tl.int32)
                value |= (part & ((1 << BITS) - 1)) << (BITS * piece)
        values = values + (value,)  # noqa: RUF005 - Triton has no star
    return values


@triton.jit
def store_tile(
    out, tile, values, peer: tl.constexpr, count, when, PIECES: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """The inverse of load_tile, of lanes `when`; of what get_tiles returned, `peer`'s values."""
    start = tl.cast(tile, tl.int64) * (_VALUES * LANES)
    words = (count + PIECES - 1) // PIECES
    BITS: tl.constexpr = 32 // PIECES
    for j in tl.static_range(packed_blocks()):
        at, there = part_of_tile(start, words, j, LANES, True)
        mask = when & there
        if PIECES == 1:
            tl.store(out + at, values[peer * packed_blocks() + j], mask=mask)
        else:
            for piece in tl.static_range(PIECES):
                element = at * PIECES + piece
                value = values[peer * packed_blocks() + j] >> (BITS * piece)
                value = value.to(out.dtype.element_ty)
                tl.store(out + element, value, mask=mask & (element < count))


@triton.jit
def put_tile(slot, tile, values, nwords, flag, peer, world, when, LANES: tl.constexpr):
    """Push a tile into `peer`'s `slot`, which takes `nwords` words of 4 bytes; none unless `when`.

    Lanes without any data are not sent, nor waited for by get_tile.
    """
    at = slot + tl.cast(tile, tl.int64) * (4 * LANES) + 2 * tl.arange(0, LANES)
    store_packed(at, 2 * LANES, values, flag, peer, world, _sent(tile, nwords, LANES) & when)


@triton.jit
def get_tile(slot, tile, nwords, flag, world, peer, LANES: tl.constexpr):
    """Wait for what `peer` put there: its values, and which lanes have come."""
    at = slot + tl.cast(tile, tl.int64) * (4 * LANES) + 2 * tl.arange(0, LANES)
    return load_packed(at, 2 * LANES, flag, world, _sent(tile, nwords, LANES), peer)


@triton.jit
def get_tiles(
    slots, stride, tile, nwords, flag, world, whose, RANKS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """The same tile of the ranks in `whose`, a bit for each, whose slots are `stride` words apart.

    The blocks of each rank, and which lanes have come.
    """
    at = slots + tl.cast(tile, tl.int64) * (4 * LANES) + 2 * tl.arange(0, LANES)
    mask = _sent(tile, nwords, LANES)
    return load_packed_all(at, 2 * LANES, stride, flag, world, whose, RANKS, mask)


@triton.jit
def _sent(tile, nwords, LANES: tl.constexpr):
    """Lanes of which at least the first value is data."""
    return tl.cast(tile, tl.int64) * (_VALUES * LANES) + tl.arange(0, LANES) < nwords


@triton.jit
def load_packable(x, first, end, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of values of BLOCK elements from `first` on as words; zeros from `end` on.

    PAIRS: elements of 2 bytes, of which two make a word, else of 4.
    """
    values = ()
    for j in tl.static_range(packed_blocks()):
        at, mask = part_of_tile(first, end, j, BLOCK)
        value = to_words(tl.load(x + at, mask=mask, other=0), PAIRS)
        values = values + (value.to(tl.int32, bitcast=True),)  # noqa: RUF005
    return values


@triton.jit
def _place_of_tile(peer, numel, shard, tile, j: tl.constexpr, arrived, BLOCK: tl.constexpr):
    """Offsets of block number `j` of a tile of `peer`'s shard, and which of them are to be used:
    those before `numel` that have `arrived`.
    """
    offsets, mask = part_of_tile(tl.cast(tile, tl.int64) * (BLOCK * _VALUES), shard, j, BLOCK)
    place = tl.cast(peer, tl.int64) * shard + offsets
    # arrived first: else the rest of all masks waits in registers for it, up to a microsecond
    return place, arrived & mask & (place < numel)


@triton.jit
def load_added_tile(
    bias, residual, peer, numel, columns, shard, tile,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each block of a tile of `peer`'s shard what reduction.load_added returns."""
    added = ()
    for j in tl.static_range(packed_blocks()):
        place, mask = _place_of_tile(peer, numel, shard, tile, j, tl.full((), 1, tl.int1), BLOCK)
        each = load_added(bias, residual, place, mask, columns, HAS_BIAS, HAS_RESIDUAL)
        added = added + (each,)  # noqa: RUF005
    return added


@triton.jit
def finish_tile(
    total, out, added, peer, numel, shard, tile, j: tl.constexpr, arrived, ranks, OP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store block number `j` of such a tile, where it has arrived, as reduction.finish does."""
    place, mask = _place_of_tile(peer, numel, shard, tile, j, arrived, BLOCK)
    finish(total, out, added, place, mask, ranks, OP)


@triton.jit
def sum_tile(
    x, first, end, slots, stride, tile, nwords, flag, world,
    OP: tl.constexpr, RANKS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce a tile of all ranks, the own one from `first` on in x, in rank order; not rounded.

    Arguments as for get_tiles and load_packable. The tile's blocks, and which elements of each
    have come.
    """
    KIND: tl.constexpr = tl.int32 if PAIRS else x.dtype.element_ty
    own = load_packable(x, first, end, PAIRS, BLOCK)
    whose = others(world, RANKS)
    LANES: tl.constexpr = BLOCK // (2 if PAIRS else 1)
    found, come = get_tiles(slots, stride, tile, nwords, flag, world, whose, RANKS, LANES)
    totals = ()
    for j in tl.static_range(packed_blocks()):
        words = ()
        for peer in tl.static_range(RANKS):
            word = found[peer * packed_blocks() + j].to(KIND, bitcast=True)
            words = words + (word,)  # noqa: RUF005
        mine = own[j].to(KIND, bitcast=True)
        total = reduce_words(mine, words, world, x.dtype.element_ty, OP, RANKS, PAIRS)
        totals = totals + (total,)  # noqa: RUF005
    return totals, per_element(come, PAIRS)


@triton.jit
def per_element(lanes, PAIRS: tl.constexpr):
    """What holds for each word, or for all, for each element of it."""
    if PAIRS and is_block(lanes):
        lanes = tl.interleave(lanes, lanes)
    return lanes


@triton.jit
def per_word(elements, PAIRS: tl.constexpr):
    """What holds for each element, or for all, for a word whose elements it holds for."""
    if PAIRS and is_block(elements):
        low, high = tl.split(tl.reshape(elements, (elements.shape[0] // 2, 2)))
        elements = low & high
    return elements


@triton.jit
def others(world, RANKS: tl.constexpr):
    """Bits of all ranks but the own one."""
    return ((1 << RANKS) - 1) & ~(1 << tdl.rank(world))
