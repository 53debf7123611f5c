"""One rank of a job on the stand-in libcuda, and how scenarios are declared."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.standin.fake import Fake, open_files

__all__ = ["ERROR", "SCENARIOS", "SIZES", "Rank", "scenario"]

SCENARIOS: dict[str, Callable[[Rank], None]] = {}
SIZES: dict[str, tuple[int, ...]] = {}  # on how many ranks each scenario makes sense
ERROR = "CUDA_ERROR_OPERATING_SYSTEM"  # what an injected failure is called


class Rank:
    """This process: its place, the stand-in, and helpers for the scenarios."""

    def __init__(self) -> None:
        self.fake = Fake()
        self.comm: Any = None
        self.rank, self.size = 0, 1
        if "PMI_SIZE" in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
            self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.last = self.rank == self.size - 1
        from tdx.runtime import backends

        backends.nvidia_gpus = lambda: 1  # there is no /dev/nvidia0

    def init(self, **settings: Any) -> Any:
        import tdx

        return tdx.init(backend="cuda", timeout_s=10.0, **settings)

    @contextlib.contextmanager
    def announced(self, place: object) -> Iterator[None]:
        """What the launcher calls this process's place on the host, in the block."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(place))  # the first that is looked at
            yield

    def meet(self) -> None:
        if self.comm is not None:
            self.comm.Barrier()

    def union(self, table: dict[str, int]) -> dict[str, int]:
        """The largest number of each row on any rank."""
        tables = [table] if self.comm is None else self.comm.allgather(table)
        names = dict.fromkeys(name for t in tables for name in t)
        return {name: max(t.get(name, 0) for t in tables) for name in names}

    @contextlib.contextmanager
    def leaves_nothing(self) -> Iterator[None]:
        """Whatever the block does, no object and no descriptor may be left."""
        self.meet()
        objects, files = self.fake.live(), open_files()
        yield
        gc.collect()
        assert self.fake.live() == objects, (self.fake.live(), objects)
        assert open_files() == files, (open_files(), files)

    @contextlib.contextmanager
    def leaves_modules(self) -> Iterator[None]:
        """As leaves_nothing; compiled kernels stay loaded, and with them the context."""
        before = self.fake.live()
        yield
        gc.collect()
        after = self.fake.live()
        for table in (before, after):
            table.pop("modules", None)
            table.pop("contexts", None)
        assert after == before, (after, before)

    @contextlib.contextmanager
    def raises(self, *words: str, kind: str = "TdxError") -> Iterator[None]:
        from tdx.runtime import errors

        with pytest.raises(getattr(errors, kind)) as caught:
            yield
        missing = [word for word in words if word not in str(caught.value)]
        assert not missing, f"{missing} not in {caught.value!r}"

    def check_works(self) -> None:
        """A world comes up, holds data and goes."""
        with self.leaves_nothing(), self.init() as world:
            x = world.array(np.arange(100, dtype=np.int32))
            world.barrier()
            assert (x.numpy() == np.arange(100)).all()
            del x


def scenario(*sizes: int) -> Callable[..., Any]:
    """The function is a scenario for worlds of these sizes; every rank calls it."""

    def decorate(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
        SCENARIOS[function.__name__] = function
        SIZES[function.__name__] = sizes
        return function

    return decorate
