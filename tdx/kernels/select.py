"""Which algorithm and which tile for which size: the constants of all operations in one place."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CONSTANTS", "Constants", "block_elements", "constants", "matmul_blocks", "power_of_two"]


@dataclass(frozen=True)
class Constants:
    """Limits of one architecture.

    Attributes
    ----------
    low_latency_bytes : int
        Largest all-reduce input for which data and flag in one word is chosen.
    block_elements : tuple[int, int]
        Fewest and most elements a block of an elementwise kernel handles at a time.
    blocks : int
        Blocks an elementwise kernel is spread over, if it is large enough.
    tile : tuple[int, int, int]
        Rows, columns and depth of a matmul's tile.
    matmul_blocks : int
        Most blocks of a matmul.
    """

    low_latency_bytes: int
    block_elements: tuple[int, int]
    blocks: int
    tile: tuple[int, int, int]
    matmul_blocks: int


CONSTANTS: dict[str, Constants] = {
    # the host tier pays for every interpreted operation, not for bytes: few, large blocks
    "host": Constants(16 << 10, (256, 1 << 17), 1, (128, 128, 128), 2),
    "cuda": Constants(256 << 10, (1024, 4096), 128, (128, 128, 64), 1 << 10),
    "hip": Constants(256 << 10, (1024, 4096), 128, (128, 128, 64), 1 << 10),
}


def constants(backend: str) -> Constants:
    """The constants of a backend."""
    return CONSTANTS[backend]


def block_elements(backend: str, numel: int) -> int:
    """Elements a block of an elementwise kernel over `numel` elements handles at a time."""
    limits = constants(backend)
    fewest, most = limits.block_elements
    return min(most, max(fewest, power_of_two(-(-numel // limits.blocks))))


def matmul_blocks(backend: str, tiles: int, resident: int) -> int:
    """Persistent blocks for a matmul of `tiles` tiles."""
    return max(1, min(tiles, resident, constants(backend).matmul_blocks))


def power_of_two(n: int) -> int:
    """The smallest power of two >= n, at least 1."""
    return 1 << max(0, n - 1).bit_length()
