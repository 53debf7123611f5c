"""Authenticated AF_UNIX connections between all ranks of a host, for messages and descriptors.

A stranger can connect to a socket or squat its name, so both ends of a connection check who the
other one is (SO_PEERCRED: user and process) and then a 128-bit token of the job, before anything
else is parsed and before any descriptor is sent. Names are random and vanish after connecting.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tdx import abi
from tdx.runtime.comm import Comm
from tdx.runtime.errors import InvalidArgument, TdxError, Unsupported
from tdx.runtime.outcomes import pack_error, raise_for_peers
from tdx.runtime.undo import Undo
from tdx.runtime.unix_sockets import Clock, Door, listen

__all__ = ["Mesh", "peer_credentials"]

_MAGIC = b"tdx-mesh"
_HELLO = struct.Struct("<16s8sHH")  # token, magic, sender, receiver
_IDENTITY = struct.Struct("<IQ32s32s16s")  # rank, pid, network and pid namespace, token
_MAX_PENDING = 4 * abi.MAX_RANKS  # connections that have not said hello yet
_open_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the process at the other end, as the kernel recorded them."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


class Mesh:
    """Connections from this rank to every other one, open until `close`.

    Attributes
    ----------
    rank, size : int
    sockets : dict[int, socket.socket]
        Peer -> connected stream socket, non-blocking. Once a HostChannel was made, they are its.
    """

    def __init__(self, rank: int, size: int, sockets: Mapping[int, socket.socket]):
        self.rank = rank
        self.size = size
        self.sockets = dict(sockets)
        for sock in self.sockets.values():
            sock.setblocking(False)
        _open_meshes.add(self)

    @classmethod
    def connect(cls, comm: Comm, deadline_s: float) -> Mesh:
        """Connect every two ranks (collective). `deadline_s` in seconds; 0: none.

        If it fails on any rank it raises on every rank, and nothing stays open: PeerTimeout for
        ranks that did not answer in time, Unsupported for ranks that cannot see each other's
        processes, TdxError otherwise.
        """
        rank, size = comm.Get_rank(), comm.Get_size()
        if size == 1:
            return cls(0, 1, {})
        clock = Clock(deadline_s)
        job = _introduce(comm)
        with Undo() as undo:
            sockets: dict[int, socket.socket] = {}
            undo.add(_close_all, sockets)
            door: Door | None = None
            error: Exception | None = None
            try:
                try:
                    door = listen(job.abstract, _MAX_PENDING)
                except OSError as failure:
                    error = TdxError(f"no AF_UNIX socket can be opened: {failure}")
                addresses = comm.allgather(door.address if door else b"")
                if door and all(addresses):
                    error = _link(job, door, addresses, clock, sockets)
            finally:
                if door:
                    door.close()
            outcomes = comm.allgather(pack_error(error))
            if isinstance(error, TdxError):
                raise error
            raise_for_peers(dict(enumerate(outcomes)), "connecting the ranks")
            undo.commit()
        return cls(rank, size, sockets)

    def close(self) -> None:
        """Close every connection; a second call does nothing."""
        _close_all(self.sockets)
        _open_meshes.discard(self)


@dataclass(frozen=True)
class _Job:
    """What every rank knows of the job after the first exchange."""

    rank: int
    token: bytes
    pids: tuple[int, ...]
    abstract: bool  # abstract socket names reach every rank

    def hello(self, receiver: int) -> bytes:
        return _HELLO.pack(self.token, _MAGIC, self.rank, receiver)

    def sender_of(self, hello: bytes) -> int | None:
        """The rank that sent `hello` to this one; None: not a rank of this job."""
        if not hmac.compare_digest(hello[: len(self.token)], self.token):
            return None
        _, magic, sender, receiver = _HELLO.unpack(hello)
        return sender if magic == _MAGIC and receiver == self.rank else None


def _introduce(comm: Comm) -> _Job:
    rank, size = comm.Get_rank(), comm.Get_size()
    token = secrets.token_bytes(16)
    network, processes = _namespace("net"), _namespace("pid")
    own = _IDENTITY.pack(rank, os.getpid(), network, processes, token)
    entries = comm.allgather(own)
    if any(len(entry) != _IDENTITY.size for entry in entries):
        raise InvalidArgument("comm.allgather changed the length of an entry")
    records = [_IDENTITY.unpack(entry) for entry in entries]
    if [record[0] for record in records] != list(range(size)):
        raise InvalidArgument("comm.allgather did not return the entries in rank order")
    if len({record[3] for record in records}) > 1:
        raise Unsupported(
            "the ranks run in different process namespaces: start all of them in one container"
        )
    reach = len({record[2] for record in records}) == 1 and any(network)
    return _Job(rank, records[0][4], tuple(record[1] for record in records), reach)


def _namespace(kind: str) -> bytes:
    try:
        return os.fsencode(os.readlink(f"/proc/self/ns/{kind}"))[:32]
    except OSError:
        return b""


def _link(
    job: _Job,
    door: Door,
    addresses: Sequence[bytes],
    clock: Clock,
    sockets: dict[int, socket.socket],
) -> Exception | None:
    """Fill `sockets`; the error, if that fails, is returned for all ranks to hear of it."""
    try:
        _connect_lower(job, addresses, clock, sockets)
        higher = set(range(job.rank + 1, len(job.pids)))
        _Admission(job, door.sock, clock, sockets).run(higher)
    except (TdxError, OSError) as error:
        return error
    return None


def _connect_lower(
    job: _Job, addresses: Sequence[bytes], clock: Clock, sockets: dict[int, socket.socket]
) -> None:
    for peer in range(job.rank):
        sockets[peer] = _dial(job, peer, addresses[peer], clock)
    for peer in range(job.rank):
        try:
            sockets[peer].settimeout(clock.remaining())
            reply = _receive_exactly(sockets[peer], _HELLO.size, clock)
        except TimeoutError as error:
            raise clock.timeout(job.rank, [peer], "connect") from error
        if len(reply) < _HELLO.size or job.sender_of(reply) != peer:
            raise TdxError(f"rank {peer} closed the connection, or did not know the job's token")


def _dial(job: _Job, peer: int, address: bytes, clock: Clock) -> socket.socket:
    with Undo() as undo:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        undo.add(sock.close)
        sock.setblocking(False)
        while True:
            try:
                sock.connect(address)
                break
            except BlockingIOError:  # more connections wait than the peer's backlog holds
                if clock.expired():
                    raise clock.timeout(job.rank, [peer], "connect") from None
                time.sleep(0.01)
            except OSError as error:
                raise TdxError(f"rank {peer} cannot be reached from {job.rank}: {error}") from error
        if peer_credentials(sock) != (job.pids[peer], os.geteuid()):
            raise TdxError(
                f"the socket of rank {peer} is held by another process or user "
                f"{peer_credentials(sock)}: refused"
            )
        sock.settimeout(clock.remaining())
        sock.sendall(job.hello(peer))
        undo.commit()
    return sock


def _receive_exactly(sock: socket.socket, size: int, clock: Clock) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(clock.remaining())
        more = sock.recv(size - len(data))
        if not more:
            break
        data += more
    return data


class _Admission:
    """Lets the higher ranks in. Whoever else connects is closed, and the waiting goes on."""

    def __init__(
        self,
        job: _Job,
        listener: socket.socket,
        clock: Clock,
        sockets: dict[int, socket.socket],
    ):
        self._job = job
        self._listener = listener
        self._clock = clock
        self._sockets = sockets
        self._pending: dict[socket.socket, bytes] = {}  # connection -> what it said so far
        self._selector = selectors.DefaultSelector()

    def run(self, wanted: set[int]) -> None:
        """Return when all `wanted` ranks are connected; PeerTimeout at the deadline."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while missing := wanted - self._sockets.keys():
                for key, _ in self._selector.select(self._clock.remaining()):
                    if key.fileobj is self._listener:
                        self._open({self._job.pids[rank] for rank in missing})
                    else:
                        self._hear(key.data, missing)
                if self._clock.expired() and wanted - self._sockets.keys():
                    raise self._clock.timeout(self._job.rank, sorted(missing), "connect")
        finally:
            for sock in self._pending:
                sock.close()
            self._selector.close()

    def _open(self, pids: set[int]) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        pid, uid = peer_credentials(sock)
        if uid != os.geteuid() or pid not in pids:
            sock.close()
            return
        if len(self._pending) >= _MAX_PENDING:
            self._drop(next(iter(self._pending)))
        sock.setblocking(False)
        self._pending[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ, sock)

    def _hear(self, sock: socket.socket, missing: set[int]) -> None:
        if sock not in self._pending:  # dropped within this round
            return
        try:
            data = sock.recv(_HELLO.size - len(self._pending[sock]))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        hello = self._pending[sock] + data
        if data and len(hello) < _HELLO.size:
            self._pending[sock] = hello
            return
        rank = self._job.sender_of(hello) if data else None
        if rank not in missing or peer_credentials(sock)[0] != self._job.pids[rank]:
            self._drop(sock)
            return
        try:
            sock.sendall(self._job.hello(rank))  # a fresh connection has room for it
        except OSError:
            self._drop(sock)
            return
        self._selector.unregister(sock)
        del self._pending[sock]
        self._sockets[rank] = sock
        missing.discard(rank)

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._pending[sock]
        sock.close()


def _close_all(sockets: dict[int, socket.socket]) -> None:
    while sockets:
        sockets.popitem()[1].close()


def _close_after_fork() -> None:
    # A forked child must not keep the connections open: peers learn from their end that a
    # rank is gone.
    for mesh in list(_open_meshes):
        mesh.close()


os.register_at_fork(after_in_child=_close_after_fork)
