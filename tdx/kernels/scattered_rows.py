"""Tiles and chunks of rows whose partial sums copy engines send to their owners."""

from __future__ import annotations

from tdx.kernels.product import Config
from tdx.kernels.reduced_product import ReducedProduct
from tdx.kernels.select import constants, engines_us, power_of_two

__all__ = ["chunk_rows", "chunk_tiles", "fused_tile", "sent_rows"]


def fused_tile(plan: ReducedProduct, config: Config | None, rows: int, passes: int = 1) -> Config:
    """The tile of a product of which each rank owns `rows` rows; see choose_tile."""
    k, n = plan.shape_b
    last = min(rows, sent_rows(plan, rows, passes)) * n * plan.partial_dtype.itemsize
    sending_us = engines_us(plan.world.backend, last)
    return plan.product.tile(config, plan.world, rows, n, k, plan.group.size, sending_us=sending_us)


def sent_rows(plan: ReducedProduct, rows: int, passes: int = 1) -> int:
    """Rows of a chunk of a peer's `rows` partial rows: a power of two.

    The last peer's are needed as soon as the own tiles are computed. If all blocks are at work for
    the rows of one rank, one part of them is sent while they compute the next.
    """
    limits = constants(plan.world.backend)
    most, tile = limits.scattered_rows, limits.tile[0] * limits.described_columns
    half = max(most // 2, limits.tile[0])
    if half < rows <= most and rows * plan.shape_b[1] > tile * limits.blocks:
        return half
    return chunk_rows(rows, most, plan.group.size - 1, passes)


def chunk_rows(rows: int, least: int, peers: int, passes: int = 1) -> int:
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
