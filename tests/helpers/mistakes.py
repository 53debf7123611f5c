"""Checks of kernels with mistakes, which the host tier names."""

from __future__ import annotations

import sys

import pytest

from tdx.runtime.errors import DriverError


def refused(world, text: str) -> None:
    """Only the kernel failed: with the rank, `text` and the caller's file; the world goes on."""
    with pytest.raises(DriverError, match=text) as caught:
        world.synchronize()
    assert f"rank {world.rank}: kernel " in str(caught.value)
    assert f"{sys._getframe(1).f_code.co_filename}:" in str(caught.value)
    x = world.array(range(4), symmetric=False)
    assert x.numpy().tolist() == [0, 1, 2, 3]
