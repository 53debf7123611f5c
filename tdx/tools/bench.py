"""`tdx bench OPERATION`: measure an operation, and its peers in the same run.

Times are microseconds: the slowest rank's median, of calls replayed as a graph. Outputs are
checked. `ratio` is the best peer's time over our best one: above 1 is faster.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Bench", "add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    import tdx.bench

    names = sorted(module.name for module in pkgutil.iter_modules(tdx.bench.__path__))
    parser.add_argument("operation", choices=names)
    parser.add_argument("-n", "--ranks", type=int, default=4, help="number of ranks (default 4)")
    parser.add_argument("--backend", choices=("host", "cuda", "hip"))
    parser.add_argument("--sizes", help="bytes per rank, comma-separated; K, M and G are binary")
    parser.add_argument("--dtype", default="bfloat16", help="element type (default bfloat16)")
    parser.add_argument("--no-peers", action="store_true", help="measure tdx only")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as well")


def main(args: argparse.Namespace) -> int:
    """Start the ranks and run the benchmark on them."""
    from tdx.tools import run

    options = [args.operation, "--dtype", args.dtype]
    for name in ("sizes", "json", "backend"):
        if getattr(args, name):
            options += [f"--{name}", getattr(args, name)]
    options += ["--no-peers"] * args.no_peers
    job = argparse.Namespace(
        ranks=args.ranks, backend=args.backend, timeout=None, keep_going=False, no_prefix=True,
        module=["tdx.tools.bench", *options], script=[],
    )  # fmt: skip
    return run.main(job)


class Bench:
    """What a benchmark module is given."""

    def __init__(self, world: Any, args: argparse.Namespace):
        from tdx.runtime import dtypes
        from tdx.tools.peers import Peers, open_peers

        self.world = world
        self.dtype = dtypes.resolve(args.dtype)
        self.peers = Peers() if args.no_peers else open_peers(world)
        self._sizes = args.sizes

    def sizes(self, default: Sequence[int]) -> list[int]:
        """Bytes per rank to measure: as asked for, else the default."""
        if not self._sizes:
            return list(default)
        return [_bytes(text) for text in self._sizes.split(",")]

    def calls(self, nbytes: int) -> int:
        """Calls a graph: fewer of large ones."""
        return max(2, min(50, (64 << 20) // max(1, nbytes)))

    def rate(self, row: dict[str, Any], ours: Sequence[str], peers: Sequence[str]) -> None:
        """Add `ratio`: the best peer over our best."""
        mine = [row[name] for name in ours if name in row]
        theirs = [row[name] for name in peers if name in row]
        if mine and theirs:
            row["ratio"] = min(theirs) / min(mine)


def _bytes(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30}
    unit = text[-1:].upper()
    return int(text[:-1]) << units[unit] if unit in units else int(text)


def _on_rank(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark on this rank; rank 0 prints."""
    import tdx

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(argv)
    module = importlib.import_module(f"tdx.bench.{args.operation}")
    with tdx.init(backend=args.backend) as world:
        bench = Bench(world, args)
        rows = []
        if world.rank == 0:
            print(_setting(world, bench), flush=True)
            print("".join(f"{name:>16}" for name in module.COLUMNS), flush=True)
        for row in module.rows(bench):
            rows.append(row)
            if world.rank == 0:
                print(_line(row, module.COLUMNS), flush=True)
        bench.peers.close()
        if world.rank == 0 and args.json:
            document = {"setting": _setting(world, bench), "rows": rows}
            Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any("error" in row for row in rows) else 0


def _setting(world: Any, bench: Bench) -> str:
    import triton

    import tdx

    parts = [
        f"{world.size} x {world.device.name}", f"tdx {tdx.__version__}",
        f"Triton {triton.__version__}", f"Python {platform.python_version()}",
        f"NumPy {np.__version__}", str(bench.dtype), bench.peers.names,
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def _line(row: dict[str, Any], columns: Sequence[str]) -> str:
    cells = []
    for name in columns:
        value = row.get(name, "")
        cells.append(f"{value:.2f}" if isinstance(value, float) else str(value))
    widths = [34 if name == "what" else 16 for name in columns]
    text = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return text + (f"  ERROR {row['error']}" if "error" in row else "")


if __name__ == "__main__":
    raise SystemExit(_on_rank())
