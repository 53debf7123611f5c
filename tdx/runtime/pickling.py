"""What a world makes belongs to its process: pickle and copy are told so."""

from __future__ import annotations

from typing import Any

__all__ = ["refuse_pickling"]


def refuse_pickling(thing: object) -> Any:
    """The `__reduce__` of a class whose objects hold memory, sockets or handles of a device."""
    raise TypeError(
        f"a tdx {type(thing).__name__} belongs to its process and cannot be pickled or copied: "
        "each process makes its own, beginning with tdx.init; pass numbers and x.numpy() on, and "
        "to a kernel what it uses as an argument, not as a global"
    )
