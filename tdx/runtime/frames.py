"""Messages between two ranks, cut into records of one fixed size.

A record is a header and up to `CHUNK_BYTES` of the message body, padded with zeros. The body is
the text of the operation followed by its payload. A descriptor travels with the first record.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tdx.runtime.errors import InvalidArgument, TdxError
from tdx.runtime.outcomes import describe_ranks
from tdx.runtime.unix_sockets import receive_some, send_some

__all__ = [
    "MAX_MESSAGE_BYTES",
    "RECORD_BYTES",
    "Inbox",
    "Link",
    "Message",
    "encode",
    "group_of",
    "members_of",
    "require_uncut",
]

_HEADER = struct.Struct("<4sIQQIII")  # magic, descriptors, group, number, text, total, chunk
_MAGIC = b"tdx1"
RECORD_BYTES = 1024
CHUNK_BYTES = RECORD_BYTES - _HEADER.size
MAX_MESSAGE_BYTES = 64 << 20
# a rank is ahead of its peers by one message, and by what it refused: little text
MAX_UNREAD_BYTES = 2 * MAX_MESSAGE_BYTES
_READ_BYTES = 16 * RECORD_BYTES
_READS = 64  # before the other connections have their turn


@dataclass(slots=True)
class Message:
    """One rank's part in one operation.

    Attributes
    ----------
    group, number : int
        The set of ranks taking part, and how many operations that set did before.
    what : str
        The operation as text, equal on all ranks that make the same call.
    payload : bytes
    fd : int | None
        A descriptor owned by whoever holds the message.
    cut : bool
        A descriptor was sent, but the kernel could not deliver it.
    """

    group: int
    number: int
    what: str
    payload: bytes
    fd: int | None = None
    cut: bool = False

    @property
    def nbytes(self) -> int:
        """What it takes up, about."""
        return RECORD_BYTES + len(self.what) + len(self.payload)

    def discard(self) -> None:
        """Close the descriptor, if there is one."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def encode(message: Message, has_fd: bool) -> bytes:
    """The records of a message, one after the other; `has_fd`: a descriptor goes with them.

    Raises InvalidArgument above `MAX_MESSAGE_BYTES`.
    """
    text = message.what.encode("utf-8", "replace")
    body = text + message.payload
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            f"{message.what[:80]}: a message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES}"
        )
    records = []
    for chunk in range(max(1, -(-len(body) // CHUNK_BYTES))):
        fds = int(has_fd and chunk == 0)
        numbers = (fds, message.group, message.number, len(text), len(body), chunk)
        part = body[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        records.append((_HEADER.pack(_MAGIC, *numbers) + part).ljust(RECORD_BYTES, b"\0"))
    return b"".join(records)


def group_of(ranks: Sequence[int], stage: int = 0) -> int:
    """The 64-bit name of a set of ranks, whatever their order, in a stage of the channel."""
    text = f"{stage}:" + ",".join(map(str, sorted(ranks)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def members_of(members: Sequence[int] | None, rank: int, size: int) -> tuple[int, ...]:
    """The world ranks of an operation, None for all; InvalidArgument for what cannot be."""
    if members is None:
        return tuple(range(size))
    ranks = tuple(members)
    if len(set(ranks)) != len(ranks) or not all(0 <= r < size for r in ranks):
        raise InvalidArgument(f"members {ranks}: each must be a different world rank below {size}")
    if rank not in ranks:
        raise InvalidArgument(f"rank {rank} is not among the members {ranks}")
    return ranks


def require_uncut(messages: Mapping[int, Message]) -> None:
    """Raise TdxError unless every descriptor that was sent has arrived."""
    cut = [rank for rank, message in messages.items() if message.cut]
    if cut:
        raise TdxError(
            f"the descriptor of {describe_ranks(cut)} could not be received: "
            "raise the limit on open files (ulimit -n)"
        )


class Link:
    """One connection: what is still to be sent, and what has come in. Never blocks.

    Attributes
    ----------
    ended : str
        Why nothing more will come; empty while the connection is up. What had arrived before
        is still delivered.
    received : int
        Bytes that have come in so far.
    """

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.ended = ""
        self.received = 0
        self._out: deque[tuple[memoryview, int | None]] = deque()
        self._buffer = bytearray()  # the beginning of a record
        self._body = bytearray()  # of the message that is coming in
        self._message = (0, 0, 0, 0)  # its group, number, bytes of text, bytes in all
        self._chunk = 0
        self._with_fd = False
        self._fds: deque[int | None] = deque()  # arrived, in order; None: cut off

    @property
    def unsent(self) -> bool:
        """Something waits for the peer to make room."""
        return bool(self._out)

    def post(self, records: bytes, fd: int | None = None) -> None:
        """Send, or queue what the socket does not take. The link owns `fd` from here on."""
        self._out.append((memoryview(records), fd))
        if self.ended:
            self._drop_out()
        self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        while self._out:
            view, fd = self._out[0]
            try:
                sent = send_some(self.sock, view, () if fd is None else (fd,))
            except BlockingIOError:
                return
            except ConnectionError:
                self._drop_out()  # the end shows when reading, after what the peer still said
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    return  # as many descriptors are on their way as the user may have open
                raise
            if fd is not None:
                os.close(fd)
            if sent == len(view):
                self._out.popleft()
            else:
                self._out[0] = (view[sent:], None)

    def receive(self) -> list[Message]:
        """Read what is there, up to a limit. The messages that are complete now are the caller's.

        A peer that does not keep to the format ends the connection.
        """
        messages: list[Message] = []
        for _ in range(_READS):
            if self.ended:
                break
            try:
                data, fds, cut = receive_some(self.sock, _READ_BYTES, 1)
            except BlockingIOError:
                break
            except ConnectionError as error:
                self._end(f"connection lost: {error.strerror}")
                break
            if not data:
                self._end("connection closed")
                break
            self._fds.extend(fds)
            if cut and not fds:
                self._fds.append(None)
            self.received += len(data)
            self._buffer += data
            messages += self._parse()
            # a read that fell short took everything, unless it stopped at a descriptor
            if len(data) < _READ_BYTES and not fds and not cut:
                break
        return messages

    def refuse(self, reason: str) -> None:
        """Listen no more to this peer, which finds its connection closed."""
        self._end(reason)
        with contextlib.suppress(OSError):  # it may have closed its end
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection and every descriptor still held."""
        self._end("closed")
        self._drop_out()
        self.sock.close()
        while self._fds:
            fd = self._fds.popleft()
            if fd is not None:
                os.close(fd)

    def _parse(self) -> list[Message]:
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= RECORD_BYTES:
            magic, fds, *message, chunk = _HEADER.unpack_from(self._buffer, start)
            if chunk == self._chunk == 0:
                self._message = tuple(message)
            text, total = self._message[2:]
            size = min(total - chunk * CHUNK_BYTES, CHUNK_BYTES)
            sound = magic == _MAGIC and text <= total <= MAX_MESSAGE_BYTES and size >= 0
            if not sound or chunk != self._chunk or tuple(message) != self._message:
                break
            if fds > int(chunk == 0):
                break
            begin = start + _HEADER.size
            self._body += self._buffer[begin : begin + size]
            self._chunk += 1
            self._with_fd |= bool(fds)
            start += RECORD_BYTES
            if len(self._body) == total:
                messages.append(self._finish())
        del self._buffer[:start]
        # what is left must be the beginning of a record; a descriptor comes with its first byte
        expected_fds = int(self._with_fd) + bool(self._buffer)
        if len(self._buffer) >= RECORD_BYTES or len(self._fds) > expected_fds:
            self.refuse("it sent a malformed record")
            self._buffer.clear()
            self._body.clear()
        return messages

    def _finish(self) -> Message:
        group, number, text, _ = self._message
        body, self._body, self._chunk = bytes(self._body), bytearray(), 0
        message = Message(group, number, body[:text].decode("utf-8", "replace"), body[text:])
        if self._with_fd:
            self._with_fd = False
            message.fd = self._fds.popleft() if self._fds else None
            message.cut = message.fd is None
        return message

    def _drop_out(self) -> None:
        while self._out:
            fd = self._out.popleft()[1]
            if fd is not None:
                os.close(fd)

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason


class Inbox:
    """Messages that have come in and nobody has asked for yet; it owns their descriptors."""

    def __init__(self) -> None:
        self._messages: dict[tuple[int, int, int], Message] = {}  # by peer, group, number
        self._bytes: dict[int, int] = {}  # by peer

    def __contains__(self, key: tuple[int, int, int]) -> bool:
        return key in self._messages

    def put(self, peer: int, message: Message) -> bool:
        """Keep a message of `peer`, unless it said that before. False: there is no room for it."""
        key = (peer, message.group, message.number)
        unread = self._bytes.get(peer, 0) + message.nbytes
        if key in self._messages or unread > MAX_UNREAD_BYTES:
            message.discard()
            return key in self._messages
        self._messages[key] = message
        self._bytes[peer] = unread
        return True

    def take(self, peer: int, group: int, number: int) -> Message:
        """A message that is there; it is the caller's from here on."""
        message = self._messages.pop((peer, group, number))
        self._bytes[peer] -= message.nbytes
        return message

    def clear(self) -> None:
        """Discard all of them."""
        for message in self._messages.values():
            message.discard()
        self._messages.clear()
        self._bytes.clear()
