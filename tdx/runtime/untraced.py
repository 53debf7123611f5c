"""tdx stays out of what `torch.compile` compiles: its calls run as they are, between graphs.

The compiler's front end, Dynamo, follows every call into the package it leads to, and runs the code
on tensors without memory. tdx asks for the addresses of tensors. Dynamo keeps a list of packages
that it does not follow. The list can be reached only by importing Dynamo, which takes seconds, and
marks on functions do not reach the functions that they call. So tdx waits until the program
imports Dynamo, and then adds itself.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["stay_untraced"]

_RULES = "torch._dynamo.trace_rules"
_PACKAGE = __name__.partition(".")[0]


def stay_untraced() -> None:
    """Put tdx on Dynamo's list, now or when that is loaded. Imports nothing, raises nothing."""
    if _RULES not in sys.modules:
        sys.meta_path.insert(0, _Watch())
        return
    with contextlib.suppress(Exception):
        _add_to(importlib.import_module(_RULES))  # waits for another thread that is loading it


def _add_to(rules: ModuleType) -> None:
    # Not a public interface. Without it tdx works as well, outside of what is compiled.
    with contextlib.suppress(Exception):
        rules.add(_PACKAGE)


class _Watch:
    """A finder that finds nothing of its own, and sees when Dynamo's list gets loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the finders behind this one have found, if it is the module with the list."""
        if name != _RULES:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                with contextlib.suppress(Exception):
                    self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: object) -> None:
        """Come after the loader's `exec_module`, once."""
        load = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[attr-defined]
            load(module)
            _add_to(module)
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)  # nobody walks the list here, as they do in find_spec

        loader.exec_module = exec_module  # type: ignore[attr-defined]
