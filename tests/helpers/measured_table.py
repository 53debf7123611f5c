"""Tables of measured figures in the READMEs, from the files in docs/benchmarks.

`python -m tests.helpers.measured_table` prints them; with `--products` it prints
docs/benchmarks/products.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from tests.helpers.commands import ROOT

_BENCHMARKS = ROOT / "docs" / "benchmarks"
MEASURED = ("2xH100", "4xH100")
MEASURED_PRODUCTS = ("2xH100", "4xH200")
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
_SIZES = {4 << 10: "4 KiB", 256 << 10: "256 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB",
          256 << 20: "256 MiB"}  # fmt: skip
_PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_KINDS = ("2xH200", "2xH100", "4xH200", "4xH100")
_HEIGHTS = {"1024 to 2047": (1024, 2048), "2048 and more": (2048, 1 << 62)}
_ROWS = (128, 512, 1024, 2048, 4096, 8192)
_NORM = "all_reduce_rms_norm"
_COLUMNS = (
    "library", "matmul", "nccl+library", "symm+library", "tdx+library", "async_tp", "all_reduce",
    "fused", "one_kernel", "low_latency", "low_latency_two_shot", "one_shot", "two_shot",
    "copy_engine", "unfused", "unfused_two_shot",
)  # fmt: skip
_PAGE = """# Products and norms, all rows

µs, from the files in this folder, which `tdx bench` has written. What columns mean, and how it was
measured, is in [README.md](README.md#how-it-is-measured). The floor is the longer of `library` and
what links need; ratio: the best sequence of a product and a collective, of anybody, in the same
run, over `chosen`; of norms an all-reduce and torch's norm are the sequence. cost: `chosen` over
the all-reduce alone.
"""


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
        "|---|---|" + "---:|" * len(_KINDS),
    ]
    for operation in _PRODUCTS:
        for name, (least, end) in _HEIGHTS.items():
            cells = []
            for kind in _KINDS:
                paths = sorted(_BENCHMARKS.glob(f"{operation}_*{kind}.json"))
                files = [path for path in paths if "float8" not in path.name]
                rows = {  # a shape may be in several files
                    (row["M"], row["N"], row["K"]): row["% of floor"]
                    for path in files for row in _rows(path) if least <= row["M"] < end
                }  # fmt: skip
                cells.append(f"{median(rows.values()):.0f} ({len(rows)})")
            lines.append(f"| `{operation}` | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def products_page() -> str:
    """Markdown: all rows of all files of products and of norms."""
    parts = [_PAGE]
    for operation in (*_PRODUCTS, _NORM):
        for path in sorted(_BENCHMARKS.glob(f"{operation}_*.json")):
            _, *words = path.stem.removeprefix(operation).split("_")
            document = json.loads(path.read_text())
            links = [f"[rows]({path.name})"]
            if path.with_suffix(".png").exists():
                links.append(f"[picture]({path.stem}.png)")
            preset = ", ".join(reversed(words))
            told = document["setting"].replace("; times in microseconds", "")
            parts.append(
                f"## {operation}, {preset}\n\n{told} ({', '.join(links)}). "
                + _summary(document["rows"])
                + _all_rows(document["rows"], operation == _NORM)
            )
    return "\n".join(parts)


def _summary(rows: list[dict]) -> str:
    ratios = [row["ratio"] for row in rows]
    large = [row["% of floor"] for row in rows if row["M"] >= _HEIGHTS["2048 and more"][0]]
    told = f"Ratio {min(ratios):.2f} to {max(ratios):.2f}, {median(ratios):.2f} in the median"
    if large:
        told += f"; from 2048 rows on {median(large):.0f} % of the floor in the median"
    return f"{told}.\n\n"


def _all_rows(rows: list[dict], norm: bool) -> str:
    columns = [name for name in _COLUMNS if any(isinstance(row.get(name), float) for row in rows)]
    axes = ("M", "N") if norm else ("M", "N", "K")
    last = ["cost", "ratio"] if norm else ["% of floor", "ratio"]
    lines = [
        f"| {' | '.join((', '.join(axes), *columns, 'chosen', 'algorithm', *last))} |",
        "|---|" + "---:|" * (1 + len(columns)) + "---|" + "---:|" * len(last),
    ]
    for row in rows:
        cells = [_short(row[name]) if row.get(name) else "" for name in columns]
        algorithm = row.get("algorithm", row.get("chosen", "fused"))
        cells += [_short(_ours(row)), f"`{algorithm}`"]
        cells += [f"{row[name]:.0f}" if "%" in name else f"{row[name]:.2f}" for name in last]
        lines.append(f"| {', '.join(str(row[axis]) for axis in axes)} | {' | '.join(cells)} |")
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


def _ours(row: dict) -> float:
    chosen = row.get("chosen", "fused")
    return row[chosen] if isinstance(chosen, str) else chosen


def _cell(row: dict) -> str:
    ours = _ours(row)
    return f"{_short(ours)} ({_short(ours * row['ratio'])})"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__" and sys.argv[1:] == ["--products"]:
    sys.stdout.write(products_page())
elif __name__ == "__main__":
    tables = [measured_table(gpus) for gpus in MEASURED]
    tables += [product_table(gpus) for gpus in MEASURED_PRODUCTS]
    sys.stdout.write("\n".join([*tables, floor_table()]))
