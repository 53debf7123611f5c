"""Which ranks share a host, and in which place each is there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tdx import abi
from tdx.runtime.comm import Comm, announced_place
from tdx.runtime.errors import InvalidArgument, Unsupported
from tdx.runtime.outcomes import describe_ranks

__all__ = ["Topology", "discover", "host_identity"]


@dataclass(frozen=True)
class Topology:
    """The place of one rank.

    Attributes
    ----------
    rank, size : int
        This rank and the number of ranks.
    host : str
        Name of this rank's host.
    local_rank, local_size : int
        This rank's number among the ranks of its host, and how many those are.
    place : int
        This process's number among all that its launcher started on the host, of which other
        worlds may have some; `local_rank` where the launcher does not tell.
    """

    rank: int
    size: int
    host: str
    local_rank: int
    local_size: int
    place: int


def host_identity() -> str:
    """Text that is equal for two processes of one host and of one container only.

    The boot id tells hosts of equal name apart; the name tells containers of one host apart.
    Whether the processes reach each other is found out when they connect.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname() or os.uname().nodename}\n{boot}"


def discover(comm: Comm, host_id: str | None = None) -> Topology:
    """Find out where the ranks run (collective).

    `host_id` replaces `host_identity()`; what stands before its first newline is the host's
    name. Raises, on every rank alike, Unsupported for more than `abi.MAX_RANKS` ranks or for
    several hosts, InvalidArgument if the communicator mixes ranks up.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    if size > abi.MAX_RANKS:
        raise Unsupported(
            f"{size} ranks: tdx connects at most {abi.MAX_RANKS}; start fewer ranks, or pass a "
            "communicator of fewer"
        )
    own = host_identity() if host_id is None else host_id
    told = announced_place()
    entries = comm.allgather(f"{rank}\n{'' if told is None else told}\n{own}".encode())
    identities: dict[str, list[int]] = {}
    places = []
    for index, entry in enumerate(entries):
        number, _, rest = entry.decode("utf-8", "replace").partition("\n")
        place, _, identity = rest.partition("\n")
        if number != str(index):
            raise InvalidArgument(
                f"comm.allgather returned the entry of rank {number[:20]!r} in place {index}: "
                "entries must be in rank order"
            )
        identities.setdefault(identity, []).append(index)
        places.append(place)
    if len(identities) > 1:
        raise Unsupported(_several_hosts(identities))
    neighbours = identities[own]
    local_rank, local_size = neighbours.index(rank), len(neighbours)
    taken = {places[each] for each in neighbours}
    # a place that ranks share is inherited: their own launcher announces none
    announced = "" not in taken and len(taken) == local_size
    at = int(places[rank]) if announced else local_rank
    return Topology(rank, size, _name(own), local_rank, local_size, at)


def _name(identity: str) -> str:
    return identity.partition("\n")[0]


def _several_hosts(identities: Mapping[str, Sequence[int]]) -> str:
    names = [_name(identity) for identity in identities]
    hosts = []
    for identity, ranks in identities.items():
        name, _, boot = identity.partition("\n")
        if names.count(name) > 1:  # only the boot id tells these apart
            name = f"{name} [{boot[:8]}]"
        hosts.append(f"{name} ({describe_ranks(ranks)})")
    return (
        f"the ranks run on {len(hosts)} hosts: {', '.join(hosts)}. tdx connects the ranks of one "
        "host for now: start all of them on one host (and in one container), or pass a "
        "communicator per host, for example MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)"
    )
