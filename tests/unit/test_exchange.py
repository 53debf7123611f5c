"""Connections between ranks: all have one, strangers do not."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import socket
import stat
import threading
import time

import pytest

from tdx.runtime import exchange, unix_sockets
from tdx.runtime.errors import PeerTimeout, TdxError, Unsupported
from tdx.runtime.exchange import Mesh
from tests.helpers.fake_comm import new_fds, open_fds, results_of, run_processes, run_threads

pytestmark = pytest.mark.timeout(60)


def exchange_all(comm) -> list[bytes]:
    """A word from each rank to each other one; what arrived."""
    with contextlib.closing(Mesh.connect(comm, 20)) as mesh:
        for peer, sock in mesh.sockets.items():
            assert fcntl.fcntl(sock, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            sock.sendall(b"%d to %d" % (mesh.rank, peer))
        seen = []
        for _, sock in sorted(mesh.sockets.items()):
            sock.settimeout(20)
            seen.append(sock.recv(100))
        comm.allgather(b"")
        return seen


@pytest.mark.parametrize("run", [run_threads, run_processes])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_are_connected(run, size):
    before = open_fds()
    results = results_of(run(size, exchange_all))
    expected = [[b"%d to %d" % (p, r) for p in range(size) if p != r] for r in range(size)]
    assert results == expected
    assert not new_fds(before)


def test_path_sockets_where_abstract_ones_do_not_reach(monkeypatch, tmp_path):
    monkeypatch.setattr(exchange, "_namespace", lambda kind: os.urandom(8) * (kind == "net"))
    monkeypatch.setattr(unix_sockets.tempfile, "gettempdir", lambda: str(tmp_path))
    assert len(str(tmp_path)) < 87, "too long for a socket's path"
    modes, listen = [], unix_sockets.listen

    def observed(abstract, backlog):
        door = listen(abstract, backlog)
        path = os.fsdecode(door.address)
        modes.append(stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode))
        assert path.startswith(str(tmp_path))
        return door

    monkeypatch.setattr(exchange, "listen", observed)
    results_of(run_threads(3, exchange_all))
    assert modes == [0o700] * 3
    assert not os.listdir(tmp_path)


def test_path_sockets_where_abstract_ones_do_not_exist(monkeypatch, tmp_path):
    class NoAbstract(socket.socket):
        def bind(self, address):
            if isinstance(address, bytes) and address.startswith(b"\0"):
                raise OSError("not here")
            super().bind(address)

    monkeypatch.setattr(unix_sockets.socket, "socket", NoAbstract)
    monkeypatch.setattr(unix_sockets.tempfile, "gettempdir", lambda: str(tmp_path))
    door = unix_sockets.listen(abstract=True, backlog=4)
    assert os.fsdecode(door.address).startswith(str(tmp_path))
    door.close()
    assert not os.listdir(tmp_path)


def test_long_temporary_directory(monkeypatch):
    monkeypatch.setattr(unix_sockets.tempfile, "gettempdir", lambda: "/tmp/" + "x" * 100)
    door = unix_sockets.listen(abstract=False, backlog=4)
    assert len(door.address) < 108
    door.close()
    assert not os.path.exists(os.path.dirname(door.address))


@pytest.fixture
def doors(monkeypatch):
    """The listening sockets of all ranks, in a list; ranks wait until `go` is set."""
    addresses, go, listen = [], threading.Event(), unix_sockets.listen

    def observed(abstract, backlog):
        door = listen(abstract, backlog)
        addresses.append(door.address)
        return door

    dial = exchange._dial

    def delayed(*args):
        go.wait(10)
        return dial(*args)

    monkeypatch.setattr(exchange, "listen", observed)
    monkeypatch.setattr(exchange, "_dial", delayed)
    return addresses, go


def call_in(address: bytes, data: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(address)
    sock.settimeout(5)
    if data:
        sock.sendall(data)
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


GOOD_LENGTH = exchange._HELLO.size
STRANGERS = {
    "wrong token": exchange._HELLO.pack(b"\7" * 16, exchange._MAGIC, 1, 0),
    "garbage": os.urandom(4096),
    "half a hello": b"\0" * (GOOD_LENGTH // 2),
    "silent": b"",
}


@pytest.mark.parametrize("said", STRANGERS)
def test_stranger_is_closed_and_changes_nothing(doors, said):
    addresses, go = doors
    before = open_fds()
    strangers = []

    def meddle():
        while len(addresses) < 2:
            time.sleep(0.01)
        strangers.extend(call_in(address, STRANGERS[said]) for address in list(addresses))
        time.sleep(0.1)
        go.set()

    thread = threading.Thread(target=meddle)
    thread.start()
    results = results_of(run_threads(2, exchange_all))
    thread.join()
    assert results == [[b"1 to 0"], [b"0 to 1"]]
    assert len(strangers) == 2
    assert all(is_closed(sock) for sock in strangers)
    for sock in strangers:
        sock.close()
    assert not new_fds(before)


def test_many_silent_strangers(doors):
    addresses, go = doors
    strangers = []

    def meddle():
        while len(addresses) < 2:
            time.sleep(0.01)
        for _ in range(300):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(addresses[0])
            strangers.append(sock)
        go.set()

    thread = threading.Thread(target=meddle)
    thread.start()
    results_of(run_threads(2, exchange_all))
    thread.join()
    for sock in strangers:
        sock.close()


@pytest.mark.parametrize("wrong", ["uid", "pid"])
def test_wrong_credentials_are_not_heard(doors, monkeypatch, wrong):
    """A connection with wrong credentials is closed before a byte of it is read."""
    addresses, go = doors
    strangers, asked = [], threading.Event()
    real = exchange.peer_credentials

    def credentials(sock):
        pid, uid = real(sock)
        if go.is_set():
            return pid, uid
        asked.set()
        return (pid, uid + 1) if wrong == "uid" else (pid + 1, uid)

    monkeypatch.setattr(exchange, "peer_credentials", credentials)

    def meddle():
        while len(addresses) < 2:
            time.sleep(0.01)
        strangers.extend(call_in(address, b"") for address in list(addresses))
        asked.wait(10)
        time.sleep(0.1)
        go.set()

    thread = threading.Thread(target=meddle)
    thread.start()
    results_of(run_threads(2, exchange_all))
    thread.join()
    assert asked.is_set()
    assert all(is_closed(sock) for sock in strangers)
    for sock in strangers:
        sock.close()


def test_squatted_name_gets_no_token(monkeypatch):
    """A listener that is not the rank's process hears nothing."""
    heard = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0tdx-test-squatter-%d" % os.getpid())
    listener.listen(4)

    def listen():
        sock, _ = listener.accept()
        heard.append(sock.recv(100))
        sock.close()

    thread = threading.Thread(target=listen)
    thread.start()
    monkeypatch.setattr(exchange, "peer_credentials", lambda sock: (1, os.geteuid()))
    job = exchange._Job(1, b"t" * 16, (os.getpid(), os.getpid()), True)
    with pytest.raises(TdxError, match="another process"):
        exchange._dial(job, 0, listener.getsockname(), unix_sockets.Clock(5))
    thread.join()
    listener.close()
    assert heard == [b""]


