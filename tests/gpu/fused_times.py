"""What fused products take with tiles of several widths and pieces of several sizes.

    tdx run -n 4 --backend cuda -m tests.gpu.fused_times all_gather_matmul 1024,7168,8192
    tdx run -n 4 --backend cuda -m tests.gpu.fused_times matmul_reduce_scatter 2048,4096,7168
    tdx run -n 4 --backend cuda -m tests.gpu.fused_times --shares matmul_all_reduce 4096,8192,7168

For each shape M, N, K as `tdx bench` takes them: microseconds in a graph, taken in turn, of
torch.mm alone where PyTorch is installed, of the unfused algorithm, of what is chosen, and of tiles
of 64, 128 and 256 columns; all-gathers in 1, 2 and 4 chunks a rank, or in one kernel with 4 to 16
blocks that push; reductions that send 256 to 2048 rows at a time, and by all algorithms that take
the shape. Where the model of tdx/kernels/tiles.py and select.py comes from. With --shares instead
of tiles what cuBLAS multiplies of a reduction: no rows, those of others, or all, in one product for
a rank or in two, beside what is chosen and the unfused algorithm. Where the model of
tdx/kernels/library_sums.py comes from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import tdx
from tdx.kernels import library_sums
from tdx.kernels.library_product import may_multiply
from tdx.kernels.select import CONSTANTS, shared_bytes
from tdx.kernels.tiles import Config
from tdx.runtime.dtypes import resolve
from tdx.runtime.errors import InvalidArgument, Unsupported
from tdx.tools.comparison import Comparison
from tdx.tools.peers import open_peers
from tdx.tools.reference import Gathered, Summands

_DTYPE = resolve("bfloat16")
_WIDTHS = (64, 128, 256)
_CHUNKS = (1, 2, 4)
_SENDERS = (4, 8, 16)
_SENT_ROWS = (256, 512, 1024, 2048)
_FUSED = {"matmul_reduce_scatter": "fused", "matmul_all_reduce": "copy_engine"}
_SUMS = {
    "matmul_reduce_scatter": tdx.MatmulReduceScatter,
    "matmul_all_reduce": tdx.MatmulAllReduce,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shares", action="store_true", help="of cuBLAS, in place of tiles")
    parser.add_argument("operation", choices=("all_gather_matmul", *_SUMS))
    parser.add_argument("shapes", nargs="+", type=lambda text: tuple(map(int, text.split(","))))
    args = parser.parse_args()
    if args.shares and args.operation not in _SUMS:
        parser.error("--shares is of reductions")
    with tdx.init() as world:
        peers = open_peers(world)
        for shape in args.shapes:
            row: dict[str, Any] = {}
            if args.operation == "all_gather_matmul":
                _gathers(world, peers, shape, row)
            else:
                _sums(world, peers, args.operation, shape, row, args.shares)
            if world.rank == 0:
                for name, taken in sorted(row.items(), key=_order):
                    text = f"{taken:8.1f} us" if isinstance(taken, float) else taken
                    sys.stdout.write(f"{args.operation} {shape} {text}  {name}\n")


def _order(item: tuple[str, Any]) -> float:
    return item[1] if isinstance(item[1], float) else 0.0


def _gathers(world: Any, peers: Any, shape: tuple[int, int, int], row: dict[str, Any]) -> None:
    given = Gathered(world, shape, _DTYPE)
    a, b, result = given.a, given.b, given.result
    make = partial(tdx.AllGatherMatmul, world, a.shape, b.shape, _DTYPE, buffer=False)
    compared = Comparison(world, row, 10)
    compared.peers(peers.products.matmul(given.whole, b, result.out), result)
    compared.ours("unfused", partial(make(algorithm="unfused"), a, b, result.out), result)
    chosen = make(algorithm="fused")
    label = f"fused as chosen: {chosen.config}, {chosen._gathering.chunks} chunks"
    compared.ours(label, partial(chosen, a, b, result.out), result)
    for width in _WIDTHS:
        for chunks in _CHUNKS:
            plan = make(
                algorithm="fused", config=_tile(world, chosen.config, width), chunks_per_rank=chunks
            )
            compared.ours(
                f"{width} columns, {chunks} chunks", partial(plan, a, b, result.out), result
            )
    usual = CONSTANTS[world.backend]
    for senders in _SENDERS:
        CONSTANTS[world.backend] = replace(usual, push_blocks=senders)  # at most
        tile = make(algorithm="one_kernel").config
        for width in _WIDTHS:
            plan = make(algorithm="one_kernel", config=_tile(world, tile, width))
            label = f"one_kernel {width} columns, up to {senders} push"
            compared.ours(label, partial(plan, a, b, result.out), result)
    CONSTANTS[world.backend] = usual
    compared.time()


def _sums(
    world: Any, peers: Any, operation: str, shape: tuple[int, int, int], row: dict[str, Any],
    shares: bool,
) -> None:  # fmt: skip
    summands = Summands(world, shape, _DTYPE)
    a, b, product = summands.a, summands.b, summands.product()
    height = shape[0] // world.size
    first, rows = (world.rank * height, height) if "scatter" in operation else (0, shape[0])
    result = summands.total(first, rows)
    make = partial(_SUMS[operation], world, a.shape, b.shape, _DTYPE, buffer=False)
    compared = Comparison(world, row, 10)
    compared.peers(peers.products.matmul(a, b, product.out), product)

    def add(name: str, plan: Any) -> None:
        compared.ours(name, partial(plan, a, b, result.out), result)

    add("chosen", make())
    for algorithm in ("unfused",) if shares else _SUMS[operation].algorithms:
        try:
            plan = make(algorithm=algorithm)
        except (InvalidArgument, Unsupported):
            continue
        add(f"{algorithm} {plan.config}", plan)
    fused = _FUSED[operation]
    if shares:
        _by_cublas(add, partial(make, algorithm=fused))
    usual, chosen = CONSTANTS[world.backend], make(algorithm=fused).config
    for sent in () if shares else _SENT_ROWS:
        CONSTANTS[world.backend] = replace(usual, scattered_rows=sent, gathered_rows=sent)
        for width in _WIDTHS:
            plan = make(algorithm=fused, config=_tile(world, chosen, width))
            add(f"{width} columns, {plan._way.parts.chunk} rows", plan)
    CONSTANTS[world.backend] = usual
    compared.time()


def _by_cublas(add: Callable[[str, Any], None], make: Callable[..., Any]) -> None:
    """With each share of it."""
    add("by no cuBLAS", make(library=False))
    chosen = make()
    if not may_multiply(chosen.world, chosen.partial_product, None):
        return
    usual = library_sums._share
    for share in ("others", "all"):
        for parts in (1, 2):
            if parts == 1 or chosen._way.parts.halves:
                library_sums._share = lambda *sizes, each=(share, parts): each
                add(f"by cuBLAS: {share}, {parts} for a rank", make(library=True))
    library_sums._share = usual


def _tile(world: Any, chosen: Config, width: int) -> Config:
    if world.backend == "host":
        return replace(chosen, block_n=width)
    stage = (chosen.block_m + width) * chosen.block_k * _DTYPE.itemsize
    large = chosen.block_m * width > 128 * 64
    return replace(
        chosen, block_n=width, num_warps=8 if large else 4,
        num_stages=min(5 if large else 6, (shared_bytes(world.device.arch) - 2048) // stage),
    )  # fmt: skip


if __name__ == "__main__":
    main()
