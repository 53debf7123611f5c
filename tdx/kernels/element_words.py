"""Elements sent as words of data and flag: a thread stores and polls one at a time, or two."""

from __future__ import annotations

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.reduction import to_words
from tdx.language.words import pair_words

__all__ = ["of_elements", "receive_elements", "send_elements"]


@triton.jit
def send_elements(
    values, to, count, flag, world, peer, when, PAIRS: tl.constexpr, WIDE: tl.constexpr
):
    """Store elements as words with flags in `peer`'s heap, from word `to` on, `count` at most.

    PAIRS: two elements share a word. WIDE: a lane has two words. `when`: bool, or for each lane.
    """
    words = to_words(values, PAIRS)
    if WIDE:
        low, high = tl.split(tl.reshape(words, (words.shape[0] // 2, 2)))
        words = pair_words(low, high)
    STEP: tl.constexpr = 2 if WIDE else 1
    at = STEP * tl.arange(0, words.shape[0])
    tdl.store_ll(to + at, words, flag, peer, world, (at < count) & when)


@triton.jit
def receive_elements(
    slot, stride, count, flag, world, DTYPE: tl.constexpr, RANKS: tl.constexpr,
    PAIRS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What all peers' `send_elements` stored: for each rank BLOCK elements as `to_words` has them,
    0 for the own one and behind `count` words. And what has come, for each lane of send_elements.
    """
    STEP: tl.constexpr = 2 if WIDE else 1
    WORDS: tl.constexpr = BLOCK // 2 if PAIRS else BLOCK
    KIND: tl.constexpr = tl.int64 if WIDE else tl.int32
    at = STEP * tl.arange(0, WORDS // STEP)
    found, come = tdl.load_ll_all(slot + at, stride, flag, world, RANKS, at < count, KIND)
    words = ()
    for peer in tl.static_range(RANKS):
        each = found[peer]
        if WIDE:
            each = tl.interleave(each.to(tl.int32), (each >> 32).to(tl.int32))
        if not PAIRS:
            each = each.to(DTYPE, bitcast=True)
        words = words + (each,)  # noqa: RUF005 - Triton has no star
    return words, come


@triton.jit
def of_elements(come, PAIRS: tl.constexpr, WIDE: tl.constexpr):
    """What is known of each lane of `send_elements`, for each element."""
    if WIDE:
        come = tl.interleave(come, come)
    if PAIRS:
        come = tl.interleave(come, come)
    return come
