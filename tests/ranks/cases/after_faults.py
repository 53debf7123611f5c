"""A rank that gave up sends nothing more: a peer that is late finds no data of its later calls."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
import triton

import tdx
import tdx.language as tdl
from tdx.kernels import matmul_all_reduce, matmul_reduce_scatter
from tdx.kernels.all_reduce import Config as AllReduceConfig
from tdx.kernels.all_reduce_rms_norm import Config as NormConfig
from tdx.kernels.copy_push import enter_kernel, grant_kernel
from tdx.kernels.matmul import Config
from tdx.runtime.errors import PeerLost, PeerTimeout, TdxError
from tests.helpers.blocks import copy_engines, many_blocks
from tests.helpers.cases import host_only, isolated, limit, worlds
from tests.helpers.stand_in import by_stand_in

TIMEOUT_S = 0.4
SHAPE = (32, 64)
WEIGHTS = {tdx.AllReduceRmsNorm: (64,), tdx.AllGatherMatmul: (64, 16),
           tdx.MatmulReduceScatter: (64, 16), tdx.MatmulAllReduce: (64, 16)}  # fmt: skip
ALGORITHMS = [
    (tdx.AllReduce, (), list(AllReduceConfig.algorithms)),
    (tdx.ReduceScatter, (), ["low_latency", "push"]),
    (tdx.Reduce, (1,), ["low_latency", "two_shot"]),
    (tdx.AllGather, (), ["low_latency", "push", "pull"]),
    (tdx.AllToAll, (), ["low_latency", "push"]),
    (tdx.Broadcast, (0,), ["low_latency", "low_latency_scatter", "scatter", "chain"]),
    (tdx.AllReduceRmsNorm, (), list(NormConfig.algorithms)),
    (tdx.AllGatherMatmul, ((64, 16),), ["fused", "one_kernel", "unfused"]),
    (tdx.MatmulReduceScatter, ((64, 16),), list(matmul_reduce_scatter.ALGORITHMS)),
    (tdx.MatmulAllReduce, ((64, 16),), list(matmul_all_reduce.ALGORITHMS)),
]

GIVEN_UP = (PeerTimeout, PeerLost)  # of a peer that waits, or has closed its world


@triton.jit
def patient_kernel(signals, world):
    """Waits for a signal that never comes."""
    tdl.wait(signals, world, 1)


@isolated
@worlds(2)
@limit(60)
@pytest.mark.parametrize(
    ("make", "args", "algorithms"), ALGORITHMS, ids=[a[0].__name__ for a in ALGORITHMS]
)
def case_nothing_is_sent(comm, backend, make, args, algorithms):
    for algorithm in algorithms:
        options = {} if algorithm is None else {"algorithm": algorithm}
        # products take the shape of b before the dtype
        shapes, rest = (args, ()) if args and isinstance(args[0], tuple) else ((), args)
        world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
        plan = make(world, SHAPE, *shapes, "float32", *rest, **options)
        # words of the next call would be taken; other slots are the second next one's again
        words = ("low_latency", "unfused")
        later = 1 if algorithm and algorithm.startswith(words) else 2
        more = [np.ones(WEIGHTS[make], np.float32)] if make in WEIGHTS else []
        _late_rank(world, plan, more, later)
        with contextlib.suppress(TdxError):
            world.close()
        comm.Barrier()


def _late_rank(world, plan, more, later):
    """Rank 0 calls the plan, gives up, and calls it `later` times more; then rank 1 calls it."""
    given = [world.array(np.full(SHAPE, value, np.float32)) for value in (1 + world.rank, 9)]
    more = [world.array(m) for m in more]
    signals = world.zeros(1, "int32")
    patient_kernel[(1,)](world.array(np.ones(1, np.int32)), world.handle)  # compiled beforehand
    for _ in range(3):
        result = plan(given[0], *more)
        wanted = None if result is None else np.array(result.numpy())
    world.barrier()
    plan(given[0], *more) if world.rank == 0 else time.sleep(3.5 * TIMEOUT_S)
    if world.rank == 0:
        patient_kernel[(1,)](signals, world.handle)
        for _ in range(later):
            plan(given[1], *more)
    else:
        result = plan(given[0], *more)  # what was sent before the fault is good, if it is enough
        with contextlib.suppress(*GIVEN_UP):
            world.synchronize()
            if wanted is not None:
                np.testing.assert_array_equal(result.numpy(), wanted)
            plan(given[0], *more)
    with pytest.raises(GIVEN_UP):
        world.synchronize()


BY_COPY_ENGINES = pytest.mark.parametrize(
    ("make", "algorithm", "share"),  # the last: what cuBLAS multiplies
    [(tdx.AllGatherMatmul, "fused", "none"), (tdx.AllGatherMatmul, "fused", "all"),
     *((tdx.MatmulReduceScatter, "fused", share) for share in ("none", "others", "all")),
     *((tdx.MatmulAllReduce, "copy_engine", share) for share in ("none", "others", "all"))],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip


@isolated
@worlds(2)
@limit(30)
@BY_COPY_ENGINES
def case_copy_engines_send_no_signals(comm, backend, make, algorithm, share):
    """Their copies go out; but the late rank finds the signals of its last call taken back."""
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    shape = (128, 64)
    with many_blocks(), copy_engines(), by_stand_in(share):  # and so several chunks
        config = Config(16, 16, 16)
        plan = make(world, shape, (64, 16), "float32", algorithm=algorithm, config=config)
    x, y = world.zeros(shape, "float32"), world.zeros((64, 16), "float32")
    plan(x, y)
    world.synchronize()
    world.barrier()
    sent = [plan._gathering.progress if make is tdx.AllGatherMatmul else plan._way.signals]
    if make is tdx.MatmulAllReduce:
        sent.append(plan._way.progress)
    if world.rank == 0:
        plan(x, y)
        with pytest.raises(PeerTimeout):
            world.synchronize()
        comm.Barrier()
    else:
        comm.Barrier()
        for signals in sent:
            seen, end = np.ones((2, signals.shape[0] // 2), np.int32), time.monotonic() + 5
            while (seen[0] == 1).any() and time.monotonic() < end:
                world.driver.read(seen.ctypes.data, signals._address, seen.nbytes)
            assert (seen[0] < -(1 << 29)).all(), seen
            # own sums are signalled to peers only
            assert (seen[1] == (make is not tdx.MatmulAllReduce or signals is sent[0])).all(), seen
        with contextlib.suppress(TdxError):
            plan(x, y)
        with pytest.raises(TdxError):
            world.synchronize()
    with contextlib.suppress(TdxError):
        world.close()


@isolated
@worlds(2)
@limit(30)
def case_copies_of_a_rank_with_a_fault_carry_no_signal(comm, backend):
    """Though its peer has let it write, and copies of the same call had one before."""
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    progress, credit, finished, epoch = (world.zeros(2, "int32") for _ in range(4))
    sent, peer = world.zeros((2, 4), "int32"), 1 - world.rank
    meeting = (progress, credit, epoch, world.handle)
    enter_kernel[(1,)](*meeting, 1, num_warps=1)
    world.barrier()
    given = (*meeting, finished, sent, peer, 1, 0, 1, 0)
    grant_kernel[(1,)](*given, ALL=False, num_warps=1)
    world.synchronize()
    assert sent.numpy()[peer, 0] == 1
    world.faults.halt()
    grant_kernel[(1,)](*given, ALL=False, num_warps=1)
    seen, end = np.ones(1, np.int32), time.monotonic() + 5
    while seen[0] == 1 and time.monotonic() < end:
        world.driver.read(seen.ctypes.data, sent[peer]._address, seen.nbytes)
    assert seen[0] == 1 - (1 << 30)
    comm.Barrier()
    with contextlib.suppress(TdxError):
        world.close()


@isolated
@worlds(3)
@limit(30)
def case_copy_engines_send_only_what_was_reduced(comm, backend):
    """A rank that gave up has changed its buffer; others find in theirs what they were given."""
    world = tdx.init(comm, backend=backend, timeout_s=TIMEOUT_S)
    plan = tdx.AllReduce(world, 300, "float32", algorithm="copy_engine")
    result = plan(world.array(np.full(300, 1 + world.rank, np.float32)))
    wanted = np.array(result.numpy())
    world.barrier()
    world.synchronize()
    if world.rank == 0:
        result.copy_from(np.full(300, 77, np.float32))
        for _ in range(2):
            plan(result)
        with pytest.raises(PeerTimeout):
            world.synchronize()
        comm.Barrier()
    else:
        comm.Barrier()
        np.testing.assert_array_equal(result.numpy(), wanted)
    comm.Barrier()
    with contextlib.suppress(TdxError):
        world.close()


@isolated
@worlds(4)
@limit(30)
@pytest.mark.parametrize("late", [1, 3])
@BY_COPY_ENGINES
def case_who_is_late_is_named(comm, backend, make, algorithm, share, late):
    """Not those whose copies wait for it."""
    world = tdx.init(comm, backend=backend, timeout_s=1)
    with many_blocks(), copy_engines(), by_stand_in(share):
        plan = make(world, (128, 64), (64, 16), "float32", algorithm=algorithm)
    x, y = world.zeros((128, 64), "float32"), world.zeros((64, 16), "float32")
    plan(x, y)
    world.synchronize()
    world.barrier()
    if world.rank != late:
        plan(x, y)
        with pytest.raises(PeerTimeout) as caught:
            world.synchronize()
        assert caught.value.peer == late, caught.value
    comm.Barrier()
    with contextlib.suppress(TdxError):
        world.close()


@isolated
@worlds(2)
@limit(60)
def case_a_kernel_under_which_copies_went_has_a_fault(comm, backend):
    """A rank with a fault waits for no credit; whose rows are overwritten meanwhile learns it."""
    host_only(backend)  # where a product takes seconds
    world = tdx.init(comm, backend=backend, timeout_s=4)
    columns = 16 if world.rank == 0 else 768
    with copy_engines():
        plan = tdx.AllGatherMatmul(
            world, (64, 64), (64, columns), "float32", algorithm="fused", config=Config(16, 16, 16)
        )
    given = [world.array(np.full((64, 64), value, np.float32)) for value in (1, 9)]
    b = world.array(np.ones((64, columns), np.float32), symmetric=False)
    world.barrier()
    world.synchronize()
    plan(given[0], b)
    if world.rank == 0:
        plan(given[1], b)
        time.sleep(0.5)
        world.faults.halt()
        comm.Barrier()
    else:
        with pytest.raises(PeerTimeout, match="rank 0: all_gather_matmul"):
            world.synchronize()
        comm.Barrier()
    with contextlib.suppress(TdxError):
        world.close()
