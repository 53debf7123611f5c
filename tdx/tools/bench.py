"""`tdx bench OPERATION`: measure an operation, and its peers in the same run.

Times are microseconds: the slowest rank's median, of calls replayed as a graph. Outputs are
checked. Of ours what is taken if none is asked for is measured, `chosen`, which `algorithm` names;
with --all-algorithms also each of them. `ratio` is the best peer's time over that chosen: above 1
is faster. `gap` is the time of the chosen one over that of our fastest in the same row: 1 is the
best, and what is below it is noise of two measurements of the same. Collectives are measured in
symmetric and in foreign memory, where arrays of other frameworks lie.

Products over ranks are compared with the product and the collective one after the other: the best
such sequence is the peer, and the floor is the product alone where it takes longer than the links.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.runtime.errors import InvalidArgument, Unsupported
from tdx.tools import bench_options
from tdx.tools.bench_options import add_arguments
from tdx.tools.timing import calls_for

if TYPE_CHECKING:
    from tdx.tools.comparison import Comparison

__all__ = ["Bench", "add_arguments", "main"]

# Of H200s with 18 NVLinks: a launch and a signal one way; what a copy engine pushes to a peer.
_FLOOR_ARCH = "sm_90"
_FLOOR_US = 2.2
_LINK_BYTES_PER_US = 391e3
_HOST_RANKS = 4
_WIDTHS = {"what": 34, "algorithm": 22, "dtype": 15}  # of columns of text


def main(args: argparse.Namespace) -> int:
    """Start the ranks and run the benchmark on them."""
    from tdx.runtime.backends import choose
    from tdx.tools import facts, run

    if args.ranks is None:
        on_host = choose(args.backend) == "host"
        args.ranks = _HOST_RANKS if on_host else max(1, len(facts.devices().get("gpus", ())))
    bench_options.check(args)
    job = argparse.Namespace(
        ranks=args.ranks, backend=args.backend, timeout=None, keep_going=False, no_prefix=True,
        module=["tdx.tools.bench", *bench_options.words(args)], script=[],
    )  # fmt: skip
    return run.main(job)


class Bench:
    """What a benchmark module is given.

    Attributes
    ----------
    world : World
    dtypes : list of np.dtype
        The element types to measure.
    dtype : np.dtype
        Of the rows that are being measured.
    peers : Peers
    """

    def __init__(self, world: Any, args: argparse.Namespace):
        from tdx.tools.peers import Peers, open_peers

        self.world = world
        self.dtypes = bench_options.types(args)
        self.dtype = self.dtypes[0]
        self.peers = Peers("--no-peers") if args.no_peers else open_peers(world)
        self._args = args

    def rows(self, module: Any) -> Iterator[dict[str, Any]]:
        """The rows of each element type; of several, with its name."""
        for dtype in self.dtypes:
            self.dtype = dtype
            name = {"dtype": dtype.name} if len(self.dtypes) > 1 else {}
            for row in module.rows(self):
                yield name | row

    def sizes(self, default: Sequence[int], parts: int = 1) -> list[int]:
        """Bytes per rank to measure: as asked for, else the default.

        Each is of `parts` equal parts of whole elements: rounded down, but to one element at least.
        """
        unit = parts * self.dtype.itemsize
        wanted = bench_options.sizes(self._args) or default
        return [max(unit, nbytes // unit * unit) for nbytes in wanted]

    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes to measure, see presets: as asked for, else the default of the backend."""
        from tdx.tools import presets

        operation, size = self._args.operation, self.world.size
        if self._args.shapes:
            return presets.given(self._args.shapes, operation, size)
        usual = "tiny" if self.world.backend == "host" else "default"
        return presets.preset(self._args.preset or usual, operation, size)

    def algorithms(self, names: Iterable[str]) -> Iterator[str | None]:
        """Those to measure: with --all-algorithms `names`; last None, for what is chosen."""
        if self._args.all_algorithms:
            yield from names
        yield None

    def plan(self, row: dict[str, Any], algorithm: str | None, make: Callable[..., Any]) -> Any:
        """`make(algorithm=...)`; None, with the reason in the row, where that one cannot be had."""
        try:
            return make(algorithm=algorithm)
        except (InvalidArgument, Unsupported) as error:
            if algorithm is None:
                raise
            row["failed"] = row.get("failed", {}) | {algorithm: str(error)}
            return None

    def comparison(self, row: dict[str, Any]) -> Comparison:
        """What checks and times the ways of a row of products, which has its axes."""
        from tdx.tools.comparison import Comparison

        m, n, k = row["M"], row["N"], row.get("K", 0)
        calls = calls_for((m * n + m * k + n * k) * self.dtype.itemsize)
        return Comparison(self.world, row, calls)

    def pattern(self, rank: int, nbytes: int) -> np.ndarray[Any, Any]:
        """`nbytes` random bytes of a rank, the same everywhere."""
        page = np.random.default_rng(rank).integers(0, 256, (1 << 20) + 13, np.uint8)
        return np.resize(page, nbytes)

    def rate(
        self,
        row: dict[str, Any],
        algorithms: Iterable[str],
        peers: Iterable[str],
        sent: float = 0,
        alone: float = 0,
    ) -> None:
        """Add `gap`, `ratio`, and `floor` and how near to it what was chosen is.

        `gap` is to the fastest of `algorithms` in the row. The floor is what the links need for
        the `sent` bytes of each rank, or for one message, or the `alone` microseconds of a product
        without communication.
        """
        chosen = row["chosen"]
        ours, theirs = ([row[n] for n in names if n in row] for names in (algorithms, peers))
        if ours:
            row["gap"] = chosen / min(ours)
        if theirs:
            row["ratio"] = min(theirs) / chosen
        if self.world.device.arch == _FLOOR_ARCH and self.world.size > 1:
            row["floor"] = max(_FLOOR_US, sent / _LINK_BYTES_PER_US, alone)
            row["% of floor"] = 100 * row["floor"] / chosen


