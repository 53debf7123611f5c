"""Liveness on the host channel: the dead, the silent, the busy, and closing."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tdx.runtime.descriptors import exchange_fds
from tdx.runtime.errors import Closed, PeerLost, PeerTimeout, TdxError
from tdx.runtime.exchange import Mesh
from tdx.runtime.host_channel import HostChannel
from tests.helpers.fake_comm import (
    Died,
    new_fds,
    open_fds,
    processes,
    results_of,
    run_processes,
    threads,
)

pytestmark = pytest.mark.timeout(90)


def test_dead_process_is_noticed_at_once():
    def body(channel):
        channel.barrier()
        if channel.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            channel.barrier("after")
        return caught.value.ranks, time.monotonic() - start, channel.lost()

    first, second, third = processes(3, body)
    assert isinstance(second, Died)
    for ranks, seconds, lost in (first, third):
        assert ranks == (1,)
        assert seconds < 1
        assert lost == {1}


def test_survivors_go_on_without_the_dead():
    def body(channel):
        if channel.rank == 1:
            os._exit(0)
        with pytest.raises(PeerLost):
            channel.barrier()
        return channel.allgather(b"%d" % channel.rank, "rest", [0, 2])

    first, _, third = processes(3, body)
    assert first == third == [b"0", b"2"]


def test_lost_without_any_operation():
    def body(channel):
        if channel.rank == 1:
            os._exit(0)
        end = time.monotonic() + 5
        while not channel.lost() and time.monotonic() < end:
            time.sleep(0.02)
        return channel.lost()

    assert processes(2, body)[0] == {1}


def test_orderly_close_is_told_from_a_loss():
    def body(channel):
        channel.barrier()
        if channel.rank == 1:
            return None
        with pytest.raises(PeerLost, match="closed its world") as caught:
            channel.barrier()
        return caught.value.ranks, channel.lost(), channel.departed()

    assert results_of(threads(2, body))[0] == ((1,), frozenset(), {1})


def test_silence_is_a_timeout_that_names_all_missing_ranks():
    def body(channel):
        if channel.rank in (1, 3):
            time.sleep(1.2)
            # the others' messages are here already, but not they
            with pytest.raises(PeerTimeout, match="rank 0 has given up: rank 0 waited in work"):
                channel.barrier("work")
        else:
            start = time.monotonic()
            with pytest.raises(PeerTimeout) as caught:
                channel.barrier("work", timeout_s=0.4)
            assert 0.35 < time.monotonic() - start < 1.1
            error = caught.value
            assert (error.rank, error.peer) == (channel.rank, 1)
            assert (error.operation, error.signal) == ("work", "host channel")
            assert "ranks 1, 3" in str(error)
            assert "0.4 s" in str(error)

    results_of(threads(4, body))


def test_a_peer_that_gave_up_is_not_waited_for():
    def body(channel):
        channel.barrier()
        if channel.rank == 1:
            channel.page.tell_fault(1, "rank 1 waited 1 s for rank 0: signal arrivals[3]")
            time.sleep(2)
            return None
        start = time.monotonic()
        with pytest.raises(
            PeerTimeout, match=r"rank 1; rank 1 has given up: .* arrivals\[3\]"
        ) as e:
            channel.barrier("after")
        assert time.monotonic() - start < 1.5  # of 30
        assert (e.value.peer, e.value.operation) == (1, "after")
        time.sleep(2.5)
        with pytest.raises((PeerLost, PeerTimeout), match=r"rank 1 has given up: .*arrivals"):
            channel.barrier("later")

    results_of(threads(3, body, timeout_s=30))


def test_a_peer_that_gave_up_because_of_another():
    def body(channel):
        channel.barrier()
        if channel.rank == 1:
            channel.page.tell_fault(2, "what rank 2 said")
            time.sleep(1)
            return None
        time.sleep(0.3)
        text = "rank 1; first: rank 2 has given up: what rank 2 said"
        with pytest.raises(PeerTimeout, match=text) as caught:
            channel.barrier("after", [0, 1, 2])
        return caught.value.origin

    assert results_of(threads(3, body, timeout_s=30))[0] == (2, "what rank 2 said")


def test_no_deadline():
    def body(channel):
        if channel.rank == 1:
            time.sleep(0.5)
        channel.barrier()

    results_of(threads(2, body, timeout_s=0))


@pytest.mark.parametrize("busy", [False, True])
def test_busy_extends_the_deadline(busy):
    def body(channel):
        if channel.rank == 0:
            if busy:
                with channel.busy("compiling"):
                    time.sleep(2.5)
            else:
                time.sleep(2.5)
        channel.barrier(timeout_s=1.0)

    results = processes(2, body)
    if busy:
        results_of(results)
    else:
        assert isinstance(results[1], PeerTimeout)


def test_busy_ends_with_its_block():
    def body(channel):
        with channel.busy("compiling"):
            assert any("compiling" in thread.name for thread in threading.enumerate())
        channel.barrier()

    results_of(threads(2, body))
    assert not any("compiling" in thread.name for thread in threading.enumerate())


def test_watcher_thread():
    """`lost` from another thread neither disturbs operations nor waits for them."""

    def body(channel):
        stop = threading.Event()
        longest = [0.0]

        def watch():
            while not stop.is_set():
                start = time.monotonic()
                channel.lost()
                channel.heartbeat()
                longest[0] = max(longest[0], time.monotonic() - start)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for i in range(100):
                answer = channel.allgather(bytes([channel.rank]) * 3000, f"call {i}")
                assert [a[0] for a in answer] == list(range(channel.size))
            if channel.rank == 0:
                time.sleep(0.5)
            channel.barrier()
        finally:
            stop.set()
            watcher.join()
        channel.barrier()
        assert longest[0] < 0.4
        return channel.lost()

    assert results_of(processes(3, body)) == [frozenset()] * 3


def test_closed_channel():
    def body(channel):
        channel.close()
        channel.close()
        channel.heartbeat()
        for call in (
            channel.barrier,
            lambda: channel.allgather(b"", "x"),
            lambda: channel.agree("x"),
            lambda: exchange_fds(channel, None, "x"),
        ):
            with pytest.raises(Closed):
                call()
        return channel.lost()

    assert results_of(threads(2, body)) == [frozenset()] * 2


def test_channels_leak_no_descriptors():
    def body(comm):
        counts = []
        for _ in range(4):
            channel = HostChannel(Mesh.connect(comm, 20), 20)
            channel.barrier()
            channel.close()
            comm.allgather(b"")
            counts.append(len(open_fds()))
        return counts

    for counts in results_of(run_processes(3, body)):
        assert len(set(counts)) == 1, counts


def test_forked_child_does_not_speak_for_its_rank():
    def body(channel):
        channel.barrier()
        if channel.rank == 0 and (pid := os.fork()) == 0:
            channel.close()
            os._exit(0)
        if channel.rank == 0:
            os.waitpid(pid, 0)
        channel.barrier()
        assert channel.lost() == channel.departed() == frozenset()
        channel.barrier()

    results_of(processes(2, body))


def test_page_cannot_be_made(monkeypatch):
    def fail(ranks):
        raise OSError("no memory files here")

    monkeypatch.setattr("tdx.runtime.heartbeat.create_page", fail)
    before = open_fds()
    results = threads(3, lambda channel: None)
    assert isinstance(results[0], OSError)
    assert all("no memory files here" in str(result) for result in results)
    assert all(isinstance(result, TdxError) for result in results[1:])
    assert not new_fds(before)
