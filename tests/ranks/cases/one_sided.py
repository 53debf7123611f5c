"""Put and get: only the caller acts; data of any type and size, and the signal behind it."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.runtime.errors import Closed, DtypeError, InvalidArgument, PeerTimeout
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.reference import assert_same_bits, poisoned, values


@triton.jit(do_not_specialize=["value"])
def take_kernel(inbox, out, signal, world, value, N, BLOCK: tl.constexpr):
    """Wait for the signal, then copy what was put."""
    ok = tdl.wait(signal, world, value)
    for start in range(0, N, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        tl.store(out + lanes, tl.load(inbox + lanes, mask=lanes < N), mask=(lanes < N) & ok)


@worlds(1, 2, 3, 4, 5)
def case_put_and_get(world):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for salt, (shape, dtype) in enumerate(
        [((1,), "int8"), ((1023,), "bfloat16"), ((3, 5), "float64"), ((0,), "int32"),
         ((2, 0), "bool"), ((4099,), "float8_e4m3fn"), ((7,), "complex64"), ((), "float32")]
    ):  # fmt: skip
        kind = "float32" if dtype == "complex64" else dtype
        mine = [values(r, shape, kind, salt).astype(dtype) for r in range(world.size)]
        src = world.array(mine[world.rank], symmetric=False)
        dst = world.array(poisoned(shape, dtype))
        world.barrier()
        tdx.put(dst, src, right)
        world.barrier()
        assert_same_bits(dst.numpy(), mine[left], (shape, dtype))
        back = world.array(poisoned(shape, dtype), symmetric=False)
        tdx.get(back, dst, right)
        assert_same_bits(back.numpy(), mine[world.rank], (shape, dtype))
        world.barrier()


@worlds(2, 3)
def case_parts_of_arrays(world):
    """Views at any alignment; the rest of the peer's array stays."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for begin in (1, 2, 3, 8):
        dst = world.array(poisoned(600, "int8"))
        src = world.array(values(world.rank, 600, "int8"))
        world.barrier()
        tdx.put(dst[begin : begin + 500], src[2 * begin : 2 * begin + 500], right)
        world.barrier()
        wanted = poisoned(600, "int8")
        wanted[begin : begin + 500] = values(left, 600, "int8")[2 * begin : 2 * begin + 500]
        assert_same_bits(dst.numpy(), wanted, begin)
        world.barrier()


@worlds(1, 2, 3)
def case_signal_comes_after_the_data(world):
    """A kernel of the peer that waits for the signal sees what was put before it, call by call."""
    n = 5000
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    inboxes = world.zeros((2, n), "float32")
    signals = world.zeros(4, "int32", name="arrived")
    taken = world.zeros(1, "int32")
    outs = []
    world.barrier()
    for turn in range(2, 12):
        src = world.array(values(world.rank, n, "float32", turn), symmetric=False)
        inbox, signal = inboxes[turn % 2], signals[turn % 2 : turn % 2 + 1]
        tdx.put(inbox, src, right, signal=signal, value=turn)
        outs.append(world.empty(n, "float32", symmetric=False))
        take_kernel[(1,)](inbox, outs[-1], signal, world.handle, turn, n, BLOCK=1024)
        tdx.barrier()  # the inbox may be written again
    for turn, out in enumerate(outs, 2):
        assert_same_bits(out.numpy(), values(left, n, "float32", turn), turn)
    tdx.put(taken, np.full(1, 7, np.int32), right, signal=signals[3], value=-5)
    world.barrier()
    assert taken.numpy() == 7
    assert signals.numpy().tolist() == [10, 11, 0, -5]
    world.barrier()


@worlds(2, 3)
def case_graph(world):
    n, right = 300, (world.rank + 1) % world.size
    src, dst = world.empty(n, "float32", symmetric=False), world.zeros(n, "float32")
    back, signal = world.empty(n, "float32", symmetric=False), world.zeros(1, "int32")
    tdx.put(dst, src, right, signal=signal, value=1)
    world.barrier()
    with tdx.graph(world) as graph:
        tdx.put(dst, src, right, signal=signal, value=9)
        tdx.get(back, dst, right)
    for turn in range(5):
        src.copy_from(values(world.rank, n, "float32", turn))
        graph.replay()
        assert_same_bits(back.numpy(), values(world.rank, n, "float32", turn), turn)
    world.barrier()
    assert signal.numpy() == 9
    world.barrier()


@worlds(2)
def case_numpy(world):
    """Foreign arrays: the calls return when the data was read, or is there."""
    peer = 1 - world.rank
    dst = world.zeros((4, 6), "float32")
    mine = values(world.rank, (4, 6), "float32")
    world.barrier()
    source = mine.copy()
    tdx.put(dst, source, peer)
    source[:] = 0
    world.barrier()
    got = poisoned((4, 6), "float32")
    tdx.get(got, dst, peer)
    assert_same_bits(got, mine)
    tdx.put(dst, np.asfortranarray(2 * mine), peer)
    tdx.get(got, dst, peer)
    assert_same_bits(got, 2 * mine)
    world.barrier()


