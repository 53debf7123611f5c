"""Gathers for a consumer kernel, optionally with a scale for each row: chunk by chunk, or first.

A consumer starts when all of a GatherFirst is there. It follows a Gathering chunk by chunk: each
rank pushes its part in chunks into every peer's gathered buffer, beside the consumer, and sets a
signal there after each chunk. A rank that enters a call gives every peer credit to write into its
buffer, so only pushes to a late rank are late, and of copy engines those to ranks behind it. If the
consumer reads the own part where it is, and can tell whether others came too early (see
copy_push.py), the own part gets into the buffer beside it too, and large chunks are pushed by copy
engines; others by a kernel of a few blocks, whose multiprocessors the consumer lacks.

A chunk's scales are stored behind its rows and before its signal: who has seen the signal may
read both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.copy_push import Beside, CopyPush, confirm_kernel, enter_kernel
from tdx.kernels.copying import copy_share
from tdx.kernels.library_product import LibraryProduct
from tdx.kernels.low_latency import LowLatency
from tdx.kernels.matmul import bind_matmul
from tdx.kernels.operand import Operand, byte_units, check_apart, elements, operand, overlap
from tdx.kernels.plan import Plan
from tdx.kernels.product import Config, Product
from tdx.kernels.pushing import Push
from tdx.kernels.select import block_bytes, block_elements, constants, gather_algorithm
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Bound
from tdx.runtime.errors import InvalidArgument

__all__ = ["GatherFirst", "Gathering", "check_products_apart", "spread_kernels"]


@triton.jit(do_not_specialize=["rows"])
def spread_kernel(scale, scales, world, rows, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Put the scales of the own rows, with STEP 0 one for all, into the gathered ones."""
    own = scales + tdl.rank(world).to(tl.int64) * rows
    for first in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(own + at, tl.load(scale + at * STEP, mask=at < rows), mask=at < rows)


