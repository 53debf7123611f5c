"""`tdx demo`: a gated MLP on several ranks, checked against NumPy in float64.

    y = (silu(x . w_gate) * (x . w_up)) . w_down

x, (tokens, hidden), is split over the ranks by rows, w_gate and w_up, (hidden, intermediate), by
columns, w_down, (intermediate, hidden), by rows. This module reads the command line, checks it
and starts the ranks as `tdx run` does; what a rank does is in demo_rank.py.

Exit code: 0 when the result is right, 1 when it is not, 2 for a wrong call or a wrong file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import zipfile
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tdx.abi import MAX_RANKS
from tdx.runtime.backends import BACKENDS, amd_gpus, choose, nvidia_gpus
from tdx.runtime.config import config
from tdx.runtime.errors import InvalidArgument, TdxError
from tdx.tools import run
from tdx.tools.child import python_words

__all__ = ["Settings", "add_arguments", "load", "main"]

ARRAYS = ("x", "w_gate", "w_up", "w_down")
_HOST_RANKS = 4
_MOST_GPU_RANKS = 4
_SIZES = {  # tokens, hidden, intermediate: Llama's proportions
    "host": (256, 256, 896),
    "gpu": (8192, 4096, 14336),
}
_OPEN_GPU = """
import sys
from tdx.runtime.driver.cuda import CudaDriver
from tdx.runtime.driver.cuda_device import probe
ranks = int(sys.argv[1])
CudaDriver(ranks - 1, ranks).close()
gpus = probe()["gpus"]
if len(gpus) < ranks:
    sys.exit("CUDA_VISIBLE_DEVICES hides some")
if any({*range(ranks)} - {n, *gpus[n]["reaches"]} for n in range(ranks)):
    sys.exit("they do not all reach each other's memory, see `nvidia-smi topo -p2p r`")
"""


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
        return backend, ranks or (_HOST_RANKS if backend == "host" else _usable_gpus(None)[0] or 1)
    usable, problem = _usable_gpus(ranks)
    if usable < min(2, ranks or 2):
        print(f"{problem}\nRunning on the host tier: one CPU process for each rank.")
        return "host", ranks or _HOST_RANKS
    if ranks is not None and ranks > usable:
        raise InvalidArgument(
            f"-n {ranks}: tdx can use {usable} GPUs here, one for each rank; pass -n {usable} or "
            f"--backend host ({problem})"
        )
    return "cuda", ranks or usable


def _usable_gpus(ranks: int | None) -> tuple[int, str]:
    """How many GPUs tdx can use, up to `ranks`; and why not more, with what to do."""
    nvidia, amd = nvidia_gpus(), amd_gpus()
    if nvidia == 0 and amd:
        try:
            choose("hip")
        except TdxError as error:
            return 0, str(error)
    if nvidia == 0:
        return 0, "No NVIDIA GPU was found; the demo uses GPUs where it finds two or more."
    problem = f"The demo needs two GPUs or more, {nvidia} was found: let it see more of them."
    for number in range(min(nvidia, ranks or _MOST_GPU_RANKS), 0, -1):
        trouble = _trouble_with_gpu(number)
        if not trouble:
            return number, problem
        problem = f"{nvidia} NVIDIA GPU(s) found, but tdx cannot use {number}: {trouble}"
    return 0, problem


def _trouble_with_gpu(number: int) -> str:
    """What goes wrong when a process of its own opens the last of `number` GPUs; empty if nothing.

    Not in this process, which must not keep a GPU's context while the ranks run.
    """
    words = [*python_words(_OPEN_GPU), str(number)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def _settings(args: argparse.Namespace, backend: str, ranks: int) -> Settings:
    given = (args.tokens, args.hidden, args.intermediate)
    if args.input is not None:
        if any(n is not None for n in given):
            raise InvalidArgument(
                "--tokens, --hidden and --intermediate come from the --input file"
            )
        x, w_gate, _, _ = load(args.input)
        (tokens, hidden), intermediate = x.shape, w_gate.shape[1]
    else:
        tokens, hidden, intermediate = _sizes(given, "host" if backend == "host" else "gpu", ranks)
    _check_divisible(tokens, intermediate, ranks)
    if args.seed < 0:
        raise InvalidArgument(f"--seed {args.seed}: must be 0 or more")
    return Settings(
        tokens,
        hidden,
        intermediate,
        dtype="float32" if backend == "host" else "bfloat16",
        seed=args.seed,
        input=os.path.abspath(args.input) if args.input else "",
        output=_writable(args.output) if args.output else "",
    )


def _sizes(given: tuple[int | None, ...], kind: str, ranks: int) -> tuple[int, int, int]:
    """Sizes as given, else the default, rounded up where the ranks must divide it."""
    sizes = []
    names = ("tokens", "hidden", "intermediate")
    for name, size, default in zip(names, given, _SIZES[kind], strict=True):
        if size is not None and size < 1:
            raise InvalidArgument(f"--{name} {size}: must be 1 or more")
        if size is None:
            size = default if name == "hidden" else -(-default // ranks) * ranks
        sizes.append(size)
    return sizes[0], sizes[1], sizes[2]


def _check_divisible(tokens: int, intermediate: int, ranks: int) -> None:
    fitting = max(n for n in range(1, ranks + 1) if tokens % n == intermediate % n == 0)
    if fitting < ranks:
        raise InvalidArgument(
            f"{ranks} ranks must divide tokens={tokens} and intermediate={intermediate}; pass "
            f"-n {fitting}, or sizes that are multiples of {ranks}"
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
        if os.path.isfile(path) and not zipfile.is_zipfile(path):
            raise ValueError("it is not an NPZ file")
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in ARRAYS if name not in file]
            if missing:
                found = ", ".join(file.files) or "nothing"
                raise ValueError(f"it lacks {', '.join(missing)}; it holds {found}")
            arrays = tuple(file[name] for name in ARRAYS)
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as error:
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
        with np.errstate(over="ignore"):
            finite = np.isfinite(array.astype(np.float32)).all()
        if not finite:
            raise InvalidArgument(f"--input {path}: {name} holds values not finite in float32")
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
