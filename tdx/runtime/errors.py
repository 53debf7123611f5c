"""Every exception tdx raises. Each derives from TdxError and from the closest built-in."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "Closed",
    "CollectiveMismatch",
    "DriverError",
    "DtypeError",
    "HeapExhausted",
    "InvalidArgument",
    "PeerLost",
    "PeerTimeout",
    "TdxError",
    "Unsupported",
]


class TdxError(Exception):
    """Base of all errors of tdx.

    Attributes
    ----------
    origin : tuple[int, str], optional
        Where other ranks failed first: the world rank of the first, and what it said.
    """

    origin: tuple[int, str] | None = None


class InvalidArgument(TdxError, ValueError):
    """A value the call cannot take: the message names the value, the limit and the remedy."""


class DtypeError(TdxError, TypeError):
    """An element type the call cannot take."""


class HeapExhausted(TdxError, MemoryError):
    """Memory is exhausted.

    If the symmetric heap can neither hold a request nor grow: on every rank. For local arrays,
    fresh results and copies: on this rank only.
    """


class Unsupported(TdxError, NotImplementedError):
    """Something this backend, platform or version does not offer."""


class Closed(TdxError, RuntimeError):
    """The world, array, plan or graph was closed or freed before this call."""


class DriverError(TdxError, RuntimeError):
    """The device, its driver or a running kernel failed."""


class CollectiveMismatch(TdxError, RuntimeError):
    """Ranks made different calls where all must make the same one.

    Attributes
    ----------
    calls : dict[int, str]
        World rank -> the call it made (or why it refused to make one).
    """

    def __init__(self, message: str, calls: dict[int, str] | None = None):
        super().__init__(message)
        self.calls = dict(calls or {})


class PeerLost(TdxError, ConnectionError):
    """One or more ranks are gone.

    Attributes
    ----------
    ranks : tuple[int, ...]
        World ranks that are gone.
    rank, peer : int
        As those of PeerTimeout: the own world rank, and the lowest of `ranks` (-1: not known).
    """

    def __init__(
        self,
        message: str,
        ranks: Sequence[int] = (),
        *,
        rank: int = -1,
        origin: tuple[int, str] | None = None,
    ):
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.rank = rank
        self.peer = min(self.ranks, default=-1)
        self.origin = origin


class PeerTimeout(TdxError, TimeoutError):
    """A wait for a peer passed its deadline. Final: further calls raise it too; see World.recover.

    Attributes
    ----------
    rank, peer : int
        World ranks that waited and that did not answer (-1: not known).
    operation, signal : str
        What was running and the name of the awaited signal. For a kernel of the user's the
        operation is the kernel's name on the host tier, and "kernel" on a GPU.
    expected, seen : int
        Value waited for and value found at the deadline.
    call_number : int
        How often the operation had been called (0: not known).
    location : str
        "file:line" of the last call of the operation, or on the host tier of the launch of
        the user's kernel ("" if not known).
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        peer: int = -1,
        operation: str = "",
        signal: str = "",
        expected: int = 0,
        seen: int = 0,
        call_number: int = 0,
        location: str = "",
        origin: tuple[int, str] | None = None,
    ):
        super().__init__(message)
        self.origin = origin
        self.rank = rank
        self.peer = peer
        self.operation = operation
        self.signal = signal
        self.expected = expected
        self.seen = seen
        self.call_number = call_number
        self.location = location
