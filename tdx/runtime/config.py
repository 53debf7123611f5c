"""All settings in one object. The environment is read once, here, when tdx is imported."""

from __future__ import annotations

import contextlib
import os
from typing import Any

__all__ = ["Config", "config"]

_SETTINGS: dict[str, tuple[type, Any, str]] = {
    "backend": (str, "", "what tdx.init() uses when no backend= is given; empty: what is there"),
    "debug": (bool, False, "check every collective call on all ranks at the call"),
    "host_multiprocessors": (int, 8, "programs of one kernel that are resident at once, host tier"),
    "host_seed": (int, 0, "not 0: the order in which the host tier resumes programs is shuffled"),
    "share_gpu": (bool, False, "let several ranks use one GPU"),
    "quiet": (bool, False, "do not say which backend was chosen"),
    "launch_blocking": (bool, False, "wait for each kernel where it is launched"),
}


class Config:
    """Settings of tdx; each may be set as `TDX_<NAME>` in the environment before the import.

    An unknown name raises AttributeError, a value of the wrong type TypeError.
    """

    __slots__ = tuple(_SETTINGS)

    backend: str
    debug: bool
    host_multiprocessors: int
    host_seed: int
    quiet: bool
    share_gpu: bool
    launch_blocking: bool

    def __init__(self) -> None:
        for name, (kind, default, _) in _SETTINGS.items():
            text = os.environ.get(f"TDX_{name.upper()}")
            setattr(self, name, default if text is None else _parse(name, kind, text))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _SETTINGS:
            names = ", ".join(_SETTINGS)
            raise AttributeError(f"tdx.config has no setting {name!r}; it has {names}")
        kind = _SETTINGS[name][0]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"tdx.config.{name} takes {kind.__name__}, got {value!r}")
        if name == "host_multiprocessors" and value not in range(1, 1025):
            raise ValueError(f"tdx.config.{name} must be in 1..1024, got {value}")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return "Config(" + ", ".join(f"{n}={getattr(self, n)!r}" for n in _SETTINGS) + ")"


def _parse(name: str, kind: type, text: str) -> Any:
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("", "0", "false", "no", "off"):
            return False
    elif kind is int:
        with contextlib.suppress(ValueError):
            return int(text, 0)
    elif kind is str:
        return text
    raise ValueError(f"TDX_{name.upper()}={text!r} is not a {kind.__name__}")


config = Config()
