"""Operations that move data: what ranks give, what they get, and how every algorithm is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tdx
from tdx.kernels import pushing
from tdx.kernels.select import MOVEMENT
from tests.helpers.blocks import many_blocks
from tests.helpers.reference import assert_same_bits, poisoned, values

__all__ = ["MOVES", "Move", "check_move", "many_rounds"]


@dataclasses.dataclass(frozen=True)
class Move:
    """An operation with an algorithm. `shape` is always that of a block for one rank."""

    operation: str
    algorithm: str

    def given_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        blocks = size if self.operation == "all_to_all" else 1
        return (blocks * shape[0], *shape[1:])

    def given(self, rank: int, size: int, shape: Sequence[int], dtype: str, salt: int = 0) -> Any:
        whole = self.given_shape(shape, size)
        if dtype == "complex64":
            return values(rank, whole, "float32", salt).astype("complex64") * (1 + 1j)
        return values(rank, whole, dtype, salt)

    def wanted(
        self, index: int, ranks: Sequence[int], shape: Sequence[int], dtype: str, salt: int = 0,
        root: int = 0,
    ) -> np.ndarray:  # fmt: skip
        """What the rank at `index` of `ranks` gets."""
        all_given = [self.given(r, len(ranks), shape, dtype, salt) for r in ranks]
        if self.operation == "broadcast":
            return all_given[root]
        if self.operation == "all_to_all":
            mine = slice(index * shape[0], (index + 1) * shape[0])
            all_given = [given[mine] for given in all_given]
        return np.concatenate(all_given)

    def plan(
        self, world: Any, shape: Sequence[int], dtype: str, root: int = 0, team: Any = None
    ) -> Any:
        whole = self.given_shape(shape, (team or world).size)
        options = {"algorithm": self.algorithm, "team": team}
        if self.operation == "broadcast":
            return tdx.Broadcast(world, whole, dtype, root, **options)
        kind = {"all_gather": tdx.AllGather, "all_to_all": tdx.AllToAll}[self.operation]
        return kind(world, whole, dtype, **options)

    def __call__(self, x: Any, root: int = 0, **options: Any) -> Any:
        """The one-line function."""
        args = (root,) if self.operation == "broadcast" else ()
        return getattr(tdx, self.operation)(x, *args, algorithm=self.algorithm, **options)

    def __str__(self) -> str:
        return f"{self.operation}-{self.algorithm}"


def check_move(world: Any, move: Move, shape: Sequence[int], dtype: str, root: int) -> None:
    """The function, with and without `out`, symmetric and not."""
    mine = move.given(world.rank, world.size, shape, dtype)
    wanted = move.wanted(world.rank, range(world.size), shape, dtype, root=root)
    x = world.array(mine, symmetric=False)
    where = (str(move), shape, dtype, root)
    for symmetric in (True, False):
        out = world.array(poisoned(wanted.shape, dtype), symmetric=symmetric)
        assert move(x, root, out=out) is out
        assert_same_bits(out.numpy(), wanted, where)
    assert_same_bits(move(x, root).numpy(), wanted, where)
    assert_same_bits(x.numpy(), mine, "the input")


MOVES = [
    *(Move("all_gather", a) for a in ("low_latency", "push", "copy_engine", "pull")),
    *(Move("all_to_all", a) for a in ("low_latency", "push")),
    *(Move("broadcast", a) for a in ("low_latency", "low_latency_scatter", "scatter", "chain")),
]


@contextmanager
def many_rounds(staging: int = 4096, rounds: tuple[int, int] = (512, 1024)) -> Iterator[None]:
    """Plans made inside have many blocks, and stage in rounds of few bytes.

    `rounds`: of a broadcast.
    """
    with many_blocks(), pytest.MonkeyPatch.context() as patch:
        for backend, limits in MOVEMENT.items():
            shapes = ((1 << 62, 512, 4),) if limits.push_shapes else ()
            few = dataclasses.replace(
                limits, broadcast_rounds=rounds, words_round=rounds[0], push_shapes=shapes
            )
            patch.setitem(MOVEMENT, backend, few)
        patch.setattr(pushing, "STAGING_BYTES", staging)
        yield
