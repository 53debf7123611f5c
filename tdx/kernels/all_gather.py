"""All-gather: every rank gets all ranks' arrays, stacked along the first axis.

W ranks, S bytes each:

low_latency  8/7 * (W - 1) * S bytes out as words of data and flag, one hop and no meeting; see
             low_latency.py. Arrays of up to 4 MiB, up to 16 ranks.
push         (W - 1) * S bytes out, straight into results in symmetric memory, else through staging
             slots of at most 64 MiB; two meetings, and one more for each further round of staging;
             see pushing.py.
copy_engine  (W - 1) * S bytes out by copy engines, into the plan's own buffer, between two
             meetings; with `out` one more copy. Workspace: W * S bytes. Only by name: the last
             result of a rank that comes after the deadline may be overwritten, see copy_engine.py.
pull         Each rank copies its array into a symmetric slot, all meet block by block, and each
             copies the slots of all ranks into its result. (W - 1) * S bytes in, one hop and one
             meeting; two slots used in turn replace a meeting at the end (see all_reduce.py).
             Workspace: 2 * S bytes.
progress     For a consumer kernel that starts before all has arrived. Each rank pushes its array
             in chunks into every peer's gathered buffer, on a stream of its own, and sets a signal
             there after each chunk. (W - 1) * S bytes out. A rank that enters a call gives every
             peer credit to write into its buffer, so nobody waits for all: only pushes to a late
             rank, and tiles that need its data, are late. See gathering.py.

Data moves as bytes, in words as wide as size and addresses allow: any element type.

Ordering: when the operation is complete on a rank's stream, no peer reads its operands or writes
its result. progress: `x` may be reused when the call's work on the stream is done (the push reads
the own part of the gathered buffer); the next call on any rank waits until this one was consumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.call import one_line
from tdx.kernels.copy_engine import CopyEngine
from tdx.kernels.copying import copy_share
from tdx.kernels.gathering import Gathering
from tdx.kernels.low_latency import LowLatency
from tdx.kernels.operand import Operand, byte_units, elements, operand
from tdx.kernels.plan import Plan, check_algorithm, check_low_latency, plain_shape
from tdx.kernels.pushing import ALIGNMENT, Push, aligned, check_overlap
from tdx.kernels.select import STAGING_BYTES, block_bytes, gather_algorithm
from tdx.runtime import dtypes
from tdx.runtime.array import Array
from tdx.runtime.checks import check_int
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["AllGather", "all_gather"]

ALGORITHMS = ("low_latency", "push", "copy_engine", "pull")


@triton.jit(do_not_specialize=["units", "slot_units"])
def pull_kernel(
    x, out, slots, channel, world, units, slot_units, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    """Stage the own `units` * UNIT words, meet, and copy everybody's slot to `out`.

    Block b reads what block b of each peer has staged: the same bytes, whatever their words.
    """
    index = tl.program_id(0)
    parts = tl.num_programs(0)
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    words = tl.cast(units, tl.int64) * UNIT
    slot = slots + (tdl.epoch(channel) & 1).to(tl.int64) * slot_units * UNIT
    if tdl.no_fault(world):
        copy_share(slot, x, words, index, parts, BLOCK)
    ok = tdl.barrier(channel, world)
    if ok:
        for hop in range(0, ranks):
            peer = (me + hop) % ranks
            to = out + peer * words
            copy_share(to, tdl.symm_at(slot, peer, world), words, index, parts, BLOCK)


class Pull:
    """Staged in a slot, and read from there by everybody. Part of a plan."""

    def __init__(self, plan: Plan, nbytes: int):
        """In the plan's preparation."""
        self._nbytes = nbytes
        self._block = block_bytes(plan.world.backend, nbytes)
        self._blocks = plan.blocks_for(-(-nbytes // self._block))
        self._channel = plan.channel(self._blocks)
        self._slot = aligned(nbytes)
        self._slots = plan.workspace("slots", (2 * self._slot,), np.uint8)
        self._alignment = math.gcd(ALIGNMENT, nbytes)
        # as aligned as arrays are; others at their first use
        self._kernels = {self._alignment: self._bind(plan, self._alignment)}

    def _bind(self, plan: Plan, alignment: int) -> Callable[..., None]:
        """The kernel for sizes and addresses that are multiples of `alignment` bytes."""
        word, unit = byte_units(alignment)
        width = word.itemsize
        return plan.bind(
            pull_kernel, self._blocks, (word, word), self._slots.view(word), self._channel,
            plan.group.handle, self._nbytes // (width * unit), self._slot // (width * unit),
            UNIT=unit, BLOCK=self._block // width, num_warps=8,
        )  # fmt: skip

    def run(self, plan: Plan, stream: int, x: Operand, to: Operand) -> None:
        """Queue it; `x` may be the own part of `to`."""
        alignment = math.gcd(self._alignment, x.address, to.address)
        kernel = self._kernels.get(alignment)
        if kernel is None:
            kernel = self._kernels[alignment] = self._bind(plan, alignment)
        kernel(stream, x, to)


class AllGather(Plan):
    """An all-gather of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape, dtype
        Of every rank's input: (n, ...), any dtype. The result is (size * n, ...).
    progress : bool
        True: a call returns at once with the plan's gathered buffer, which fills while consumer
        kernels on the same stream wait on `plan.progress`; see Gathering.
    chunks_per_rank : int
        With progress: signals per rank.
    algorithm : {"low_latency", "push", "copy_engine", "pull"}, optional
        Not with progress, which has its own.
    team : Team, optional
    buffer : bool
        Whether the plan has a result buffer, for calls without `out`.

    With progress the plan has the attributes of Gathering: `progress`, `epoch`, `chunk_rows`,
    `chunks`; consumers wait for `tl.load(epoch)`.

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted.
    """

    operation = "all_gather"

    def __init__(
        self,
        world: World,
        shape: Any,
        dtype: Any,
        *,
        progress: bool = False,
        chunks_per_rank: int = 1,
        algorithm: str | None = None,
        team: Group | None = None,
        buffer: bool = True,
    ):
        with self.agreement(world, team) as shared:
            self.shape = plain_shape(shape)
            self.dtype = dtypes.resolve(dtype)
            if not self.shape:
                raise InvalidArgument("all_gather: the input needs at least one axis, got shape ()")
            chunks = check_int(chunks_per_rank, "chunks_per_rank", 1)
            if chunks > 1 and not progress:
                raise InvalidArgument("chunks_per_rank is for progress=True")
            check_algorithm("all_gather", algorithm, ALGORITHMS)
            if progress and algorithm is not None:
                raise InvalidArgument(
                    f"algorithm={algorithm!r} is not for progress=True, which always pushes"
                )
            self._nbytes = elements(self.shape) * self.dtype.itemsize
            ranks = self.group.size
            usual = gather_algorithm(world.backend, self._nbytes, ranks)
            if usual == "pull" and 2 * self._nbytes > STAGING_BYTES:  # its slots hold all of it
                usual = "push"
            self.algorithm = algorithm or usual
            if self.algorithm == "low_latency" and not progress:
                check_low_latency("all_gather", self._nbytes, ranks)
            self.out_shape = (self.group.size * self.shape[0], *self.shape[1:])
            self.result = (self.out_shape, self.dtype)
            self.gathering: Gathering | None = None
            shared.update(
                shape=self.shape, dtype=self.dtype, progress=progress,
                chunks_per_rank=chunks, given_algorithm=algorithm, algorithm=self.algorithm,
            )  # fmt: skip
        with self.preparation():
            if progress:
                self._build_progress(chunks)
            else:
                self._build(buffer)

    def _build_progress(self, chunks: int) -> None:
        gathering = Gathering(self, self.shape, self.dtype, chunks)
        self.progress, self.epoch = gathering.progress, gathering.epoch
        self.chunks, self.chunk_rows = gathering.chunks, gathering.chunk_rows
        self.gathering = gathering
        self._shown = [operand(self.world, gathering.buffer, "gathered")]

    def _build(self, buffer: bool) -> None:
        # push and copy engines write into the peers' buffers themselves
        self._out: Array | None = None
        if self.algorithm == "copy_engine":
            gathered = self.workspace("gathered", self.out_shape, self.dtype)
            own = self.group.rank * self._nbytes
            self._movement: Any = CopyEngine(self, gathered, own, self._nbytes)
            self._out = gathered if buffer else None
            return
        if self.algorithm == "low_latency":
            self._movement = LowLatency(self, self._nbytes, each=False)
        elif self.algorithm == "push":
            self._movement = Push(self, self._nbytes, each=False)
        else:
            self._movement = Pull(self, self._nbytes)
        if self.algorithm == "push" and buffer:
            self._out = self.workspace("result", self.out_shape, self.dtype)
        else:
            self._out = self.result_buffer(self.out_shape, self.dtype, buffer)

    def __call__(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """Queue the all-gather of `x`.

        Returns `out`, or the plan's own buffer when it is None; with progress always the plan's
        gathered buffer, a symmetric array. The buffer is overwritten by the next call. `x` may be
        the own part of `out`.
        """
        handle, op, to = self.again(stream, x, out) or self._begin(stream, x, out)
        gathering = self.gathering
        if gathering is not None:
            gathering.join(handle)
            gathering.start(self, op, handle)
            return gathering.buffer.reshape(self.out_shape)
        if self._nbytes:
            self._movement.run(self, handle, op, to)
        return self._out if out is None else out

    def _begin(self, stream: Any, x: Any, out: Any) -> tuple[int, Operand, Operand]:
        try:
            op = self.input(x, self.shape, self.dtype)
            if self.gathering is None:
                to = self.output(out, self._out, self.out_shape, self.dtype)
                own, size = self.group.rank * self._nbytes, self.group.size
                for written in (to, *self._shown):
                    check_overlap(
                        "all_gather", op, written, own, (self._nbytes, size * self._nbytes)
                    )
                return self.begin_checked(stream, op, to)
            if out is None:
                return self.begin(stream, op), op, op
            raise InvalidArgument("all_gather: out= is not for plans with progress=True")
        except Exception as error:
            self.refuse(error)
            raise

    def join(self, stream: Any = None) -> None:
        """With progress: later work of `stream` waits until the own part was pushed to all.

        Needed before the end of a graph's recording; the next call does it by itself.
        """
        if self.gathering is None:
            raise InvalidArgument("all_gather: join is for plans with progress=True")
        self.world.check()
        handle = self.begin_stream(stream)
        self.follow_recorded(handle)
        self.gathering.join(handle)


def all_gather(
    x: Any,
    out: Any = None,
    team: Group | None = None,
    stream: Any = None,
    algorithm: str | None = None,
) -> Any:
    """All ranks' `x`, stacked along the first axis in rank order. Collective over `team`.

    Parameters
    ----------
    x : tdx array, or any array of NumPy or a DLPack producer
        (n, ...), any dtype; same shape and dtype on every rank.
    out : array, optional
        (size * n, ...). `x` may be its own part.
    team : Team, optional
    stream : optional
        None: the world's current stream for a tdx array, else the caller's.
    algorithm : {"low_latency", "push", "copy_engine", "pull"}, optional

    Returns the result in the caller's own framework, fresh unless `out` is given.

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted, and a pending fault.
    """
    return one_line(AllGather, x, out, team, stream, {"algorithm": algorithm})
