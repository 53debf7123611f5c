"""Python processes that find out what must not be found out in this one."""

from __future__ import annotations

import sys

__all__ = ["python_words"]

# a file there may be called as a module of the standard library
_FOLDER_LAST = "import os, sys; sys.path.append(os.getcwd())\n"


def python_words(code: str, python: str = sys.executable) -> list[str]:
    """A command that runs `code`; what the current folder has is found last."""
    return [python, "-P", "-c", _FOLDER_LAST + code]
