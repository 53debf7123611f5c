"""Collects rank cases (tests/ranks/cases/*.py) as tests; see tests/helpers/cases.py."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.aot.harness import Compiler
from tests.helpers.cases import expand, options_of
from tests.helpers.commands import ROOT
from tests.helpers.jobs import CaseFailure, Jobs, Request, Skipped

_CASES = ROOT / "tests" / "ranks" / "cases"
_TOOLS = {"cuda": ["nvidia-smi", "-L"], "hip": ["rocm-smi", "--showid", "--csv"]}
_JOBS = pytest.StashKey[Jobs]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tdx-backend",
        choices=("host", "cuda", "hip"),
        default="host",
        help="backend of rank cases, examples and the demo; on GPUs worlds are at most as large as "
        "their number. All other tests run on the host tier, but for those marked gpu",
    )
    parser.addoption(
        "--tdx-ranks",
        type=int,
        help="ranks of the largest world; default: of as many as there are GPUs, or on the host "
        "tier of any, but without 2 where a case has 3 or 4, and 3 and 4 take turns",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not _largest_world(config):
        backend = config.getoption("--tdx-backend")
        raise pytest.UsageError(
            f"--tdx-backend {backend}: {' '.join(_TOOLS[backend])} shows no GPU, or is not there; "
            "leave the option away to run on the host tier, or pass the GPUs into the container"
        )
    config.stash[_JOBS] = Jobs(config.getoption("--tdx-backend"))
    os.environ.pop("TDX_BACKEND", None)  # not the user's: see tests/helpers/commands.py


@pytest.fixture(scope="session")
def most_ranks(request: pytest.FixtureRequest) -> int:
    """The largest world on the backend that was asked for."""
    return _largest_world(request.config)


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    """Compiles kernels for GPUs; its processes start with the first test that asks for it."""
    with contextlib.closing(Compiler()) as compiler:
        yield compiler


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix == ".py" and file_path.parent == _CASES:
        return CaseFile.from_parent(parent, path=file_path)
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Rank cases last, those of one world size together: they share a job."""
    if config.getoption("--tdx-backend") == "host":  # a GPU that is there is left alone
        config.hook.pytest_deselected(items=[item for item in items if _needs_gpu(item)])
        items[:] = [item for item in items if not _needs_gpu(item)]
    items.sort(key=lambda item: item.order if isinstance(item, CaseItem) else (0, 0))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The last case of a job answers for the job's end."""
    if isinstance(item, CaseItem) and getattr(nextitem, "order", None) != item.order:
        item.config.stash[_JOBS].close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[_JOBS].kill()


class CaseFile(pytest.File):
    """A module of rank cases."""

    def collect(self) -> Iterator[CaseItem]:
        relative = self.path.relative_to(ROOT).with_suffix("")
        module = importlib.import_module(".".join(relative.parts))
        largest = _largest_world(self.config)
        for name, case in vars(module).items():
            if not name.startswith("case_") or case.__module__ != module.__name__:
                continue
            marks = {mark.name for mark in getattr(case, "pytestmark", [])}
            if "gpu" in marks and self.config.getoption("--tdx-backend") == "host":
                continue  # there is nothing to run: not even a skip
            found = list(expand(case))
            if len(dict(found)) < len(found):
                raise self.CollectError(f"{name}: two parameter sets have the same id")
            for turn, (parameters, _) in enumerate(found, len(name)):
                for size in _sizes(self.config, options_of(case).worlds, largest, turn):
                    label = f"{name}[{parameters}{'-' if parameters else ''}w{size}]"
                    yield CaseItem.from_parent(
                        self, name=label, case=case, parameters=parameters, size=size
                    )


class CaseItem(pytest.Item):
    """One case on one world size."""

    def __init__(self, *, case: Any, parameters: str, size: int, **rest: Any):
        super().__init__(**rest)
        options = options_of(case)
        self.order = (2 if options.isolated else 1, size)
        self.request = Request(
            id=self.nodeid,
            module=case.__module__,
            name=case.__name__,
            parameters=parameters,
            size=size,
            limit_s=options.limit_s,
            isolated=options.isolated,
            dies=options.dies,
        )
        # The job's own limit acts first.
        self.add_marker(pytest.mark.timeout(options.limit_s + 120))
        for mark in getattr(case, "pytestmark", []):
            if mark.name != "parametrize":
                self.add_marker(getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs))

    def runtest(self) -> None:
        jobs = self.config.stash[_JOBS]
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TDX_BACKEND", self.config.getoption("--tdx-backend"))
                jobs.run(self.request)
        except Skipped as skipped:
            pytest.skip(str(skipped))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CaseFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


def _needs_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None


def _sizes(config: pytest.Config, worlds: tuple[int, ...], largest: int, turn: int) -> list[int]:
    """Those of a case's world sizes that are run, on the host tier not all: see --tdx-ranks."""
    left_out: set[int] = set()
    if config.getoption("--tdx-backend") == "host" and config.getoption("--tdx-ranks") is None:
        left_out |= set() if {3, 4}.isdisjoint(worlds) else {2}
        left_out |= {3 + turn % 2} if {3, 4} <= {*worlds} else set()
    return [size for size in worlds if size <= largest and size not in left_out]


def _largest_world(config: pytest.Config) -> int:
    backend, given = config.getoption("--tdx-backend"), config.getoption("--tdx-ranks")
    if given is not None:
        return int(given)
    if backend == "host":
        return 1 << 30
    needle = "GPU " if backend == "cuda" else "card"
    try:
        done = subprocess.run(_TOOLS[backend], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no tool, or it finds no driver
        return 0
    return sum(line.startswith(needle) for line in done.stdout.splitlines())
