"""Hosts and local ranks."""

from __future__ import annotations

import threading

import pytest

from tdx import abi
from tdx.runtime import topology
from tdx.runtime.errors import InvalidArgument, Unsupported
from tdx.runtime.topology import Topology, discover, host_identity
from tests.helpers.fake_comm import results_of, run_threads


@pytest.mark.parametrize("size", [1, 2, 5])
def test_one_host(size):
    host = host_identity().partition("\n")[0]
    expected = [Topology(rank, size, host, rank, size, rank) for rank in range(size)]
    assert results_of(run_threads(size, discover)) == expected


@pytest.mark.parametrize(
    ("told", "places"),
    [
        ([5, 4, 0], [5, 4, 0]),
        ([7, 7, 7], [0, 1, 2]),  # inherited
        ([1, 2, 1], [0, 1, 2]),
        ([1, None, 2], [0, 1, 2]),
        ([None, None, None], [0, 1, 2]),
    ],
)
def test_places_among_the_processes_of_a_launcher(monkeypatch, told, places):
    """Those that announce one each, or else the ranks of the host by their number."""
    ranks = threading.local()
    monkeypatch.setattr(topology, "announced_place", lambda: told[ranks.own])

    def body(comm):
        ranks.own = comm.Get_rank()
        return discover(comm)

    found = results_of(run_threads(3, body))
    assert [each.place for each in found] == places
    assert [each.local_rank for each in found] == [0, 1, 2]


def test_identity_is_stable():
    assert host_identity() == host_identity()
    assert host_identity().partition("\n")[0]


def test_several_hosts_on_every_rank():
    hosts = ["red\n1", "red\n1", "blue\n2", "red\n1"]
    results = run_threads(4, lambda comm: discover(comm, hosts[comm.Get_rank()]))
    for result in results:
        assert isinstance(result, Unsupported)
        assert "red (ranks 0-1, 3)" in str(result)
        assert "blue (rank 2)" in str(result)


def test_hosts_of_one_name_are_told_apart():
    results = run_threads(2, lambda comm: discover(comm, f"localhost\nboot{comm.Get_rank()}"))
    assert all("localhost [boot0] (rank 0)" in str(result) for result in results)
    assert all(isinstance(result, Unsupported) for result in results)


class Shuffled:
    """An allgather in the wrong order."""

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 2

    def allgather(self, payload):
        return [payload.replace(b"0", b"1", 1), payload]


def test_mixed_up_ranks():
    with pytest.raises(InvalidArgument, match="rank order"):
        discover(Shuffled())


def test_too_many_ranks():
    comm = Shuffled()
    comm.Get_size = lambda: abi.MAX_RANKS + 1
    with pytest.raises(Unsupported, match=f"at most {abi.MAX_RANKS}"):
        discover(comm)
