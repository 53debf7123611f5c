"""A word on stderr when `tdx.init` waits for long: MPI waits for ever, and says nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

from tdx.runtime.checks import as_float
from tdx.runtime.comm import Comm

__all__ = ["Notice"]

_DEFAULT_S = 30.0


class Notice:
    """Inside `with`, one line is written after `timeout_s` seconds, by a thread of its own.

    Where `timeout_s` is no positive number, after 30 seconds. A world of one waits for nobody, and
    gets no line.

    Attributes
    ----------
    opened : Comm or None
        The communicator, once there is one.
    """

    def __init__(self, comm: Any, timeout_s: Any):
        """`comm`, `timeout_s`: as `tdx.init` got them, unchecked."""
        seconds = as_float(timeout_s)
        valid = seconds is not None and 0 < seconds <= threading.TIMEOUT_MAX
        self.opened: Comm | None = None
        self._given = comm
        self._after_s = seconds if valid and seconds is not None else _DEFAULT_S
        self._timer = threading.Timer(self._after_s, self._write)
        self._timer.name = "tdx init notice"
        self._timer.daemon = True  # a process that ends is not held up

    def __enter__(self) -> Notice:
        with contextlib.suppress(RuntimeError):  # no more threads: peers must not wait for this one
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join(1.0)  # a fork after `init` finds no thread; but stderr may be blocked

    def _write(self) -> None:
        if self.opened is not None and self.opened.Get_size() == 1:
            return
        text = (
            f"tdx: {self._who()} is still in tdx.init after {self._after_s:g} s: every rank "
            "must call it\n"
        )
        with contextlib.suppress(Exception):  # stderr may be closed, or None
            sys.stderr.write(text)
            sys.stderr.flush()

    def _who(self) -> str:
        with contextlib.suppress(Exception):
            return f"rank {self._rank()}"
        return "a rank"

    def _rank(self) -> int:
        """This rank. Raises an exception of some type if it is not known yet."""
        if self.opened is not None:
            return self.opened.Get_rank()
        # The caller's thread is inside MPI now; another may ask only if MPI allows several.
        module = sys.modules["mpi4py.MPI"]
        if not module.Is_initialized() or module.Query_thread() != module.THREAD_MULTIPLE:
            raise LookupError
        comm = module.COMM_WORLD if self._given is None else self._given
        return int(comm.Get_rank())
