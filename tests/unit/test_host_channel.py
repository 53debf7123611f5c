"""Agreement, deadlines, liveness and descriptors on the host channel."""

from __future__ import annotations

import os
import resource
import struct
import time

import pytest

from tdx.runtime import frames
from tdx.runtime.descriptors import exchange_fds
from tdx.runtime.errors import (
    CollectiveMismatch,
    DtypeError,
    HeapExhausted,
    InvalidArgument,
    PeerLost,
    TdxError,
)
from tests.helpers.fake_comm import Died, open_fds, processes, results_of, run_python, threads

pytestmark = pytest.mark.timeout(90)


def quiet_fds(channel):
    """The open descriptors at a moment when no peer's are on their way here."""
    channel.barrier()
    fds = open_fds()
    channel.barrier()
    return fds


@pytest.mark.parametrize("run", [threads, processes])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_allgather(run, size):
    def body(channel):
        return [
            channel.allgather(b"%d" % channel.rank * (channel.rank * 1000 + i), f"call {i}")
            for i in range(4)
        ]

    expected = [[b"%d" % r * (r * 1000 + i) for r in range(size)] for i in range(4)]
    assert results_of(run(size, body)) == [expected] * size


def test_large_payloads_do_not_block_each_other():
    """More than the socket buffers hold, from everybody to everybody at once."""

    def body(channel):
        answer = channel.allgather(bytes([channel.rank]) * (3 << 20), "large")
        channel.barrier()
        return [(len(a), a[0], a[-1]) for a in answer]

    assert results_of(processes(3, body)) == [[(3 << 20, r, r) for r in range(3)]] * 3


def test_too_large_payload():
    def body(channel):
        channel.allgather(bytes(frames.MAX_MESSAGE_BYTES), "too large")

    (result,) = threads(1, body)
    assert isinstance(result, InvalidArgument)
    assert str(frames.MAX_MESSAGE_BYTES) in str(result)


def test_members_have_their_own_numbers_and_order():
    def body(channel):
        answers = []
        if channel.rank in (0, 2):
            for _ in range(3):
                answers.append(channel.allgather(b"%d" % channel.rank, "even", [2, 0]))
        answers.append(channel.allgather(b"%d" % channel.rank, "all"))
        if channel.rank in (1, 2):
            answers.append(channel.allgather(b"%d" % channel.rank, "odd", (1, 2)))
        return answers

    even, everyone, odd = [[b"2", b"0"]] * 3, [[b"0", b"1", b"2"]], [[b"1", b"2"]]
    expected = [even + everyone, everyone + odd, even + everyone + odd]
    assert results_of(threads(3, body)) == expected


@pytest.mark.parametrize("members", [[0, 0], [0, 2], [-1, 0], [1], []])
def test_bad_members(members):
    def body(channel):
        if channel.rank == 0:
            with pytest.raises(InvalidArgument, match="member"):
                channel.barrier(members=members)
        channel.barrier()

    results_of(threads(2, body))


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf")])
def test_bad_timeout(timeout_s):
    results = threads(2, lambda channel: channel.barrier(timeout_s=timeout_s))
    assert all(isinstance(r, InvalidArgument) and "timeout_s" in str(r) for r in results)


def test_mismatch_has_the_table_and_ranks_stay_in_step():
    def body(channel):
        call = "plan all_reduce(f32)" if channel.rank != 1 else "plan broadcast(f32)"
        with pytest.raises(CollectiveMismatch) as caught:
            channel.agree(call)
        channel.agree("the same")
        channel.barrier()
        return str(caught.value), caught.value.calls

    table = {0: "plan all_reduce(f32)", 1: "plan broadcast(f32)", 2: "plan all_reduce(f32)"}
    for message, calls in results_of(threads(3, body)):
        assert calls == table
        assert "ranks 0, 2: plan all_reduce(f32); rank 1: plan broadcast(f32)" in message


def test_barrier_against_agree():
    def body(channel):
        with pytest.raises(CollectiveMismatch) as caught:
            channel.barrier() if channel.rank else channel.agree("plan")
        channel.barrier()
        return caught.value.calls

    assert results_of(threads(2, body)) == [{0: "plan", 1: "barrier"}] * 2


def test_refusal_names_rank_and_reason():
    def body(channel):
        refused = DtypeError("int4 is not taken") if channel.rank == 2 else None
        start = time.monotonic()
        with pytest.raises((DtypeError, CollectiveMismatch)) as caught:
            channel.agree("plan", refused)
        assert time.monotonic() - start < 1
        channel.barrier()
        return caught.value

    results = results_of([[r] for r in threads(3, body)])
    (first,), (second,), (third,) = results
    assert isinstance(third, DtypeError)
    for error in (first, second):
        assert isinstance(error, CollectiveMismatch)
        assert error.calls[2] == "refused: DtypeError: int4 is not taken"


def test_refusal_alone_does_not_wait():
    """The only rank that calls gets its own error at once, and the numbers stay in step."""

    def body(channel):
        if channel.rank == 0:
            start = time.monotonic()
            with pytest.raises(DtypeError):
                channel.agree("plan", DtypeError("no"))
            assert time.monotonic() - start < 1
        else:
            with pytest.raises(CollectiveMismatch):
                channel.agree("plan")
        channel.barrier()

    results_of(threads(2, body))


def test_refuser_that_dies_is_still_heard():
    def body(channel):
        if channel.rank == 0:
            try:
                channel.agree("plan", DtypeError("no"))
            except DtypeError:
                os._exit(3)
        time.sleep(0.3)
        with pytest.raises(CollectiveMismatch, match="DtypeError: no"):
            channel.agree("plan")

    first, second = processes(2, body)
    assert isinstance(first, Died)
    assert second is None


