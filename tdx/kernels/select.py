"""Which algorithm and which tile for which size: the constants of all operations in one place."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CONSTANTS",
    "Constants",
    "block_bytes",
    "block_elements",
    "constants",
    "low_latency_elements",
    "power_of_two",
    "tile_for",
]


@dataclass(frozen=True)
class Constants:
    """Limits of one architecture.

    Attributes
    ----------
    low_latency_bytes : int
        Largest all-reduce input for which data and flag in one word is chosen.
    low_latency_bytes_per_block : int
        What a block handles at a time then.
    block_elements : tuple[int, int]
        Fewest and most elements a block of an elementwise kernel handles at a time.
    blocks : int
        Blocks an elementwise kernel is spread over, if it is large enough.
    tile : tuple[int, int, int]
        Rows, columns and depth in bytes of a matmul's tile.
    stages : int
        Depth of a matmul's load pipeline.
    matmul_blocks : int
        Most blocks of a matmul.
    push_blocks : int
        Blocks of a kernel that pushes beside a matmul, for all peers together.
    chunks_per_rank : int
        Pieces in which a rank's part is gathered beside a matmul.
    """

    low_latency_bytes: int
    low_latency_bytes_per_block: int
    block_elements: tuple[int, int]
    blocks: int
    tile: tuple[int, int, int]
    stages: int
    matmul_blocks: int
    push_blocks: int
    chunks_per_rank: int


# A GPU's tile of 128 x 128 x 128 bytes takes 32 KiB of shared memory a stage.
CONSTANTS: dict[str, Constants] = {
    # the host tier pays for every interpreted operation, not for bytes: few, large blocks
    "host": Constants(16 << 10, 1 << 19, (256, 1 << 17), 1, (256, 256, 1024), 1, 2, 1, 1),
    "cuda": Constants(256 << 10, 1 << 10, (1024, 4096), 128, (128, 128, 128), 3, 1 << 10, 16, 8),
    "hip": Constants(256 << 10, 1 << 10, (1024, 4096), 128, (128, 128, 128), 2, 1 << 10, 16, 8),
}


def constants(backend: str) -> Constants:
    """The constants of a backend."""
    return CONSTANTS[backend]


def block_elements(backend: str, numel: int) -> int:
    """Elements a block of an elementwise kernel over `numel` elements handles at a time."""
    limits = constants(backend)
    fewest, most = limits.block_elements
    return min(most, max(fewest, power_of_two(-(-numel // limits.blocks))))


def low_latency_elements(backend: str, numel: int, itemsize: int) -> int:
    """The same for data-and-flag words: on GPUs a word for each thread."""
    most = constants(backend).low_latency_bytes_per_block // itemsize
    return min(most, block_elements(backend, numel))


def block_bytes(backend: str, nbytes: int) -> int:
    """The same for a kernel that moves bytes in words of up to 8."""
    return 8 * block_elements(backend, -(-nbytes // 8))


def tile_for(backend: str, m: int, n: int, k: int, itemsize: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a product's tile: no larger than the product asks for."""
    rows, columns, depth_bytes = constants(backend).tile
    if backend != "host":
        if itemsize == 4:  # IEEE float32 has no tensor cores: its operands need registers
            columns //= 2
        elif k % 16 or n % 16:  # single elements are loaded, each with its own mask
            rows, columns, depth_bytes = rows // 2, columns // 2, depth_bytes // 2
    limits = ((rows, m), (columns, n), (depth_bytes // itemsize, k))
    fitted = [max(16, min(limit, power_of_two(extent))) for limit, extent in limits]
    return fitted[0], fitted[1], fitted[2]


def power_of_two(n: int) -> int:
    """The smallest power of two >= n, at least 1."""
    return 1 << max(0, n - 1).bit_length()
