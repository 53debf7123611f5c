"""Tables of measured figures in the READMEs, from the files in docs/benchmarks.

`python -m tests.helpers.measured_table` prints them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from tests.helpers.commands import ROOT

_BENCHMARKS = ROOT / "docs" / "benchmarks"
MEASURED = ("2xH100", "4xH100")
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
_SIZES = {4 << 10: "4 KiB", 256 << 10: "256 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB",
          256 << 20: "256 MiB"}  # fmt: skip
_PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_KINDS = ("2xH200", *MEASURED)
_HEIGHTS = {"1024 to 2047": (1024, 2048), "2048 and more": (2048, 1 << 62)}
_ROWS = (128, 512, 1024, 2048, 4096, 8192)


def measured_table(gpus: str) -> str:
    """Markdown: by size the time of tdx on `gpus`, as 2xH100, and in brackets the best peer's."""
    return _table("µs", _SIZES, _OPERATIONS, gpus, "bytes")


def product_table(gpus: str) -> str:
    """The same for each number of rows of a product."""
    return _table("µs, M", dict(zip(_ROWS, map(str, _ROWS), strict=True)), _PRODUCTS, gpus, "M")


def floor_table() -> str:
    """Markdown: of products the median % of the floor over all rows of so many rows or more."""
    lines = [
        "| median % of the floor | M | " + " | ".join(_KINDS) + " |",
        "|---|---|---:|---:|---:|",
    ]
    for operation in _PRODUCTS:
        for name, (least, end) in _HEIGHTS.items():
            cells = []
            for kind in _KINDS:
                paths = sorted(_BENCHMARKS.glob(f"{operation}_*{kind}.json"))
                files = [path for path in paths if "float8" not in path.name]
                rows = [row for path in files for row in _rows(path) if least <= row["M"] < end]
                cells.append(f"{median(row['% of floor'] for row in rows):.0f} ({len(rows)})")
            lines.append(f"| `{operation}` | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _table(
    corner: str, columns: dict[int, str], operations: tuple[str, ...], gpus: str, key: str
) -> str:
    lines = [f"| {corner} | {' | '.join(columns.values())} |", "|---|" + "---:|" * len(columns)]
    for operation in operations:
        rows = _rows(_BENCHMARKS / f"{operation}_{gpus}.json")
        of_size: dict[int, dict] = {}
        for row in rows:
            if row.get("memory") != "foreign":
                of_size.setdefault(row[key], row)  # the usual shapes come first
        cells = [_cell(of_size[size]) if size in of_size else "" for size in columns]
        lines.append(f"| `{operation}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _rows(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


def _cell(row: dict) -> str:
    chosen = row.get("chosen", "fused")
    ours = row[chosen] if isinstance(chosen, str) else chosen
    return f"{_short(ours)} ({_short(ours * row['ratio'])})"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    tables = [make(gpus) for make in (measured_table, product_table) for gpus in MEASURED]
    sys.stdout.write("\n".join([*tables, floor_table()]))
