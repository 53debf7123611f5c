"""A communicator made of plain sockets, as an engine without MPI may have one.

What tdx needs of it: `Get_rank`, `Get_size`, and an `allgather` of bytes; during `tdx.init` only.
Here every rank talks to rank 0, which passes on what it gets.
"""

from __future__ import annotations

import os
import socket


class SocketComm:
    """One rank. links: rank 0 has one for each other rank, in their order; the others one to it."""

    def __init__(self, rank: int, size: int, links: list[socket.socket]):
        self.rank, self.size, self.links = rank, size, links

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def allgather(self, payload: bytes) -> list[bytes]:
        if self.rank:
            self.links[0].send(payload)
            return [self.links[0].recv(1 << 20) for _ in range(self.size)]
        parts = [payload, *(link.recv(1 << 20) for link in self.links)]
        for link in self.links:
            for part in parts:
                link.send(part)
        return parts


def fork(size: int) -> SocketComm:
    """Become `size` processes; the one that called is rank 0. Before threads or GPUs are in use."""
    kind = (socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the bounds of messages
    pairs = [socket.socketpair(*kind) for _ in range(1, size)]
    rank = next((r for r in range(1, size) if os.fork() == 0), 0)
    return SocketComm(rank, size, [pairs[rank - 1][1]] if rank else [near for near, _ in pairs])


def wait(comm: SocketComm) -> None:
    """At the end of rank 0: wait for the others. Raises RuntimeError if one of them failed."""
    if comm.rank == 0 and any([os.wait()[1] for _ in range(1, comm.size)]):
        raise RuntimeError("a worker failed")
