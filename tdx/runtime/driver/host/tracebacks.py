"""What an error in a kernel shows of the stack: the user's own lines, not the interpreter's."""

from __future__ import annotations

from types import TracebackType

__all__ = ["users_part"]

_INTERNAL = ("tdx", "triton", "numpy")  # packages


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of packages that run a kernel, and of generated code."""
    if trace is None:
        return None
    rest = users_part(trace.tb_next)
    frame = trace.tb_frame
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    if package in _INTERNAL or frame.f_code.co_filename.startswith("<"):
        return rest
    return TracebackType(rest, frame, trace.tb_lasti, trace.tb_lineno)
