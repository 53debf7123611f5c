"""tdx.init and close: how often, how fast, and what every rank hears when it fails."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import threading
import time

import numpy as np
import pytest

import tdx
from tdx.runtime.driver.host import HostDriver
from tdx.runtime.errors import (
    Closed,
    CollectiveMismatch,
    DriverError,
    HeapExhausted,
    InvalidArgument,
    PeerTimeout,
    Unsupported,
)
from tests.helpers.cases import host_only, isolated, limit, worlds


def resources():
    """Threads, descriptors and mappings above 1 GiB (heaps are reserved, not small)."""
    gc.collect()
    with open("/proc/self/maps") as file:
        ends = [line.split()[0].split("-") for line in file]
    large = sum(int(high, 16) - int(low, 16) > 1 << 30 for low, high in ends)
    return threading.active_count(), len(os.listdir("/proc/self/fd")), large


@isolated
@pytest.mark.smoke
@worlds(1, 2, 4)
def case_again_and_again(comm, backend):
    with tdx.init(comm, backend=backend, heap_bytes=1 << 20):
        pass
    before = resources()
    for _ in range(100 if comm.Get_size() == 2 else 10):
        with tdx.init(comm, backend=backend, heap_bytes=1 << 20) as world:
            assert (world.rank, world.size) == (comm.Get_rank(), comm.Get_size())
            assert world.zeros(3, "int8").numpy().tolist() == [0, 0, 0]
            world.barrier()
    assert resources() == before


@isolated
@worlds(4)
def case_is_fast(comm, backend):
    import triton  # noqa: F401

    seconds = []
    for _ in range(3):
        comm.barrier()
        start = time.perf_counter()
        world = tdx.init(comm, backend=backend)
        seconds.append(time.perf_counter() - start)
        world.close()
    if comm.Get_rank() == 0:
        print("init:", ", ".join(f"{1e3 * s:.0f} ms" for s in seconds))  # noqa: T201
    assert min(seconds) < 2


@isolated
@worlds(2)
def case_a_second_world_is_refused(comm, backend):
    with tdx.init(comm, backend=backend) as world:
        with pytest.raises(InvalidArgument, match="is open already; close it"):
            tdx.init(comm, backend=backend)
        world.barrier()
    tdx.init(comm, backend=backend).close()


@isolated
@worlds(2, 3)
def case_ranks_that_disagree(comm, backend):
    before = resources()
    for name, mine, other in [
        ("heap_bytes", 1 << 20, 1 << 21),
        ("timeout_s", 30.0, 20.0),
        ("on_peer_failure", "raise", "abort"),
    ]:
        table = rf"different values:[^$]*rank 1: .*{name}={other}"
        with pytest.raises(InvalidArgument, match=table):
            tdx.init(comm, backend=backend, **{name: other if comm.Get_rank() == 1 else mine})
        assert resources() == before
    tdx.init(comm, backend=backend).close()


BAD_VALUES = [
    ("backend", "cpu", InvalidArgument, "'cpu' is not one of cuda, hip, host"),
    ("backend", "hip", Unsupported, "use backend='host'"),
    ("heap_bytes", -1, InvalidArgument, "256 bytes"),
    ("heap_bytes", 1e9, InvalidArgument, "got 1000000000.0"),
    ("timeout_s", -1, InvalidArgument, "got -1"),
    ("timeout_s", float("nan"), InvalidArgument, "got nan"),
    ("timeout_s", "10", InvalidArgument, "got '10'"),
    ("timeout_s", 1e7, InvalidArgument, "0: no deadline"),
    ("on_peer_failure", "ignore", InvalidArgument, "'ignore' is not one of"),
]


@isolated
@worlds(1, 2)
def case_bad_values(comm, backend):
    """On the last rank only: the others hear of it."""
    before = resources()
    last = comm.Get_rank() == comm.Get_size() - 1
    for name, value, error, text in BAD_VALUES:
        with pytest.raises(error, match=text):
            tdx.init(comm, **({"backend": backend} | ({name: value} if last else {})))
        assert resources() == before
    tdx.init(comm, backend=backend).close()


@isolated
@worlds(1, 2)
def case_cuda_without_a_gpu(comm):
    from tdx.runtime.backends import nvidia_gpus

    if nvidia_gpus() == 0:
        with pytest.raises((DriverError, Unsupported), match=r"cuda.*backend='host'"):
            tdx.init(comm, backend="cuda")


@isolated
@worlds(1)
@pytest.mark.parametrize("comm_like", [3, "MPI", object()], ids=["int", "str", "object"])
def case_what_is_no_communicator(comm_like):
    with pytest.raises(InvalidArgument, match="Get_rank"):
        tdx.init(comm_like)


@isolated
@worlds(1)
def case_several_hosts(backend):
    class TwoHosts:
        def Get_rank(self):
            return 0

        def Get_size(self):
            return 2

        def allgather(self, payload):
            return [payload, payload.replace(os.uname().nodename.encode(), b"elsewhere")[::-1]]

    with pytest.raises(tdx.errors.TdxError):
        tdx.init(TwoHosts(), backend=backend)


@isolated
@worlds(1, 3)
def case_a_failing_verb_undoes_everything(comm, backend):
    """The n-th use of a verb fails on the last rank: all ranks raise, nothing stays."""
    host_only(backend)
    tdx.init(comm, backend=backend).close()
    before = resources()
    size = comm.Get_size()
    for verb, uses in [
        ("mem_create", 2), ("mem_export", 2), ("mem_import", 2 * size), ("mem_map", 2 * size),
        ("stream_create", 1), ("alloc", 2), ("addr_reserve", 1),
    ]:  # fmt: skip
        for number in range(1, uses + 1):
            with (
                _failing(verb, number if comm.Get_rank() == size - 1 else 0),
                pytest.raises(HeapExhausted, match=f"injected into {verb}"),
            ):
                tdx.init(comm, backend=backend, timeout_s=5)
            assert resources() == before
    with tdx.init(comm, backend=backend) as world:
        world.barrier()


@contextlib.contextmanager
def _failing(verb, number):
    """The number-th use of a driver's verb raises HeapExhausted; 0: none does."""
    original, calls = getattr(HostDriver, verb), []

    def failing(self, *args):
        calls.append(args)
        if len(calls) == number:
            raise HeapExhausted(f"injected into {verb}")
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostDriver, verb, failing)
        yield


