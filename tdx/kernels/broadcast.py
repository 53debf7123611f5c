"""Broadcast: every rank gets the root's array.

W ranks, S bytes:

low_latency  The root pushes its array to every peer as words of data and flag (see low_latency.py).
             2 * (W - 1) * S bytes out of the root, one hop and no meeting. Two slots used in turn;
             the peers acknowledge each call, and the root looks at the acknowledgements of two
             calls ago before it uses a slot again, so it does not wait for them.
scatter      Scatter and all-gather (van de Geijn), in rounds: the root pushes a part of a round to
             each of the W - 1 peers, with a signal, and goes on; the peers push theirs to each
             other while the root scatters the next round. So every link carries S bytes once:
             S / bandwidth and one round to fill the pipeline. Blocks work in two lanes, each with
             half of the array and half a round apart: while those of one wait until their stores
             have arrived, before they signal, those of the other fill the links.
             Peers write straight into results in symmetric memory, else into up to four slots of
             a round for each lane, at most 64 MiB (see pushing.py: places). A peer that signals
             round r has copied round r - 2 out, so who has seen that may write round r + 2.
             One peer passes nothing on: it copies a round out as soon as that is there, and where
             it need not, everything is one round.

Data moves as bytes, in words as wide as size and addresses allow: any element type.

Ordering: when the operation is complete on a rank's stream, no peer reads its operands or writes
its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx import abi
from tdx.kernels.call import one_line
from tdx.kernels.copying import VECTOR, copy_share, copy_shares, padded
from tdx.kernels.low_latency import load_words, store_words
from tdx.kernels.operand import Operand, byte_units, elements
from tdx.kernels.plan import Plan, check_algorithm, plain_shape
from tdx.kernels.pushing import (
    ALIGNMENT,
    aligned,
    announce,
    check_overlap,
    is_direct,
    place_of,
    staged,
)
from tdx.kernels.select import (
    broadcast_round_bytes,
    check_low_latency,
    low_latency_words,
    movement_algorithm,
    push_block,
    push_tile,
)
from tdx.language.address import masked_peers
from tdx.runtime import dtypes
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["Broadcast", "broadcast"]

ALGORITHMS = ("low_latency", "scatter")
_SLOTS = tl.constexpr(4)
_MOST = tl.constexpr(abi.MAX_RANKS)
_VECTOR = tl.constexpr(VECTOR)


@triton.jit(do_not_specialize=["root", "count", "vectors"])
def low_latency_kernel(
    x, out, slots, read, channel, world, root, count, vectors,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The root pushes `count` elements of WIDTH bytes to everybody; the others store what arrives.

    Block b acknowledges in the root's words `read`, one for each block and rank.
    """
    PIECES: tl.constexpr = 4 // WIDTH if WIDTH < 4 else 1
    KIND: tl.constexpr = tl.int64 if WIDTH == 8 else tl.int32
    SPAN: tl.constexpr = 2 if WIDTH == 8 else 1
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    sound = tdl.no_fault(world, uniform=False)  # beside the load of the epoch
    flag = tdl.epoch(channel)
    slot = slots + (flag & 1).to(tl.int64) * vectors * _VECTOR
    read += tl.program_id(0) * ranks
    values = (count + PIECES - 1) // PIECES
    if me == root:
        sound = sound & tdl.wait_all(read, ranks, world, flag - 2)
    for start in range(tl.program_id(0) * BLOCK, values, tl.num_programs(0) * BLOCK):
        at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = at < values
        if me == root:
            words = load_words(x, at, count, mask, PIECES)
            for hop in range(1, ranks):
                peer = (me + hop) % ranks
                tdl.store_ll(slot + at * SPAN, words, flag, peer, world, mask & sound)
            store_words(out, at, words, count, mask, PIECES)
        else:
            words, there = tdl.load_ll(slot + at * SPAN, flag, world, mask, root, KIND, False)
            store_words(out, at, words, count, mask & there, PIECES)
    tdl.notify(read + me, root, world, flag)


