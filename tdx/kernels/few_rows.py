"""When few rows are gathered by the kernel that multiplies them, and in which parts.

See gathering_product.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tdx.kernels.product import Config
from tdx.kernels.select import constants
from tdx.runtime.world import World

__all__ = ["FEW_ROWS", "GROWTH", "FewRows", "Parts", "few_rows", "parts_of"]

GROWTH = 4  # each part ends at so many times the end of the one before, but for the last


@dataclass(frozen=True)
class FewRows:
    """Limits of one architecture.

    Attributes
    ----------
    rows : tuple[int, int]
        Fewest rows of a rank for each of its peers: every rank's rows have tiles of their own, for
        which b is read. And most rows of a rank.
    slot_bytes : int
        Most memory for the rows of all ranks in two calls.
    parts, share : int
        Most parts of K, and which share of it the first is.
    depth : int
        Parts begin at multiples of it, unless the tile is given: no less than a tile's depth.
    first_us : float
        Microseconds until the first part of a peer is there.
    """

    rows: tuple[int, int]
    slot_bytes: int
    parts: int
    share: int
    depth: int
    first_us: float


_CUDA = FewRows((32, 256), slot_bytes=64 << 20, parts=2, share=8, depth=256, first_us=5)
FEW_ROWS = {
    "host": replace(_CUDA, rows=(1, 0), depth=16, first_us=0),
    "cuda": _CUDA,
    "hip": _CUDA,  # not measured
}


def few_rows(backend: str, rows: int, nbytes: int, ranks: int) -> bool:
    """Whether `rows` rows of each rank, `nbytes`, are gathered by the kernel that multiplies.

    Ranks choose alike: N, which may differ between them, says nothing here.
    """
    limits = FEW_ROWS[backend]
    fewest, most = limits.rows
    fits = 2 * ranks * nbytes <= limits.slot_bytes
    return ranks > 1 and fewest * (ranks - 1) <= rows <= most and fits


@dataclass(frozen=True)
class Parts:
    """How rows travel, the same on every rank: columns of the first part, parts, pushing blocks."""

    first: int
    count: int
    senders: int


def parts_of(world: World, depth: int, itemsize: int, config: Config | None) -> Parts:
    """For rows of `depth` elements and, if it is given, that tile."""
    limits, of_tiles = FEW_ROWS[world.backend], constants(world.backend)
    unit = config.block_k if config else max(limits.depth, of_tiles.tile[2] // itemsize)
    first, count = max(unit, depth // limits.share // unit * unit), limits.parts
    while count > 1 and first * GROWTH ** (count - 2) >= depth:
        count -= 1
    resident = world.driver.resident_blocks()
    return Parts(first, count, max(1, min(of_tiles.push_blocks, resident // 4)))
