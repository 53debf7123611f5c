"""Benchmark rows as a picture: times over sizes.

python -m tdx.tools.plot ROWS.json PICTURE.png
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tdx.runtime.errors import InvalidArgument

__all__ = ["draw", "require"]

_NOT_TIMES = ("bytes", "ratio", "% of floor")


def require() -> None:
    """Raise InvalidArgument unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgument("--plot needs matplotlib: pip install matplotlib")


def draw(title: str, setting: str, rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw every column of microseconds over `bytes`, both logarithmic, into a PNG."""
    require()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "bytes" in row and row.get("memory") != "foreign"]
    if not rows:
        raise InvalidArgument(f"{title}: nothing to draw over sizes")
    names = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if isinstance(value, float) and name not in _NOT_TIMES and not name.endswith("_host")
    )
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    for name in names:
        points = [(row["bytes"], row[name]) for row in rows if name in row]
        style = {"color": "black", "linestyle": ":"} if name == "floor" else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), label=name, markersize=3, linewidth=1, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_ylabel("microseconds a call")
    axes.set_title(f"{title}\n{setting}", fontsize=7)
    axes.grid(visible=True, which="both", linewidth=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(source: str, target: str) -> None:
    document = json.loads(Path(source).read_text())
    draw(Path(source).stem, document["setting"], document["rows"], target)


if __name__ == "__main__":
    main(*sys.argv[1:])
