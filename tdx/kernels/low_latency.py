"""Movement of small blocks as words of data and flag: what all_gather and all_to_all share.

Every rank has a block of S bytes for every rank (all_gather: the same for all). It pushes each as
64-bit words, 7 bytes of data and one of flag (of the epoch), and reads what the others pushed:
8/7 * (W - 1) * S bytes out, one hop and no meeting, because the data is its own signal, as in
NCCL's LL. Blocks are bytes, whatever the element type; packed.py tells where they are in words.

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
from tdx.kernels.operand import Operand
from tdx.kernels.packed import (
    VALUES,
    get_tiles,
    load_tile,
    low_latency_lanes,
    others,
    put_tile,
    slot_words,
    store_tile,
    tiles_of,
)
from tdx.kernels.plan import Plan

__all__ = ["LowLatency"]

_VALUES = tl.constexpr(VALUES)


@triton.jit(do_not_specialize=["count"])
def low_latency_kernel(
    x, out, slots, channel, world, count,
    EACH: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Push blocks of `count` elements of WIDTH bytes to everybody, and store what arrives.

    EACH: x has a block for every rank.
    """
    PIECES: tl.constexpr = 4 // WIDTH
    me = tdl.rank(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    words = tl.cdiv(count, PIECES)
    tiles = tl.cdiv(words, LANES * _VALUES)
    stride = tl.cast(tiles, tl.int64) * (4 * LANES)
    base = slots + (flag & 1).to(tl.int64) * RANKS * stride
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # all loads before the first store, which nothing can be moved across
        sent = (load_tile(x, tile, count, PIECES, LANES),) if not EACH else ()
        if EACH:
            for hop in tl.static_range(1, RANKS):
                source = x + ((me + hop) % RANKS).to(tl.int64) * count
                sent = sent + (load_tile(source, tile, count, PIECES, LANES),)  # noqa: RUF005
        for hop in tl.static_range(1, RANKS):
            values = sent[hop - 1 if EACH else 0]
            peer = (me + hop) % RANKS
            put_tile(base + me * stride, tile, values, words, flag, peer, world, sound, LANES)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        own = load_tile(x + (me.to(tl.int64) * count if EACH else 0), tile, count, PIECES, LANES)
        found, arrived = get_tiles(
            base, stride, tile, words, flag, world, others(world, RANKS), RANKS, LANES
        )
        for peer in tl.static_range(RANKS):
            to = out + tl.cast(peer, tl.int64) * count
            store_tile(to, tile, found, peer, count, arrived & (me != peer), PIECES, LANES)
        to = out + me.to(tl.int64) * count
        store_tile(to, tile, own, 0, count, arrived, PIECES, LANES)


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
        self._lanes, self._warps = low_latency_lanes(plan.world.backend, nbytes)
        self._blocks = plan.blocks_for(tiles_of(nbytes, self._lanes))
        words = 2 * plan.group.size * slot_words(nbytes, self._lanes)
        self._slots = plan.packed_slots(words)
        self._channel = plan.channel(self._blocks)
        width = math.gcd(4, nbytes)
        self._kernels = {width: self._bind(plan, width)} if nbytes else {}

    def _bind(self, plan: Plan, width: int) -> Callable[..., None]:
        kind = np.dtype(f"i{width}")
        return plan.bind(
            low_latency_kernel, self._blocks, (kind, kind), self._slots, self._channel,
            plan.group.handle, self._nbytes // width, EACH=self._each, WIDTH=width,
            LANES=self._lanes, RANKS=plan.group.size, num_warps=self._warps,
        )  # fmt: skip

    def run(self, plan: Plan, stream: int, x: Operand, to: Operand) -> None:
        """Queue it; `to` may be `x`."""
        width = math.gcd(4, self._nbytes, x.address, to.address)
        kernel = self._kernels.get(width)
        if kernel is None:
            kernel = self._kernels[width] = self._bind(plan, width)
        kernel(stream, x, to)
