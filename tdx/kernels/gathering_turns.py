"""How tiles of a product are dealt out where some blocks push its rows, and how long that takes.

Blocks take turns: so many push the own rows first and join the others at some turn. Times are those
of a tile; all pieces of a peer count as there when its last one is.
"""

from __future__ import annotations

import math

from tdx.kernels.product import Product, blocks_for, least_us
from tdx.kernels.select import constants, engines_us, follows
from tdx.runtime.world import World

__all__ = [
    "PIECES", "choices", "end_of_turns", "is_compared", "leaves_idle", "most_senders", "one_kernel",
    "schedule", "turns_of",
]  # fmt: skip

# Fewest rows of a rank: b is read for each rank's rows, which fewer do not make up for. Most of
# all ranks, of two and of more: copy engines take no blocks from the product.
_FEWEST, _MOST, _MOST_OF_MANY = 512, 4096, 8192
# A short product of few rows, and of many, in what copy engines take, and rows of a rank of which
# all are; measured on four H100s.
_SHORT_OF_FEW, _SHORT, _ALL_SHORT = 1.4, 2, 256
# Most memory for the rows of all ranks in two calls, of two ranks and of more.
_SLOT_BYTES, _SLOT_BYTES_OF_MANY = 128 << 20, 256 << 20
PIECES = 16  # in which the rows of a rank are pushed
_SENDERS = (1, 2, 4, 6, 8, 12, 16)
# Elements of a tile in whose time a block pushes one row to a peer: on an H200 23 GB/s, and 79 us
# for 128 x 256 elements and a depth of 8192 of bfloat16.
_ROW_ELEMENTS = 295
# What of its time the kernel has to leave blocks idle, and for how long beside what copy engines
# take, so that these and cuBLAS are faster. Measured on two H200s.
_IDLE, _IDLE_ENGINES = 0.2, 1.5


def most_senders(world: World) -> int:
    """Most blocks that push."""
    return max(1, min(constants(world.backend).push_blocks, world.driver.resident_blocks() // 4))


def one_kernel(backend: str, rows: int, nbytes: int, ranks: int) -> bool:
    """Whether `rows` rows of each rank, `nbytes`, are gathered by the kernel that multiplies.

    Ranks choose alike: N, which may differ between them, says nothing here; see leaves_idle and
    choices.
    """
    if backend == "host" or ranks == 1:
        return False
    most, memory = (_MOST, _SLOT_BYTES) if ranks == 2 else (_MOST_OF_MANY, _SLOT_BYTES_OF_MANY)
    return _FEWEST <= rows <= most // ranks and 2 * ranks * nbytes <= memory


def is_compared(backend: str, rows: int, nbytes: int, ranks: int) -> bool:
    """Whether N and K of all ranks have a say: see choices."""
    few = ranks > 2 and rows < _FEWEST and not follows(backend, rows, nbytes, ranks)
    return one_kernel(backend, rows, nbytes, ranks) or (few and backend != "host")


def choices(
    world: World, product: Product, rows: int, columns: int, depth: int, ranks: int
) -> tuple[str, str, bool]:
    """The usual algorithm where that is compared, another, and whether that is faster here.

    Of two ranks leaves_idle says that. Of more, links are slower than short products: then few rows
    are gathered first, and many are pushed by the kernel that multiplies, as each piece takes copy
    engines a while. (Products of float32 are none, unless tensor cores round it.)
    """
    if ranks == 2:
        return "one_kernel", "fused", False
    size = product.dtype.itemsize
    product_us = least_us(world, size, ranks * rows, columns, depth)
    gather_us = engines_us(world.backend, (ranks - 1) * rows * depth * size)
    if rows <= _FEWEST:
        usual = "one_kernel" if rows == _FEWEST else "fused"
        short = rows <= _ALL_SHORT or product_us < _SHORT_OF_FEW * gather_us
        return usual, "unfused", size <= 2 and short
    return "fused", "one_kernel", size <= 2 and product_us < _SHORT * gather_us


def end_of_turns(
    world: World, rows: int, columns: int, ranks: int, height: int, width: int
) -> float:  # fmt: skip
    """After how many tiles, of height x width, of a block the kernel ends: see schedule."""
    return schedule(world, rows, columns, ranks, height, width)[0]


def schedule(
    world: World, rows: int, columns: int, ranks: int, height: int, width: int
) -> tuple[float, int, int]:
    """When all is done, how many blocks push, and at which turn they join: what ends first."""
    own = -(-rows // height) * -(-columns // width)
    tiles = own * ranks
    found = []
    for senders in (n for n in _SENDERS if n <= most_senders(world)):
        multipliers = blocks_for(world, tiles, senders)
        pushed_rows = (ranks - 1) * rows * -(-PIECES // senders) / PIECES
        pushed = pushed_rows * _ROW_ELEMENTS / (height * width)
        for late in {int(pushed), math.ceil(pushed), -(-tiles // multipliers)}:
            end = max(
                _end(order, own, tiles, senders, multipliers, late, pushed)
                for order in range(multipliers + senders)
            )
            found.append((end, -senders, late))
    end, senders, late = min(found)
    return end, -senders, late


def leaves_idle(
    world: World, product: Product, rows: int, columns: int, depth: int, ranks: int
) -> bool:  # fmt: skip
    """Whether copy engines and cuBLAS, which deals out tiles otherwise, are faster than this."""
    limits, size = constants(world.backend), product.dtype.itemsize
    times = limits.tile_times
    if not one_kernel(world.backend, rows, rows * depth * size, ranks):
        return False
    if ranks != 2 or size != 2:  # not measured
        return False
    height = limits.tile[0]
    end = min(
        end_of_turns(world, rows, columns, ranks, height, width) * times[width] for width in times
    )
    end_us = end * limits.tile_us * depth * size / 1024
    idle_us = end_us - least_us(world, size, ranks * rows, columns, depth)
    return idle_us > max(_IDLE * end_us, _IDLE_ENGINES * limits.engine_us)


def turns_of(limit: int, order: int, senders: int, multipliers: int, late: int) -> int:
    """Turns of a block until its tile would be none of the first `limit`, as the kernel counts."""
    early = -(-max(limit - order, 0) // multipliers)
    rest = max(limit - late * multipliers - order, 0)
    return min(early, late) + -(-rest // (multipliers + senders))


def _end(
    order: int, own: int, tiles: int, senders: int, multipliers: int, late: int, pushed: float
) -> float:
    """When a block has computed its tiles."""
    count = turns_of(tiles, order, senders, multipliers, late)
    if order >= multipliers:
        return pushed + max(count - late, 0)
    first = turns_of(own, order, senders, multipliers, late)
    return count if first == count else max(first, pushed) + count - first
