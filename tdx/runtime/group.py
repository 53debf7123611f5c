"""Groups of ranks with their own numbering: the world itself, and teams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from tdx import abi
from tdx.runtime.agreement import agree
from tdx.runtime.checks import as_int
from tdx.runtime.errors import InvalidArgument, TdxError, Unsupported
from tdx.runtime.pickling import refuse_pickling
from tdx.runtime.signals import Handle
from tdx.runtime.triton_driver import constexpr

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = ["Group", "Outsider", "Team", "agree_on_team", "check_rank", "make_handle"]


def make_handle(world: World, rank: int, size: int, index: int) -> Handle:
    """The handle of a group in which this process has number `rank`."""
    return Handle(
        world.faults.control,
        abi.pack_handle(rank, size, index),
        world.window.stride,
        constexpr(index != 0),
    )


def check_rank(rank: Any, size: int, what: str) -> int:
    """`rank` as an int within 0..size-1, else InvalidArgument."""
    whole = as_int(rank)
    if whole is None:
        raise InvalidArgument(f"{what} must be an int, got {rank!r}")
    if not 0 <= whole < size:
        raise InvalidArgument(f"{what} {rank} is outside 0..{size - 1}")
    return whole


def agree_on_team(world: World, ranks: Any, teams: int) -> tuple[int, ...]:
    """The checked world ranks of a new team, where there are `teams` with the world. Collective.

    Raises InvalidArgument, Unsupported; CollectiveMismatch if ranks give different ones.
    """
    members: tuple[int, ...] = ()
    refused: TdxError | None = None
    try:
        if not isinstance(ranks, Iterable):
            raise InvalidArgument(f"a team is given by its world ranks, got {ranks!r}")
        members = tuple(check_rank(rank, world.size, "team rank") for rank in ranks)
        if not members or len(set(members)) != len(members):
            raise InvalidArgument(f"a team needs one or more different ranks, got {members}")
        if teams > abi.MAX_TEAMS:
            raise Unsupported(
                f"a world has at most {abi.MAX_TEAMS} teams, which stay until it is closed: make "
                "each once, and use it again"
            )
    except TdxError as error:
        refused = error
    if refused is not None:
        world.channels.agree("team", refused)
    agree(world, f"team({list(members)})")
    return members


class Group:
    """Ranks that call operations together.

    Attributes
    ----------
    rank, size : int
        Number of this process in the group, and how many there are.
    ranks : tuple[int, ...]
        World ranks, in group order.
    index : int
        0 for the world, else the team's number.
    handle : Handle
        The kernel argument through which device functions know the group.
    world : World
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    index: int
    handle: Handle
    world: World

    def __reduce__(self) -> Any:
        return refuse_pickling(self)

    def check_rank(self, rank: int, what: str = "rank") -> int:
        """`rank` as an int within the group, else InvalidArgument."""
        return check_rank(rank, self.size, what)


class Outsider:
    """What `world.team` gives a rank that is not in the team: false, and refused as `team=`."""

    def __init__(self, rank: int, ranks: tuple[int, ...]):
        self.rank = rank
        self.ranks = ranks

    def __bool__(self) -> Literal[False]:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InvalidArgument(f"{self!r} has no {name}: ask `if team:` before")

    def __repr__(self) -> str:
        return f"<no tdx.Team: rank {self.rank} is not one of {self.ranks}>"


class Team(Group):
    """A subset of the world's ranks. Made by `world.team`; accepted wherever `team=` is."""

    def __init__(self, world: World, ranks: tuple[int, ...], index: int):
        self.world = world
        self.ranks = ranks
        self.rank = ranks.index(world.rank)
        self.size = len(ranks)
        self.index = index
        self.handle = make_handle(world, self.rank, self.size, index)

    def __repr__(self) -> str:
        return f"<tdx.Team {self.index}: ranks {self.ranks}>"
