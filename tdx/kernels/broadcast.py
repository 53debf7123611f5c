"""Broadcast: every rank gets the root's array.

W ranks, S bytes:

low_latency          The root pushes its array to every peer as words of data and flag (see
                     broadcast_words.py). 8/7 * (W - 1) * S bytes out of the root, one hop, no
                     meeting. Two slots used in turn; the peers acknowledge each call, and the root
                     looks at the acknowledgements of two calls ago before it uses a slot again, so
                     it does not wait for them.
low_latency_scatter  Scatter and all-gather (van de Geijn) with such words: the root pushes a part
                     to each peer, which passes it on to the others (or to an only peer all). 8/7 *
                     S bytes out of the root, two hops, larger arrays in rounds, which are
                     acknowledged like calls. A peer writes to others what came after the root had
                     seen that they have left the round before last.
scatter              The same in rounds, with a signal behind each part of a round: the peers push
                     theirs to each other while the root scatters the next round. So every link
                     carries S bytes once: S / bandwidth and one round to fill the pipeline.
chain                In rounds: the root pushes them to the next rank, with a signal, which pushes
                     them on to the rank after it, and so on. Each rank receives from one and sends
                     to one, as links are fastest, but W - 2 rounds fill the pipeline.

Blocks work on rounds in two lanes, each with half of the array and half a round apart: while those
of one wait until their stores have arrived, before they signal, those of the other fill the links.
Ranks write straight into results in symmetric memory, else into up to four slots of a round for
each lane, at most 64 MiB (see pushing.py: places). In a chain the receiver copies a round out while
it passes it on, and signals back that the slot is free. In a scatter who signals round r has copied
round r - 2 out, so who has seen that may write round r + 2. Where the only peer need not copy
anything, a chain is one round.

Data moves as bytes, in words as wide as size and addresses allow: any element type.

Ordering: when the operation is complete on a rank's stream, no peer reads its operands or writes
its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tdx.kernels.broadcast_rounds import SLOTS, chain_kernel, scatter_kernel
from tdx.kernels.broadcast_words import low_latency_kernel, low_latency_scatter_kernel
from tdx.kernels.call import one_line
from tdx.kernels.operand import Operand, byte_units, elements
from tdx.kernels.packed import low_latency_lanes, slot_words, tiles_of
from tdx.kernels.plan import Plan, check_algorithm, check_low_latency, plain_shape
from tdx.kernels.pushing import (
    ALIGNMENT,
    aligned,
    check_overlap,
    is_direct,
)
from tdx.kernels.select import (
    LOW_LATENCY_BYTES,
    MOVEMENT,
    broadcast_algorithm,
    broadcast_round_bytes,
    push_block,
    push_tile,
)
from tdx.runtime import dtypes
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["Broadcast", "broadcast"]

ALGORITHMS = ("low_latency", "low_latency_scatter", "scatter", "chain")
_WORDS = ALGORITHMS[:2]


class Broadcast(Plan):
    """A broadcast of one shape and dtype from one root, ready to be called.

    Parameters
    ----------
    world : World
    shape, dtype
        Of every rank's argument and of the result. Any dtype.
    root : int
        Whose array is sent: a rank of the team.
    algorithm : {"low_latency", "low_latency_scatter", "scatter", "chain"}, optional
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
            self.algorithm = algorithm or broadcast_algorithm(world.backend, self._nbytes, ranks)
            if self.algorithm in _WORDS:
                scatters = self.algorithm == _WORDS[1]
                most = LOW_LATENCY_BYTES  # of a round
                nbytes = min(self._nbytes, most) if scatters else self._nbytes
                check_low_latency("broadcast", nbytes, ranks, (), self.algorithm, most)
            shared.update(
                shape=self.shape, dtype=self.dtype, root=self.root, given_algorithm=algorithm,
                algorithm=self.algorithm,
            )  # fmt: skip
        with self.preparation():
            self._kernels: dict[Any, Callable[..., None]] = {}
            if self.algorithm in _WORDS:
                self._build_words()
            else:
                self._build_rounds()
            # peers write into it themselves
            self._out = self.workspace("result", self.shape, self.dtype) if buffer else None

    def _build_words(self) -> None:
        ranks, scatters = self.group.size, self.algorithm == _WORDS[1]
        self._part, self._rounds = self._nbytes, 1
        if scatters:
            peers, most = max(1, ranks - 1), MOVEMENT[self.world.backend].words_round
            # parts begin where vectors of 16 bytes do
            self._part = aligned(-(-min(self._nbytes, most) // peers))
            self._rounds = -(-self._nbytes // (self._part * peers))
        self._lanes, self._warps = low_latency_lanes(self.world.backend, self._part)
        self._blocks = self.blocks_for(tiles_of(self._part, self._lanes))
        words = 2 * (ranks if scatters else 1) * slot_words(self._part, self._lanes)
        self._slots = self.packed_slots(words, self._rounds)
        self._read = self.workspace("read", (self._blocks * ranks,), np.int32, steps=self._rounds)
        self._channel = self.channel(self._blocks)
        if self._nbytes and ranks > 1:
            self._words_kernel(math.gcd(4, self._nbytes))

    def _words_kernel(self, width: int) -> Callable[..., None]:
        kernel = self._kernels.get(width)
        if kernel is None:
            kind = np.dtype(f"i{width}")
            common = (
                (kind, kind), self._slots, self._read, self._channel, self.group.handle,
                self.root, self._nbytes // width,
            )  # fmt: skip
            named = {"WIDTH": width, "LANES": self._lanes, "num_warps": self._warps}
            if self.algorithm == "low_latency":
                kernel = self.bind(low_latency_kernel, self._blocks, *common, **named)
            else:
                kernel = self.bind(
                    low_latency_scatter_kernel, self._blocks, *common, self._part // width,
                    self._rounds, RANKS=self.group.size, **named,
                )  # fmt: skip
            self._kernels[width] = kernel
        return kernel

    def _build_rounds(self) -> None:
        ranks, backend = self.group.size, self.world.backend
        if ranks == 1:
            return
        whole, chain = aligned(self._nbytes), self.algorithm == "chain"
        usual = broadcast_round_bytes(backend, self._nbytes, ranks, chain)
        lanes = self._lanes = 1 if whole <= usual else 2
        self._lane = aligned(-(-whole // lanes))
        self._round = min(whole, usual) // lanes
        self._rounds = -(-(self._lane + (lanes - 1) * self._round // 2) // self._round)
        self._part = aligned(-(-self._round // (ranks - 1)))  # of a scatter
        sent = self._round if chain else self._part
        self._block, self._warps = push_block(backend, lanes * sent)
        blocks = self.blocks_for(lanes * -(-sent // self._block))
        self._blocks = max(1, blocks // lanes) * lanes
        slots = lanes * min(SLOTS, self._rounds)
        self._stage = self.workspace("staging", (slots * self._round,), np.uint8)
        self._places = self.workspace("places", (4 * self._blocks * ranks,), np.int64)
        self._sent = self.workspace("sent", (self._blocks * ranks,), np.int32, steps=self._rounds)
        self._channel = self.channel(self._blocks)
        self._alignment = math.gcd(ALIGNMENT, self._nbytes)
        if self._nbytes:
            for direct in (False, True):
                self._rounds_kernel(direct, self._alignment)

    def _rounds_kernel(self, direct: bool, alignment: int) -> Callable[..., None]:
        kernel = self._kernels.get((direct, alignment))
        if kernel is None:
            word, unit = byte_units(alignment)
            width = word.itemsize
            chain = self.algorithm == "chain"
            sizes = [self._nbytes, self._lane, self._round, *([] if chain else [self._part])]
            kernel = self._kernels[direct, alignment] = self.bind(
                chain_kernel if chain else scatter_kernel, self._blocks, (word, word),
                self._stage.view(word), self._places, self._sent, self._channel,
                self.group.handle, int(direct), self.root,
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
        elif self.algorithm in _WORDS:
            width = math.gcd(4, self._nbytes, op.address, to.address)
            self._words_kernel(width)(stream, op, to)
        else:
            alignment = math.gcd(self._alignment, op.address, to.address)
            # nobody writes to the root: its result goes through no slot
            direct = self.group.rank == self.root or is_direct(self, to, self._alignment)
            self._rounds_kernel(direct, alignment)(stream, op, to)


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
    algorithm : {"low_latency", "low_latency_scatter", "scatter", "chain"}, optional

    Returns the result in the caller's own framework, fresh unless `out` is given.

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted, and a pending fault.
    """
    return one_line(Broadcast, x, out, team, stream, {"root": root, "algorithm": algorithm})