@triton.jit(do_not_specialize=["units", "chunk_units", "chunks", "rows", "chunk_rows"])
def push_kernel(
    gathered, scales, progress, credit, epoch, world, units, chunk_units, chunks, rows, chunk_rows,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Push the own part to the peers, chunk by chunk; a peer's chunks are shared by programs."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    number = tl.load(epoch)
    peers = ranks - 1
    peer = (me + peers - tl.program_id(0) % peers) % ranks
    own = gathered + me.to(tl.int64) * units * UNIT
    theirs = tdl.symm_at(own, peer, world)
    ok = tdl.wait(credit + peer, world, number, peer=peer)
    for chunk in range(tl.program_id(0) // peers, chunks, tl.num_programs(0) // peers):
        begin = tl.cast(chunk, tl.int64) * chunk_units
        end = tl.minimum(begin + chunk_units, units.to(tl.int64))
        if ok:
            words = (end - begin) * UNIT
            copy_share(theirs + begin * UNIT, own + begin * UNIT, words, 0, 1, BLOCK)
            if SCALED:
                first = chunk * chunk_rows
                mine = scales + me.to(tl.int64) * rows + first
                count = tl.minimum(chunk_rows, rows - first)
                copy_share(tdl.symm_at(mine, peer, world), mine, count, 0, 1, SCALES)
        tdl.notify(progress + me * chunks + chunk, peer, world, number, when=ok)


class Gathering:
    """A gathered buffer that fills while a consumer kernel reads it. Part of a plan.

    Attributes
    ----------
    buffer : Array
        (W, *shape): the gathered data, symmetric.
    scales : Array
        (W, rows) float32, there with the rows they belong to; without `scaled` of no use.
    progress : Array
        (W * chunks,) int32: signal r * chunks + c reaches `epoch` when chunk c of rank r is there.
    epoch : Array
        (1,) int32: the number of the current call, on the device.
    chunk_rows : int
        Rows of a chunk along the first axis of `shape`; the last chunk may be shorter.
    engines : bool
        Whether copy engines push.
    blocks : int
        Multiprocessors that the consumer leaves to the kernels that push.
    """

    def __init__(
        self, plan: Plan, shape: tuple[int, ...], dtype: np.dtype, chunks: int, multiple: int = 1,
        scaled: bool = False, direct: bool = False,
    ):  # fmt: skip
        """About `chunks` chunks, of rows that are a multiple of `multiple`.

        `direct`: consumers read the own part where it is, and `confirm` follows them.
        """
        rows = shape[0]
        self.chunk_rows = max(1, -(-rows // (chunks * multiple))) * multiple
        self.chunks = max(1, -(-rows // self.chunk_rows))
        # not the plan itself, which holds this: memory goes back when the plan is dropped
        self._world, self._group, self._direct = plan.world, plan.group, direct
        size = plan.group.size
        self.buffer = plan.workspace("gathered", (size, *shape), dtype)
        self.progress = plan.workspace("progress", (size * self.chunks,), np.int32, self.chunks)
        credit = plan.workspace("credit", (size,), np.int32)
        self.epoch = plan.world.zeros((1,), np.int32, symmetric=False)
        # some array has to stand in where a kernel has no use for one
        self.scales = plan.workspace("scales", (size, rows), np.float32) if scaled else self.epoch
        self._nbytes = elements(shape) * dtype.itemsize
        signals = (self.progress, credit, self.epoch, plan.group.handle)
        self._enter = plan.bind(enter_kernel, 1, (), *signals, self.chunks, num_warps=1)
        self._spread = spread_kernels(plan, self.scales, rows) if scaled else []
        row_bytes = elements(shape[1:]) * dtype.itemsize
        self._pushing: CopyPush | _KernelPush
        chunk_bytes = min(self.chunk_rows, rows) * row_bytes
        self.engines = (
            direct and size > 1 and chunk_bytes >= constants(plan.world.backend).engine_bytes
        )
        units = size * self.chunks
        self._confirm = plan.bind(
            confirm_kernel, 1, (), self.progress, self.epoch, plan.group.handle, units, num_warps=1
        )
        if self.engines:
            pieces = self._pieces(rows, row_bytes, scaled)
            self._pushing = CopyPush(plan, signals, self.chunks, pieces)
        else:
            self._pushing = _KernelPush(plan, self, signals, row_bytes, scaled)
        self.blocks = self._pushing.blocks
        self.join = self._pushing.join

    def _pieces(
        self, rows: int, row_bytes: int, scaled: bool
    ) -> Callable[[int, int], list[tuple[Array, int, Array | None, int, int]]]:
        """What copy engines copy to a peer as a chunk."""
        own, height, width = self._group.rank * rows, self.chunk_rows, row_bytes

        def pieces(peer: int, chunk: int) -> list[tuple[Array, int, Array | None, int, int]]:
            begin, count = chunk * height, min(height, rows - chunk * height)
            first = own + begin
            data = (self.buffer, first * width, None, begin * width, count * width)
            scales = (self.scales, 4 * first, self.scales, 4 * first, 4 * count)
            return [data, scales] if scaled else [data]

        return pieces

    def start(
        self, plan: Plan, x: Operand, stream: int, scale: Operand | None = None, step: int = 0,
        first: bool = False,
    ) -> Operand:  # fmt: skip
        """Queue the gathering of contiguous `x`; consumers queued on `stream` may follow at once.

        Returns where they read the own part: `x` itself if direct, unless it has to be copied
        `first`, since it is written to. `plan` is the one that this is a part of. If scaled:
        `scale` of `rows` float32 with step 1, of one for all rows with step 0. The previous call
        must have been joined: `join(stream)` makes later work of the stream wait until the own part
        was pushed to all peers.
        """
        beside = self._direct and not first
        if not beside:
            self._keep_own(x, stream)
            x = operand(self._world, self.buffer[self._group.rank], "gathered")
        if scale is not None:
            self._spread[step](stream, scale)
        self._enter(stream)
        if isinstance(self._pushing, CopyPush):
            side = self._pushing.start(stream, x)
            if beside:
                self._keep_own(x, side)
        else:
            self._pushing.start(stream, (lambda side: self._keep_own(x, side)) if beside else None)
        return x

    def _keep_own(self, x: Operand, stream: int) -> None:
        """Put the own part into the buffer."""
        if self._nbytes:
            own = self.buffer._address + self._group.rank * self._nbytes
            self._world.driver.copy(own, x.address, self._nbytes, stream, x.owner)

    def confirm(self, stream: int, read: bool = True) -> None:
        """After the last read of the buffer: that no peer with a fault has written there again.

        `read`: whether anything has waited for the rows.
        """
        if self.engines or not read:
            self._confirm(stream)


class _KernelPush:
    """One kernel that pushes the own part of a Gathering to all peers."""

    def __init__(
        self, plan: Plan, to: Gathering, signals: tuple[Any, ...], row_bytes: int, scaled: bool
    ):
        size, rows, chunk_bytes = plan.group.size, to.buffer.shape[1], to.chunk_rows * row_bytes
        most = constants(plan.world.backend).push_blocks // max(1, size - 1)
        self.blocks = (size - 1) * max(1, min(to.chunks, most))
        self._world, self._buffer = plan.world, to.buffer
        self._blocks = [array._block for array in (to.buffer, to.scales, *signals[:3])]
        self._beside = Beside(plan.world, min(1, size - 1))
        nbytes = rows * row_bytes
        word, unit = byte_units(nbytes, chunk_bytes)
        width = word.itemsize
        self._push = plan.bind(
            push_kernel, max(1, self.blocks), (word,), to.scales, *signals,
            nbytes // (width * unit), chunk_bytes // (width * unit), to.chunks, rows,
            to.chunk_rows, UNIT=unit, SCALED=scaled,
            SCALES=block_elements(plan.world.backend, rows),
            BLOCK=block_bytes(plan.world.backend, nbytes) // width, num_warps=8,
        )  # fmt: skip

    def start(self, stream: int, before: Callable[[int], None] | None = None) -> None:
        """Queue it, and `before` before it, behind what is queued on `stream` now."""
        self._beside.fork(stream)
        if before is not None and not self._beside.streams:
            before(stream)
        for side in self._beside.streams:
            for block in self._blocks:  # the plan may be dropped before it is joined
                if side.handle not in block.last:
                    block.last.append(side.handle)
            if before is not None:
                before(side.handle)
            self._push(side.handle, operand(self._world, self._buffer, "buffer"))

    def join(self, stream: int) -> None:
        """Later work of `stream` waits for what was started."""
        self._beside.join(stream)
        for side in self._beside.streams:
            for block in self._blocks:  # uses on `stream` stand for those beside it
                if stream in block.last and side.handle in block.last:
                    block.last.remove(side.handle)


class GatherFirst:
    """A gather that is complete before the consumer starts. Part of a plan.

    Attributes
    ----------
    buffer, scales : Array
        As a Gathering has them.
    chunks, chunk_rows : int
        One chunk of all rows of a rank.
    """

    def __init__(self, plan: Plan, shape: tuple[int, ...], dtype: np.dtype, scaled: bool):
        size, rows = plan.group.size, shape[0]
        self.chunks, self.chunk_rows = 1, max(1, rows)
        self.buffer = plan.workspace("gathered", (size, *shape), dtype)
        self._nbytes = nbytes = elements(shape) * dtype.itemsize
        way = gather_algorithm(plan.world.backend, nbytes, size)
        kind = LowLatency if way == "low_latency" else Push
        self._rows = kind(plan, nbytes, each=False) if nbytes else None
        self.scales = self.buffer
        if scaled:
            self.scales = plan.workspace("scales", (size, rows), np.float32)
            self._spread = spread_kernels(plan, self.scales, rows)
            self._scales = kind(plan, 4 * rows, each=False) if rows else None

    def start(
        self, plan: Plan, x: Operand, stream: int, scale: Operand | None = None, step: int = 0,
        first: bool = False,
    ) -> Operand:  # fmt: skip
        """Queue the gathering, as Gathering.start; consumers read all of it in the buffer."""
        if self._rows is not None:
            whole = operand(plan.world, self.buffer, "buffer")
            if overlap(x, whole):  # peers are about to write there
                own = operand(plan.world, self.buffer[plan.group.rank], "gathered")
                plan.world.driver.copy(own.address, x.address, self._nbytes, stream, x.owner)
                x = own
            self._rows.run(plan, stream, x, whole)
        if scale is not None and self._scales is not None:
            self._spread[step](stream, scale)
            own = self.scales[plan.group.rank]
            self._scales.run(
                plan, stream, operand(plan.world, own, "scales"),
                operand(plan.world, self.scales, "scales"),
            )  # fmt: skip
        return x

    def bind(
        self, plan: Plan, product: Product, config: Config, memory: Sequence[Array],
        sizes: Sequence[int], steps: tuple[int, int], described: bool, bias: np.dtype,
        library: LibraryProduct | None = None,
    ) -> Callable[..., None]:  # fmt: skip
        """The product of the gathered rows: of what start returned, b, c, bias and scales of b.

        `memory`: what split_memory gave; `sizes`, `steps`: see Product, with the rows of all ranks;
        `library`: what runs instead.
        """
        run: Bound
        if library is not None:
            plan.use(library.memory)
            run = library
        else:
            others = (product.out_dtype, bias, product.scale_dtype, product.scale_dtype)
            run = bind_matmul(
                plan.world, product, config, sizes, steps, described, others, memory,
                plan.group.handle,
            )  # fmt: skip
        gathered = operand(plan.world, self.buffer, "gathered")
        scales = operand(plan.world, self.scales, "scales")
        return lambda stream, _, *ops: run(stream, gathered, *ops[:3], scales, ops[3])

    def join(self, stream: int) -> None:
        """Nothing is left to wait for."""

    def confirm(self, stream: int, read: bool = True) -> None:
        """Peers look for faults before they write."""


def spread_kernels(plan: Plan, scales: Array, rows: int) -> list[Callable[..., None]]:
    """Bound to spread one scale, and one for each row."""
    block = block_elements(plan.world.backend, rows)
    return [
        plan.bind(
            spread_kernel, plan.blocks_for(-(-rows // block)), (np.float32,), scales,
            plan.group.handle, rows, STEP=step, BLOCK=block,
        )
        for step in (0, 1)
    ]  # fmt: skip


def check_products_apart(
    operation: str, gathered: Operand, x: Operand, left: Operand, products: list[Any]
) -> None:
    """Refuse results over what a later product reads, and operands in the gathered rows.

    `left`: the scales of x; a product: (kernel, b, result, bias, scales of b).
    """
    outs = [to for _, _, to, _, _ in products]
    read = [y for _, y, _, _, _ in products]
    # x stands in for what there is not
    read += [op for p in products for op in (*p[3:], left) if op is not x]
    for i, to in enumerate(outs):
        check_apart(operation, to, *read)
        if any(overlap(to, other) for other in outs[:i]):
            raise InvalidArgument(
                f"{operation}: out {i} (shape {to.shape}) overlaps another out: pass one array for "
                "each b"
            )
    end = gathered.address + elements(gathered.shape) * gathered.dtype.itemsize
    for op in (*read, *outs):
        if gathered.address <= op.address < end:
            raise InvalidArgument(
                f"{operation}: the array of shape {op.shape} lies in the plan's gathered rows, "
                "which each call overwrites: pass a copy"
            )
