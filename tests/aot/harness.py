"""Ahead-of-time compilation of kernels for GPUs that are not there, in processes of its own.

A process that has run Triton's interpreter cannot compile any more, and a batch shares the cost
of starting Triton: so tests list `Job`s and `compile_jobs` runs them all in a few children.

    JOBS = [Job("tests.aot.kernels", "k_put", {"x": "*bf16", "world": "world"}, {}, target)
            for target in TARGETS]
    outcome = compile_jobs(JOBS)[JOBS[0]]
    assert "st.global.v4" in outcome.code

Types in a signature are Triton's ("*bf16", "i32", "constexpr"), or "world", "team" and "channel"
for the handles. Pointers and the names in `divisible` count as divisible by 16, except those in
`unaligned`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
NVIDIA = tuple(t for t in TARGETS if t.startswith("sm_"))
AMD = tuple(t for t in TARGETS if t.startswith("gfx"))


@dataclass(frozen=True)
class Job:
    """One compilation: `module.kernel` with types and constexpr values, for one target."""

    module: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    unaligned: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ()
    library: bool = True

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other) -> bool:
        return isinstance(other, Job) and self.key == other.key


@dataclass(frozen=True)
class Outcome:
    """What a compilation produced.

    `code` is PTX or AMD assembly; `ttgir` Triton's own representation; `spills` and `stack` are
    spilled registers (AMD) or the bytes of stack that hold them (NVIDIA), and bytes of
    stack; `shared` bytes of shared memory. `error` holds the message of a failed compilation.
    """

    code: str = ""
    ttgir: str = ""
    spills: int = 0
    stack: int = 0
    registers: int = 0
    shared: int = 0
    error: str = ""


def compile_jobs(jobs: Iterable[Job], timeout_s: float = 500) -> dict[Job, Outcome]:
    """Compile all jobs in a child process for each core, with fresh caches; failures in `error`."""
    jobs = list(dict.fromkeys(jobs))
    shares = min(len(jobs), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max(1, shares)) as pool:
        # neighbours in a table take about as long
        parts = [jobs[i::shares] for i in range(shares)]
        done = pool.map(partial(_compile, timeout_s=timeout_s), parts)
        return {job: outcome for part in done for job, outcome in part.items()}


def _compile(jobs: list[Job], timeout_s: float) -> dict[Job, Outcome]:
    """Compile the jobs one after the other in one child process."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment.update(TRITON_CACHE_DIR=cache, PYTHONPATH=str(ROOT))
        environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            input=json.dumps([asdict(job) for job in jobs]),
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the compiling process failed:\n{done.stdout}{done.stderr}")
    results = json.loads(done.stdout.splitlines()[-1])
    return {job: Outcome(**result) for job, result in zip(jobs, results, strict=True)}


def compile_kernel(module, kernel, signature, constexprs, target, **options) -> Outcome:
    """One compilation; raises RuntimeError with the compiler's message if it fails."""
    job = Job(module, kernel, signature, constexprs, target, options)
    outcome = compile_jobs([job])[job]
    if outcome.error:
        raise RuntimeError(outcome.error)
    return outcome
