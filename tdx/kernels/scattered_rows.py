"""Rows whose partial sums copy engines send to their owners: whether, chunks, tiles, and sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.library_product import may_multiply
from tdx.kernels.product import Config, least_us
from tdx.kernels.reduced_product import ReducedProduct
from tdx.kernels.select import constants, engines_us, power_of_two
from tdx.kernels.tile_product import store_tile
from tdx.runtime.agreement import unanimous

__all__ = [
    "Parts", "chunk_tiles", "each_phase", "fused_tile", "is_short", "product_turns", "sum_tile",
    "wait_each",
]  # fmt: skip

# A short product's time: of two ranks in what copy engines take besides the bytes, of more in all
# that they take; and what each of more sends beside which all are, with cuBLAS and without. On two
# H200s and four H100s.
_SHORT, _SHORT_OF_MANY, _FEW_BYTES = 3, 0.7, (8 << 20, 12 << 20)
_EVEN = 1.05  # as many times as many turns of tiles phases may take


def is_short(plan: ReducedProduct, rows: int) -> bool:
    """Whether all products, of `rows` rows for each rank, are short beside copy engines.

    These take long for few bytes. Ranks vote: their K may differ, and whether cuBLAS multiplies.
    """
    backend, size, gpu = plan.world.backend, plan.group.size, constants(plan.world.backend)
    k, n = plan.shape_b
    sent = (size - 1) * rows * n * plan.partial_dtype.itemsize
    if plan.dtype.itemsize > 2 or not sent or backend == "host":
        return False
    few, few_by_ours = _FEW_BYTES
    if size > 2 and sent <= few:
        return True
    if size == 2 and sent >= gpu.engine_us * gpu.link_bytes_per_us:
        return False
    most = _SHORT * gpu.engine_us if size == 2 else _SHORT_OF_MANY * engines_us(backend, sent)
    short = least_us(plan.world, plan.dtype.itemsize, rows * size, n, k) < most
    if size > 2 and sent <= few_by_ours:
        short = short or not may_multiply(plan.world, plan.partial_product, plan.pinned)
    return unanimous(plan.group, plan.call, short)


def fused_tile(
    plan: ReducedProduct, config: Config | None, rows: int, whole: bool = False
) -> Config:
    """The tile of a product of which each rank owns `rows` rows; see Parts."""
    k, n = plan.shape_b
    last = min(rows, Parts.of(plan, rows, whole).chunk) * n * plan.partial_dtype.itemsize
    sending_us = engines_us(plan.world.backend, last)
    return plan.product.tile(config, plan.world, rows, n, k, plan.group.size, sending_us=sending_us)


@dataclass(frozen=True)
class Parts:
    """How many of the `rows` rows that a rank owns are computed, and sent, at a time.

    Attributes
    ----------
    phase : int
        Rows of each rank that all compute before they go on, `rows` if they do not.
    chunk : int
        Of partial sums which are sent: a power of two.
    own_chunk : int
        Of finished ones, likewise; 0: of these none is sent.
    """

    phase: int
    chunk: int
    own_chunk: int

    @classmethod
    def of(cls, plan: ReducedProduct, rows: int, whole: bool) -> Parts:
        """`whole`: every rank gets all rows."""
        peers, limits = plan.group.size - 1, constants(plan.world.backend)
        if not whole:
            return cls(rows, _sent_rows(plan, rows, 1), 0)
        own = _chunk_rows(rows, limits.gathered_rows, peers, 2)
        phase = _phase_rows(plan, rows, own) if peers > 1 else rows
        if phase < rows:
            return cls(phase, phase, phase)
        return cls(rows, _sent_rows(plan, rows, 2), own)

    @property
    def halves(self) -> bool:
        """Whether half of a phase is whole chunks, which travel while the other half is made."""
        return self.phase % (2 * self.chunk) == 0


def _sent_rows(plan: ReducedProduct, rows: int, passes: int) -> int:
    """Rows of a chunk: the last peer's are needed as soon as the own tiles are computed.

    If all blocks are at work for the rows of one rank, one part of them is sent while they compute
    the next.
    """
    limits = constants(plan.world.backend)
    most, tile = limits.scattered_rows, limits.tile[0] * limits.described_columns
    half = max(most // 2, limits.tile[0])
    if half < rows <= most and rows * plan.shape_b[1] > tile * limits.blocks:
        return half
    return _chunk_rows(rows, most, plan.group.size - 1, passes)


def _phase_rows(plan: ReducedProduct, rows: int, least: int) -> int:
    """Few, as nothing hides what is sent after the last phase; `least`, or what engines copy well.

    But as many as are multiplied about as fast as all `rows` at once; `rows` if no fewer are.
    """
    n = plan.shape_b[1]
    limits = constants(plan.world.backend)
    if plan.world.backend == "host":
        return least
    while least < rows and least * n * plan.partial_dtype.itemsize < limits.engine_bytes:
        least *= 2
    blocks, phase = plan.world.driver.resident_blocks(), least
    most = _EVEN * product_turns([rows], n, blocks)
    while phase < rows:
        few = plan.product.scaled and rows % phase  # rows of float8, which cuBLAS does not make
        if not few and product_turns(each_phase(rows, phase), n, blocks) <= most:
            return phase
        phase *= 2
    return rows


def each_phase(rows: int, phase: int) -> list[int]:
    """The rows of each phase."""
    return [min(phase, rows - first) for first in range(0, rows, phase)]


def product_turns(heights: Iterable[int], columns: int, blocks: int, width: int = 0) -> float:
    """Turns of tiles of the most columns that products of so many rows take.

    In tiles of `width`, or the best.
    """
    limits = constants("cuda")
    times = limits.tile_times

    def turns(rows: int, width: int) -> float:
        tiles = -(-rows // limits.tile[0]) * -(-columns // width)
        return -(-tiles // blocks) * times.get(width, width / max(times))

    return sum(min(turns(rows, each) for each in ([width] if width else times)) for rows in heights)


def _chunk_rows(rows: int, least: int, peers: int, passes: int) -> int:
    """Rows of a chunk, a power of two if `least` is.

    A stream's queue takes about 1000 entries: three for each chunk and peer, in each pass.
    """
    most = min(16, max(1, 300 // (max(1, peers) * passes)))
    return max(least, power_of_two(-(-rows // most)))


def chunk_tiles(config: Config, rows: int, columns: int, chunk: int) -> list[int]:
    """Tiles of each chunk of `chunk` rows; of one, if there are no rows."""
    return [
        config.tiles(min(chunk, rows - first), columns) for first in range(0, max(1, rows), chunk)
    ]


@triton.jit
def wait_each(signal, ranks, step, world, epoch, ok):
    """Wait for every rank's signal, `step` words apart. Whether all came, and `ok`."""
    for first in range(0, ranks, 32):
        peers = tl.minimum(first + tl.arange(0, 32), ranks - 1)
        ok = tdl.wait(signal + peers * step, world, tl.load(epoch), peer=peers) & ok
    return ok


@triton.jit
def sum_tile(
    c, bias, own, partials, row, col, rows, count, columns, world, ok,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store the sum of a tile of own rows with the peers' partials, in rank order."""
    me = tdl.rank(world)
    ranks = tdl.num_ranks(world)
    size = tl.cast(rows, tl.int64) * columns
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    first_row = tl.cast(row, tl.int64) * BM
    first_column = tl.cast(col, tl.int64) * BN
    at = rm[:, None] * columns + rn[None, :]
    inside = (rm[:, None] < count - first_row) & (rn[None, :] < columns - first_column) & ok
    part = partials + first_row * columns + first_column
    own = own.to(partials.dtype.element_ty).to(tl.float32)
    total = tl.full((BM, BN), -0.0, tl.float32)  # with which a sum is the other summand
    for first in range(0, ranks, 2):
        for rank in tl.static_range(2):  # as many loads at a time
            peer = first + rank
            there = (peer < ranks) & (peer != me)
            value = tl.load(part + at, mask=inside & there, other=-0.0).to(tl.float32)
            total += tl.where(peer == me, own, value)
            part += size
    store_tile(c, total, bias, row, col, count, columns, columns, ok, BM, BN, HAS_BIAS, ACTIVATION)
