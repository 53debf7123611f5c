"""Ahead-of-time compilation of kernels for GPUs that are not there, in processes of its own.

A process that has run Triton's interpreter cannot compile any more, and starting Triton takes
time: so a few children compile all `Job`s of a session, while tests look at what is ready.

    jobs = [Job("tests.aot.kernels", "k_put", {"x": "*bf16", "world": "world"}, {}, target)
            for target in TARGETS]
    compiler.start(jobs)  # the fixture, a Compiler
    assert "st.global.v4" in compiler[jobs[0]].code

Types in a signature are Triton's ("*bf16", "i32", "constexpr"), or "world", "team" and "channel"
for the handles. Pointers and the names in `divisible` count as divisible by 16, except those in
`unaligned`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

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


class Compiler:
    """Compiles in the background, in a process for each core, into a fresh cache.

    `compiler[job]` waits for the job's outcome; a failed compilation is in its `error`.
    """

    def __init__(self) -> None:
        self._cache = tempfile.TemporaryDirectory()
        self._pool = ProcessPoolExecutor(
            len(os.sched_getaffinity(0)),
            multiprocessing.get_context("spawn"),
            _use_cache,
            (self._cache.name,),
        )
        self._started: dict[Job, Future[dict[str, Any]]] = {}

    def start(self, jobs: Iterable[Job]) -> None:
        """Put the jobs in line, in this order."""
        for job in jobs:
            if job not in self._started:
                self._started[job] = self._pool.submit(_compile, asdict(job))

    def __getitem__(self, job: Job) -> Outcome:
        self.start([job])
        return Outcome(**self._started[job].result())

    def close(self) -> None:
        """End the processes; what nobody has begun with is dropped."""
        self._pool.shutdown(cancel_futures=True)
        self._cache.cleanup()


def _use_cache(cache: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    from tests.aot.worker import compile_job  # imports Triton

    try:
        return compile_job(job)
    except Exception as error:
        return {"error": "\n".join(_causes(error))}


def chosen(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """The cases and targets that the module's tests are run for: those worth compiling ahead."""
    items = [item for item in request.session.items if item.path == request.path]
    known = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return [(each["case"], each["target"]) for each in known if {"case", "target"} <= set(each)]


def _causes(error: BaseException | None) -> Iterator[str]:
    """The error and what it came from, a line each."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__