def _on_rank(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark on this rank; rank 0 prints."""
    import tdx
    from tdx.tools import plot

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(argv)
    module = importlib.import_module(f"tdx.bench.{args.operation}")
    with tdx.init(backend=args.backend) as world:
        bench = Bench(world, args)
        rows: list[dict[str, Any]] = []
        columns = ["dtype"] * (len(bench.dtypes) > 1) + _columns(module, args.all_algorithms)
        setting = _setting(world, bench)
        document = {"setting": setting, "rows": rows, "notes": []}
        if world.rank == 0:
            print(f"{setting}; times in microseconds", flush=True)
            print(_heading(columns, args.markdown), flush=True)
        for row in bench.rows(module):
            rows.append(row)
            if world.rank == 0:
                print(_line(row, columns, args.markdown), flush=True)
                _write(args.json, document)  # what is there when a run is cut short
        bench.peers.close()
        missing = [bench.peers.missing, *[bench.peers.products.missing] * ("library" in columns)]
        notes = _notes("; ".join(filter(None, missing)), columns, rows)
        if world.rank == 0:
            print("".join(f"\n{note}" for note in notes), end="\n" * bool(notes), flush=True)
            _write(args.json, document | {"notes": notes})
        if world.rank == 0 and args.plot:
            plot.draw(args.operation, setting, rows, args.plot)
    return 1 if any("error" in row for row in rows) else 0


def _write(path: str | None, document: dict[str, Any]) -> None:
    """Write the document whole, or leave the one before."""
    if path:
        part = Path(f"{path}.part")
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(path)


def _setting(world: Any, bench: Bench) -> str:
    import triton

    import tdx

    gpus = set(world.channels.allgather(world.driver.info.identity.encode(), "bench: GPUs"))
    shared = b"" not in gpus and len(gpus) < world.size
    parts = [
        f"{world.size} x {world.device.name}",
        f"on {len(gpus)} shared: times mean nothing" if shared else "", f"tdx {tdx.__version__}",
        f"Triton {triton.__version__}", f"Python {platform.python_version()}",
        f"NumPy {np.__version__}", *map(str, bench.dtypes), bench.peers.names,
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def _columns(module: Any, all_algorithms: bool) -> list[str]:
    """What is printed of a row: what only --all-algorithms measures is left out without it."""
    more = () if all_algorithms else (*getattr(module, "ALGORITHMS", ()), "gap")
    return [name for name in module.COLUMNS if name not in more]


def _widths(columns: Sequence[str]) -> list[int]:
    return [_WIDTHS.get(name) or max(12, len(name) + 2) for name in columns]


def _heading(columns: Sequence[str], markdown: bool) -> str:
    if markdown:
        return f"| {' | '.join(columns)} |\n|{'---:|' * len(columns)}"
    return "".join(f"{n:>{w}}" for n, w in zip(columns, _widths(columns), strict=True))


def _notes(missing: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is said below the table: why columns are empty, and what its stars stand for."""
    notes = []
    theirs = {name for name in columns if "nccl" in name}
    if missing and theirs and not any(theirs & row.keys() for row in rows):
        library = any("library" in row for row in rows)
        what = "no collectives to compare with" if library else "nothing to compare with"
        alone = "library" in columns and not library
        of = "floor and ratio are" if any("floor" in row for row in rows) else "ratio is"
        own = f"; {of} with tdx's own matmul" if alone else ""
        notes.append(f"{what} ({missing}): those columns are empty{own}")
    found: dict[tuple[str, str], dict[str, None]] = {}  # of one size there may be several rows
    for row in rows:
        shape = ",".join(str(row[axis]) for axis in ("dtype", "bytes", *"MNK") if axis in row)
        for name, reason in row.get("failed", {}).items():
            found.setdefault((name, reason), {})[shape] = None
    for (name, reason), shapes in found.items():
        more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
        notes.append(f"* {name} at {next(iter(shapes))}{more}: {reason}")
    return notes


def _line(row: dict[str, Any], columns: Sequence[str], markdown: bool) -> str:
    failed = row.get("failed", {})
    values = [row.get(name, "*" if name in failed else "") for name in columns]
    cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in values]
    if markdown:
        text = f"| {' | '.join(cells)} |"
    else:
        text = "".join(f"{c:>{w}}" for c, w in zip(cells, _widths(columns), strict=True))
    return text + (f"  ERROR {row['error']}" if "error" in row else "")


if __name__ == "__main__":
    raise SystemExit(_on_rank())
