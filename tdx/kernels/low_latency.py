"""Movement of small blocks as words of data and flag: what all_gather and all_to_all share.

Every rank has a block of S bytes for every rank (all_gather: the same for all). It pushes each as
64-bit words, 4 bytes of data and 4 of flag (the epoch), and reads what the others pushed:
2 * (W - 1) * S bytes out, one hop and no meeting, because the data is its own signal. The protocol
is that of NCCL's LL. Word k of a block holds its bytes 4k to 4k + 3, whatever the element type.

Two slots used in turn: a rank can be in call n + 2 only when every other has left call n, because
a call needs words of everybody.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copying import VECTOR, padded
from tdx.kernels.operand import Operand
from tdx.kernels.plan import Plan
from tdx.kernels.select import low_latency_words

__all__ = ["LowLatency", "load_words", "store_words"]

_VECTOR = tl.constexpr(VECTOR)


@triton.jit
def load_words(x, at, count, mask, PIECES: tl.constexpr):
    """Words `at` of `count` elements, of which PIECES make a word; zeros behind the end."""
    if PIECES == 1:
        words = tl.load(x + at, mask=mask, other=0)
    else:
        BITS: tl.constexpr = 32 // PIECES
        words = tl.zeros(at.shape, tl.int32)
        for piece in tl.static_range(PIECES):
            element = at * PIECES + piece
            value = tl.load(x + element, mask=mask & (element < count), other=0).to(tl.int32)
            words |= (value & ((1 << BITS) - 1)) << (BITS * piece)
    return words


@triton.jit
def store_words(out, at, words, count, mask, PIECES: tl.constexpr):
    """The inverse of load_words."""
    if PIECES == 1:
        tl.store(out + at, words, mask=mask)
    else:
        BITS: tl.constexpr = 32 // PIECES
        for piece in tl.static_range(PIECES):
            element = at * PIECES + piece
            value = (words >> (BITS * piece)).to(out.dtype.element_ty)
            tl.store(out + element, value, mask=mask & (element < count))


@triton.jit(do_not_specialize=["count", "vectors"])
def low_latency_kernel(
    x, out, slots, channel, world, count, vectors,
    EACH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Push blocks of `count` elements of WIDTH bytes to everybody, and store what arrives.

    EACH: x has a block for every rank. A rank's slot has VECTOR * vectors words.
    """
    PIECES: tl.constexpr = 4 // WIDTH if WIDTH < 4 else 1
    KIND: tl.constexpr = tl.int64 if WIDTH == 8 else tl.int32
    SPAN: tl.constexpr = 2 if WIDTH == 8 else 1  # words that a value takes
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    stride = vectors * _VECTOR
    base = slots + (flag & 1).to(tl.int64) * RANKS * stride
    values = (count + PIECES - 1) // PIECES
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, values, step):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = at < values
        # all loads before the first store, which nothing can be moved across
        sent = (load_words(x, at, count, mask, PIECES),) if not EACH else ()
        if EACH:
            for hop in tl.static_range(1, RANKS):
                source = x + ((me + hop) % RANKS).to(tl.int64) * count
                sent = sent + (load_words(source, at, count, mask, PIECES),)  # noqa: RUF005
        for hop in tl.static_range(1, RANKS):
            words = sent[hop - 1 if EACH else 0]
            to = base + me * stride + at * SPAN
            tdl.store_ll(to, words, flag, (me + hop) % RANKS, world, mask & sound)
    for start in range(tl.program_id(0) * BLOCK, values, step):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = at < values
        own = load_words(x + (me.to(tl.int64) * count if EACH else 0), at, count, mask, PIECES)
        found, arrived = tdl.load_ll_all(base + at * SPAN, stride, flag, world, RANKS, mask, KIND)
        for peer in tl.static_range(RANKS):
            words = tl.where(me == peer, own, found[peer])
            to = out + tl.cast(peer, tl.int64) * count
            store_words(to, at, words, count, mask & arrived, PIECES)


class LowLatency:
    """Blocks from every rank to every rank, as data-and-flag words. Part of a plan.

    Parameters
    ----------
    plan : Plan
        In its preparation.
    nbytes : int
        Of a block.
    each : bool
        Whether x has a block for every rank, or one for all of them.
    """

    def __init__(self, plan: Plan, nbytes: int, each: bool):
        self._nbytes, self._each = nbytes, each
        words = -(-nbytes // 4)
        self._block_words = low_latency_words(plan.world.backend, words)
        self._blocks = plan.blocks_for(-(-words // self._block_words))
        self._vectors = padded(words)
        slots = 2 * plan.group.size * self._vectors * VECTOR
        self._slots = plan.workspace("slots", (slots,), np.int64)
        self._channel = plan.channel(self._blocks)
        width = math.gcd(8, nbytes)
        self._kernels = {width: self._bind(plan, width)} if nbytes else {}

    def _bind(self, plan: Plan, width: int) -> Callable[..., None]:
        kind = np.dtype(f"i{width}")
        return plan.bind(
            low_latency_kernel, self._blocks, (kind, kind), self._slots, self._channel,
            plan.group.handle, self._nbytes // width, self._vectors, EACH=self._each,
            WIDTH=width, BLOCK=self._block_words // (2 if width == 8 else 1),
            RANKS=plan.group.size, num_warps=8,
        )  # fmt: skip

    def run(self, plan: Plan, stream: int, x: Operand, to: Operand) -> None:
        """Queue it; `to` may be `x`."""
        width = math.gcd(8, self._nbytes, x.address, to.address)
        kernel = self._kernels.get(width)
        if kernel is None:
            kernel = self._kernels[width] = self._bind(plan, width)
        kernel(stream, x, to)
