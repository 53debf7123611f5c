"""Runs what `pytest --tdx-backend cuda` runs on GPUs in several pytest processes at once.

    python -m tests.gpu.suite                                # on all GPUs that are visible
    python -m tests.gpu.suite --gpus 2 --only w1 w2 -k movement --limit 600 --out results
    python -m tests.gpu.suite --share 4                      # worlds of 4 on one GPU

With --share several ranks have one GPU and take turns, so that kernels which wait for each other
take a thousand times longer: it tells whether results are right, not what holds for ranks at once.

Cases are collected once and given to *streams*: pytest processes, each with GPUs of its own and a
list of cases of one world size, in pytest's order, so that they share jobs. Streams of one *phase*
run at once. At the end, alone: `quiet`, the cases that others would disturb, and `rest`, the
examples, the demo and tests/gpu. Cases that need more GPUs than there are are counted apart.

Exit code: 0 if all passed or skipped themselves, 1 if not (also for cases not run because of
--limit or a pytest that broke off), 2 for bad usage. Cases that need more GPUs do not change it.

It is a plugin of these pytest processes as well (hooks at the end), which notes each result at
once: what a stream had done before it was killed is known.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT

PYTEST = [sys.executable, "-u", "-m", "pytest", "-p", "tests.gpu.suite", "--tdx-backend", "cuda"]
TARGETS = [
    "tests/ranks/cases", "tests/ranks/test_examples.py", "tests/ranks/test_demo.py", "tests/gpu",
]  # fmt: skip
QUIET = re.compile(r"/(leaks|strangers)\.py::")  # which others on the machine would disturb
END_LIMIT_S = 10.0  # between SIGTERM and SIGKILL for a stream
OUTCOMES = ("passed", "skipped", "errors", "failed")  # of several of one case the last counts

_LARGEST = 64  # ranks of a job: cases of all world sizes are collected


# ---- planning


@dataclass
class Stream:
    """One pytest process, before, while and after it runs."""

    name: str
    gpus: tuple[int, ...]  # places in the list of visible ones
    ids: list[str]
    outcomes: dict[str, str] = field(default_factory=dict)  # of the cases that have ended
    causes: dict[str, str] = field(default_factory=dict)  # of those that failed
    seconds: float = 0.0
    trouble: str = "not started"  # why the outcomes are not all

    def having(self, outcome: str) -> list[str]:
        return [case for case in self.ids if self.outcomes.get(case, "not run") == outcome]


def world_of(case: str) -> int | None:
    """World size of a rank case, None for other tests."""
    found = re.search(r"::case_\w+\[(?:.*-)?w(\d+)\]$", case)
    return int(found[1]) if found else None


def plan(
    ids: Iterable[str], gpus: int, only: Sequence[str] = ()
) -> tuple[list[list[Stream]], list[str]]:
    """Phases of streams, and the cases that need more GPUs; ids are in pytest's order.

    only: "w2" and the like, and "rest"; default: all.
    """
    runs: dict[int, list[list[str]]] = {}
    quiet: list[str] = []
    rest: list[str] = []
    too_large: list[str] = []
    # pytest puts cases that share a job first, then those with jobs of their own: two runs a size
    for size, group in groupby(ids, world_of):
        run = list(group)
        if only and (f"w{size}" if size else "rest") not in only:
            continue
        if size is None:
            rest += run
        elif size > gpus:
            too_large += run
        else:
            quiet += [case for case in run if QUIET.search(case)]
            runs.setdefault(size, []).append([case for case in run if not QUIET.search(case)])
    phases: list[list[Stream]] = []
    while runs:
        phase: list[Stream] = []
        used = longest = 0
        for size in sorted(runs, reverse=True):
            shares = split(runs[size], (gpus - used) // size)
            most = max(map(len, shares), default=0)
            if phase and (not shares or most > longest):
                continue  # a later phase has more GPUs for it
            for number, share in enumerate(shares, 1):
                name = f"w{size}-{number}" if len(shares) > 1 else f"w{size}"
                phase.append(Stream(name, tuple(range(used, used + size)), share))
                used += size
            longest = max(longest, most)
            del runs[size]
        phases.insert(0, phase)
    alone = {"quiet": quiet, "rest": rest}
    phases += [[Stream(name, tuple(range(gpus)), few)] for name, few in alone.items()]
    return [phase for phase in phases if phase and phase[0].ids], too_large


def split(runs: Iterable[list[str]], parts: int) -> list[list[str]]:
    """Equal parts of each run, in its order: cases with jobs of their own take far longer."""
    shares: list[list[str]] = [[] for _ in range(parts)]
    for run in runs if parts else ():
        shares.sort(key=len, reverse=True)
        for share, more in zip(shares, sorted(_deal(run, parts), key=len), strict=True):
            share += more
    return [share for share in shares if share]


def _deal(run: list[str], parts: int) -> list[list[str]]:
    """Whole files, which share compiled kernels; of one a piece where parts would differ much."""
    files = [list(group) for _, group in groupby(run, lambda case: case.split("::")[0])]
    hands: list[list[list[str]]] = [[] for _ in range(parts)]

    def count(hand: list[list[str]]) -> int:
        return sum(map(len, hand))

    for file in sorted(files, key=len, reverse=True):
        min(hands, key=count).append(file)
    while True:
        least, most = min(hands, key=count), max(hands, key=count)
        gap = count(most) - count(least)
        if gap <= max(1, len(run) // parts // 10):
            break
        file = max(most, key=len)
        piece = min(gap // 2, len(file))
        least.append(file[-piece:])
        del file[-piece:]
    place = {case: i for i, case in enumerate(run)}
    return [
        sorted((case for file in hand for case in file), key=place.__getitem__) for hand in hands
    ]


# ---- running


def visible_gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return []
    known = [str(i) for i in range(len(re.findall("^GPU ", done.stdout, re.MULTILINE)))]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = []
    for name in known if chosen is None else map(str.strip, chosen.split(",")):
        if name not in known and not name.startswith(("GPU-", "MIG-")):
            break  # CUDA shows none from there on
        names.append(name)
    return names


def start(stream: Stream, gpus: list[str], out: Path) -> subprocess.Popen[bytes]:
    _record(stream, out).write_text("")  # not what an earlier run has left
    (out / f"{stream.name}.xml").unlink(missing_ok=True)
    words = ["-v", "-ra", "-p", "no:cacheprovider", f"--junitxml={out / stream.name}.xml"]
    words += [f"--suite-record={_record(stream, out)}", f"--tdx-ranks={len(stream.gpus)}"]
    with open(out / f"{stream.name}.log", "wb") as log:
        return subprocess.Popen(
            [*PYTEST, *words, *stream.ids],
            cwd=ROOT,
            env=os.environ | _visible([gpus[i] for i in stream.gpus]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group that can be ended
        )


def _visible(gpus: list[str]) -> dict[str, str]:
    """The environment that shows these GPUs, some of them more than once where ranks share them."""
    unique = list(dict.fromkeys(gpus))
    sharing = {"TDX_SHARE_GPU": "1"} if len(unique) < len(gpus) else {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(unique)} | sharing


def finish(stream: Stream, code: int, record: Path, killed: str = "") -> None:
    """Read what the stream has noted; its pytest ended with the code."""
    for line in record.read_text().splitlines():
        with contextlib.suppress(ValueError):  # killed while it wrote
            case, outcome, why = json.loads(line)
            stream.causes[case] = stream.causes.get(case) or why
            known = stream.outcomes.get(case, outcome)
            stream.outcomes[case] = max(known, outcome, key=OUTCOMES.index)
    may_be_1 = bool(stream.having("failed") or stream.having("errors"))
    fine = code == 0 or (code == 1 and may_be_1)
    stream.trouble = "" if fine else killed or f"pytest ended with code {code}"
    counts = ", ".join(f"{len(stream.having(what))} {what}" for what in (*OUTCOMES, "not run"))
    how = stream.trouble or "done"
    _say(f"{stream.name}: {how} after {stream.seconds:.1f} s: {counts}")


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """End the processes with their groups: pytest and the jobs that it runs."""
    left = [process for process in processes if _signal(process, signal.SIGTERM)]
    deadline = time.monotonic() + END_LIMIT_S
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [process for process in left if _signal(process, 0)]
    for process in left:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send it to the group of the process; False if nobody is left there."""
    process.poll()  # a zombie would be left
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def run(phases: list[list[Stream]], gpus: list[str], out: Path, limit: float) -> None:
    """Run the phases, until time.monotonic() is `limit`."""
    running: list[tuple[subprocess.Popen[bytes], Stream, float]] = []
    why = "ended at the limit"

    def ended(killed: str = "") -> None:
        for one in list(running):
            process, stream, begun = one
            if process.poll() is not None:
                running.remove(one)
                end([process])  # what a pytest that crashed has left
                stream.seconds = time.monotonic() - begun
                finish(stream, process.returncode, _record(stream, out), killed)

    try:
        for phase in phases:
            for stream in phase:
                if time.monotonic() < limit:
                    running.append((start(stream, gpus, out), stream, time.monotonic()))
            while running and time.monotonic() < limit:
                time.sleep(0.1)
                ended()
    except KeyboardInterrupt:
        why = "interrupted"
    finally:
        end(process for process, *_ in running)
    ended(why)