@triton.jit
def _part(rank, root, ranks, part_units, count):
    """(begin, units) of the part of a round's `count` units that a peer passes on."""
    begin = tl.minimum(((rank - root + ranks) % ranks - 1) * part_units, count)
    return begin, tl.minimum(part_units, count - begin)


@triton.jit
def _target(stage, announced, peer, world, begin, slot, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """Where `peer` wants unit `begin` of the result, which is unit `slot` of its staging."""
    place = place_of(announced, peer)
    there = tl.where(place != 0, place // (WIDTH * UNIT) + begin, slot)
    return tdl.symm_at(stage, peer, world) + there * UNIT


@triton.jit
def _round(turn, lane, lane_units, units, round_units, LANES: tl.constexpr):
    """(begin, units, staging slot) of a lane's round; the second lane's first is half as long."""
    turn = tl.cast(turn, tl.int64)
    begin = tl.cast(lane, tl.int64) * lane_units
    first = begin + turn * round_units - lane * (round_units // 2)
    end = tl.minimum(first + round_units, tl.minimum(begin + lane_units, units))
    first = tl.maximum(first, begin)
    slot = (turn % _SLOTS * LANES + lane) * round_units
    return first, tl.maximum(end - first, 0), slot


@triton.jit(do_not_specialize=[
    "direct", "root", "units", "lane_units", "round_units", "part_units", "rounds",
])  # fmt: skip
def scatter_kernel(
    x, out, stage, places, sent, channel, world, direct, root, units, lane_units, round_units,
    part_units, rounds,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Scatter rounds of `round_units` * UNIT words, which the peers pass on, in each lane.

    A peer's part of a round is `part_units`, the same bytes on all ranks, whatever their words.
    Block b of a peer passes on, and copies out, what block b of others has sent it; their rounds
    are counted in `sent`, a word for each block and rank.
    """
    lane = tl.program_id(0) % LANES
    index = tl.program_id(0) // LANES
    parts = tl.num_programs(0) // LANES
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    units = tl.cast(units, tl.int64)
    number = tdl.epoch(channel)
    places += (number & 1) * (2 * tl.num_programs(0) * ranks)  # some ranks may be a call ahead
    announced, ok = announce(places, stage, out, direct, number, world)
    slots_are_used = staged(announced, world)
    everyone = tl.arange(0, _MOST)
    peers = masked_peers(everyone, world)
    sent += tl.program_id(0) * ranks
    before = (number - 1) * rounds
    later = tl.where(ranks > 2, 1, 0)  # peers pass a round on before they copy the last one out
    at_once = (ranks == 2) & (slots_are_used == 0)  # nobody waits for a part of it
    rounds = tl.where(at_once, 1, rounds)
    round_units = tl.where(at_once, 2 * tl.cast(lane_units, tl.int64), round_units)
    part_units = tl.where(at_once, lane_units, part_units)
    for turn in range(0, rounds + later):
        if turn < rounds:
            begin, count, slot = _round(turn, lane, lane_units, units, round_units, LANES)
            if (turn >= _SLOTS) & slots_are_used:  # before the root, which waits for them too
                ok = tdl.wait_all(sent, ranks, world, before + turn + 3 - _SLOTS) & ok
            if me != root:
                ok = tdl.wait(sent + root, world, before + turn + 1, peer=root) & ok
            for hop in range(1, ranks):
                peer = (me + hop) % ranks
                if peer != root:
                    whose = tl.where(me == root, peer, me)
                    first, size = _part(whose, root, ranks, part_units, count)
                    to = _target(
                        stage, announced, peer, world, begin + first, slot + first, WIDTH, UNIT
                    )
                    at = (begin + first) * UNIT
                    if ok & (me == root):
                        copy_shares(
                            to, x + at, out + at, x + at, size * UNIT, index, parts, BLOCK, GROUP
                        )
                    elif ok:
                        source = out + at
                        if direct == 0:
                            source = stage + (slot + first) * UNIT
                        copy_share(to, source, size * UNIT, index, parts, BLOCK, GROUP)
            tdl.notify(sent + me, peers, world, before + turn + 1, when=ok & (everyone < ranks))
        done = turn - later
        if (me != root) & (done >= 0) & ((direct == 0) | (done == rounds - 1)):
            ok = tdl.wait_all(sent, ranks, world, before + done + 1) & ok
            if ok & (direct == 0):
                begin, count, slot = _round(done, lane, lane_units, units, round_units, LANES)
                for hop in range(1, ranks):
                    first, size = _part((root + hop) % ranks, root, ranks, part_units, count)
                    copy_share(
                        out + (begin + first) * UNIT, stage + (slot + first) * UNIT, size * UNIT,
                        index, parts, BLOCK, GROUP,
                    )  # fmt: skip


class Broadcast(Plan):
    """A broadcast of one shape and dtype from one root, ready to be called.

    Parameters
    ----------
    world : World
    shape, dtype
        Of every rank's argument and of the result. Any dtype.
    root : int
        Whose array is sent: a rank of the team.
    algorithm : {"low_latency", "scatter"}, optional
    team : Team, optional
    buffer : bool
        Whether the plan has a result buffer, for calls without `out`.

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted.
    """

    operation = "broadcast"

    def __init__(
        self,
        world: World,
        shape: Any,
        dtype: Any,
        root: int,
        *,
        algorithm: str | None = None,
        team: Group | None = None,
        buffer: bool = True,
    ):
        with self.agreement(world, team) as shared:
            self.shape = plain_shape(shape)
            self.dtype = dtypes.resolve(dtype)
            self.result = (self.shape, self.dtype)
            self.root = self.group.check_rank(root, f"{self.operation}: root")
            self._nbytes = elements(self.shape) * self.dtype.itemsize
            ranks = self.group.size
            check_algorithm("broadcast", algorithm, ALGORITHMS)
            self.algorithm = algorithm or movement_algorithm(
                world.backend, self._nbytes, ranks, "scatter"
            )
            if self.algorithm == "low_latency":
                check_low_latency("broadcast", self._nbytes, ranks)
            shared.update(
                shape=self.shape, dtype=self.dtype, root=self.root, given_algorithm=algorithm,
                algorithm=self.algorithm,
            )  # fmt: skip
        with self.preparation():
            self._kernels: dict[Any, Callable[..., None]] = {}
            if self.algorithm == "low_latency":
                self._build_low_latency()
            else:
                self._build_scatter()
            # peers write into it themselves
            self._out = self.workspace("result", self.shape, self.dtype) if buffer else None

    def _build_low_latency(self) -> None:
        words = -(-self._nbytes // 4)
        self._block = low_latency_words(self.world.backend, words)
        self._blocks = self.blocks_for(-(-words // self._block))
        self._vectors = padded(words)
        self._slots = self.workspace("slots", (2 * self._vectors * VECTOR,), np.int64)
        self._read = self.workspace("read", (self._blocks * self.group.size,), np.int32)
        self._channel = self.channel(self._blocks)
        if self._nbytes:
            self._words_kernel(math.gcd(8, self._nbytes))

    def _words_kernel(self, width: int) -> Callable[..., None]:
        kernel = self._kernels.get(width)
        if kernel is None:
            kind = np.dtype(f"i{width}")
            kernel = self._kernels[width] = self.bind(
                low_latency_kernel, self._blocks, (kind, kind), self._slots, self._read,
                self._channel, self.group.handle, self.root, self._nbytes // width,
                self._vectors, WIDTH=width, BLOCK=self._block // (2 if width == 8 else 1),
                num_warps=8,
            )  # fmt: skip
        return kernel

    def _build_scatter(self) -> None:
        ranks, backend = self.group.size, self.world.backend
        if ranks == 1:
            return
        whole, usual = aligned(self._nbytes), broadcast_round_bytes(backend, self._nbytes, ranks)
        lanes = self._lanes = 1 if whole <= usual else 2
        self._lane = aligned(-(-whole // lanes))
        self._round = min(whole, usual) // lanes
        self._rounds = -(-(self._lane + (lanes - 1) * self._round // 2) // self._round)
        self._part = aligned(-(-self._round // (ranks - 1)))
        self._block, self._warps = push_block(backend, lanes * self._part)
        blocks = self.blocks_for(lanes * -(-self._part // self._block))
        self._blocks = max(1, blocks // lanes) * lanes
        slots = lanes * min(_SLOTS.value, self._rounds)
        self._stage = self.workspace("staging", (slots * self._round,), np.uint8)
        self._places = self.workspace("places", (4 * self._blocks * ranks,), np.int64)
        self._sent = self.workspace("sent", (self._blocks * ranks,), np.int32, steps=self._rounds)
        self._channel = self.channel(self._blocks)
        self._alignment = math.gcd(ALIGNMENT, self._nbytes)
        if self._nbytes:
            for direct in (False, True):
                self._scatter_kernel(direct, self._alignment)

    def _scatter_kernel(self, direct: bool, alignment: int) -> Callable[..., None]:
        kernel = self._kernels.get((direct, alignment))
        if kernel is None:
            word, unit = byte_units(alignment)
            width = word.itemsize
            sizes = (self._nbytes, self._lane, self._round, self._part)
            kernel = self._kernels[direct, alignment] = self.bind(
                scatter_kernel, self._blocks, (word, word), self._stage.view(word), self._places,
                self._sent, self._channel, self.group.handle, int(direct), self.root,
                *(nbytes // (width * unit) for nbytes in sizes), self._rounds, WIDTH=width,
                UNIT=unit, LANES=self._lanes,
                **push_tile(self.world.backend, self._block, self._warps, width),
            )  # fmt: skip
        return kernel

    def __call__(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """Queue the broadcast; returns `out`, or the plan's buffer when it is None.

        `x` counts on the root only. The buffer is overwritten by the next call. `out` may be `x`.
        """
        handle, op, to = self.again(stream, x, out) or self._begin(stream, x, out)
        if self._nbytes:
            self._run(handle, op, to)
        return self._out if out is None else out

    def _begin(self, stream: Any, x: Any, out: Any) -> tuple[int, Operand, Operand]:
        try:
            op = self.input(x, self.shape, self.dtype)
            to = self.output(out, self._out, self.shape, self.dtype)
            check_overlap("broadcast", op, to, 0, (self._nbytes, self._nbytes))
            return self.begin_checked(stream, op, to)
        except Exception as error:
            self.refuse(error)
            raise

    def _run(self, stream: int, op: Operand, to: Operand) -> None:
        if self.group.size == 1:
            if op.address != to.address:
                self.world.driver.copy(to.address, op.address, self._nbytes, stream, op.owner)
        elif self.algorithm == "low_latency":
            width = math.gcd(8, self._nbytes, op.address, to.address)
            self._words_kernel(width)(stream, op, to)
        else:
            alignment = math.gcd(self._alignment, op.address, to.address)
            # nobody writes to the root: its result goes through no slot
            direct = self.group.rank == self.root or is_direct(self, to, self._alignment)
            self._scatter_kernel(direct, alignment)(stream, op, to)


def broadcast(
    x: Any,
    root: int,
    out: Any = None,
    team: Group | None = None,
    stream: Any = None,
    algorithm: str | None = None,
) -> Any:
    """The array of rank `root`, on every rank. Collective over `team`.

    Parameters
    ----------
    x : tdx array, or any array of NumPy or a DLPack producer
        Any shape and dtype, the same on every rank; only the root's elements count.
    root : int
        A rank of `team`.
    out : array, optional
        Where the result goes; may be `x`.
    team : Team, optional
    stream : optional
        None: the world's current stream for a tdx array, else the caller's.
    algorithm : {"low_latency", "scatter"}, optional

    Returns the result in the caller's own framework, fresh unless `out` is given.

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted, and a pending fault.
    """
    return one_line(Broadcast, x, out, team, stream, {"root": root, "algorithm": algorithm})
