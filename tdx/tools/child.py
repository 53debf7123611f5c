"""Python processes that find out what must not be found out in this one."""

from __future__ import annotations

import sys
from pathlib import Path

import tdx

__all__ = ["python_words"]

_ROOT = str(Path(tdx.__file__).parents[1])
_THIS_TDX = f"import sys; sys.path[:0] = [{_ROOT!r}] * ({_ROOT!r} not in sys.path)\n"


def python_words(code: str, python: str = sys.executable) -> list[str]:
    """A command that runs `code`, with this tdx.

    Not what lies in the current folder, which may be called as a module of the standard library.
    """
    return [python, "-P", "-c", _THIS_TDX + code]
