"""Messages cut into records: mutated, replayed and flooding ones against the parser."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import socket
import threading
import time

import pytest

from tdx.runtime import frames
from tdx.runtime.frames import CHUNK_BYTES, RECORD_BYTES, Inbox, Link, Message, encode
from tests.helpers.fake_comm import open_fds

STREAMS = 4000  # mutated ones
HEADER = frames._HEADER.size


@pytest.fixture
def pair():
    """A sending socket and the link that receives."""
    sender, receiver = socket.socketpair()
    sender.setblocking(False)
    receiver.setblocking(False)
    link = Link(receiver)
    yield sender, link
    sender.close()
    link.close()


def plain(rng: random.Random) -> Message:
    size = rng.choice([0, 1, 100, CHUNK_BYTES - 5, CHUNK_BYTES, CHUNK_BYTES + 1, 5000])
    what = "x" * rng.choice([0, 5, 1500])
    return Message(rng.getrandbits(64), rng.getrandbits(64), what, rng.randbytes(size))


def flip(rng, data):
    """Other bits in a few bytes, of a header mostly."""
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(data))
        if rng.random() < 0.8:
            at = at // RECORD_BYTES * RECORD_BYTES + rng.randrange(HEADER)
        data[at] ^= 1 << rng.randrange(8)
    return data


def cut(rng, data):
    begin = rng.randrange(len(data))
    return data[:begin] + data[begin + rng.randrange(1, 3000) :]


def again(rng, data):
    """A record, or any piece, that comes a second time."""
    step = rng.choice([1, RECORD_BYTES])
    begin = rng.randrange(0, len(data), step)
    end = begin + step * rng.randrange(1, 4)
    return data[:end] + data[begin:end] + data[end:]


def swap(rng, data):
    a, b = (rng.randrange(0, len(data), RECORD_BYTES) for _ in range(2))
    one, two = data[a : a + RECORD_BYTES], data[b : b + RECORD_BYTES]
    data[a : a + RECORD_BYTES], data[b : b + RECORD_BYTES] = two, one
    return data


def insert(rng, data):
    at = rng.choice([rng.randrange(len(data)), rng.randrange(0, len(data), RECORD_BYTES)])
    return data[:at] + rng.randbytes(rng.choice([1, 50, RECORD_BYTES])) + data[at:]


def absurd(rng, data):
    """A header with extreme numbers."""
    numbers = [rng.choice([0, 1, 2**31, 2**32 - 1, 64 << 20, (64 << 20) + 1]) for _ in range(4)]
    at = rng.randrange(0, len(data), RECORD_BYTES)
    fds, text, total, chunk = numbers
    frames._HEADER.pack_into(data, at, frames._MAGIC, fds, 1, 1, text, total, chunk)
    return data


def feed(sender, link, data, rng) -> list[Message]:
    """Send in pieces as far as the link listens; what it made of them."""
    messages = []
    while data and not link.ended:
        piece = data[: rng.choice([1, 100, 1000, 20000])]
        with contextlib.suppress(BlockingIOError):
            data = data[sender.send(piece) :]
        messages += link.receive()
        assert len(link._buffer) < RECORD_BYTES
        assert len(link._body) <= frames.MAX_MESSAGE_BYTES
    return messages


def same_start(a: bytes, b: bytes) -> int:
    """How many bytes two streams begin with in common."""
    if b.startswith(a) or a.startswith(b):
        return min(len(a), len(b))
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


@pytest.mark.parametrize("mutate", [flip, cut, again, swap, insert, absurd])
def test_mutated_streams(mutate):
    """What came before the mutation is delivered, nothing raises, and memory stays bounded."""
    rng = random.Random(mutate.__name__)
    before = open_fds()
    ended = 0
    for _ in range(STREAMS // 6):
        messages = [plain(rng) for _ in range(rng.randrange(1, 5))]
        records = [encode(message, False) for message in messages]
        good = b"".join(records)
        bad = bytes(mutate(rng, bytearray(good)))
        a, b = socket.socketpair()
        a.setblocking(False)
        b.setblocking(False)
        link = Link(b)
        got = feed(a, link, bad, rng)
        sound, position = 0, 0
        for record in records:
            position += len(record)
            sound += position <= same_start(good, bad)
        assert got[:sound] == messages[:sound]
        if link.ended:
            ended += 1
            assert link.ended == "it sent a malformed record"
            with contextlib.suppress(OSError):
                a.send(good)
            assert link.receive() == []
        a.close()
        link.close()
    assert ended > STREAMS // 6 // 8
    assert open_fds() == before


def test_random_bytes():
    rng = random.Random(1)
    for _ in range(500):
        a, b = socket.socketpair()
        b.setblocking(False)
        link = Link(b)
        assert feed(a, link, rng.randbytes(rng.choice([10, RECORD_BYTES, 9000])), rng) == []
        a.close()
        link.close()


def test_parts_of_two_messages_do_not_mix(pair):
    """Each record of a message has to say the same of it."""
    sender, link = pair
    one = encode(Message(1, 1, "one", b"1" * 3000), False)
    two = encode(Message(1, 2, "two", b"2" * 3000), False)
    sender.send(one[:RECORD_BYTES] + two[RECORD_BYTES:])
    assert link.receive() == []
    assert "malformed" in link.ended


def send_with_fd(sender, data) -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        frames.send_some(sender, data, [fd])
    finally:
        os.close(fd)


def test_descriptors_that_nobody_announced():
    """They end the connection, wherever they come; and none stays open."""
    before = open_fds()
    for data in (encode(Message(1, 1, "x", b""), False), b"t", b"\0" * RECORD_BYTES):
        for _ in range(3):
            a, b = socket.socketpair()
            a.setblocking(False)
            b.setblocking(False)
            link = Link(b)
            messages = []
            for _ in range(50):
                with contextlib.suppress(OSError):
                    send_with_fd(a, data)
                messages += link.receive()
                assert len(link._fds) <= 2
            assert link.ended == "it sent a malformed record"
            assert [m.fd for m in messages] == [None] * len(messages)
            a.close()
            link.close()
    assert open_fds() == before


def test_announced_descriptors_arrive_in_order(pair):
    sender, link = pair
    before = open_fds()
    for number in range(20):
        send_with_fd(sender, encode(Message(1, number, "x", b"y" * 200 * number), True))
    messages = []
    while len(messages) < 20:
        messages += link.receive()
    assert not link.ended
    assert all(message.fd is not None for message in messages)
    for message in messages:
        message.discard()
    assert open_fds() == before


def test_a_flood_does_not_hold_the_reader(pair):
    """A peer that never stops sending has its turn, not more."""
    sender, link = pair
    record = encode(Message(1, 1, "x", b"y" * 900), False) * 16
    stop = threading.Event()

    def flood():
        sender.setblocking(True)
        sender.settimeout(0.1)
        sent = 0  # bytes of a record: a full socket takes a part of it
        with contextlib.suppress(ConnectionError):
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    sent = (sent + sender.send(record[sent:])) % len(record)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        counts = []
        end = time.monotonic() + 30
        while sum(counts) < 5000 and time.monotonic() < end:
            select.select([link.sock], [], [], 0.1)  # the sender, too, needs Python's lock
            counts.append(len(link.receive()))
        ended = link.ended
    finally:
        stop.set()
        link.close()
        thread.join()
    assert max(counts) <= frames._READS * frames._READ_BYTES // RECORD_BYTES
    assert not ended
    assert sum(counts) >= 5000


def test_the_inbox_is_bounded(monkeypatch):
    monkeypatch.setattr(frames, "MAX_UNREAD_BYTES", 100 * RECORD_BYTES)
    before = open_fds()
    inbox = Inbox()

    def message(number):
        return Message(1, number, "x", b"", os.memfd_create("test", os.MFD_CLOEXEC))

    kept = sum(inbox.put(7, message(number)) for number in range(1000))
    assert 50 < kept < 100
    assert inbox.put(8, message(0))  # another peer's share
    inbox.take(7, 1, 0).discard()
    assert inbox.put(7, message(1000))  # there is room again
    assert len(open_fds()) == len(before) + kept + 1
    inbox.clear()
    assert open_fds() == before


def test_a_message_said_twice_counts_once():
    before = open_fds()
    inbox = Inbox()
    first, second = (
        Message(1, 1, "x", text, os.memfd_create("test", os.MFD_CLOEXEC)) for text in (b"1", b"2")
    )
    assert inbox.put(3, first)
    assert inbox.put(3, second)
    assert second.fd is None
    assert inbox.take(3, 1, 1) is first
    assert (3, 1, 1) not in inbox
    first.discard()
    assert open_fds() == before


def test_more_descriptors_on_their_way_than_the_user_may_have(pair, monkeypatch):
    """The kernel refuses them until peers have taken some: they wait like what has no room."""
    sender, receiver = pair
    link, refusals = Link(sender), [1, 1]

    def send(*args):
        if refusals:
            refusals.pop()
            raise OSError(errno.ETOOMANYREFS, "too many references")
        return send_some(*args)

    send_some = frames.send_some
    monkeypatch.setattr(frames, "send_some", send)
    fd = os.open("/dev/null", os.O_RDONLY)
    link.post(encode(Message(1, 2, "what", b""), True), fd)
    assert link.unsent
    link.flush()
    assert link.unsent
    link.flush()
    assert not link.unsent
    (got,) = receiver.receive()
    assert got.what == "what"
