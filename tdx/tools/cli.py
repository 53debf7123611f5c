"""The `tdx` command: one module of `tdx.tools` per subcommand, imported when it is chosen.

A subcommand's module has `add_arguments(parser)` and `main(args) -> int` (the exit code).
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from tdx import __version__
from tdx.runtime.config import config
from tdx.runtime.errors import TdxError

__all__ = ["main"]

_COMMANDS = {  # name -> (module, help)
    "run": ("tdx.tools.run", "run a script on N ranks of this machine"),
    "demo": ("tdx.tools.demo", "a gated MLP on several ranks, checked"),
    "bench": ("tdx.tools.bench", "measure an operation"),
    "info": ("tdx.tools.info", "versions, backend and limits"),
    "doctor": ("tdx.tools.doctor", "check this machine, measure its links"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `tdx` command with `argv` (default: sys.argv[1:]); returns the exit code.

    0: success. 2: wrong usage, or a TdxError, whose text goes to stderr. 141: nobody reads stdout.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    chosen = argv[0] if argv and argv[0] in _COMMANDS else None
    parser = argparse.ArgumentParser(
        prog="tdx", description="Distributed Triton kernels for MPI programs."
    )
    parser.add_argument("--version", action="version", version=f"tdx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    module = None
    for name, (path, text) in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == chosen:
            module = importlib.import_module(path)
            module.add_arguments(sub)
    args = parser.parse_args(argv)
    assert module is not None  # argparse has ended the program otherwise
    try:
        config.check()
        code: int = module.main(args)
        sys.stdout.flush()
        return code
    except TdxError as error:
        print(f"tdx {chosen}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # nobody reads the output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
