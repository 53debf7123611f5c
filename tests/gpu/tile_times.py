"""What a product takes with each of many tiles: where the constants of tiles.py come from.

    tdx run -n 1 --backend cuda -m tests.gpu.tile_times 128,7168,8192 64,7168,8192 --best 8
    tdx run -n 1 --backend cuda -m tests.gpu.tile_times 8192,7168,8192 --dtype float8_e4m3fn

For each shape M, N, K prints microseconds in a graph, taken in turn on a hot GPU: of torch.mm, or
for float8 torch._scaled_mm, where PyTorch is installed, of the tile that is chosen where blocks may
share it, and of the best others, each checked against that one. b of float8 is a transpose.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import tdx
from tdx.kernels.product import Product
from tdx.kernels.select import shared_bytes
from tdx.kernels.tiles import FLOAT8_DEPTH, Config
from tdx.runtime.dtypes import resolve
from tdx.tools.reference import FLOAT8
from tdx.tools.timing import recorded, times_in_turn

_CALLS = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="+", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--best", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", FLOAT8), default="bfloat16")
    parser.add_argument("--fast-accum", action="store_true", help="of float8, PyTorch too")
    args = parser.parse_args()
    with tdx.init() as world:
        for shape in args.shapes:
            taken = _times(world, args.dtype, args.fast_accum, *shape)
            tiles = [name for name in taken if name.startswith("Config")]
            tiles.sort(key=taken.__getitem__)
            for name in [*(name for name in taken if name not in tiles), *tiles[: args.best]]:
                sys.stdout.write(f"{shape} {taken[name]:8.2f} us  {name}\n")


def _times(world: Any, dtype: str, fast_accum: bool, m: int, n: int, k: int) -> dict[str, float]:
    generator = np.random.default_rng(0)
    a, b = (
        world.array(
            generator.standard_normal(shape, np.float32).astype(resolve(dtype)), symmetric=False
        )
        for shape in ((m, k), (n, k) if dtype == FLOAT8 else (k, n))
    )
    b = b.T if dtype == FLOAT8 else b
    out = world.empty((m, n), "bfloat16", symmetric=False)
    wanted = tdx.matmul(a, b).numpy().astype(np.float32)
    bound = 0.02 * np.abs(wanted).max()
    chosen = Product.make(world, dtype, fast_accum=fast_accum).tile(
        None, world, m, n, k, split=True
    )
    calls: dict[str, Callable[[], object]] = {}
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_stream(torch.cuda.ExternalStream(world.stream.own))
            left, right, to = (torch.from_dlpack(x) for x in (a, b, out))
            one = torch.ones((), device=left.device)
            if dtype == FLOAT8:
                options = {"out_dtype": to.dtype, "out": to, "use_fast_accum": fast_accum}
                calls["torch"] = partial(torch._scaled_mm, left, right, one, one, **options)
            else:
                calls["torch"] = partial(torch.mm, left, right, out=to)
    ours = partial(tdx.matmul, a, b, out=out, fast_accum=fast_accum)
    calls[f"chosen {chosen}"] = partial(ours, config=chosen)
    for config in _grid(world, chosen, dtype, n, k):
        call = partial(ours, config=config)
        call()
        worst = np.abs(out.numpy().astype(np.float32) - wanted).max()
        if worst > bound:
            raise AssertionError(f"{config}: off by {worst}, more than {bound}")
        calls[str(config)] = call
    replays = {name: _recorded(world, name, call) for name, call in calls.items()}
    return times_in_turn(world, replays, _CALLS, 15)


def _grid(world: Any, chosen: Config, dtype: str, n: int, k: int) -> Iterator[Config]:
    shared = shared_bytes(world.device.arch) if world.backend == "cuda" else 1 << 20
    size, all_heights = resolve(dtype).itemsize, chosen.block_m >= 128 and dtype == FLOAT8
    heights = (64, 128, 256) if all_heights else (chosen.block_m,)
    for height, width, depth in product(heights, (64, 128, 256), (64, 128, 256)):
        stages = min(8, (shared - 2048) // ((height + width) * depth * size))
        if dtype == FLOAT8 and depth < FLOAT8_DEPTH:
            continue
        for split, warps in product((1, 2, 3, 4, 6, 8, 12, 16), (4, 8)):
            tiles = -(-n // width) * split
            area = height * width
            fit = area <= 128 * 128 if warps == 4 else area >= 128 * 64
            few = all_heights or 33 <= tiles <= 528  # of one row of tiles; of many none is shared
            if (
                fit
                and few
                and stages >= 2
                and split * depth <= k
                and (split == 1 or not all_heights)
            ):
                yield replace(
                    chosen, block_m=height, block_n=width, block_k=depth, num_stages=stages,
                    split_k=split, num_warps=warps,
                )  # fmt: skip


def _recorded(world: Any, name: str, call: Callable[[], object]) -> Callable[[], None]:
    if name != "torch":
        return recorded(world, call, _CALLS)
    import torch

    call()  # makes the library's handle, which cannot be recorded
    recording = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recording, stream=torch.cuda.Stream()):
        for _ in range(_CALLS):
            call()

    return recording.replay


if __name__ == "__main__":
    main()
