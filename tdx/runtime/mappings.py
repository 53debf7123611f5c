"""What this process has mapped into its addresses, as the kernel tells it."""

from __future__ import annotations

import os
from typing import NamedTuple

__all__ = ["Mapping", "mappings"]


class Mapping(NamedTuple):
    """A line of /proc/self/maps.

    Attributes
    ----------
    start, end : int
        Addresses; the last one is not in it.
    rights : str
        "rwxs" or "rwxp" (shared or private), with "-" for what is not allowed.
    offset : int
        Byte of the file at `start`.
    device, inode : int
        Of the file, as `os.stat` gives them; 0: there is none.
    file : str
        Its path, followed by " (deleted)" when it has none any more.
    """

    start: int
    end: int
    rights: str
    offset: int
    device: int
    inode: int
    file: str


def mappings() -> list[Mapping]:
    """All mappings of this process, in order of addresses."""
    found = []
    with open("/proc/self/maps") as file:
        for line in file:
            span, rights, offset, device, inode, *path = line.split(maxsplit=5)
            start, end = (int(text, 16) for text in span.split("-"))
            major, minor = (int(text, 16) for text in device.split(":"))
            name = path[0].rstrip("\n") if path else ""
            number = os.makedev(major, minor)
            found.append(Mapping(start, end, rights, int(offset, 16), number, int(inode), name))
    return found
