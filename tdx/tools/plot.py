"""Benchmark rows as a picture: times over sizes for each memory, or over M for each N and K.

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

__all__ = ["AXES", "check", "draw"]

AXES = ("bytes", "M")  # what times are drawn over
_NOT_TIMES = ("gap", "ratio", "% of floor", "cost")


def check(path: str) -> None:
    """Raise InvalidArgument unless matplotlib is there and writes files with such a suffix."""
    _require()
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in kinds:
        raise InvalidArgument(
            f"--plot {path}: matplotlib writes no such pictures; take a name that ends in one of "
            + ", ".join(f".{kind}" for kind in kinds)
        )


def _require() -> None:
    """Raise InvalidArgument unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgument("--plot needs matplotlib: pip install matplotlib")


def draw(title: str, setting: str, rows: Sequence[dict[str, Any]], path: str) -> None:
    """Draw every column of microseconds over `bytes` or `M`, both logarithmic, into the file.

    Rows with M are drawn in one panel for each N and K, those with bytes in one for each memory;
    of several element types each has its own.
    """
    _require()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        names = [row["dtype"]] if "dtype" in row else []
        if "M" in row:
            names += [f"{axis}={row[axis]}" for axis in "NK" if axis in row]
        elif "bytes" in row:
            names += [f"{row['memory']} memory"] if "memory" in row else []
        else:
            continue
        panels.setdefault(", ".join(names), []).append(row)
    if not panels:
        raise InvalidArgument(f"{title}: nothing to draw over sizes")
    wide = min(3, len(panels))
    high = -(-len(panels) // wide)
    figure, grid = pyplot.subplots(
        high, wide, figsize=(8 if wide == 1 else 5 * wide, 5 * high), dpi=120, squeeze=False
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, part) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, part)
        axes.set_title(name, fontsize=7)
    figure.suptitle(f"{title}\n{setting}", fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _panel(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Lines of one panel."""
    across = "M" if "M" in rows[0] else "bytes"
    names = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if isinstance(value, float) and name not in _NOT_TIMES and not name.endswith("_host")
    )
    for name in names:
        points = [(row[across], row[name]) for row in rows if name in row]
        is_floor = name == "floor"
        # a line of one point shows by its marker alone
        style = {"color": "black", "linestyle": ":", "marker": "x"} if is_floor else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), label=name, markersize=3, linewidth=1, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(across)
    axes.set_ylabel("microseconds a call")
    axes.grid(visible=True, which="both", linewidth=0.3)
    axes.legend(fontsize=7)


def main(source: str, target: str) -> None:
    document = json.loads(Path(source).read_text())
    draw(Path(source).stem, document["setting"], document["rows"], target)


if __name__ == "__main__":
    main(*sys.argv[1:])
