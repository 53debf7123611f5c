"""What an error in a kernel takes from the stack: the user's own lines, and the verb in it."""

from __future__ import annotations

import sys
from collections.abc import Container
from types import FrameType, TracebackType

__all__ = ["running_verb", "users_part"]

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


def running_verb(names: Container[str]) -> str:
    """The innermost function of tdx.language with one of the names that runs; "" for none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("tdx.language.") and frame.f_code.co_name in names:
            return frame.f_code.co_name
        frame = frame.f_back
    return ""
