"""Plans made as for other sizes: of many blocks, with gathers by copy engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tdx.kernels import scattered_rows
from tdx.kernels.select import CONSTANTS


@contextmanager
def many_blocks() -> Iterator[None]:
    """Plans made inside have small blocks and up to eight of them; same on every rank."""
    small = dataclasses.replace(
        CONSTANTS["host"], block_elements=(64, 64), blocks=8, low_latency_lanes=(8, 16),
        matmul_blocks=8, push_blocks=8, chunks_per_rank=3, tile=(32, 32, 128), scattered_rows=32,
        gathered_rows=32,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONSTANTS, "host", small)
        yield


@contextmanager
def copy_engines(use: bool = True) -> Iterator[None]:
    """Plans made inside gather beside a product by copy engines, of any size, or not at all."""
    with pytest.MonkeyPatch.context() as patch:
        for backend, constants in CONSTANTS.items():
            patch.setitem(
                CONSTANTS,
                backend,
                dataclasses.replace(constants, engine_bytes=1 if use else 1 << 62),
            )
        yield


@contextmanager
def phases() -> Iterator[None]:
    """Plans made inside gather sums of several peers in phases, though blocks may have no tiles."""
    with copy_engines(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(scattered_rows, "_EVEN", float("inf"))
        yield
