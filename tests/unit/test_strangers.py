"""Those who do not belong to the job: other users, other jobs, wrong tokens, replays, floods."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from tdx.runtime import exchange, frames, unix_sockets
from tdx.runtime.errors import TdxError
from tdx.runtime.exchange import Mesh
from tests.helpers.fake_comm import (
    new_fds,
    open_fds,
    processes,
    results_of,
    run_processes,
    run_python,
    run_threads,
    threads,
)

pytestmark = pytest.mark.timeout(90)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def listening(pid: int) -> list[str]:
    """Names of the sockets on which a process listens."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    with open("/proc/net/unix") as table:
        rows = [line.split() for line in table][1:]
    # flags 00010000: it listens
    return [row[7] for row in rows if row[3] == "00010000" and f"socket:[{row[6]}]" in inodes]


ANOTHER_USER = """
import contextlib, os, socket, sys
address, data = map(bytes.fromhex, sys.argv[1:])
os.setgid(65534)
os.setuid(65534)
heard = b"?"  # where it gets nowhere
with contextlib.suppress(PermissionError), socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(5)
    sock.connect(address)
    heard = b"closed"
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)
    with contextlib.suppress(ConnectionError):
        heard = sock.recv(100) or heard
os.write(1, heard)
"""


def connect_as_another_user(address: bytes, data: bytes) -> bytes:
    """What a process of another user hears there, having said `data`; "?" if it gets nowhere."""
    command = [sys.executable, "-c", ANOTHER_USER, address.hex(), data.hex()]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).stdout


@as_root
@pytest.mark.parametrize("abstract", [True, False], ids=["abstract", "path"])
def test_another_user_is_not_heard(monkeypatch, abstract):
    """Even with the right token: its connection is closed before a byte is read."""
    heard, said = [], []
    hear, dial = exchange._Admission._hear, exchange._dial
    link = exchange._link

    def observed(self, sock, missing):
        said.append(exchange.peer_credentials(sock)[1])
        hear(self, sock, missing)

    def meddled(job, door, addresses, clock, sockets):
        def stranger():
            time.sleep(0.2)  # rank 0 is in its admission
            hello = exchange._HELLO.pack(job.token, exchange._MAGIC, 1, 0)
            heard.append(connect_as_another_user(addresses[0], hello))

        if job.rank == 0:
            threading.Thread(target=stranger).start()
        return link(job, door, addresses, clock, sockets)

    def late(*args):
        while not heard:
            time.sleep(0.01)
        return dial(*args)

    monkeypatch.setattr(exchange._Admission, "_hear", observed)
    monkeypatch.setattr(exchange, "_link", meddled)
    monkeypatch.setattr(exchange, "_dial", late)
    if not abstract:
        monkeypatch.setattr(exchange, "listen", lambda _, n: unix_sockets.listen(False, n))
    results_of(run_threads(2, lambda comm: Mesh.connect(comm, 60).close(), timeout_s=60))
    assert heard == [b"closed" if abstract else b"?"]
    assert set(said) == {os.geteuid()}


HEAP_OF_ANOTHER = """
import ctypes, os, numpy as np, tdx

def reach(address):
    pid, refused = os.getppid(), []
    os.setgid(65534)
    os.setuid(65534)
    targets = [f"/proc/{pid}/fd/{name}" for name in FDS]
    targets += [f"/proc/{pid}/mem", f"/proc/{pid}/map_files", f"/proc/{pid}/fd"]
    for target in targets:
        try:
            os.listdir(target) if target.endswith(("fd", "files")) else os.open(target, os.O_RDONLY)
        except PermissionError:
            refused.append(target)
    assert refused == targets, (targets, refused)
    data = ctypes.create_string_buffer(8)
    here = (ctypes.c_uint64 * 2)(ctypes.addressof(data), 8)
    there = (ctypes.c_uint64 * 2)(address, 8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.process_vm_readv(pid, here, 1, there, 1, 0) == -1
    assert ctypes.get_errno() == 1, ctypes.get_errno()  # EPERM

with tdx.init(backend="host") as world:
    held = os.memfd_create("kept", os.MFD_CLOEXEC)  # as a heap's is, while it is being mapped
    FDS = [held]
    x = world.array(np.arange(8))
    world.synchronize()
    address = x.data_ptr()
    # a stranger: of another user, and without what this process was given
    if (pid := os.fork()) == 0:
        try:
            reach(address)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (x.numpy() == np.arange(8)).all()
print("good")
"""


