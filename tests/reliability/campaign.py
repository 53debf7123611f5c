"""Injects every kind of fault again and again, and prints what became of it.

    python -m tests.reliability.campaign --backend host -n 3 --rounds 10 --json FILE

A fault is detected if every surviving rank raised an error that names it, in time: within the
deadline and one second. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.helpers.commands import ROOT, tdx_environment
from tests.reliability.faults import ENDS_THE_CULPRIT, HARMLESS, KINDS, TIMEOUT_S

_JOB_LIMIT_S = 60.0


def run(kind: str, ranks: int, backend: str) -> list[dict[str, Any]]:
    """The reports of the surviving ranks of one job."""
    words = ["run", "-n", str(ranks), "--keep-going", "--no-prefix", "--backend", backend]
    done = subprocess.run(
        [sys.executable, "-m", "tdx", *words, "-m", "tests.reliability.faults", kind],
        cwd=ROOT,
        env=tdx_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_JOB_LIMIT_S,
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind"')]
    expected = ranks - (kind in ENDS_THE_CULPRIT)
    if len(reports) != expected:
        raise SystemExit(
            f"{kind}: {len(reports)} of {expected} ranks reported\n{done.stdout}{done.stderr}"
        )
    return reports


def judge(kind: str, reports: list[dict[str, Any]]) -> str:
    """What is wrong with the reports of a job; empty if all is well."""
    for report in reports:
        if (report["error"] is None) != (kind in HARMLESS):
            return f"rank {report['rank']} raised {report['error']}"
        if report["seconds"] > TIMEOUT_S + 1:
            return f"rank {report['rank']} took {report['seconds']:.1f} s"
        if report["after"] not in ("closed", "recovered"):
            return f"rank {report['rank']}: {report['after']}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="host")
    parser.add_argument("-n", "--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kinds", help="comma-separated")
    parser.add_argument("--limit", type=float, default=1e9, help="start no round after so many s")
    parser.add_argument("--json")
    args = parser.parse_args()
    begun = time.monotonic()
    kinds = args.kinds.split(",") if args.kinds else KINDS
    rows: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in kinds}
    bad = 0
    for _ in range(args.rounds):
        for kind in kinds:
            if time.monotonic() - begun > args.limit:
                continue
            rows[kind].append(run(kind, args.ranks, args.backend))
            if wrong := judge(kind, rows[kind][-1]):
                bad += 1
                print(f"{kind}: {wrong}\n{json.dumps(rows[kind][-1], indent=1)}", file=sys.stderr)
    print("| fault | injected | detected | raised | median, s | max, s | then |")
    print("|---|---|---|---|---|---|---|")
    for kind, jobs in rows.items():
        print(_row(kind, jobs))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if bad else 0


def _row(kind: str, jobs: list[list[dict[str, Any]]]) -> str:
    reports = [report for job in jobs for report in job]
    if not reports:
        return f"| {kind} | 0 | | | | | |"
    seconds = [report["seconds"] for report in reports]
    raised = Counter(report["error"] or "nothing" for report in reports)
    after = Counter(report["after"] for report in reports)
    detected = sum(not judge(kind, job) for job in jobs)
    cells = (
        kind.replace("_", " "), len(jobs), detected, ", ".join(raised),
        f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", ", ".join(after),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    raise SystemExit(main())
