"""Symmetric arrays: described for messages, and in debug mode agreed on one by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tdx.runtime import dlpack
from tdx.runtime.agreement import agree
from tdx.runtime.array import Array
from tdx.runtime.block import SymmetricBlock
from tdx.runtime.config import config
from tdx.runtime.heap import UNKNOWN, Made
from tdx.runtime.places import caller
from tdx.runtime.signals import Site
from tdx.runtime.window import Region

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = ["allocate_symmetric", "allocate_user"]


def allocate_user(
    world: World, shape: tuple[int, ...], dtype: np.dtype, name: str | None, number: int
) -> Array:
    """The array of that number in the user's heap, of a shape and dtype that have been checked."""
    label = name or f"array{number}"
    named = f"array {name!r}" if name else "array"
    made = Made(f"{named} {shape} {dtype}", caller())
    site = Site("kernel", label, itemsize=max(4, dtype.itemsize))
    array = allocate_symmetric(world, world.user_region, shape, dtype, label, site, made)
    array._block.named = bool(name)
    if config.debug:
        agree(world, "world.empty")
    return array


def allocate_symmetric(
    world: World,
    region: Region,
    shape: tuple[int, ...],
    dtype: np.dtype,
    label: str,
    site: Site,
    made: Made = UNKNOWN,
) -> Array:
    """An array at the same offset of the heaps of all ranks that have the region."""
    nbytes = math.prod(shape) * dtype.itemsize
    block = SymmetricBlock(world.driver, world.exports, region, nbytes, label, made)
    world.note_site(block, block.offset, site)
    strides = dlpack.row_major(shape, dtype.itemsize)
    return Array(world, block, block.address, shape, strides, dtype)
