"""What each framework's arrays can do with tdx, found out by doing it: a table of README.md.

    tdx run -n 2 --no-prefix --backend cuda -m tests.helpers.framework_table >table.md
    python -m tests.helpers.framework_table table.md

The first line prints the table: columns of that backend as they are found, of the frameworks that
are installed, the others as README.md has them. The second puts a printed one into README.md. The
rank case framework_table.py finds the columns of its backend too, and compares.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import tdx
from tdx.errors import DtypeError, InvalidArgument, Unsupported
from tdx.interop import owner_of
from tdx.kernels.operand import operand
from tdx.tools.facts import frameworks, versions
from tests.helpers.commands import ROOT
from tests.helpers.frameworks import jax_device, missing

__all__ = ["COLUMNS", "DTYPES", "REFUSALS", "column", "columns_of", "replaced", "table"]

COLUMNS = {  # in their order: framework and backend, name
    ("numpy", "host"): "NumPy",
    ("jax", "host"): "JAX",
    ("torch", "host"): "PyTorch",
    ("cupy", "cuda"): "CuPy, GPU",
    ("jax", "cuda"): "JAX, GPU",
    ("torch", "cuda"): "PyTorch, GPU",
}
DTYPES = ("float64", "int64", "bool", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
REFUSALS = (DtypeError, InvalidArgument, Unsupported)

_TABLE = re.compile(r"^\| \| NumPy \|.*\n(?:\|.*\n)+(\nGPU columns: .*\n)?", re.M)

Columns = dict[str, dict[str, str]]  # name -> row -> cell


# ---- trying


class _Space(NamedTuple):
    """What is asked of a framework."""

    make: Callable[[np.ndarray], Any]  # the same array, in memory that the rank's kernels reach
    content: Callable[[Any], bytes]
    address: Callable[[Any], int]
    inside: Callable[[Any], Any] | None = None  # a call while it traces, or with gradients


def column(world: Any, module: str) -> dict[str, str]:
    """Row -> "yes", "no", the error that says no; "-" where the question makes no sense."""
    with _SPACES[module](world) as space:
        return {row: _answer(row, question) for row, question in _questions(world, space).items()}


def _questions(world: Any, space: _Space) -> dict[str, Callable[[], Any] | None]:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    x, out = space.make(values), space.make(np.zeros_like(values))
    framework = owner_of(x)
    assert framework is not None
    ours = world.array(values, symmetric=False)

    def holds(result: Any, expected: np.ndarray) -> bool:
        same_shape = tuple(result.shape) == expected.shape
        return same_shape and space.content(result) == expected.tobytes()

    def gathers(array: np.ndarray) -> bool:
        """A round trip through symmetric memory keeps the bytes and the type."""
        x = space.make(array)
        result = tdx.all_gather(x)
        return result.dtype == x.dtype and holds(result, np.concatenate([array] * world.size))

    questions: dict[str, Callable[[], Any] | None] = {
        "read where it is": lambda: operand(world, x, "x").address == space.address(x),
        "result of the same type": lambda: type(tdx.all_reduce(x)) is type(x),
        "sees a tdx array without a copy": (
            lambda: space.address(framework.adopt(ours, x)) == ours.data_ptr()
        ),
        "`out=`": (lambda: tdx.all_reduce(x, out=out) is out and holds(out, values * world.size)),
        "transposed input": (
            lambda: holds(tdx.all_gather(x.T), np.concatenate([values.T] * world.size))
        ),
        "empty input": (lambda: holds(tdx.all_gather(space.make(values[:0])), values[:0])),
        "traced, or with gradients": (space.inside and (lambda: space.inside(x) is not None)),
    }
    for name in DTYPES:
        kind = np.dtype(getattr(ml_dtypes, name, None) or name)
        questions[name] = lambda kind=kind: gathers(np.arange(6).astype(kind))
    return questions


def _answer(row: str, question: Callable[[], Any] | None) -> str:
    if question is None:
        return "-"
    try:
        return "yes" if question() else "no"
    except REFUSALS as error:
        sys.stderr.write(f"{row}: {type(error).__name__}: {error}\n")
        return type(error).__name__
    except Exception as error:  # frameworks raise what they like
        sys.stderr.write(f"{row}:\n{traceback.format_exc()}")
        return f"no: {type(error).__name__}"


@contextlib.contextmanager
def _numpy(world: Any) -> Iterator[_Space]:
    yield _Space(np.array, lambda x: x.tobytes(), lambda x: x.ctypes.data)


@contextlib.contextmanager
def _cupy(world: Any) -> Iterator[_Space]:
    import cupy

    with cupy.cuda.Device(world.device.index):
        yield _Space(
            cupy.asarray,
            lambda x: x.get().tobytes(),
            lambda x: x.data.ptr,
            lambda x: cupy.fuse(tdx.all_reduce)(x),
        )


@contextlib.contextmanager
def _jax(world: Any) -> Iterator[_Space]:
    """With 64-bit types, as a user of them sets it."""
    device = jax_device(world)
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield _Space(
            lambda array: jax.device_put(array, device),
            lambda x: np.asarray(x).tobytes(),
            lambda x: x.unsafe_buffer_pointer(),
            lambda x: jax.jit(tdx.all_reduce)(x),
        )
    finally:
        jax.config.update("jax_enable_x64", before)


@contextlib.contextmanager
def _torch(world: Any) -> Iterator[_Space]:
    import torch

    device = "cpu" if world.backend == "host" else f"cuda:{world.device.index}"

    def make(array: np.ndarray) -> Any:
        """By way of integers: NumPy arrays of ml_dtypes' types are not taken."""
        if array.dtype.isbuiltin == 1:
            return torch.from_numpy(array.copy()).to(device)
        bits = torch.from_numpy(array.view(f"i{array.itemsize}").copy())
        return bits.view(getattr(torch, array.dtype.name)).to(device)

    yield _Space(
        make,
        lambda x: x.cpu().contiguous().view(torch.uint8).numpy().tobytes(),
        lambda x: x.data_ptr(),
        lambda x: tdx.all_reduce(x.clone().requires_grad_()),
    )


