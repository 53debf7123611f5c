"""What kernels are told of the world: handles and channels, and where a signal belongs.

A handle lets device code know rank, size, stride and fault word; a channel is a set of signals
in symmetric memory with epochs kept on the device. Layouts: tdx/abi.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tdx import abi
from tdx.runtime.agreement import agree
from tdx.runtime.block import SymmetricBlock
from tdx.runtime.board import CallBoard, Entry
from tdx.runtime.checks import as_int
from tdx.runtime.errors import InvalidArgument, TdxError
from tdx.runtime.pickling import refuse_pickling

if TYPE_CHECKING:
    from tdx.runtime.array import Array
    from tdx.runtime.faults import Pointer
    from tdx.runtime.window import Window
    from tdx.runtime.world import Group, World

__all__ = ["Channel", "Handle", "Site", "Sites", "Usage", "agreed_channel", "make_channel"]

_MAX_BLOCKS = 1 << 16
_REMEMBERED = 64  # dropped blocks that faults can still be told of


class Handle(NamedTuple):
    """A kernel argument: what device functions take as `world`. See tdx/abi.py."""

    control: Pointer
    packed: int
    stride: int
    is_team: Any  # constexpr

    def __reduce__(self) -> Any:
        return refuse_pickling(self)


class Channel(NamedTuple):
    """A kernel argument: what device functions take as `channel`. See tdx/abi.py."""

    words: Array  # symmetric int32
    control: Pointer
    packed: int

    def __reduce__(self) -> Any:
        return refuse_pickling(self)


class Usage(Entry):
    """How often an operation was called, replays of graphs included, and where the last time."""

    __slots__ = ("code", "depth", "entry", "instruction")

    def __init__(self, board: CallBoard | None = None, key: int = 0, text: str = ""):
        super().__init__(board, key, text)
        self.code: CodeType | None = None
        self.instruction = 0  # where in the code, in bytes: cheaper to ask for than the line
        self.depth = 0  # so many frames of tdx are below it, the first of them in `entry`
        self.entry: CodeType | None = None

    @property
    def location(self) -> str:
        """ "file:line", or nothing."""
        if self.code is None:
            return ""
        for start, end, line in self.code.co_lines():
            if start <= self.instruction < end and line is not None:
                return f"{self.code.co_filename}:{line}"
        return self.code.co_filename

    def call_of(self, expected: int, steps: int = 1, bits: int = 32) -> int:
        """The call that waits for `expected`, of so many bits: signals of plans count their calls'
        steps.

        The host may have queued later ones since, with 8 bits fewer than 256.
        """
        behind = ((self.calls * steps - expected) & ((1 << bits) - 1)) // steps
        return self.calls - behind if behind < self.calls else self.calls


@dataclass
class Site:
    """To whom a piece of symmetric memory belongs, for messages.

    Attributes
    ----------
    operation, signal : str
    usage : Usage
        Of the operation; its calls are 0 where nobody counts.
    words_per_rank : int
        Where the words belong to the ranks of a group in turn: how many to each; else 0.
    steps : int
        By how much a call raises the words.
    bits : int
        Of a word that count.
    itemsize : int
        Bytes of a word.
    channel : (blocks, ranks), optional
        Where the words are those of a channel.
    """

    operation: str
    signal: str
    usage: Usage = field(default_factory=Usage)
    words_per_rank: int = 0
    steps: int = 1
    bits: int = 32
    itemsize: int = 4
    channel: tuple[int, int] | None = None

    def name(self, word: int) -> str:
        """What messages call the word."""
        blocks, ranks = self.channel or (0, 0)
        pad = word - abi.CHANNEL_HEADER_WORDS - blocks * abi.STATE_WORDS
        if not blocks or (word > 0 and pad < 0):
            return f"{self.signal}[{word}]"
        if word == abi.CHANNEL_GRID_COUNT:
            return f"{self.signal}[grid_barrier]"
        return f"{self.signal}[block {pad // ranks}, rank {pad % ranks}]"

    def arrived(self, word: int, seen: int) -> str:
        """For the word of a grid barrier, which has `seen`: how many programs came; else ""."""
        if self.channel is None or word != abi.CHANNEL_GRID_COUNT:
            return ""
        blocks = self.channel[0]
        low = seen & 0x7FFFFFFF  # the first program adds 2**31 - (blocks - 1), the others 1
        came = low if low < blocks else low - (1 << 31) + blocks
        return (
            f"{came} of {blocks} programs came to grid_barrier; launch exactly {blocks} programs, "
            "all resident, of which each comes"
        )


class Sites:
    """Offsets in the own heap -> the site of the block there. Blocks remove themselves.

    The last few of those are found until others take their place: kernels may still use them.
    """

    def __init__(self) -> None:
        self._sites: dict[int, tuple[int, Site]] = {}
        self._dropped: deque[tuple[int, tuple[int, Site]]] = deque(maxlen=_REMEMBERED)

    def add(self, offset: int, nbytes: int, site: Site) -> None:
        self._sites[offset] = (nbytes, site)

    def remove(self, offset: int, site: Site) -> None:
        """Take the site out, unless a later block has taken its place."""
        if self._sites.get(offset, (0, None))[1] is site:
            self._dropped.append((offset, self._sites.pop(offset)))

    def find(self, offset: int) -> tuple[Site, int] | None:
        """The site of the block that holds byte `offset`, and the index of the word there."""
        for start, (nbytes, site) in list(self._sites.items()) + list(self._dropped)[::-1]:
            if start <= offset < start + nbytes:
                return site, (offset - start) // site.itemsize
        return None

    def locate(self, address: int, window: Window) -> tuple[Site, int, str]:
        """The site and the index of the word at an address, and what messages call it."""
        rank, offset = window.rank_of(address) or (window.rank, -1)
        found = self.find(offset)
        if found is None:
            return Site("kernel", ""), 0, f"{address:#x}, which is in no symmetric array"
        site, word = found
        name = site.name(word) + ("" if rank == window.rank else f" of rank {rank}")
        return site, word, name


def _check_blocks(blocks: Any) -> int:
    """A channel's number of blocks as an int; InvalidArgument."""
    whole = as_int(blocks)
    if whole is None or not 1 <= whole <= _MAX_BLOCKS:
        raise InvalidArgument(f"a channel takes 1 to {_MAX_BLOCKS} blocks, got {blocks!r}")
    return whole


def make_channel(world: World, group: Group, blocks: int, site: Site) -> Channel:
    """Signals for `blocks` blocks of every rank of `group`, zeroed. Collective, not agreed here.

    The caller must have all ranks of the group meet before a peer's first use.
    """
    blocks = _check_blocks(blocks)
    site.channel = blocks, group.size
    words = abi.channel_words(blocks, group.size)
    array = world.allocate_runtime(group, (words,), np.dtype(np.int32), site)
    assert isinstance(array._block, SymmetricBlock)
    return Channel(array, world.faults.control, abi.pack_channel(blocks))


def agreed_channel(world: World, group: Group, blocks: int) -> Channel:
    """A channel of the user's, once all ranks of the group ask for the same. See World.channel."""
    refused: TdxError | None = None
    try:
        _check_blocks(blocks)
    except TdxError as error:
        refused = error
    if refused is not None:
        world.channels.agree("channel", refused, members=group.ranks)
    agree(group, f"channel(blocks={blocks})")
    result = make_channel(world, group, blocks, Site("kernel", f"channel({blocks})"))
    world.meet("channel", group)
    return result
