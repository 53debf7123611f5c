"""Options of `tdx bench`: what they are, and the check of their values before anything starts."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
from types import ModuleType
from typing import Any

import numpy as np

from tdx.runtime.errors import DtypeError, InvalidArgument

__all__ = ["add_arguments", "check", "sizes", "types", "words"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    import tdx.bench
    from tdx.tools import presets

    names = sorted(module.name for module in pkgutil.iter_modules(tdx.bench.__path__))
    parser.add_argument("operation", choices=names, metavar="OPERATION", help=", ".join(names))
    parser.add_argument("-n", "--ranks", type=int, help="number of ranks (default: 4, or the GPUs)")
    parser.add_argument(
        "--backend", choices=("host", "cuda", "hip"), help="where (default: GPUs if there are any)"
    )
    parser.add_argument(
        "--sizes",
        metavar="BYTES,...",
        help="of collectives: bytes as in the tables' first column, as 4096,64K,1MiB; 1KiB:1GiB is "
        "every power of two from the first to the last. Where ranks have equal parts, sizes are "
        "rounded down to whole elements of each, one at least",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="M,N,K",
        help="of products: M of all ranks, N and K of one; all_reduce_rms_norm takes M,N",
    )
    parser.add_argument(
        "--preset",
        choices=presets.PRESETS,
        help="shapes of products (default: default, on the host tier tiny)",
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        metavar="TYPE,...",
        help="element types, as bfloat16,float32: rows for each, and of several a column of their "
        "names (default bfloat16)",
    )
    parser.add_argument("--no-peers", action="store_true", help="measure tdx alone")
    parser.add_argument(
        "--all-algorithms",
        action="store_true",
        help="measure each algorithm of tdx as well as the one that is chosen, with the gap "
        "between that and the fastest",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON as well")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the times as PNG, or as what else the name ends in (needs matplotlib); each of "
        "several element types has panels of its own",
    )
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")


def words(args: argparse.Namespace) -> list[str]:
    """The same options as a command line for the ranks."""
    options = [args.operation, "--dtype", args.dtype]
    for name in ("sizes", "preset", "json", "plot", "backend"):
        if getattr(args, name):
            options += [f"--{name}", getattr(args, name)]
    options += ["--shapes", *args.shapes] if args.shapes else []
    for name in ("no_peers", "all_algorithms", "markdown"):
        options += [f"--{name.replace('_', '-')}"] * getattr(args, name)
    return options


def check(args: argparse.Namespace) -> None:
    """Raise InvalidArgument or DtypeError for values that the operation does not take.

    `args.ranks` is known. Files that are to be written are opened, and left as they were.
    """
    from tdx.tools import plot, run

    run.check_ranks(args.ranks)
    module = importlib.import_module(f"tdx.bench.{args.operation}")
    axis = module.COLUMNS[0]
    if args.all_algorithms and not hasattr(module, "ALGORITHMS"):
        raise InvalidArgument(f"--all-algorithms: {args.operation} has none to choose from")
    for name, wanted in (("sizes", "bytes"), ("shapes", "M"), ("preset", "M")):
        if getattr(args, name) is not None and axis != wanted:
            raise InvalidArgument(f"--{name}: {args.operation} does not take it; see --help")
    if args.shapes and args.preset:
        raise InvalidArgument("--shapes and --preset: give one of them")
    _check_types(args, module)
    _check_memory(args)
    if args.plot and axis not in plot.AXES:
        raise InvalidArgument(
            f"--plot {args.plot}: {args.operation} measures no sizes to draw times over; --json "
            "writes its rows"
        )
    if args.plot:
        plot.check(args.plot)
    _check_file("json", args.json, ".part")
    _check_file("plot", args.plot)


def types(args: argparse.Namespace) -> list[np.dtype[Any]]:
    """The element types to measure, each once. Raises DtypeError."""
    from tdx.runtime import dtypes

    return list(dict.fromkeys(dtypes.resolve(text.strip()) for text in args.dtype.split(",")))


def sizes(args: argparse.Namespace) -> list[int]:
    """The bytes that --sizes asks for, none if it is not given. Raises InvalidArgument."""
    texts = [] if args.sizes is None else args.sizes.split(",")
    return [nbytes for text in texts for nbytes in _size_or_range(text)]


def _check_types(args: argparse.Namespace, module: ModuleType) -> None:
    kinds = types(args)
    if len(kinds) > 1 and module.COLUMNS[0] not in ("bytes", "M"):
        raise InvalidArgument(
            f"--dtype {args.dtype}: {args.operation} measures no element types; leave it out"
        )
    taken = getattr(module, "DTYPES", None)
    for dtype in kinds:
        if taken is not None and dtype.name not in taken:
            raise DtypeError(f"--dtype {dtype}: {args.operation} takes {', '.join(taken)}")
        for nbytes in sizes(args):
            if nbytes % dtype.itemsize:
                raise InvalidArgument(
                    f"--sizes: {nbytes} bytes are no whole number of elements of {dtype}, which "
                    f"take {dtype.itemsize} each"
                )


def _check_memory(args: argparse.Namespace) -> None:
    """Raise InvalidArgument for a size or shape that no rank has the memory for.

    Counted is what every bench holds at least: an input and a result, of which one may be a rank's
    part of the other, or the operands and the result. What passes may still be too large.
    """
    from tdx.runtime.heap import format_bytes
    from tdx.tools import presets

    itemsize = max(dtype.itemsize for dtype in types(args))
    needed = {f"--sizes: {format_bytes(n)}": n + n // args.ranks for n in sizes(args)}
    for shape in presets.given(args.shapes or (), args.operation, args.ranks):
        m, n, k = (*shape, 0)[:3]
        text = ",".join(map(str, shape))
        needed[f"--shapes {text}"] = (m * n + m * k + n * k) * itemsize
    if not needed:
        return
    what, most = max(needed.items(), key=lambda item: item[1])
    there = _memory(args)
    if there is not None and most > there:
        raise InvalidArgument(
            f"{what} takes {format_bytes(most)} of each of {args.ranks} ranks, which may use "
            f"{format_bytes(there)}; take less, or fewer ranks"
        )


def _memory(args: argparse.Namespace) -> int | None:
    """Bytes that arrays of a rank may take; None where it is not known."""
    from tdx.runtime.backends import choose
    from tdx.runtime.driver.host.memory import available_bytes
    from tdx.tools import facts

    if choose(args.backend) == "host":
        return available_bytes() // 2 // args.ranks  # as the host tier; NumPy's take as much
    gpus = facts.devices().get("gpus", ())
    return min((int(gpu["memory_bytes"]) for gpu in gpus), default=None)


def _check_file(name: str, path: str | None, more: str = "") -> None:
    """Raise InvalidArgument unless the file can be written; first it is one with `more` behind."""
    if path is None:
        return
    if not path:
        raise InvalidArgument(f"--{name} {path!r}: give the name of a file")
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise InvalidArgument(f"--{name} {path}: there is no such folder")
    # a folder; a device, which a file would replace
    if os.path.exists(path) and not os.path.isfile(path):
        raise InvalidArgument(f"--{name} {path}: that is no regular file; give the name of one")
    first = path + more
    is_new = not os.path.exists(first)
    try:
        with open(first, "ab"):
            pass
    except OSError as error:
        raise InvalidArgument(
            f"--{name} {path}: cannot be written ({error.strerror}); give another place"
        ) from None
    if is_new:
        os.unlink(first)


def _size_or_range(text: str) -> list[int]:
    """Of a size, or of a range such as 1KiB:1GiB the powers of two in it."""
    first, *last = map(_bytes, text.split(":", 1))
    if not last:
        return [first]
    if first.bit_count() > 1 or last[0].bit_count() > 1 or first > last[0]:
        raise InvalidArgument(
            f"--sizes: {text!r} is no range: give two powers of two, the smaller one first, as "
            "1KiB:1GiB"
        )
    return [1 << n for n in range(first.bit_length() - 1, last[0].bit_length())]


def _bytes(text: str) -> int:
    """A size such as 65536, 64K or 64KiB."""
    found = re.fullmatch(r"(\d+) ?([KMG]?)(?:iB|B)?", text.strip(), re.IGNORECASE)
    if found is None or not int(found[1]):
        raise InvalidArgument(
            f"--sizes: {text!r} is no size: give bytes > 0, as 65536, 64K or 64KiB, with commas "
            "between them, or a range as 1KiB:1GiB"
        )
    return int(found[1]) << 10 * " KMG".index(found[2].upper() or " ")
