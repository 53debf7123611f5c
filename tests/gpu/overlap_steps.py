"""What each step of docs/tutorials/overlap.md takes, from gather-then-compute to descriptors.

    tdx run -n 2 --backend cuda -m tests.gpu.overlap_steps 8192,4096,4096 --chunks 16

For each shape M, N, K of one rank's product, with M rows of all ranks: microseconds in a graph,
taken in turn, of a library's product alone where there is one, of tdx.matmul and of the kernel
of step 1 alone, of the five steps, and of what tdx.AllGatherMatmul chooses. All are bfloat16. M has
to be a multiple of ranks * chunks * 128, N of 256 and K of 64; of 16 each on the host tier, N of
32, which shows that results are right. For NVIDIA GPUs with 200 KiB of shared memory or more.
Tiles have 128 rows and 128 columns, with descriptors, which take fewer registers, 256.

Programs that wait must not keep those that push from starting, in whatever order a graph launches
them. Pushes have their own stream of higher priority, and steps 4 and 5 leave multiprocessors to
them. In steps 2 and 3 more programs may wait than there is room for, so they leave room on each
multiprocessor: their pipeline takes more than half of the shared memory, so that one is there at a
time, and so few registers that one that pushes fits beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import tdx
import tdx.language as tdl
from tdx.runtime.dtypes import resolve
from tdx.tools.comparison import Comparison
from tdx.tools.peers import open_peers
from tdx.tools.reference import Gathered

_DTYPE = resolve("bfloat16")
_CALLS = 10


@triton.jit
def _place(unit, tile, ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """First row and column of a chunk's tile; neighbours share columns of b, and so the cache."""
    height: tl.constexpr = ROWS // BM
    return unit * ROWS + tile % height * BM, tile // height * BN


@triton.jit
def _multiply(
    a, b, row, column, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DESCRIBED: tl.constexpr = False,
):  # fmt: skip
    """The tile at `row` and `column`, float32; DESCRIBED: a and b are tensor descriptors."""
    total = tl.zeros((BM, BN), tl.float32)
    if DESCRIBED:
        for start in range(0, K, BK):
            total = tl.dot(a.load([row, start]), b.load([start, column]), total)
    else:
        depth = tl.arange(0, BK)
        a_at = tl.arange(0, BM)[:, None] * K + depth[None, :]
        b_at = depth[:, None] * N + tl.arange(0, BN)[None, :]
        a_tile, b_tile = a + tl.cast(row, tl.int64) * K, b + column
        for _ in range(0, K, BK):
            total = tl.dot(tl.load(a_tile + a_at), tl.load(b_tile + b_at), total)
            a_tile += BK
            b_tile += BK * N
    return total