def test_one_rank_fails_and_all_raise(monkeypatch):
    before = open_fds()
    dial = exchange._dial

    def failing(job, peer, address, clock):
        if job.rank == 2:
            raise TdxError("no way")
        return dial(job, peer, address, clock)

    monkeypatch.setattr(exchange, "_dial", failing)
    start = time.monotonic()
    results = run_threads(3, lambda comm: Mesh.connect(comm, 1.0))
    assert time.monotonic() - start < 5
    assert all(isinstance(result, TdxError) for result in results)
    assert "rank 2: TdxError: no way" in str(results[0]) or isinstance(results[0], PeerTimeout)
    del results
    assert not new_fds(before)


def test_listening_fails_on_one_rank(monkeypatch):
    listen, calls = unix_sockets.listen, []

    def failing(abstract, backlog):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("out of luck")
        return listen(abstract, backlog)

    monkeypatch.setattr(exchange, "listen", failing)
    results = run_threads(3, lambda comm: Mesh.connect(comm, 20.0))
    assert all(isinstance(r, TdxError) and "out of luck" in str(r) for r in results)


def test_different_containers(monkeypatch):
    monkeypatch.setattr(exchange, "_namespace", lambda kind: os.urandom(4))
    results = run_threads(2, lambda comm: Mesh.connect(comm, 5.0))
    assert all(isinstance(r, Unsupported) and "container" in str(r) for r in results)


def mesh_pair() -> tuple[Mesh, Mesh]:
    a, b = socket.socketpair()
    return Mesh(0, 2, {1: a}), Mesh(1, 2, {0: b})


def test_forked_child_does_not_hold_connections_open():
    left, right = mesh_pair()
    stop = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=stop.wait, args=(30,))
    child.start()
    right.close()
    left.sockets[1].settimeout(5)
    assert left.sockets[1].recv(1) == b""
    stop.set()
    child.join()
    left.close()
