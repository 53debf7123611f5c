"""What every rank of a test job runs: cases, one after another, as the pytest side asks for them.

Arguments: socket name, backend. Requests and results are JSON lines.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import socket
import sys
import time
import traceback
import zlib
from typing import Any

import numpy as np
import pytest

from tests.helpers.cases import expand

_MAX_LOCAL = 400  # characters of a variable's value in a failure


class Runner:
    """One rank's state: its world, made when a case first asks for it."""

    def __init__(self, backend: str):
        self.backend = backend
        self._world: Any = None

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run the case; outcome "passed", "skipped" or "failed" with its text."""
        started = time.perf_counter()
        try:
            self._call(request)
            outcome, text = "passed", ""
        except pytest.skip.Exception as skipped:
            outcome, text = "skipped", str(skipped)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and pytest.fail as well
            outcome, text = "failed", describe(error)
        sys.stdout.flush()
        sys.stderr.flush()
        seconds = time.perf_counter() - started
        return {"case": request["id"], "outcome": outcome, "text": text, "seconds": seconds}

    def _call(self, request: dict[str, Any]) -> None:
        case = getattr(importlib.import_module(request["module"]), request["name"])
        arguments = dict(expand(case))[request["parameters"]]
        wanted = inspect.signature(case).parameters
        if "rng" in wanted:
            arguments["rng"] = np.random.default_rng(zlib.crc32(request["id"].encode()))
        if "backend" in wanted:
            arguments["backend"] = self.backend
        if "comm" in wanted:
            from mpi4py import MPI

            arguments["comm"] = MPI.COMM_WORLD
        if "world" not in wanted:
            case(**arguments)
            return
        if self._world is None:
            import tdx

            self._world = tdx.init(backend=self.backend)
        case(world=self._world, **arguments)
        self._world.synchronize()  # a fault left behind belongs to this case
        self._world.check()

    def close(self) -> None:
        if self._world is not None:
            self._world.close()


def describe(error: BaseException) -> str:
    """The traceback from the case on, then the case's local variables."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    if trace is not None:
        text += "Local variables of the case:\n"
        for name, value in trace.tb_frame.f_locals.items():
            text += f"    {name} = {_shorten(value)}\n"
    return text


def _shorten(value: Any) -> str:
    try:
        text = repr(value).replace("\n", "\n      ")
    except Exception as error:
        text = f"<repr failed: {error!r}>"
    return text if len(text) <= _MAX_LOCAL else text[:_MAX_LOCAL] + "..."


def main() -> None:
    name, backend = sys.argv[1:]
    from mpi4py import MPI

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(b"\0" + name.encode())
    runner = Runner(backend)

    def send(message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    send({"rank": MPI.COMM_WORLD.Get_rank(), "pid": os.getpid()})
    for line in connection.makefile("rb"):
        send(runner.run(json.loads(line)))
    runner.close()


if __name__ == "__main__":
    main()