_SPACES = {"numpy": _numpy, "cupy": _cupy, "jax": _jax, "torch": _torch}


# ---- the table


def columns_of(text: str) -> Columns:
    """Those of the table that is in the text: README.md's, or what was printed."""
    found = _TABLE.search(text)
    if found is None:
        raise ValueError("no table of frameworks, which would begin with `| | NumPy |`")
    lines = [line for line in found[0].splitlines() if line.startswith("|")]
    (_, *names), _, *rows = ([c.strip() for c in line.split("|")[1:-1]] for line in lines)
    return {name: {row[0]: row[n + 1] for row in rows} for n, name in enumerate(names)}


def table(columns: Columns, note: str) -> str:
    """Markdown, as `_TABLE` matches it."""
    names = [name for name in COLUMNS.values() if name in columns]
    lines = [f"| | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for row in dict.fromkeys(row for name in names for row in columns[name]):
        cells = (columns[name].get(row, "?") for name in names)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + note


def replaced(text: str, printed: str) -> str:
    """README's text with the table that was printed; columns which that has not are kept."""
    columns = columns_of(text) | columns_of(printed)
    made = table(columns, _note(printed) or _note(text))
    return _TABLE.sub(lambda _: made, text)


def _note(text: str) -> str:
    """What stands below the table about the run on GPUs."""
    found = _TABLE.search(text)
    return (found and found[1]) or ""


def _found(world: Any) -> Columns:
    """The columns of the world's backend, as this rank finds them."""
    columns = {}
    for (module, backend), name in COLUMNS.items():
        if backend != world.backend:
            continue
        if why := missing(module, backend):
            sys.stderr.write(f"{name}: left as it is, {why}\n")
            continue
        try:
            columns[name] = column(world, module)
        except Exception:  # other frameworks may be better off
            sys.stderr.write(f"{name}: left as it is\n{traceback.format_exc()}")
    return columns


def _agreed(parts: list[Columns]) -> Columns:
    """What ranks have found; in a cell on which they differ, all of it."""
    return {
        name: {row: " / ".join(dict.fromkeys(part[name][row] for part in parts)) for row in rows}
        for name, rows in parts[0].items()
        if all(name in part for part in parts)
    }


def _describe(world: Any, columns: Columns) -> str:
    """The note for a run on GPUs."""
    known = {name: module for (module, _), name in COLUMNS.items()}
    used = [f"{name.split(',')[0]} {frameworks()[known[name]]}" for name in columns]
    where = f"{world.size} x {world.device.name}, Triton {versions()['triton']}"
    return f"\nGPU columns: {', '.join([where, *used])}.\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.framework_table")
    parser.add_argument("printed", type=Path, nargs="?", help="put this table into README.md")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    if args.printed:
        readme.write_text(replaced(text, args.printed.read_text()))
        return
    from mpi4py import MPI

    with tdx.init() as world:
        found = _agreed(MPI.COMM_WORLD.allgather(_found(world)))
        if world.rank == 0:
            kept, note = columns_of(text), _note(text)
            if world.backend != "host":  # the note is about this run alone
                host = [name for (_, backend), name in COLUMNS.items() if backend == "host"]
                kept = {name: kept[name] for name in kept if name in host}
                note = _describe(world, found)
            sys.stdout.write(table(kept | found, note))


if __name__ == "__main__":
    main()