@pytest.mark.parametrize(
    ("raised", "expected"), [(HeapExhausted("full"), HeapExhausted), (KeyError("k"), TdxError)]
)
def test_together_fails_everywhere(raised, expected):
    def body(channel):
        def step():
            if channel.rank == 1:
                raise raised
            return channel.rank

        with pytest.raises(Exception) as caught:  # noqa: PT011
            channel.together(step, "grow")
        assert channel.together(lambda: channel.rank + 1, "again") == channel.rank + 1
        return [caught.value]

    (first,), (second,), (third,) = results_of(threads(3, body))
    assert second is raised
    for error in (first, third):
        assert type(error) is expected
        assert f"rank 1: {type(raised).__name__}: {raised}" in str(error)


def test_together_interrupted():
    def body(channel):
        def step():
            if channel.rank == 0:
                raise KeyboardInterrupt

        channel.together(step, "grow")

    first, second = threads(2, body)
    assert isinstance(first, KeyboardInterrupt)
    assert isinstance(second, TdxError)
    assert "rank 0: KeyboardInterrupt" in str(second)


def test_exchange_fds():
    def body(channel):
        before = quiet_fds(channel)
        fd = None
        if channel.rank != 1:
            fd = os.memfd_create("test", os.MFD_CLOEXEC)
            os.write(fd, b"%d" % channel.rank)
        fds = exchange_fds(channel, fd, "heap")
        content = [None if f is None else os.pread(f, 10, 0) for f in fds]
        assert fd not in fds or fd is None
        assert not any(os.get_inheritable(f) for f in fds if f is not None)
        for f in (*fds, fd):
            if f is not None:
                os.close(f)
        assert quiet_fds(channel) == before
        return content

    for size in (1, 2, 4):
        expected = [None if r == 1 else b"%d" % r for r in range(size)]
        assert results_of(processes(size, body)) == [expected] * size


def test_exchange_fds_mismatch_leaks_nothing():
    def body(channel):
        before = quiet_fds(channel)
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        with pytest.raises(CollectiveMismatch):
            exchange_fds(channel, fd, f"heap of {channel.rank}")
        with pytest.raises(CollectiveMismatch):
            channel.barrier() if channel.rank else exchange_fds(channel, fd, "heap")
        os.close(fd)
        assert quiet_fds(channel) == before

    results_of(processes(3, body))


def test_exchange_fds_above_the_limit_fails_everywhere():
    def body(channel):
        fd = None if channel.rank == 1 else os.memfd_create("test", os.MFD_CLOEXEC)
        before = quiet_fds(channel)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if channel.rank == 1:  # room for one of the peers' two descriptors
            free = [n for n in range(max(before) + 20) if n not in before]
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[1], limits[1]))
        channel.barrier()
        with pytest.raises(TdxError, match="ulimit -n"):
            exchange_fds(channel, fd, "heap")
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert quiet_fds(channel) == before

    results_of(processes(3, body))


def test_exchange_fds_without_room_for_copies_fails_everywhere():
    def body(channel):
        fd = os.memfd_create("test", os.MFD_CLOEXEC)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if channel.rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        with pytest.raises(TdxError, match="cannot be duplicated"):
            exchange_fds(channel, fd, "heap")
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        channel.barrier()

    results_of(processes(3, body))


def test_malformed_record_ends_the_connection():
    def body(channel):
        channel.barrier()
        if channel.rank == 1:
            channel._links[0].sock.send(b"\xff" * frames.RECORD_BYTES)
            time.sleep(0.3)
            return
        with pytest.raises(PeerLost, match="malformed"):
            channel.barrier()

    results_of(threads(2, body))


def test_record_with_absurd_sizes():
    header = struct.pack("<4sIQQIII", b"tdx1", 0, 1, 1, 50, 10, 0)
    assert len(header) == frames._HEADER.size

    def body(channel):
        channel.barrier()
        if channel.rank == 1:
            channel._links[0].sock.send(header.ljust(frames.RECORD_BYTES, b"\0"))
            time.sleep(0.3)
            return
        with pytest.raises(PeerLost, match="malformed"):
            channel.barrier()

    results_of(threads(2, body))


def test_a_thousand_barriers_of_eight_ranks(record_property):
    def body(channel):
        channel.barrier()
        start = time.perf_counter()
        for _ in range(1000):
            channel.barrier()
        return (time.perf_counter() - start) * 1e3  # us a barrier

    microseconds = max(results_of(processes(8, body)))
    record_property("us_per_barrier", microseconds)
    assert microseconds < 20_000


MPI_BODY = """
import os, sys
from tdx.runtime.comm import close_comm, open_comm
from tdx.runtime.descriptors import exchange_fds
from tdx.runtime.exchange import Mesh
from tdx.runtime.host_channel import HostChannel
from tdx.runtime.topology import discover
comm = open_comm()
where = discover(comm)
channel = HostChannel(Mesh.connect(comm, 20), 20)
close_comm(comm)
assert (where.rank, where.local_size) == (channel.rank, channel.size)
fd = os.memfd_create('x')
os.write(fd, b'%d' % channel.rank)
fds = exchange_fds(channel, fd, 'files')
assert [os.pread(f, 9, 0) for f in fds] == [b'%d' % r for r in range(channel.size)]
channel.barrier()
channel.close()
sys.stdout.write('good\\n')
"""


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_mpi_ranks(size):
    done = run_python(MPI_BODY, launch=size)
    assert done.stdout.split() == ["good"] * size, done.stderr