@as_root
def test_another_user_cannot_map_the_heap():
    done = run_python(HEAP_OF_ANOTHER)
    assert done.stdout.split() == ["good"], done.stdout + done.stderr


def test_nobody_listens_once_the_ranks_are_connected():
    def body(channel):
        channel.barrier()
        names = listening(os.getpid())
        channel.barrier()
        return names

    assert results_of(processes(2, body)) == [[], []]


@pytest.mark.parametrize("how", ["token", "process"])
def test_a_process_of_the_same_user(how):
    """It is closed and told nothing, with a wrong token, and with the right one as well."""

    def body(comm):
        told = []
        link, dial = exchange._link, exchange._dial

        def call(job, address):
            token = b"\7" * 16 if how == "token" else job.token
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(5)
                sock.connect(address)
                with contextlib.suppress(ConnectionError):
                    sock.sendall(exchange._HELLO.pack(token, exchange._MAGIC, job.rank, 0))
                with contextlib.suppress(ConnectionError):
                    told.append(sock.recv(100))

        def meddled(job, door, addresses, clock, sockets):
            if job.rank == 1 and how == "token":
                call(job, addresses[0])
            elif job.rank == 1:
                if (pid := os.fork()) == 0:
                    try:
                        call(job, addresses[0])
                    finally:
                        os._exit(len(b"".join(told)))
                told.append(bytes(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
            return link(job, door, addresses, clock, sockets)

        exchange._link = meddled  # in this process only, which ends with the test
        exchange._dial = dial
        mesh = Mesh.connect(comm, 20)
        peers = [exchange.peer_credentials(sock)[0] for sock in mesh.sockets.values()]
        comm.allgather(b"")
        mesh.close()
        return os.getpid(), peers, b"".join(told)

    (first, to_first, _), (second, to_second, told) = results_of(run_processes(2, body))
    assert (to_first, to_second) == ([second], [first])
    assert told == b""


def test_mutated_hellos(monkeypatch):
    """Hundreds of them, with the right process id: the ranks meet all the same."""
    rng = random.Random(7)
    before = open_fds()
    closed, done = [], threading.Event()
    link, dial = exchange._link, exchange._dial

    def say(job, address):
        data = bytearray(exchange._HELLO.pack(job.token, exchange._MAGIC, 1, 0))
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        data = (data * rng.choice([1, 1, 50]))[: rng.choice([1, 20, len(data), 5000])]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(20)
            sock.connect(address)
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                closed.append(sock.recv(1))

    def meddled(job, door, addresses, clock, sockets):
        def meddle():
            try:
                for _ in range(300):
                    say(job, addresses[0])
            finally:
                done.set()

        if job.rank == 0:
            threading.Thread(target=meddle).start()
        return link(job, door, addresses, clock, sockets)

    def late(*args):
        done.wait(60)
        return dial(*args)

    monkeypatch.setattr(exchange, "_link", meddled)
    monkeypatch.setattr(exchange, "_dial", late)
    results_of(run_threads(2, lambda comm: Mesh.connect(comm, 60).close(), timeout_s=60))
    assert len(closed) > 100
    assert set(closed) == {b""}
    assert not new_fds(before)


class _HalfComm:
    """One of two jobs of two ranks; the addresses of ranks are those of the other job if `crossed`.

    The exchange gathers identities, addresses and outcomes, in this order.
    """

    def __init__(self, comm, crossed):
        self._comm = comm
        self._crossed = crossed
        self._calls = 0

    def Get_rank(self):
        return self._comm.Get_rank() % 2

    def Get_size(self):
        return 2

    def allgather(self, payload):
        self._calls += 1
        job = self._comm.Get_rank() // 2
        if self._crossed and self._calls == 2:
            job = 1 - job
        return self._comm.allgather(payload)[2 * job : 2 * job + 2]


def test_two_jobs_at_once_do_not_meet():
    def body(comm):
        mesh = Mesh.connect(_HalfComm(comm, crossed=False), 20)
        peers = [exchange.peer_credentials(sock)[0] for sock in mesh.sockets.values()]
        comm.allgather(b"")
        mesh.close()
        return os.getpid(), peers

    (a, to_a), (b, to_b), (c, to_c), (d, to_d) = results_of(run_processes(4, body))
    assert (to_a, to_b, to_c, to_d) == ([b], [a], [d], [c])


def test_ranks_that_come_to_another_job_are_refused():
    def body(comm):
        before = open_fds()
        with pytest.raises(TdxError) as caught:
            Mesh.connect(_HalfComm(comm, crossed=True), 2)
        assert open_fds() == before
        return str(caught.value)

    for rank, text in enumerate(results_of(run_processes(4, body))):
        wanted = "held by another process" if rank % 2 else "waited 2 s in connect for rank 1"
        assert wanted in text


def test_replays_change_nothing():
    """All that a rank ever said, said again between its calls: the others hear it once."""

    def body(channel):
        said = []
        send = frames.send_some

        def recorded(sock, data, fds=()):
            count = send(sock, data, fds)
            said.append(bytes(data[:count]))
            return count

        frames.send_some = recorded  # in this process only, which ends with the test
        answers = []
        before = open_fds()
        for turn in range(30):
            answers.append(channel.allgather(b"%d %d" % (channel.rank, turn), f"call {turn}"))
            if channel.rank == 1:
                for link in channel._links.values():
                    for data in said[-20:]:
                        link.sock.setblocking(True)
                        link.sock.sendall(data)
                        link.sock.setblocking(False)
        channel.barrier()
        assert open_fds() == before
        assert not channel.lost()
        channel.barrier()
        return answers

    expected = [[b"%d %d" % (rank, turn) for rank in range(3)] for turn in range(30)]
    assert results_of(processes(3, body)) == [expected] * 3


def test_a_flood_of_messages_for_nobody(monkeypatch):
    """It costs the flooder its connection, and the others go on."""
    limit = 64 * frames.RECORD_BYTES
    monkeypatch.setattr(frames, "MAX_UNREAD_BYTES", limit)

    def body(channel):
        channel.barrier()
        if channel.rank == 1:
            for link in channel._links.values():
                link.sock.setblocking(True)
                with contextlib.suppress(ConnectionError):
                    for number in range(5000):
                        message = frames.Message(12345, number, "x", b"")
                        link.sock.sendall(frames.encode(message, False))
                        if number == 200:  # time for the peers to look
                            time.sleep(0.3)
            return None
        end = time.monotonic() + 20
        while not (gone := channel.lost() | channel.departed()) and time.monotonic() < end:
            time.sleep(0.01)
        assert channel._links[1].ended == "it sent more than anybody asked for"
        assert channel._inbox._bytes[1] <= limit
        return gone, channel.allgather(b"%d" % channel.rank, "rest", [0, 2])

    first, _, third = processes(3, body)
    assert first == third == ({1}, [b"0", b"2"])


def test_truncated_and_mutated_messages_of_a_connected_pair():
    """Whatever is wrong with what a peer says, it is an error that names it, at once."""
    rng = random.Random(11)
    record = frames.encode(
        frames.Message(frames.group_of([0, 1]), 9, "barrier", b"z" * 3000), False
    )
    mutations = [record[: rng.randrange(1, len(record))] for _ in range(5)]
    for _ in range(10):
        data = bytearray(record)
        data[rng.choice([0, 1, 2, 3, 24, 28, 32, 33])] ^= 0x40
        mutations.append(bytes(data))
    assert struct.calcsize("<4sIQQIII") == frames._HEADER.size

    for data in mutations:

        def body(channel, data=data):
            channel.barrier()
            if channel.rank == 1:
                channel._links[0].sock.sendall(data)
                return
            start = time.monotonic()
            with pytest.raises(TdxError, match="rank 1"):
                channel.barrier()
            assert time.monotonic() - start < 5

        results_of(threads(2, body))