def _record(stream: Stream, out: Path) -> Path:
    return out / f"{stream.name}.jsonl"


# ---- the whole


def collect(keyword: str) -> tuple[list[str], int]:
    """Ids in pytest's order, of all world sizes, and the exit code if there are none to run."""
    words = ["--collect-only", "-q", "-rs", f"--tdx-ranks={_LARGEST}"]
    words += ["-k", keyword] if keyword else []
    done = subprocess.run([*PYTEST, *words, *TARGETS], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:  # 4 bad usage, 5 nothing found
        _say(done.stdout + done.stderr + "no test was run")
        return [], 2 if done.returncode in (4, 5) else 1
    listed, _, notes = done.stdout.partition("\n\n")
    for skipped in re.findall("^SKIPPED.*", notes, re.MULTILINE):
        _say(f"not collected: {skipped}")
    return [line for line in listed.splitlines() if "::" in line], 0


def report(streams: list[Stream], too_large: list[str], seconds: float, setting: str) -> int:
    """Print table, failures and summary; returns the exit code."""
    columns = ("passed", "failed", "errors", "skipped", "not run")
    rows = [["stream", "GPUs", "cases", *columns, "seconds"]]
    total: Counter[str] = Counter()
    for stream in streams:
        counts = {what: len(stream.having(what)) for what in columns}
        total.update(counts)
        numbers = map(str, (len(stream.ids), *counts.values()))
        places = ",".join(map(str, stream.gpus))
        rows.append([stream.name, places, *numbers, f"{stream.seconds:.1f}"])
    for size, count in sorted(Counter(map(world_of, too_large)).items()):
        rows.append([f"w{size}", "-", str(count), *"0000", str(count), "-"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    for stream in streams:
        for what, label in (("failed", "FAILED"), ("errors", "ERROR")):
            for case in stream.having(what):
                _say(f"{label} {case} ({stream.name}): {stream.causes.get(case, '')}")
    for stream in streams:
        if stream.trouble:
            _say(f"{stream.name}: {stream.trouble}")
    parts = [f"{total[what]} {what}" for what in columns if total[what] or what == "passed"]
    parts += [f"{len(too_large)} need more GPUs"] if too_large else []
    _say(f"{', '.join(parts)} in {seconds:.1f} s ({setting})")
    bad = total["failed"] or total["errors"] or total["not run"]
    return 1 if bad or any(stream.trouble for stream in streams) else 0


def main(words: Sequence[str] | None = None) -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.suite")
    parser.add_argument("--gpus", type=int, help="use the first so many (default: all visible)")
    parser.add_argument("--share", type=int, default=1, help="ranks that may have one GPU")
    parser.add_argument("--only", nargs="+", default=[], metavar="SIZE", help="w1, w2, ...; rest")
    parser.add_argument("-k", dest="keyword", default="", metavar="EXPR", help="as in pytest")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all")
    parser.add_argument("--out", type=Path, help="for logs and junit files (default: a new folder)")
    args = parser.parse_args(words)
    gpus = visible_gpus()
    number = len(gpus) if args.gpus is None else args.gpus
    if not 1 <= number <= len(gpus):
        parser.error(f"{number} GPUs: `nvidia-smi -L` and CUDA_VISIBLE_DEVICES show {len(gpus)}")
    if args.share < 1:
        parser.error(f"--share {args.share}: must be 1 or more")
    if wrong := [name for name in args.only if not re.fullmatch(r"w[1-9]\d*|rest", name)]:
        parser.error(f"--only {' '.join(wrong)}: takes w1, w2, ... and rest")
    if not args.limit > 0:
        parser.error(f"--limit {args.limit:g}: must be above 0 seconds")
    ids, code = collect(args.keyword)
    if code:
        return code
    places = gpus[:number] * args.share
    phases, too_large = plan(ids, len(places), args.only)
    if not phases and not too_large:
        parser.error("there is no such case")
    out = args.out or Path(tempfile.mkdtemp(prefix="tdx-suite-"))
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    streams = [stream for phase in phases for stream in phase]
    _say(f"{sum(len(stream.ids) for stream in streams)} cases, logs in {out}")
    run(phases, places, out, begun + args.limit)
    shared = f", each for {args.share} ranks" if args.share > 1 else ""
    setting = f"{number} GPU{'s' if number > 1 else ''}{shared}{_commit()}"
    return report(streams, too_large, time.monotonic() - begun, setting)


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # a copy without history
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        return f", commit {done.stdout.strip()}"
    return ""


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# ---- the plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite-record", help="file to which a line is added for each result")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--suite-record"):
        config.pluginmanager.register(_Recorder(path))


class _Recorder:
    def __init__(self, path: str):
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            broken = report.failed and report.when != "call"
            outcome = "errors" if broken else report.outcome
            lines = report.longreprtext.splitlines() if report.failed else []
            named = re.compile(r"(E  +)?[\w.]*[A-Z]\w+(: |$)")
            causes = [line for line in lines if named.match(line)] or lines or [""]
            with open(self._path, "a") as file:
                file.write(json.dumps([report.nodeid, outcome, causes[-1]]) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the results so far are told
    sys.exit(main())
