"""When the kernels and copies of one call of a product run: where its time goes.

    tdx run -n 4 --backend cuda -m tests.gpu.timeline matmul_all_reduce 4096,8192,7168

For each shape M, N, K as `tdx bench` takes them what is chosen, or --algorithm NAME, is recorded
and replayed as the bench does, in PyTorch's profiler. Rank 0 prints for the last replay, in
microseconds, each stream's kernels, copies and waits: when the first of a name began, when the last
ended, how long all took, and how many there were.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import tdx
from tdx.runtime.dtypes import resolve
from tdx.tools.reference import Gathered, Summands
from tdx.tools.timing import recorded

_DTYPE = resolve("bfloat16")
_PLANS = {
    "all_gather_matmul": tdx.AllGatherMatmul,
    "matmul_reduce_scatter": tdx.MatmulReduceScatter,
    "matmul_all_reduce": tdx.MatmulAllReduce,
}
_WARM, _REPLAYS = 20, 3
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm")
    parser.add_argument("operation", choices=_PLANS)
    parser.add_argument("shapes", nargs="+", type=lambda text: tuple(map(int, text.split(","))))
    args = parser.parse_args()
    with tdx.init() as world:
        for shape in args.shapes:
            plan, call = _planned(world, args.operation, shape, args.algorithm)
            replay = recorded(world, call, 1)
            lines = _lines(_events(world, replay))
            if world.rank == 0:
                sys.stdout.write(f"{args.operation} {shape} {plan.algorithm}\n" + "".join(lines))


def _planned(world: Any, operation: str, shape: tuple[int, int, int], algorithm: str | None) -> Any:
    """A plan and what calls it."""
    if operation == "all_gather_matmul":
        given: Any = Gathered(world, shape, _DTYPE)
        result = given.result
    else:
        given = Summands(world, shape, _DTYPE)
        height = shape[0] // world.size
        scattered = operation == "matmul_reduce_scatter"
        result = given.total(*((world.rank * height, height) if scattered else (0, shape[0])))
    make = partial(_PLANS[operation], world, given.a.shape, given.b.shape, _DTYPE, buffer=False)
    plan = make(algorithm=algorithm)
    return plan, partial(plan, given.a, given.b, result.out)


def _events(world: Any, replay: Any) -> list[dict[str, Any]]:
    """What ran on this rank's device in the last of several replays."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(_WARM):
        replay()
    world.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        for _ in range(_REPLAYS):
            world.barrier()
            replay()
            world.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        taken.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ran = sorted((e for e in events if e.get("cat") in _ON_DEVICE), key=lambda e: e["ts"])
    return ran[-(len(ran) // _REPLAYS) :]


def _lines(events: list[dict[str, Any]]) -> list[str]:
    if not events:
        return ["  the profiler saw nothing\n"]
    begin = events[0]["ts"]
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for event in events:
        groups.setdefault((event["args"]["stream"], event["name"][:60]), []).append(event)
    return [
        f"  stream {stream:4}  {of[0]['ts'] - begin:8.1f} to "
        f"{max(e['ts'] + e['dur'] for e in of) - begin:8.1f}  "
        f"{sum(e['dur'] for e in of):8.1f} us in {len(of):3}  {name}\n"
        for (stream, name), of in sorted(groups.items(), key=lambda item: item[1][0]["ts"])
    ]


if __name__ == "__main__":
    main()
