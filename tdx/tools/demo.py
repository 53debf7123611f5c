"""`tdx demo`: a gated MLP on several ranks, checked against NumPy in float64.

    y = (silu(x . w_gate) * (x . w_up)) . w_down

x, (tokens, hidden), is split over the ranks by rows, w_gate and w_up, (hidden, intermediate), by
columns, w_down, (intermediate, hidden), by rows. This module reads the command line, checks it
and starts the ranks as `tdx run` does; what a rank does is in demo_rank.py.

Exit code: 0 when the result is right, 1 when it is not, 2 for a wrong call or a wrong file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import zipfile
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tdx.abi import MAX_RANKS
from tdx.runtime.backends import BACKENDS, amd_gpus, choose, nvidia_gpus
from tdx.runtime.config import config
from tdx.runtime.errors import InvalidArgument, TdxError
from tdx.tools import run

__all__ = ["Settings", "add_arguments", "load", "main"]

ARRAYS = ("x", "w_gate", "w_up", "w_down")
_HOST_RANKS = 4
_MOST_GPU_RANKS = 4
_SIZES = {  # tokens, hidden, intermediate: Llama's proportions
    "host": (256, 256, 896),
    "gpu": (8192, 4096, 14336),
}


@dataclass(frozen=True)
class Settings:
    """What the ranks are told.

    tokens, hidden, intermediate: sizes of the MLP. dtype: in which it is computed. input, output:
    files, "" for none.
    """

    tokens: int
    hidden: int
    intermediate: int
    dtype: str
    seed: int
    input: str
    output: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a gated MLP, y = (silu(x w_gate) * (x w_up)) w_down, on several ranks, with its "
        "communication hidden behind the matmuls, and check it against NumPy in float64."
    )
    parser.add_argument("-n", "--ranks", type=int, help="number of ranks (default: 4, or the GPUs)")
    parser.add_argument("--backend", choices=BACKENDS, help="default: the GPUs, if tdx can use two")
    parser.add_argument(
        "--input",
        metavar="FILE.npz",
        help="x (tokens, hidden), w_gate and w_up (hidden, intermediate), w_down (intermediate, "
        "hidden); default: random numbers",
    )
    parser.add_argument("--output", metavar="FILE.npz", help="write the result to this file, as y")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default: 0)")
    for name in ("tokens", "hidden", "intermediate"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="size, without --input")


def main(args: argparse.Namespace) -> int:
    """Check the arguments and run the demo; returns the exit code."""
    backend, ranks = _place(args.backend, args.ranks)
    settings = _settings(args, backend, ranks)
    job = argparse.Namespace(
        ranks=ranks,
        backend=backend,
        timeout=None,
        keep_going=False,
        no_prefix=True,
        module=["tdx.tools.demo_rank", json.dumps(asdict(settings))],
        script=[],
    )
    print(f"starting {ranks} rank{'s' * (ranks > 1)}", flush=True)
    return run.main(job)


def _place(backend: str | None, ranks: int | None) -> tuple[str, int]:
    """Backend and number of ranks; says why when it is not the GPUs."""
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        raise InvalidArgument(f"-n {ranks}: the number of ranks must be in 1..{MAX_RANKS}")
    if backend is not None or config.backend:
        backend = choose(backend)
    else:
        problem = _gpu_problem()
        backend = "host" if problem else "cuda"
        if problem:
            print(f"{problem}\nRunning on the host tier: one CPU process for each rank.")
    if backend == "host":
        return backend, ranks or _HOST_RANKS
    gpus = nvidia_gpus() if backend == "cuda" else amd_gpus()
    if ranks is not None and ranks > gpus:
        raise InvalidArgument(
            f"-n {ranks}: this machine has {gpus} GPU(s), one for each rank; pass -n {gpus} or "
            "--backend host"
        )
    return backend, ranks or min(_MOST_GPU_RANKS, gpus)


def _gpu_problem() -> str:
    """Why the demo cannot use GPUs, with what to do; empty when it can."""
    nvidia, amd = nvidia_gpus(), amd_gpus()
    if nvidia == 0 and amd == 0:
        return "No GPU was found; the demo uses GPUs where two or more can be seen."
    if nvidia < 2 and amd < 2:
        return "One GPU was found, the demo needs two or more: let it see more of them."
    try:
        choose("cuda" if nvidia >= 2 else "hip")
    except TdxError as error:
        return f"{max(nvidia, amd)} GPUs were found, but tdx cannot use them: {error}"
    if nvidia < 2 or importlib.util.find_spec("cuda") is None:
        extra = "cuda13" if nvidia >= 2 else "hip"
        return (
            f"{max(nvidia, amd)} GPUs were found, but no Python binding of their driver: "
            f'pip install "tdx-kernels[{extra}]"'
        )
    return ""


def _settings(args: argparse.Namespace, backend: str, ranks: int) -> Settings:
    given = (args.tokens, args.hidden, args.intermediate)
    if args.input is not None:
        if any(n is not None for n in given):
            raise InvalidArgument(
                "--tokens, --hidden and --intermediate come from the --input file"
            )
        x, w_gate, _, _ = load(args.input)
        sizes = (*x.shape, w_gate.shape[1])
    else:
        sizes = _sizes(given, "host" if backend == "host" else "gpu", ranks)
    _check_divisible(sizes[0], "tokens", ranks)
    _check_divisible(sizes[2], "intermediate", ranks)
    if args.seed < 0:
        raise InvalidArgument(f"--seed {args.seed}: must be 0 or more")
    return Settings(
        *sizes,
        dtype="float32" if backend == "host" else "bfloat16",
        seed=args.seed,
        input=os.path.abspath(args.input) if args.input else "",
        output=_writable(args.output) if args.output else "",
    )


def _sizes(given: tuple[int | None, ...], kind: str, ranks: int) -> tuple[int, int, int]:
    """Sizes as given, else the default, rounded up where the ranks must divide it."""
    sizes = []
    for name, size, default in zip(("tokens", "hidden", "intermediate"), given, _SIZES[kind]):
        if size is not None and size < 1:
            raise InvalidArgument(f"--{name} {size}: must be 1 or more")
        if size is None:
            size = default if name == "hidden" else -(-default // ranks) * ranks
        sizes.append(size)
    return sizes[0], sizes[1], sizes[2]


def _check_divisible(size: int, name: str, ranks: int) -> None:
    if size % ranks:
        fitting = max(n for n in range(1, ranks + 1) if size % n == 0)
        raise InvalidArgument(
            f"{name}={size} is no multiple of the {ranks} ranks; pass -n {fitting}, or "
            f"{name} that {ranks} divides"
        )


def _writable(path: str) -> str:
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or os.path.isdir(path):
        raise InvalidArgument(f"--output {path}: cannot write a file there; pass another path")
    return os.path.abspath(path)


def load(path: str) -> tuple[np.ndarray[Any, Any], ...]:
    """The arrays x, w_gate, w_up, w_down of an NPZ file, in their own floating-point type.

    Raises InvalidArgument when the file or a shape, dtype or value in it is not usable.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it is not an NPZ file")
            missing = [name for name in ARRAYS if name not in file]
            if missing:
                found = ", ".join(file.files) or "nothing"
                raise ValueError(f"it lacks {', '.join(missing)}; it holds {found}")
            arrays = tuple(file[name] for name in ARRAYS)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidArgument(
            f"--input {path}: {error}. Expected an NPZ file with {', '.join(ARRAYS)}, as "
            "numpy.savez writes it"
        ) from error
    for name, array in zip(ARRAYS, arrays, strict=True):
        if array.ndim != 2 or 0 in array.shape or array.dtype.kind != "f":
            raise InvalidArgument(
                f"--input {path}: {name} must be a floating-point matrix, got shape {array.shape}, "
                f"dtype {array.dtype}"
            )
        if not np.isfinite(array).all():
            raise InvalidArgument(f"--input {path}: {name} holds values that are not finite")
    _check_shapes(path, arrays)
    return arrays


def _check_shapes(path: str, arrays: tuple[np.ndarray[Any, Any], ...]) -> None:
    x, w_gate, w_up, w_down = (array.shape for array in arrays)
    hidden, intermediate = x[1], w_gate[1]
    expected = ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))
    if (w_gate, w_up, w_down) != expected:
        raise InvalidArgument(
            f"--input {path}: with x of shape {x} and {intermediate} columns of w_gate, the shapes "
            f"of w_gate, w_up, w_down must be {', '.join(map(str, expected))}; got {w_gate}, "
            f"{w_up}, {w_down}"
        )
