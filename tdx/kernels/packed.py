"""Tiles of packed words of data and flag: what the low-latency kernels share.

A tile is what a block sends or takes at a time: LANES lanes of 28 bytes, which as four words with
flags take 32 (see tdx/language/words.py). Value j of lane i is word j * LANES + i of 4 bytes, so
that loads and stores of data are contiguous; and so are the pairs of words of all lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.reduction import reduce_words, to_words
from tdx.language.words import load_packed, load_packed_all, store_packed

__all__ = [
    "VALUES", "get_tile", "get_tiles", "load_packable", "load_tile", "others", "per_element",
    "put_tile", "reduce_value", "slot_words", "store_tile", "tiles_of",
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


@triton.jit
def load_tile(x, tile, count, PIECES: tl.constexpr, LANES: tl.constexpr):
    """Tile number `tile` of `count` elements, of which PIECES make a word; zeros behind the end."""
    first = tl.cast(tile, tl.int64) * (_VALUES * LANES) + tl.arange(0, LANES)
    words = (count + PIECES - 1) // PIECES
    BITS: tl.constexpr = 32 // PIECES
    values = ()
    for j in tl.static_range(_VALUES):
        at = first + j * LANES
        mask = at < words
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
    out, tile, values, first: tl.constexpr, count, when, PIECES: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """The inverse of load_tile, of lanes `when`; `values` from number `first` on."""
    start = tl.cast(tile, tl.int64) * (_VALUES * LANES) + tl.arange(0, LANES)
    words = (count + PIECES - 1) // PIECES
    BITS: tl.constexpr = 32 // PIECES
    for j in tl.static_range(_VALUES):
        at = start + j * LANES
        mask = when & (at < words)
        if PIECES == 1:
            tl.store(out + at, values[first + j], mask=mask)
        else:
            for piece in tl.static_range(PIECES):
                element = at * PIECES + piece
                value = (values[first + j] >> (BITS * piece)).to(out.dtype.element_ty)
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

    VALUES values of each rank, and which lanes have come.
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
    """VALUES blocks of BLOCK elements from `first` on as words; zeros from `end` on.

    PAIRS: elements of 2 bytes, of which two make a word, else of 4.
    """
    values = ()
    for j in tl.static_range(_VALUES):
        at = tl.cast(first, tl.int64) + j * BLOCK + tl.arange(0, BLOCK)
        value = to_words(tl.load(x + at, mask=at < end, other=0), PAIRS)
        values = values + (value.to(tl.int32, bitcast=True),)  # noqa: RUF005
    return values


@triton.jit
def reduce_value(
    own, found, j: tl.constexpr, world, DTYPE: tl.constexpr, OP: tl.constexpr,
    RANKS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Reduce value j of the own tile and of those found, in rank order; not rounded."""
    KIND: tl.constexpr = tl.int32 if PAIRS else DTYPE
    words = ()
    for peer in tl.static_range(RANKS):
        words = words + (found[peer * _VALUES + j].to(KIND, bitcast=True),)  # noqa: RUF005
    mine = own[j].to(KIND, bitcast=True)
    return reduce_words(mine, words, world, DTYPE, OP, RANKS, PAIRS)


@triton.jit
def per_element(lanes, PAIRS: tl.constexpr):
    """What holds for each word, for each element of it."""
    return tl.interleave(lanes, lanes) if PAIRS else lanes


@triton.jit
def others(world, RANKS: tl.constexpr):
    """Bits of all ranks but the own one."""
    return ((1 << RANKS) - 1) & ~(1 << tdl.rank(world))
