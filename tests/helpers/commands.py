"""Running `tdx` and Python in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ROOT", "run_tdx", "tdx_environment"]

ROOT = Path(__file__).parents[2]


def tdx_environment(**changes: str) -> dict[str, str]:
    """The environment with this checkout importable, and the changes.

    On the host tier, also where there are GPUs, unless TDX_BACKEND is set: rank cases and examples
    set it to what pytest's --tdx-backend says. Products are those of tdx unless a test asks cuBLAS.
    """
    earlier = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([earlier] if earlier else [])])
    return {"TDX_BACKEND": "host", "TDX_CUBLAS": "0"} | os.environ | {"PYTHONPATH": path} | changes


def run_tdx(
    *words: str, cwd: Path | None = None, timeout_s: float = 60.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python -m tdx words...`, its output captured as text; does not raise for exit codes."""
    command: Sequence[str] = [sys.executable, "-m", "tdx", *words]
    return subprocess.run(
        command,
        cwd=cwd,
        env=tdx_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