@triton.jit
def _store(c, total, row, column, ok, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    at = tl.arange(0, BM)[:, None] * N + tl.arange(0, BN)[None, :]
    tl.store(c + tl.cast(row, tl.int64) * N + column + at, total.to(c.dtype.element_ty), mask=ok)


@triton.jit
def plain_kernel(
    a, b, c, CHUNKS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program for each tile; all rows are there."""
    TILES: tl.constexpr = ROWS // BM * (N // BN)
    program = tl.program_id(0)
    row, column = _place(program // TILES, program % TILES, ROWS, BM, BN)
    _store(c, _multiply(a, b, row, column, N, K, BM, BN, BK), row, column, True, N, BM, BN)


@triton.jit
def ranks_kernel(
    gathered, b, c, progress, epoch, world,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program for each tile, own ones first; it waits for all rows of the tile's rank."""
    TILES: tl.constexpr = ROWS // BM * (N // BN)
    units = tdl.num_ranks(world) * CHUNKS
    program = tl.program_id(0)
    unit = (tdl.rank(world) * CHUNKS + program // TILES) % units
    row, column = _place(unit, program % TILES, ROWS, BM, BN)
    first = unit // CHUNKS * CHUNKS
    ok = tdl.wait_all(progress + first, CHUNKS, world, tl.load(epoch), first_peer=-CHUNKS)
    total = _multiply(gathered, b, row, column, N, K, BM, BN, BK)
    _store(c, total, row, column, ok, N, BM, BN)


@triton.jit
def arrival_kernel(
    gathered, b, c, progress, epoch, world,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program for each tile of columns, which takes all chunks as they come."""
    me, units = tdl.rank(world), tdl.num_ranks(world) * CHUNKS
    call = tl.load(epoch)
    column = tl.program_id(0) * BN
    done = tdl.nothing_done()
    for _ in range(units):
        unit, done, ok = tdl.wait_any(progress, units, world, call, done, first=me * CHUNKS)
        for row in range(unit * ROWS, (unit + 1) * ROWS, BM):
            total = _multiply(gathered, b, row, column, N, K, BM, BN, BK)
            _store(c, total, row, column, ok, N, BM, BN)


@triton.jit
def persistent_kernel(
    gathered, b, c, progress, epoch, world,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Each program takes its share of the tiles of every chunk, as chunks come."""
    TILES: tl.constexpr = ROWS // BM * (N // BN)
    me, units = tdl.rank(world), tdl.num_ranks(world) * CHUNKS
    call = tl.load(epoch)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    done = tdl.nothing_done()
    for _ in range(units):
        unit, done, ok = tdl.wait_any(progress, units, world, call, done, first=me * CHUNKS)
        if DESCRIBED:
            tdl.fence_async_proxy()
        # tiles go round the blocks over all chunks, whatever the order of arrival; own ones first
        before = (unit + units - me * CHUNKS) % units * TILES
        for tile in range((block + blocks - before % blocks) % blocks, TILES, blocks):
            row, column = _place(unit, tile, ROWS, BM, BN)
            total = _multiply(gathered, b, row, column, N, K, BM, BN, BK, DESCRIBED)
            _store(c, total, row, column, ok, N, BM, BN)


class Steps:
    """The steps of one shape; each method queues a call of one of them."""

    def __init__(self, world: Any, given: Gathered, shape: tuple[int, int, int], chunks: int):
        m, n, k = shape
        bm, bn, bk = (16, 16, 16) if world.backend == "host" else (128, 128, 64)
        rows = m // (world.size * chunks)
        if rows < 1 or m != world.size * chunks * rows or rows % bm or n % (2 * bn) or k % bk:
            raise ValueError(
                f"{m},{n},{k} with {world.size} ranks of {chunks} chunks: M must be a multiple of "
                f"{world.size * chunks * bm}, N of {2 * bn}, K of {bk}"
            )
        self._world, self._given, self._out = world, given, given.result.out
        self._plan = tdx.AllGather(
            world, given.a.shape, _DTYPE, progress=True, chunks_per_rank=chunks
        )
        self._signals = (self._plan.progress, self._plan.epoch, world.handle)
        self._tile, self._columns, self._tiles = (bm, bn, bk), n // bn, m // bm * (n // bn)
        beside = self._plan.gathering.blocks
        self._blocks = max(1, min(self._tiles, world.driver.resident_blocks() - beside))
        self._options = {
            "CHUNKS": chunks, "ROWS": rows, "N": n, "K": k, "BM": bm, "BN": bn, "BK": bk,
            "num_warps": 8, "num_stages": 4,
        }  # fmt: skip
        # a thread of it and one that pushes, of 58, share 256
        self._shares = {"maxnreg": 168} if world.backend == "cuda" else {}

    def plain(self, rows: Any) -> None:
        """The product of rows that are there."""
        plain_kernel[(self._tiles,)](
            rows, self._given.b, self._out, **self._options, **self._shares
        )

    def gather_first(self) -> None:
        """Step 1. The barrier: own rows being sent does not tell that the peers' have come."""
        gathered = self._plan(self._given.a)
        self._plan.join()
        tdx.barrier()
        self.plain(gathered)

    def beside(self, kernel: Any, grid: int, **more: Any) -> None:
        """Steps 2 to 4: `kernel` beside the gather."""
        gathered = self._plan(self._given.a)
        kernel[(grid,)](gathered, self._given.b, self._out, *self._signals, **self._options, **more)
        self._plan.join()  # what pushes belongs to the recording

    def described(self) -> None:
        """Step 5."""
        bm, bn, bk = self._tile
        options = self._options | {"BN": 2 * bn}
        gathered = TensorDescriptor.from_tensor(self._plan(self._given.a), [bm, bk])
        b = TensorDescriptor.from_tensor(self._given.b, [bk, 2 * bn])
        persistent_kernel[(self._blocks,)](
            gathered, b, self._out, *self._signals, **options, DESCRIBED=True
        )
        self._plan.join()

    def ways(self) -> dict[str, Callable[[], Any]]:
        """All of them, by name."""
        persistent = partial(self.beside, persistent_kernel, self._blocks, DESCRIBED=False)
        return {
            "plain kernel alone": partial(self.plain, self._given.whole),
            "1 gather, then compute": self.gather_first,
            "2 a signal for each rank": partial(
                self.beside, ranks_kernel, self._tiles, **self._shares
            ),
            f"3 order of arrival, {self._columns} programs": partial(
                self.beside, arrival_kernel, self._columns, **self._shares
            ),
            f"4 persistent, {self._blocks} programs": persistent,
            "5 tensor descriptors": self.described,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="+", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--chunks", type=int, help="of a rank's rows; 8, on the host tier 2")
    args = parser.parse_args()
    with tdx.init() as world:
        peers = open_peers(world)
        for shape in args.shapes:
            row: dict[str, Any] = {}
            _times(world, peers, shape, args.chunks or (2 if world.backend == "host" else 8), row)
            if world.rank == 0:
                for name, taken in row.items():
                    text = f"{taken:8.1f} us" if isinstance(taken, float) else taken
                    sys.stdout.write(f"{shape} {text}  {name}\n")


def _times(
    world: Any, peers: Any, shape: tuple[int, int, int], chunks: int, row: dict[str, Any]
) -> None:
    given = Gathered(world, shape, _DTYPE)
    a, b, result = given.a, given.b, given.result
    ways = Steps(world, given, shape, chunks).ways()
    compared = Comparison(world, row, _CALLS)
    compared.peers(peers.products.matmul(given.whole, b, result.out), result)
    compared.ours("tdx.matmul alone", partial(tdx.matmul, given.whole, b, out=result.out), result)
    for name, call in ways.items():
        compared.ours(name, call, result)
    chosen = tdx.AllGatherMatmul(world, a.shape, b.shape, _DTYPE, buffer=False)
    label = f"AllGatherMatmul, {chosen.algorithm}"
    compared.ours(label, partial(chosen, a, b, result.out), result)
    compared.time()


if __name__ == "__main__":
    main()