@isolated
@worlds(2)
def case_no_descriptor_left(comm, backend):
    tdx.init(comm, backend=backend).close()
    before = resources()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    for spare in (0, 2, 4, 6, 8):
        if comm.Get_rank() == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
        try:
            tdx.init(comm, backend=backend, timeout_s=5).close()
        except (tdx.errors.TdxError, OSError) as error:
            wanted = ("ulimit", "open files", "descriptor", "rank 0 cannot be reached")
            assert any(text in str(error) for text in wanted), error  # noqa: PT017
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        comm.barrier()
    tdx.init(comm, backend=backend).close()
    assert resources() == before


@isolated
@worlds(2)
def case_exports_outlive_the_world(comm, backend):
    """A NumPy view keeps the memory; close says so; letting go of it unmaps."""
    host_only(backend)  # NumPy has no views of GPU memory; tests/gpu has this with CuPy's
    world = tdx.init(comm, backend=backend)
    x = world.array(np.full(4, world.rank, np.int32))
    local = world.array(np.arange(4, dtype=np.int32), symmetric=False)
    views = [np.asarray(x), np.from_dlpack(x), np.asarray(local)]
    with pytest.warns(ResourceWarning, match="3 exported"):
        world.close()
    views[0][:] += 1
    assert (views[1] == world.rank + 1).all()
    assert (views[2] == np.arange(4)).all()
    mapped = resources()[2]
    with tdx.init(comm, backend=backend) as second:
        second.barrier()
    assert (views[0] == world.rank + 1).all()
    views.clear()
    gc.collect()
    unmapped = resources()[2]
    assert unmapped < mapped
    third = tdx.init(comm, backend=backend)
    view = np.asarray(third.array(np.arange(4), symmetric=False))  # its memory alone stays
    with pytest.warns(ResourceWarning, match="1 exported"):
        third.close()
    assert resources()[2] == unmapped
    assert (view == np.arange(4)).all()
    with pytest.raises(Closed, match="world is closed"):
        x.numpy()


@isolated
@worlds(2)
@limit(20)
def case_close_has_a_deadline(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=1)
    if world.rank == 0:
        with pytest.raises(PeerTimeout, match="close"):
            world.close()
        assert world.closed
        comm.barrier()
    else:
        comm.barrier()  # late: rank 0 has come and gone
        world.close()
    tdx.init(comm, backend=backend).close()


@isolated
@worlds(2)
def case_different_calls_are_named(comm, backend):
    with tdx.init(comm, backend=backend, timeout_s=5) as world:
        call = world.barrier if world.rank == 0 else lambda: world.team([0, 1])
        with pytest.raises(CollectiveMismatch, match=r"rank 0: barrier; rank 1: team\(\[0, 1\]\)"):
            call()
        world.barrier()
