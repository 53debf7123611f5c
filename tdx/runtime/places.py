"""Where in the user's program a call is made."""

from __future__ import annotations

import sys

__all__ = ["caller"]


def caller() -> str:
    """ "file:line" of the innermost frame outside of tdx, for messages."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__"))[:4] == "tdx." and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
