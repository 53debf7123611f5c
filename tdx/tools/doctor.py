"""`tdx doctor`: can tdx run here, how fast are the links, and what is missing and why.

It collects the facts (facts.py), starts ranks that measure the links between them through tdx
itself (links.py), and judges both (capabilities.py). It never initialises MPI or a GPU in its own
process.

Exit code: 0 if tdx can run here, 1 if something is missing that it needs or the ranks ran out of
time, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from tdx import errors
from tdx.runtime.backends import BACKENDS
from tdx.runtime.errors import InvalidArgument
from tdx.tools import facts
from tdx.tools.capabilities import Capability, judge
from tdx.tools.child import python_words
from tdx.tools.info import text
from tdx.tools.job import TIMED_OUT

__all__ = ["add_arguments", "main"]

_TDX = "from tdx.tools.cli import main; sys.exit(main())"
_HOST_RANKS = 2
_MOST_RANKS = 16  # pairs are measured one after the other
_WIDTH = 79


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check whether tdx can run here, measure the links between ranks, and say what is missing, "
        "why, and what to do about it. Exit code 0: it can run; 1: it cannot, or the ranks were "
        "not done in time."
    )
    parser.add_argument(
        "-n",
        "--ranks",
        type=int,
        help=f"ranks to start, at most {_MOST_RANKS} (default: one a GPU, or 2 on the CPU)",
    )
    parser.add_argument("--backend", choices=BACKENDS, help="default: what tdx.init() chooses")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="for the ranks (default 120)"
    )


def main(args: argparse.Namespace) -> int:
    """Print the report; returns 0 or 1."""
    if args.ranks is not None and not 1 <= args.ranks <= _MOST_RANKS:
        raise InvalidArgument(f"-n {args.ranks}: the number of ranks must be in 1..{_MOST_RANKS}")
    if args.timeout <= 0:
        raise InvalidArgument(f"--timeout {args.timeout:g}: must be above 0 seconds")
    report = _examine(args)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def _examine(args: argparse.Namespace) -> dict[str, Any]:
    """All facts, the measurement, and what follows from them."""
    found: dict[str, Any] = {
        "versions": facts.versions(),
        "mpi": facts.mpi(),
        "backend": facts.backend(args.backend),
        "devices": facts.devices(),
        "frameworks": facts.frameworks(),
        "limits": facts.limits(),
    }
    chosen = found["backend"]["init() chooses"]
    gpus = len(found["devices"].get("gpus", ()))
    ranks = args.ranks or (_HOST_RANKS if chosen != "cuda" else max(1, min(gpus, _MOST_RANKS)))
    found["job"] = _measure(chosen, ranks, args.timeout) if chosen else {"ranks": ranks}
    capabilities = judge(found)
    return {
        "ok": all(one.available for one in capabilities if one.required),
        **found,
        "capabilities": [vars(one) for one in capabilities],
    }


def _measure(backend: str, ranks: int, timeout_s: float) -> dict[str, Any]:
    """What links.py finds on `ranks` ranks, or "problem"."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "links.json")
        words = [
            "-n",
            str(ranks),
            "--backend",
            backend,
            "--timeout",
            f"{timeout_s:g}",
            "--no-prefix",
        ]
        done = subprocess.run(
            [*python_words(_TDX), "run", *words, "-m", "tdx.tools.links", str(path)],
            env=os.environ | {"TDX_QUIET": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            return {"ranks": ranks, **json.loads(path.read_text())}
    late = done.returncode == TIMED_OUT
    problem = f"not finished after {timeout_s:g} s" if late else _cause(done.stderr)
    found = {"ranks": ranks, "problem": problem, "output": done.stderr[-4000:]}
    return found | {"timeout_s": timeout_s} if late else found


def _cause(output: str) -> str:
    """The line of a failed job's output that says most: its first exception, if it has one."""
    kinds = "|".join(["[A-Z]\\w*Error", *errors.__all__])
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(rf"(\w+\.)*({kinds}): ", line)]
    said = [line for line in lines if line.startswith("tdx run: ")]
    return (raised or said or lines or ["it ended without a message"])[0]


# ---- as text
def _print(report: dict[str, Any]) -> None:
    ranks = report["job"]["ranks"]
    where = report["backend"]["init() chooses"] or "no backend"
    print(f"tdx {report['versions']['tdx']} {_verdict(report)}: {where}, {_count(ranks, 'rank')}")
    for section in ("versions", "mpi", "backend", "frameworks", "limits"):
        print(f"\n{section}")
        for name, value in report[section].items():
            _print_wrapped(f"  {name:<20}", text(value))
    _print_devices(report["devices"])
    _print_links(report["job"])
    print("\ncapabilities")
    for one in report["capabilities"]:
        _print_capability(Capability(**one))


def _verdict(report: dict[str, Any]) -> str:
    lacking = [one for one in report["capabilities"] if one["required"] and not one["available"]]
    if not lacking:
        return "can run here"
    if "timeout_s" in report["job"] and [one["name"] for one in lacking] == ["ranks"]:
        return (
            f"ran out of time ({report['job']['timeout_s']:g} s), whether it can run is not known"
        )
    return "CANNOT run here"


def _print_devices(devices: dict[str, Any]) -> None:
    print("\ndevices")
    if not devices.get("gpus"):
        _print_wrapped("  ", devices.get("problem", "no GPU that tdx has a driver for"))
        return
    _print_wrapped(f"  {'driver':<20}", devices["driver"])
    for index, gpu in enumerate(devices["gpus"]):
        size = text(gpu["memory_bytes"])
        reaches = ", ".join(map(str, gpu["reaches"])) or "none"
        detail = f"{gpu['name']}, {gpu['arch']}, {size}, reaches GPUs: {reaches}"
        _print_wrapped(f"  {f'GPU {index}':<20}", detail)


def _print_links(job: dict[str, Any]) -> None:
    for key, title in (
        ("bandwidth", "GB/s of puts from rank (row) to rank (column)"),
        ("latency", "microseconds of a signal, one way"),
    ):
        rows = job.get(key, [])
        if len(rows) < 2:
            continue
        print(f"\nlinks: {title}")
        for start in range(0, len(rows), 8):  # 80 columns hold eight ranks
            part = range(start, min(start + 8, len(rows)))
            print(" " * 8 + "".join(f"{column:>8}" for column in part))
            for number, row in enumerate(rows):
                cells = "".join(_cell(row[column]) for column in part)
                print(f"{number:>8}{cells}")


def _cell(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.1f}':>8}"


def _print_capability(one: Capability) -> None:
    state = "ok" if one.available else "FAILS" if one.required else "missing"
    _print_wrapped(f"  {state:<8}", f"{one.name}: {one.detail}" if one.detail else one.name)
    if one.remedy:
        _print_wrapped(" " * 12, f"remedy: {one.remedy}")


def _print_wrapped(start: str, value: str) -> None:
    print(
        textwrap.fill(
            value,
            _WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
