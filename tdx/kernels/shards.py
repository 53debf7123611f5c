"""Arrays split into shards, one for each rank: what two_shot.py and reduce_scatter.py share.

Every rank pushes shard p of its array into the staging slot of rank p, and rank p adds what it
got to its own, in rank order. Hop-major: all blocks push to the next rank, then to the one after
it, so that at any time each rank sends to one and receives from one, and no link is asked for
twice. Block b of every rank has the same elements of each shard, so blocks meet their likes only.

Large shards go in steps, which are numbered over all calls, through the slots in turn. A rank that
works ahead pushes step t + 1 before it waits for step t. So when it pushes step t, it has step
t - 2 of every peer, and these had then finished reading step t - 4: four slots are enough, without
a signal that says so. Two are, when each call is one step or nobody works ahead, because then it
has step t - 1 of every peer.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

import tdx.language as tdl
from tdx import abi
from tdx.kernels.copying import VECTOR, copy_share, padded
from tdx.kernels.packed import VALUES, load_packable, put_tile, sum_tile
from tdx.kernels.reduction import combine, widen
from tdx.kernels.select import STAGING_BYTES, STEPS_BYTES
from tdx.language.address import masked_peers

__all__ = [
    "Steps",
    "fewest_steps",
    "notify_ranks",
    "part_length",
    "push_packed",
    "push_step",
    "sum_of_packed",
    "sum_of_ranks",
]

_LANES = tl.constexpr(abi.MAX_RANKS)
_VALUES = tl.constexpr(VALUES)


@dataclass(frozen=True)
class Steps:
    """How a shard passes through the staging slots.

    Attributes
    ----------
    vectors : int
        Elements of a step of one shard, in units of VECTOR.
    count : int
        Steps of a call.
    ahead : bool
        Whether a step is pushed before the one before it is reduced.
    """

    vectors: int
    count: int
    ahead: bool = True

    @property
    def slots(self) -> int:
        """How many slots are used in turn: a power of two."""
        return 4 if self.ahead and self.count > 1 else 2

    @property
    def elements(self) -> int:
        """Elements of a step of one shard."""
        return self.vectors * VECTOR

    @classmethod
    def make(cls, shard: int, slot_bytes: int, least: int | None, ahead: bool = True) -> Steps:
        """Steps for `shard` elements, of which a slot with all ranks' pieces takes `slot_bytes`.

        At least `least` steps, and as many as `fewest_steps` says.
        """
        vectors = padded(-(-shard // max(fewest_steps(slot_bytes, ahead), least or 1)))
        return cls(vectors, max(1, -(-shard // (vectors * VECTOR))), ahead)


def fewest_steps(slot_bytes: int, ahead: bool = True) -> int:
    """Steps of shards for which the memory of slots is bounded; a slot for all takes `slot_bytes`.

    Each step ends with signals behind stores, which it waits for: so few, and large ones.
    """
    return (
        1
        if 2 * slot_bytes <= STAGING_BYTES
        else -(-(4 if ahead else 2) * slot_bytes // STEPS_BYTES)
    )


@triton.jit
def part_length(rank, shard, numel, begin, size):
    """Elements of a step of `rank`'s shard, from `begin` on; the last shards may be short."""
    end = tl.minimum(numel - rank * shard, tl.minimum(shard, begin + size))
    return tl.maximum(end - begin, 0)


@triton.jit
def push_step(x, slot, world, numel, shard, begin, size, BLOCK: tl.constexpr):
    """Push a step of every other rank's shard of `x` into its slot, at this rank's place."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    for hop in range(1, ranks):
        peer = (me + hop) % ranks
        count = part_length(peer, shard, numel, begin, size)
        to = tdl.symm_at(slot + me * size, peer, world)
        source = x + peer * shard + begin
        copy_share(to, source, count, tl.program_id(0), tl.num_programs(0), BLOCK)


@triton.jit
def notify_ranks(signals, world, value, when):
    """Set this rank's signal at every rank, the own one included."""
    peers = tl.arange(0, _LANES)
    send = (peers < tdl.num_ranks(world)) & when
    tdl.notify(signals + tdl.rank(world), masked_peers(peers, world), world, value, when=send)


@triton.jit
def sum_of_ranks(own, slot, size, at, mask, world, OP: tl.constexpr, RANKS: tl.constexpr):
    """The elements `at` of all ranks' pieces, reduced in rank order, not rounded.

    The own piece is read from `own`, rank p's from `slot` + p * `size`.
    """
    me = tdl.rank(world)
    total = widen(tl.load(tl.where(me == 0, own, slot) + at, mask=mask))
    for peer in tl.static_range(1, RANKS):
        source = tl.where(me == peer, own, slot + peer * size)
        total = combine(total, widen(tl.load(source + at, mask=mask)), OP)
    return total


@triton.jit
def push_packed(
    x, slots, stride, flag, world, numel, shard, tile, when,
    RANKS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Push a tile of every other rank's shard as words with flags (see packed.py).

    They go to this rank's place in `slots`, which has `stride` words for each rank; nothing does
    unless `when`.
    """
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    me = tdl.rank(world)
    AT_ONCE: tl.constexpr = RANKS - 1 if RANKS >= 2 and RANKS <= 8 else 1
    words = tl.cdiv(shard, PER_WORD)
    for hop in range(1, RANKS, AT_ONCE):
        sent = ()  # all loads before the first store, which nothing can be moved across
        for i in tl.static_range(AT_ONCE):
            peer = (me + hop + i) % RANKS
            sent = sent + (_tile_of(x, peer, numel, shard, tile, PAIRS, BLOCK),)  # noqa: RUF005
        for i in tl.static_range(AT_ONCE):
            peer = (me + hop + i) % RANKS
            to = slots + me * stride
            put_tile(to, tile, sent[i], words, flag, peer, world, when, BLOCK // PER_WORD)


@triton.jit
def sum_of_packed(
    x, slots, stride, flag, world, numel, shard, tile,
    OP: tl.constexpr, RANKS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of the own shard, reduced: its blocks, and which elements of each are there."""
    PER_WORD: tl.constexpr = 2 if PAIRS else 1
    begin = tdl.rank(world) * shard
    first = begin + tl.cast(tile, tl.int64) * (BLOCK * _VALUES)
    return sum_tile(
        x, first, tl.minimum(begin + shard, numel), slots, stride, tile, tl.cdiv(shard, PER_WORD),
        flag, world, OP, RANKS, PAIRS, BLOCK,
    )  # fmt: skip


@triton.jit
def _tile_of(x, rank, numel, shard, tile, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of `rank`'s shard as words."""
    begin = rank * shard
    first = begin + tl.cast(tile, tl.int64) * (BLOCK * _VALUES)
    return load_packable(x, first, tl.minimum(begin + shard, numel), PAIRS, BLOCK)
