"""`tdx info`: versions, the backend that would be chosen, and limits, without starting a rank."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tdx.tools import facts

__all__ = ["add_arguments", "collect", "main", "text"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Print what `collect` finds; returns 0."""
    found = collect()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for section, entries in found.items():
        print(section)
        for name, value in entries.items():
            print(f"  {name:<20}{text(value)}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Sections "versions", "mpi", "backend", "limits"; see tdx.tools.facts."""
    return {
        "versions": facts.versions(),
        "mpi": facts.mpi(),
        "backend": facts.backend(),
        "limits": facts.limits(),
    }


def text(value: Any) -> str:
    """A fact as text: sizes in GiB, yes and no, none."""
    if value in (None, []):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value >= 1 << 20:
        return f"{value / (1 << 30):.1f} GiB"
    return ", ".join(value) if isinstance(value, list) else str(value)
