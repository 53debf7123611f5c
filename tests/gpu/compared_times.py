"""What it gains that plans compare cuBLAS's algorithms, and what it takes when a plan is made.

    tdx run -n 2 --backend cuda -m tests.gpu.compared_times all_gather_matmul 128,26624,16384
    tdx run -n 2 --backend cuda -m tests.gpu.compared_times matmul_reduce_scatter 8192,8192,7168

For each shape M, N, K as `tdx bench` takes them: microseconds in a graph, taken in turn, of a plan
with the first algorithm that cuBLAS names and of one that compares them, and milliseconds in which
each was made, of the slowest rank. Results are checked; they have the same bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import Any

import tdx
from tdx.runtime.dtypes import resolve
from tdx.tools.comparison import Comparison
from tdx.tools.reference import Gathered, Summands
from tdx.tools.timing import slowest
from tests.helpers.reference import assert_same_bits

_DTYPE = resolve("bfloat16")
_PLANS = {
    "all_gather_matmul": tdx.AllGatherMatmul,
    "matmul_reduce_scatter": tdx.MatmulReduceScatter,
    "matmul_all_reduce": tdx.MatmulAllReduce,
}
_WAYS = {"first": False, "compared": True}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("operation", choices=_PLANS)
    parser.add_argument("shapes", nargs="+", type=lambda text: tuple(map(int, text.split(","))))
    args = parser.parse_args()
    with tdx.init() as world:
        for shape in args.shapes:
            line = _compare(world, args.operation, shape)
            if world.rank == 0:
                sys.stdout.write(f"{args.operation} {shape} {line}\n")


def _compare(world: Any, operation: str, shape: tuple[int, int, int]) -> str:
    given, result = _operands(world, operation, shape)
    row: dict[str, Any] = {}
    compared = Comparison(world, row, 10)
    _make(world, operation, given, False)  # what all plans of these shapes have to load
    made, plans = {}, {}
    for name, tune in _WAYS.items():
        world.barrier()
        began = time.perf_counter()
        plan = plans[name] = _make(world, operation, given, tune)
        made[name] = slowest(world, time.perf_counter() - began) * 1e3
        compared.ours(name, partial(plan, *given, result.out), result)
    compared.time()
    first, other = (plan(*given, result.out).numpy() for plan in plans.values())
    assert_same_bits(first, other)
    times = [f"{row[name]:.1f} us {name} (made in {made[name]:.1f} ms)" for name in _WAYS]
    return f"{plans['first'].algorithm}: " + ", ".join(times)


def _operands(world: Any, operation: str, shape: tuple[int, int, int]) -> tuple[Any, Any]:
    """a and b, and what comes of them."""
    if operation == "all_gather_matmul":
        gathered = Gathered(world, shape, _DTYPE)
        return (gathered.a, gathered.b), gathered.result
    summands = Summands(world, shape, _DTYPE)
    height = shape[0] // world.size
    rows = (world.rank * height, height) if "scatter" in operation else (0, shape[0])
    return (summands.a, summands.b), summands.total(*rows)


def _make(world: Any, operation: str, given: Any, tune: bool) -> Any:
    shapes = (x.shape for x in given)
    return _PLANS[operation](world, *shapes, _DTYPE, tune=tune, buffer=False)


if __name__ == "__main__":
    main()
