"""A kernel of tdx in the place of cuBLAS, on any backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tdx.kernels import library_chunks, library_sums
from tdx.kernels.matmul import Config, bind_matmul


class _StandIn:
    """Called with addresses as a LibraryProduct is."""

    memory = ()

    def __init__(self, world, product, sizes, steps):
        config = Config(16, 32, 64, num_warps=4)
        others = (product.out_dtype, product.bias_dtype, *[product.scale_dtype] * 2)
        self._run = bind_matmul(world, product, config, sizes, steps, False, others, ())

    def at(self, stream, a, *places):
        self._run(stream, *(SimpleNamespace(address=x or a, owner=None) for x in (a, *places)))

    def prepare(self, *operands):
        self._run.prepare(*(SimpleNamespace(address=1 << 20, owner=None) for _ in range(6)))


def _parts(plan: Any, fused: Any) -> int:
    return 2 if fused.parts.halves and not plan.product.scaled else 1


@contextmanager
def by_stand_in(share: str = "all") -> Iterator[list[Any]]:
    """What is bound inside multiplies so, beside copies, if what it reads is aligned; the sizes.

    `share`: of sums, as library_sums.py has it; if "none" all is by the kernels of operations.
    """
    made: list[Any] = []

    def stand_in(world, product, config, sizes, steps, bias, aligned, pays):
        if not aligned:
            return None
        made.append(sizes)
        return _StandIn(world, product, sizes, steps)

    with pytest.MonkeyPatch.context() as patch:
        if share != "none":
            patch.setattr(library_chunks, "library_product", stand_in)
            patch.setattr(library_sums, "library_product", stand_in)
            patch.setattr(library_sums, "_share", lambda plan, fused: (share, _parts(plan, fused)))
        yield made
