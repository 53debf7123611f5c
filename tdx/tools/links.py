"""What `tdx doctor` runs on every rank: `python -m tdx.tools.links FILE`.

One pair of ranks after the other, so that no link is shared, all through tdx itself:

- bandwidth: a rank puts a block to its peer (copy engine) several times in a row; GB/s (10^9
  bytes) from events around the puts. The peer then compares every byte.
- latency: two ranks answer each other's signal from within a kernel; microseconds one way.

Then one all-reduce, checked. Rank 0 writes {"devices": [...], "bandwidth": rows, "latency": rows,
"mpi_takes_gpu_memory": ...} to FILE as JSON; row i, column j is from rank i to rank j, and None on
the diagonal. What MPI says of GPU memory is None on the host tier, and where it does not say.
"""

from __future__ import annotations

import json
import sys
from itertools import combinations, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import tdx
from tdx.bench.latency import ping_pong_kernel
from tdx.runtime.comm import mpi_takes_gpu_memory
from tdx.runtime.errors import TdxError

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = ["measure"]

_WORDS = {"host": 1 << 20, "gpu": 16 << 20}  # int32: 4 MiB and 64 MiB a put
_PUTS = 8
_ROUNDS = {"host": 20, "gpu": 1000}


def measure(world: World) -> dict[str, Any]:
    """The document of this module's docstring; collective, the same on every rank.

    Raises TdxError, on every rank, where bytes arrive that were not sent, or a sum is wrong.
    """
    kind = "host" if world.backend == "host" else "gpu"
    wrong: list[str] = []
    rows = {
        "bandwidth": _bandwidth(world, _WORDS[kind], wrong),
        "latency": _latency(world, _ROUNDS[kind]),
        "device": [world.device.name, world.device.arch, world.device.memory_bytes],
        "wrong": [*wrong, *_wrong_sum(world)],
    }
    everybody = world.channels.allgather(json.dumps(rows).encode(), "doctor: results")
    found = [json.loads(payload) for payload in everybody]
    said = [text for entry in found for text in entry["wrong"]]
    if said:
        raise TdxError("; ".join(said))
    names = ("name", "arch", "memory_bytes")
    return {
        "devices": [dict(zip(names, entry["device"], strict=True)) for entry in found],
        "bandwidth": [entry["bandwidth"] for entry in found],
        "latency": _symmetric([entry["latency"] for entry in found]),
        "mpi_takes_gpu_memory": mpi_takes_gpu_memory(world.backend) if kind == "gpu" else None,
    }


def _bandwidth(world: World, words: int, wrong: list[str]) -> list[float | None]:
    """GB/s from this rank to each peer; `wrong` gets what arrived here and was not sent."""
    inbox = world.zeros(words, np.int32)
    source = world.array(np.full(words, world.rank + 1, np.int32), symmetric=False)
    row: list[float | None] = [None] * world.size
    for sender, receiver in permutations(range(world.size), 2):
        world.barrier()
        if world.rank == sender:
            tdx.put(inbox, source, receiver)
            start = world.stream.record()
            for _ in range(_PUTS):
                tdx.put(inbox, source, receiver)
            end = world.stream.record()
            end.wait()
            row[receiver] = _PUTS * inbox.nbytes / start.elapsed(end) / 1e6
        world.barrier()
        if world.rank == receiver and (inbox.numpy() != sender + 1).any():
            wrong.append(f"other bytes than rank {sender} put arrived at rank {receiver}")
    world.barrier()
    return row


def _latency(world: World, rounds: int) -> list[float | None]:
    """Microseconds a signal takes from this rank to each later one."""
    signal, epoch = world.zeros(1, np.int32), world.zeros(1, np.int32, symmetric=False)
    row: list[float | None] = [None] * world.size

    def exchange(first: int, second: int, count: int) -> float:
        world.barrier()
        start = world.stream.record()
        ping_pong_kernel[(1,)](signal, epoch, world.handle, first, second, count, num_warps=1)
        end = world.stream.record()
        end.wait()
        return start.elapsed(end) * 1e3 / count / 2

    for first, second in combinations(range(world.size), 2):
        exchange(first, second, 2)
        taken = exchange(first, second, rounds)
        if world.rank == first:
            row[second] = taken
    world.synchronize()
    return row


def _symmetric(rows: list[list[float | None]]) -> list[list[float | None]]:
    """The lower half of a matrix whose upper half was measured."""
    size = range(len(rows))
    return [[rows[min(i, j)][max(i, j)] for j in size] for i in size]


def _wrong_sum(world: World) -> list[str]:
    """What is wrong with an all-reduce on this rank."""
    total = tdx.all_reduce(np.full(1000, world.rank + 1, np.float32))
    expected = world.size * (world.size + 1) // 2
    if (total == expected).all():
        return []
    return [f"an all-reduce gave rank {world.rank} {total.min():g}, and {expected} is right"]


def _on_rank(path: str) -> None:
    with tdx.init() as world:
        found = measure(world)
        if world.rank == 0:
            Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    _on_rank(sys.argv[1])
