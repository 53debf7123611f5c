"""All-gather: every rank gets all ranks' arrays, stacked along the first axis.

W ranks, S bytes each:

pull      Each rank copies its array into a symmetric slot, all meet block by block, and each
          copies the slots of all ranks into its result. (W - 1) * S bytes in, one hop and one
          meeting; two slots used in turn replace a meeting at the end (see all_reduce.py).
progress  For a consumer kernel that starts before all has arrived. Each rank pushes its array
          in chunks into every peer's gathered buffer, on a stream of its own, and sets a signal
          there after each chunk. (W - 1) * S bytes out. A rank that enters a call gives every
          peer credit to write into its buffer, so nobody waits for all: only pushes to a late
          rank, and tiles that need its data, are late.

Data moves as bytes, in words as wide as size and addresses allow: any element type.

Ordering: pull: when the operation is complete on a rank's stream, no peer reads its operands.
progress: `x` may be reused when the call's work on the stream is done (the push reads the own
part of the gathered buffer); the next call on any rank waits until this one was consumed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.operand import elements, operand, words_of
from tdx.kernels.plan import Call, Plan, cached, world_of
from tdx.kernels.select import block_elements
from tdx.runtime import dtypes
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.stream import order
from tdx.runtime.world import World

__all__ = ["AllGather", "Gathering", "all_gather"]


@triton.jit(do_not_specialize=["words"])
def pull_kernel(x, out, slots, channel, world, words, BLOCK: tl.constexpr):
    """Stage the own `words` words, meet, and copy everybody's slot to `out`."""
    first = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    slot = slots + (tdl.epoch(channel) & 1).to(tl.int64) * words
    for start in range(first, words, step):
        offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = offsets < words
        tl.store(slot + offsets, tl.load(x + offsets, mask=mask), mask=mask)
    ok = tdl.barrier(channel, world)
    for hop in range(0, ranks):
        peer = (me + hop) % ranks
        theirs = tdl.symm_at(slot, peer, world)
        to = out + tl.cast(peer, tl.int64) * words
        for start in range(first, words, step):
            offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
            mask = (offsets < words) & ok
            tl.store(to + offsets, tl.load(theirs + offsets, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["words", "chunks"])
def enter_kernel(x, gathered, progress, credit, epoch, world, words, chunks, BLOCK: tl.constexpr):
    """Begin a call: own part in place, own signals set, credit for this call to every peer."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    number = tl.load(epoch) + 1
    own = gathered + me.to(tl.int64) * words
    for start in range(0, words, BLOCK):
        offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
        mask = offsets < words
        tl.store(own + offsets, tl.load(x + offsets, mask=mask), mask=mask)
    for chunk in range(0, chunks):
        tdl.notify(progress + me * chunks + chunk, me, world, number)
    for hop in range(1, ranks):
        tdl.notify(credit + me, (me + hop) % ranks, world, number)
    tl.store(epoch, number)


@triton.jit(do_not_specialize=["words", "chunk_words", "chunks"])
def push_kernel(
    gathered, progress, credit, epoch, world, words, chunk_words, chunks, BLOCK: tl.constexpr
):
    """Program k pushes the own part to peer me - 1 - k, chunk by chunk, once it gives credit."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    number = tl.load(epoch)
    peer = (me + ranks - 1 - tl.program_id(0)) % ranks
    own = gathered + me.to(tl.int64) * words
    theirs = tdl.symm_at(own, peer, world)
    ok = tdl.wait(credit + peer, world, number, peer=peer)
    for chunk in range(0, chunks):
        begin = tl.cast(chunk, tl.int64) * chunk_words
        end = tl.minimum(begin + chunk_words, words.to(tl.int64))
        for start in range(begin, end, BLOCK):
            offsets = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
            mask = (offsets < end) & ok
            tl.store(theirs + offsets, tl.load(own + offsets, mask=mask), mask=mask)
        tdl.notify(progress + me * chunks + chunk, peer, world, number, when=ok)


class Gathering:
    """A gathered buffer that fills while a consumer kernel reads it. Part of a plan.

    Attributes
    ----------
    buffer : Array
        (W, *shape): the gathered data, symmetric.
    progress : Array
        (W * chunks,) int32: signal r * chunks + c reaches `epoch` when chunk c of rank r is there.
    epoch : Array
        (1,) int32: the number of the current call, on the device.
    chunk_rows : int
        Rows of a chunk along the first axis of `shape`; the last chunk may be shorter.
    """

    def __init__(self, plan: Plan, shape: tuple[int, ...], dtype: np.dtype, chunks: int):
        rows = shape[0] if shape else 1
        self.chunk_rows = max(1, -(-rows // chunks))
        self.chunks = max(1, -(-rows // self.chunk_rows))
        self._plan = plan
        self._shape, self._dtype = shape, dtype
        size = plan.group.size
        self.buffer = plan.workspace("gathered", (size, *shape), dtype)
        self.progress = plan.workspace("progress", (size * self.chunks,), np.int32)
        self._credit = plan.workspace("credit", (size,), np.int32)
        self.epoch = plan.world.zeros((1,), np.int32, symmetric=False)
        self._side = plan.world.new_stream(priority=-1)
        self._block = block_elements(plan.world.backend, elements(shape))

    def start(self, x: Any, stream: int) -> None:
        """Queue the gathering of operand `x`; consumers queued on `stream` may follow at once."""
        plan = self._plan
        driver = plan.world.driver
        chunk_bytes = self.chunk_rows * elements(self._shape[1:]) * self._dtype.itemsize
        # words must not straddle chunks: a word of a chunk's size divides the array's too
        words, source, target = words_of(x, operand(plan.world, self.buffer, "buffer"))
        width = source.dtype.itemsize
        if chunk_bytes % width:
            width = int(np.gcd(chunk_bytes, width))
            words = words * source.dtype.itemsize // width
            source, target = source.cast(f"i{width}"), target.cast(f"i{width}")
        world = plan.group.handle
        plan.launch(
            enter_kernel, 1, stream, source, target, self.progress, self._credit, self.epoch,
            world, words, self.chunks, BLOCK=self._block,
        )  # fmt: skip
        if plan.group.size > 1:
            order(driver, stream, self._side.handle)
            plan.launch(
                push_kernel, plan.group.size - 1, self._side.handle, target, self.progress,
                self._credit, self.epoch, world, words, chunk_bytes // width, self.chunks,
                BLOCK=self._block,
            )  # fmt: skip

    def join(self, stream: int) -> None:
        """Later work of `stream` waits until the own part was pushed to all peers."""
        if self._plan.group.size > 1:
            order(self._plan.world.driver, self._side.handle, stream)


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
    team : Team, optional

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
        team: Group | None = None,
    ):
        self.shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(shape)
        self._with_progress, self._chunks = progress, chunks_per_rank

        def check() -> None:
            self.dtype = dtypes.resolve(dtype)
            if not self.shape:
                raise InvalidArgument("all_gather: the input needs at least one axis, got shape ()")
            if not isinstance(chunks_per_rank, int) or chunks_per_rank < 1:
                raise InvalidArgument(f"chunks_per_rank must be an int >= 1, got {chunks_per_rank}")
            if chunks_per_rank > 1 and not progress:
                raise InvalidArgument("chunks_per_rank is for progress=True")

        call = (
            f"all_gather(shape={self.shape}, dtype={dtype}, progress={progress}, "
            f"chunks_per_rank={chunks_per_rank})"
        )
        super().__init__(world, call, team, check)

    def _build(self) -> None:
        self.out_shape = (self.group.size * self.shape[0], *self.shape[1:])
        nbytes = elements(self.shape) * self.dtype.itemsize
        if self._with_progress:
            self.gathering = Gathering(self, self.shape, self.dtype, self._chunks)
            self.progress = self.gathering.progress
            self.epoch = self.gathering.epoch
            self.chunk_rows = self.gathering.chunk_rows
            self.chunks = self.gathering.chunks
            return
        self._block = block_elements(self.world.backend, nbytes)
        self._blocks = self.blocks_for(-(-nbytes // self._block))
        self._channel = self.channel(self._blocks)
        self._slots = self.workspace("slots", (2 * max(1, nbytes),), np.uint8)
        self._out = self.local(self.out_shape, self.dtype)

    def __call__(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """Queue the all-gather of `x`.

        Returns `out`, or the plan's own buffer when it is None; with progress always the plan's
        gathered buffer, a symmetric array. The buffer is overwritten by the next call.
        """
        op = self.input(x, self.shape, self.dtype)
        if self._with_progress:
            if out is not None:
                raise InvalidArgument("all_gather: out= is not for plans with progress=True")
            handle = self.begin(stream, op)
            self.gathering.join(handle)
            self.gathering.start(op, handle)
            return self.gathering.buffer.reshape(self.out_shape)
        to = self.output(out, self._out, self.out_shape, self.dtype)
        handle = self.begin(stream, op, to)
        if elements(self.shape):
            slots = operand(self.world, self._slots, "slots")
            words, source, target, staging = words_of(op, to, slots)
            self.launch(
                pull_kernel, self._blocks, handle, source, target, staging, self._channel,
                self.group.handle, words, BLOCK=self._block,
            )  # fmt: skip
        return self._out if out is None else out

    def join(self, stream: Any = None) -> None:
        """With progress: later work of `stream` waits until the own part was pushed to all.

        Needed before the end of a graph's recording; the next call does it by itself.
        """
        self.gathering.join(self.begin_stream(stream))


def all_gather(x: Any, out: Any = None, team: Group | None = None, stream: Any = None) -> Any:
    """All ranks' `x`, stacked along the first axis in rank order. Collective over `team`.

    Parameters
    ----------
    x : tdx array, or any array of NumPy or a DLPack producer
        (n, ...), any dtype; same shape and dtype on every rank.
    out : array, optional
        (size * n, ...).
    team : Team, optional
    stream : optional
        None: the world's current stream.

    Returns the result in the caller's own framework, fresh unless `out` is given.

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted, and a pending fault.
    """
    world = world_of(x)
    group = world.group(team)
    call = Call(world, group, x, "all_gather")
    with call.posting_refusals():
        source = call.readable(x)
        like = operand(world, source, "x")
        plan = cached(
            world,
            group,
            ("all_gather", like.shape, like.dtype),
            lambda: AllGather(world, like.shape, like.dtype, team=team),
        )
        target = call.result(plan.out_shape, plan.dtype) if out is None else out
        plan(source, target, stream=stream)
    return call.finish(target)


