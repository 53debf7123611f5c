"""All settings in one object. The environment is read once, here, when tdx is imported."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from .checks import as_int
from .errors import InvalidArgument

__all__ = ["Config", "config"]


class _Setting(NamedTuple):
    kind: type
    default: Any
    meaning: str
    takes: str  # as an error puts it


_BOOL = "1, true, yes, on, or 0, false, no, off"
_INT = "an integer, as 17 or 0x11"
_MOST_MULTIPROCESSORS = 1024

_SETTINGS: dict[str, _Setting] = {
    "backend": _Setting(
        str, "",
        "what `tdx.init()` uses when no `backend=` is given, `cuda` or `host`; empty: "
        "what is there",
        "cuda, hip or host",
    ),
    "cublas": _Setting(
        bool, True, "let cuBLAS multiply where it is installed and faster, unless `library=` says",
        _BOOL,
    ),
    "debug": _Setting(
        bool, False,
        "check collective calls and symmetric arrays on all ranks at once; show whole errors of "
        "kernels", _BOOL,
    ),
    "host_multiprocessors": _Setting(
        int, 8, "programs of one kernel that are resident at once, host tier",
        f"an integer from 1 to {_MOST_MULTIPROCESSORS}",
    ),
    "host_seed": _Setting(
        int, 0, "not 0: the host tier resumes programs in a shuffled order, with pauses", _INT
    ),
    "share_gpu": _Setting(bool, False, "let several ranks use one GPU", _BOOL),
    "quiet": _Setting(bool, False, "do not say which backend was chosen", _BOOL),
    "launch_blocking": _Setting(bool, False, "on the host tier wait for each kernel", _BOOL),
}  # fmt: skip


class Config:
    """Settings of tdx; each may be set as `TDX_<NAME>` in the environment before the import.

    An unknown name raises AttributeError, a value of the wrong type TypeError. A variable that
    cannot be read raises InvalidArgument where the setting is first used, `tdx.init` included:
    the import itself never fails.
    """

    __slots__ = tuple(_SETTINGS)

    backend: str
    cublas: bool
    debug: bool
    host_multiprocessors: int
    host_seed: int
    quiet: bool
    share_gpu: bool
    launch_blocking: bool

    def __init__(self) -> None:
        for name, setting in _SETTINGS.items():
            text = os.environ.get(_variable(name))
            value = setting.default if text is None else _parse(setting.kind, text)
            if value is not None and _fits(name, value):
                object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Only for what __init__ left unset."""
        _check_name(name)
        text = os.environ.get(_variable(name), "")
        raise InvalidArgument(
            f"{_variable(name)}={text!r} in the environment: it takes {_SETTINGS[name].takes}; "
            f"correct it, or set tdx.config.{name}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        _check_name(name)
        kind = _SETTINGS[name].kind
        given = as_int(value) if kind is int else value
        if not isinstance(given, kind):
            raise TypeError(f"tdx.config.{name} takes {kind.__name__}, got {value!r}")
        if not _fits(name, given):
            raise ValueError(
                f"tdx.config.{name} must be in 1..{_MOST_MULTIPROCESSORS}, got {value}"
            )
        object.__setattr__(self, name, given)

    def check(self) -> None:
        """Raise InvalidArgument for the first variable of the environment that has a bad value."""
        for name in _SETTINGS:
            getattr(self, name)

    def __repr__(self) -> str:
        return "Config(" + ", ".join(f"{n}={getattr(self, n)!r}" for n in _SETTINGS) + ")"


def _variable(name: str) -> str:
    return f"TDX_{name.upper()}"


def _check_name(name: str) -> None:
    if name not in _SETTINGS:
        names = ", ".join(_SETTINGS)
        raise AttributeError(f"tdx.config has no setting {name!r}; it has {names}")


def _fits(name: str, value: Any) -> bool:
    """Whether a value of the right type is within the setting's limits."""
    return name != "host_multiprocessors" or 1 <= value <= _MOST_MULTIPROCESSORS


def _parse(kind: type, text: str) -> Any:
    """The value that the text stands for; None: it stands for none."""
    if kind is bool:
        known = {"1": True, "true": True, "yes": True, "on": True}
        return (known | dict.fromkeys(("", "0", "false", "no", "off"), False)).get(text.lower())
    if kind is int:
        try:
            return int(text, 0)
        except ValueError:
            return None
    return text


config = Config()