@worlds(2)
def case_one_rank_alone(world):
    """Nobody else has to call; a refusal stays with the rank it belongs to."""
    x = world.zeros(8, "int32")
    world.barrier()
    if world.rank == 1:
        tdx.put(x, np.arange(8, dtype=np.int32), 0)
        with pytest.raises(InvalidArgument):
            tdx.put(x, np.arange(9, dtype=np.int32), 0)
        world.synchronize()
    world.barrier()
    assert x.numpy().tolist() == (list(range(8)) if world.rank == 0 else [0] * 8)
    world.barrier()


@worlds(2)
def case_bad_arguments(world):
    peer = 1 - world.rank
    x, local = world.zeros((4, 6), "float32"), world.zeros((4, 6), "float32", symmetric=False)
    word, host = world.zeros(1, "int32"), np.zeros((4, 6), np.float32)
    fixed = host.copy()
    fixed.flags.writeable = False
    for error, words, call in [
        (InvalidArgument, rf"dst is the view that peer\({peer}\) made",
         lambda: tdx.put(x.peer(peer), local, peer)),
        (InvalidArgument, "src is the view", lambda: tdx.get(local, x.peer(peer), peer)),
        (InvalidArgument, "signal is the view",
         lambda: tdx.put(x, local, peer, signal=word.peer(peer))),
        (InvalidArgument, "dst must be a symmetric", lambda: tdx.put(local, x, peer)),
        (InvalidArgument, "dst must be a symmetric", lambda: tdx.put(host, x, peer)),
        (InvalidArgument, "src must be a symmetric", lambda: tdx.get(x, local, peer)),
        (InvalidArgument, "signal must be a symmetric",
         lambda: tdx.put(x, local, peer, signal=3)),
        (InvalidArgument, "dst .*contiguous", lambda: tdx.put(x.T, local.T, peer)),
        (InvalidArgument, "src .*shape", lambda: tdx.put(x, local[1:], peer)),
        (DtypeError, "src has dtype float64", lambda: tdx.put(x, host.astype(float), peer)),
        (DtypeError, "signal must be int32", lambda: tdx.put(x, local, peer, signal=x[0, :1])),
        (InvalidArgument, "one element",
         lambda: tdx.put(x, local, peer, signal=world.zeros(2, "int32"))),
        (InvalidArgument, "32 bits", lambda: tdx.put(x, local, peer, signal=word, value=1 << 31)),
        (InvalidArgument, "32 bits", lambda: tdx.put(x, local, peer, signal=word, value=1.0)),
        (InvalidArgument, "put: peer 2 is outside", lambda: tdx.put(x, local, 2)),
        (InvalidArgument, "get: peer -1 is outside", lambda: tdx.get(local, x, -1)),
        (InvalidArgument, "dst is read-only", lambda: tdx.get(fixed, x, peer)),
        (InvalidArgument, "dst .*shape", lambda: tdx.get(local[1:], x, peer)),
        (DtypeError, "dst .*float64", lambda: tdx.get(world.zeros((4, 6), "float64"), x, peer)),
        (InvalidArgument, "put: .* own rank overlap",
         lambda: tdx.put(x[1:], x[:-1], world.rank)),
        (InvalidArgument, "get: .* own rank overlap",
         lambda: tdx.get(x[1:], x[:-1], world.rank)),
        (InvalidArgument, "dst must be", lambda: tdx.get("text", x, peer)),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            call()
    freed = world.zeros((4, 6), "float32")
    freed.free()
    with pytest.raises(Closed):
        tdx.put(freed, local, peer)
    world.barrier()
    assert not x.numpy().any()
    assert not word.numpy().any()
    world.barrier()


@triton.jit
def never_kernel(signal, world):
    tdl.wait(signal, world, 1)


@isolated
@worlds(2)
@limit(30)
def case_nothing_is_signalled_while_a_fault_stands(comm, backend):
    with pytest.raises(PeerTimeout), tdx.init(comm, backend=backend, timeout_s=0.5) as world:  # noqa: PT012
        peer = 1 - world.rank
        never, arrived = world.zeros(1, "int32"), world.zeros(1, "int32")
        x = world.zeros(64, "float32")
        world.barrier()
        if world.rank == 0:  # queued before the fault, run after it
            never_kernel[(1,)](never, world.handle)
            tdx.put(x, x, peer, signal=arrived, value=1)
            with pytest.raises(PeerTimeout):
                world.synchronize()
        comm.barrier()
        if world.rank == 1:
            assert arrived.numpy() == 0
        comm.barrier()
        if world.rank == 1:
            never_kernel[(1,)](never, world.handle)
            world.synchronize()
        with pytest.raises(PeerTimeout):
            tdx.put(x, x, peer)
        world.check()
