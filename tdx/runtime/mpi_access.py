"""Handing arrays to MPI, or to another library of the host that knows nothing of our streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tdx.runtime.array import Array
from tdx.runtime.comm import mpi_name, mpi_takes_gpu_memory
from tdx.runtime.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = ["mpi_access"]


@contextlib.contextmanager
def mpi_access(world: World, arrays: Sequence[Any], gpu_aware: bool | None) -> Iterator[Any]:
    """See `World.mpi`."""
    world.check()
    if world.recording is not None:
        raise InvalidArgument(
            "world.mpi waits for the device, which a graph cannot record: use it before or after "
            "the `with tdx.graph(...)` block"
        )
    if not arrays:
        raise InvalidArgument("world.mpi takes the arrays that MPI will read or write, got none")
    for array in arrays:
        _check_array(world, array)
    if world.backend != "host":
        _require_gpu_aware(world.backend, gpu_aware)
    with world.surfacing():
        for array in arrays:
            array._block.wait(world.stream.handle)
    world.check()
    # nothing to do at the end: what the caller queues afterwards comes after what MPI has done
    yield arrays[0] if len(arrays) == 1 else tuple(arrays)


def _check_array(world: World, array: Any) -> None:
    if not isinstance(array, Array):
        raise InvalidArgument(
            f"world.mpi takes tdx arrays, got {type(array).__name__}: pass others to MPI as their "
            "own library says"
        )
    if array.world is not world:
        raise InvalidArgument(f"world.mpi: {array.name} belongs to another world")
    if array.owner_rank != world.rank:
        raise InvalidArgument(
            f"world.mpi: {array.name} is rank {array.owner_rank}'s, whose pending work rank "
            f"{world.rank} cannot wait for: let rank {array.owner_rank} call MPI, or copy the "
            "array first"
        )
    array._block.check()


def _require_gpu_aware(backend: str, gpu_aware: bool | None) -> None:
    known = mpi_takes_gpu_memory(backend) if gpu_aware is None else gpu_aware
    if known:
        return
    says = "does not say whether it takes" if known is None else "does not take"
    if gpu_aware is False:
        says = "does not take (gpu_aware=False)"
    raise Unsupported(
        f"world.mpi: {mpi_name()} {says} GPU memory. Send x.numpy() instead, and receive into a "
        "NumPy array for x.copy_from; or use an MPI that is built for GPUs (Open MPI and MPICH: "
        "configured --with-cuda or --with-ucx; MPICH_GPU_SUPPORT_ENABLED=1 on Cray). If you know "
        "that it does take it, through UCX for instance: world.mpi(..., gpu_aware=True)"
    )
