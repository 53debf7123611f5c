"""Kernels of users with a mistake in them: the host tier says which, instead of crashing."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.kernels.all_reduce import Config
from tdx.runtime.driver.host import executor
from tdx.runtime.errors import InvalidArgument
from tests.helpers.cases import host_only, isolated, worlds
from tests.helpers.mistakes import refused

N = tl.constexpr(64)


@triton.jit
def use_kernel(x, own, signal, peer, world, VERB: tl.constexpr):
    lanes = tl.arange(0, N)
    if VERB == "put":
        tdl.put(x, own, N, peer, world)
    elif VERB == "get":
        tdl.get(own, x, N, peer, world)
    elif VERB == "put_signal":
        tdl.put_signal(x, own, N, signal, 1, peer, world)
    elif VERB == "notify":
        tdl.notify(signal, peer, world, 1)
    elif VERB == "add":
        tdl.notify(signal, peer, world, 1, op="add")
    elif VERB == "broadcast":
        tdl.broadcast(x, own, N, tdl.rank(world), world)
    elif VERB == "wait":
        tdl.wait(signal, world, 0, peer=peer)
    elif VERB == "load":
        tl.store(own + lanes, tl.load(tdl.symm_at(x + lanes, peer, world)))
    elif VERB == "store":
        tl.store(tdl.symm_at(x, peer, world) + lanes, 1)
    elif VERB == "cas":
        tl.atomic_cas(tdl.symm_at(signal, peer, world), 0, 1)


@triton.jit
def masked_kernel(x, own, world):
    me, size = tdl.rank(world), tdl.num_ranks(world)
    lanes = tl.arange(0, N)
    at = tdl.symm_at(x + lanes, me + 1, world)
    tl.store(at, me + lanes, mask=(lanes < N) & (me + 1 < size))
    peers = tl.arange(0, N)
    tl.store(tdl.symm_at(x + 64 + me, peers, world), 100 + me, mask=peers < size)
    found = tl.load(tdl.symm_at(x + 128, peers, world), mask=peers < size, other=7)
    tl.store(own + peers, found)
    # lanes before the array, and of memory that has no copies, as long as nobody uses them
    tl.store(tdl.symm_at(x + lanes - 32, 0, world), 5, mask=(lanes >= N) & (me == 0))
    tdl.notify(own, me + 1, world, 1, when=False)


@triton.jit
def masked_tile_kernel(x, own, world, rows, M: tl.constexpr):
    """Blocks of pointers with two dimensions: a wrong peer, wrong rows, blocks of peers."""
    me, size = tdl.rank(world), tdl.num_ranks(world)
    r, c = tl.arange(0, M)[:, None], tl.arange(0, 4)[None, :]
    for peer in range(-1, size + 1):
        mask = (r < rows) & (c < 4) & (peer >= 0) & (peer < size)
        value = tl.load(tdl.symm_at(x + r * 4 + c, peer, world), mask=mask, other=0)
        if (peer >= 0) & (peer < size):
            tl.store(own + peer, tl.sum(tl.sum(value, 1), 0))
        else:
            tl.store(own + 8, tl.sum(tl.sum(value, 1), 0))
    few = tl.arange(0, 2)[:, None]
    found = tl.load(tdl.symm_at(x + few, tl.arange(0, 4), world), mask=c < size, other=7)
    tl.store(own + 16 + few * 4 + c, found)
    found = tl.load(tdl.symm_at(x + few, c, world), mask=c < size, other=7)
    tl.store(own + 32 + few * 4 + c, found)
    tl.store(own + 40 + few, tl.load(tdl.symm_at(x + few, (few + me) * 0, world)))


@triton.jit
def beside_kernel(x, own, world, n, peer):
    """Scalar pointers before and behind what is mapped, used within."""
    lanes = tl.arange(0, N)
    halo = tl.load(tdl.symm_at(x - 1, peer, world) + lanes, mask=lanes > 0, other=-1)
    tl.store(own + lanes, halo)
    tl.store(own + N + lanes, tl.load(tdl.symm_at(x + n, peer, world) - N + lanes))


@triton.jit
def beyond_kernel(x, own, world, step, peer):
    tl.store(own, tl.load(tdl.symm_at(x + step, peer, world)))


@triton.jit
def other_kernel(x, world):
    tl.store(tdl.symm_at(x, 1, world), 1)


@triton.jit
def own_kernel(local, own, world):
    lanes = tl.arange(0, N)
    me = tdl.rank(world)
    tl.store(own + lanes, tl.load(tdl.symm_at(local, me, world) + lanes))
    tl.store(own + N + lanes, tl.load(tdl.symm_at(local + lanes, me, world)))
    peers = tl.zeros((N,), tl.int32) + me
    tl.store(own + 2 * N + lanes, tl.load(tdl.symm_at(local + lanes, peers, world)))


@triton.jit
def wait_at_peer_kernel(signal, peer, world):
    tdl.wait(tdl.symm_at(signal, peer, world), world, 0)


@triton.jit
def twice_kernel(x, peer, world, VERB: tl.constexpr):
    at = tdl.symm_at(x + 5, peer, world)
    if VERB == "put":
        tdl.put(at, x, 8, peer, world)
    elif VERB == "put_signal":
        tdl.put_signal(x, x + 8, 8, at, 1, peer, world)
    elif VERB == "notify":
        tdl.notify(at, peer, world)
    else:
        tl.store(tdl.symm_at(at, peer, world), 1)


@triton.jit
def words_kernel(words, peer, world):
    tdl.load_ll(words + 3, 1, world, peer=peer)


@triton.jit
def handle_kernel(x, world, VERB: tl.constexpr):
    if VERB == "rank":
        tl.store(x, tdl.rank(world))
    elif VERB == "wait":
        tdl.wait(x, world, 0)
    elif VERB == "put":
        tdl.put(x, x, 1, 0, world)
    elif VERB == "no_fault":
        tl.store(x, tdl.no_fault(world).to(tl.int32))


@triton.jit
def channel_kernel(x, channel, world, VERB: tl.constexpr):
    if VERB == "barrier":
        tdl.barrier(channel, world)
    elif VERB == "grid_barrier":
        tdl.grid_barrier(channel)
    else:
        tl.store(x, tdl.epoch(channel))


@worlds(1, 2, 3)
@pytest.mark.parametrize(
    "verb", ["put", "get", "put_signal", "notify", "add", "wait", "load", "store", "cas"]
)
def case_a_peer_that_does_not_exist(world, verb):
    host_only(world.backend)
    x, own, signal = (world.zeros(64, "int32", name=name) for name in ("x", "own", "signal"))
    size = world.size
    for peer in (size, -1, -2, 1000):
        if verb == "wait" and peer == -1:
            continue  # says that the peer is not known
        use_kernel[(1,)](x, own, signal, peer, world.handle, VERB=verb)
        refused(world, rf"peer {peer} is outside 0\.\.{size - 1}: the handle is of {size} ranks")
    assert not x.numpy().any()
    world.barrier()


@worlds(3)
def case_a_peer_outside_of_a_team(world):
    host_only(world.backend)
    x, signal = world.zeros(64, "int32"), world.zeros(64, "int32")
    team, world_channel = world.team([2, 0]), world.channel(1)
    if team:
        use_kernel[(1,)](x, x, signal, 2, team.handle, VERB="store")
        refused(world, r"peer 2 is outside 0\.\.1: the handle is of 2 ranks")
        channel = world.channel(1, team=team)
        wrong = r"channel is a channel of ranks \[2, 0\], and world the handle of ranks \[0, 1, 2\]"
        with pytest.raises(InvalidArgument, match=wrong):
            channel_kernel[(1,)](x, channel, world.handle, VERB="barrier")
        with pytest.raises(InvalidArgument, match=r"handle of ranks \[2, 0\]"):
            channel_kernel[(1,)](x, world_channel, team.handle, VERB="barrier")
        other_kernel[(1,)](channel.words, world.handle)
        refused(world, r"argument 'x' of rank 1: it was made for a team without that rank")
    world.barrier()


@worlds(1, 2, 3)
def case_masks_make_any_peer_legal(world):
    x, own = world.zeros(192, "int32"), world.zeros(64, "int32")
    x[128:].copy_from(np.full(64, world.rank, np.int32))
    world.barrier()
    masked_kernel[(1,)](x, own, world.handle)
    world.barrier()
    found, size = x.numpy(), world.size
    left = world.rank - 1
    assert (found[:64] == (left + np.arange(64) if left >= 0 else 0)).all()
    assert found[64 : 64 + size].tolist() == [100 + r for r in range(size)]
    assert own.numpy().tolist() == list(range(size)) + [7] * (64 - size)
    world.barrier()


@worlds(1, 2, 3)
def case_masks_make_any_peer_legal_in_tiles(world):
    x, own = world.zeros(8, "int32"), world.zeros(64, "int32")
    x.copy_from(np.arange(8, dtype=np.int32) + 100 * world.rank)
    world.barrier()
    for most in (2, 1 << 13):
        masked_tile_kernel[(1,)](x, own, world.handle, 2, M=most)
    found, size = own.numpy(), world.size
    assert found[:9].tolist() == [28 + 800 * r for r in range(size)] + [0] * (9 - size)
    wanted = [[100 * r + i if r < size else 7 for r in range(4)] for i in range(2)]
    assert found[16:24].reshape(2, 4).tolist() == wanted
    assert found[32:40].reshape(2, 4).tolist() == wanted
    assert found[40:42].tolist() == [0, 1]
    world.barrier()


@isolated
@worlds(1, 2, 3)
def case_pointers_beside_the_heap_used_within(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=5)
    x = world.zeros(world.user_region.heap.largest_free // 4, "int32")  # first and last at once
    own = world.zeros(128, "int32", symmetric=False)
    x[:64].copy_from(np.arange(64, dtype=np.int32) + 100 * world.rank)
    x[-64:].copy_from(np.arange(64, dtype=np.int32) + 1000 * world.rank)
    world.barrier()
    for peer in range(world.size):
        beside_kernel[(1,)](x, own, world.handle, x.size, peer)
        found = own.numpy()
        assert found[:64].tolist() == [-1, *range(100 * peer, 100 * peer + 63)]
        assert (found[64:] == np.arange(64) + 1000 * peer).all()
    if backend == "host":
        for peer in range(world.size):
            copy = "" if peer == world.rank else f" of rank {peer}"
            for step in (-1, x.size):
                beyond_kernel[(1,)](x, own, world.handle, step, peer)
                refused(world, f"load from element {step} of argument 'x'{copy}, whose memory")
    world.barrier()
    world.close()


@worlds(1, 2, 3)
def case_local_memory_is_the_own_ranks_copy(world):
    local = world.array(np.arange(64, dtype=np.int32), symmetric=False)
    own = world.zeros(192, "int32")
    own_kernel[(1,)](local, own, world.handle)
    assert (own.numpy() == np.tile(np.arange(64), 3)).all()
    world.barrier()


@worlds(2, 3)
def case_kernels_of_the_library_have_no_access_checked(world):
    """A masked peer that does not exist would have: see masked_peers."""
    host_only(world.backend)
    x = world.array(np.full(48, world.rank, np.float32))
    out = world.empty(48 * world.size, "float32")
    made = []
    original, executor.Checks = executor.Checks, lambda *a: made.append(original(*a)) or made[-1]
    try:
        for algorithm in Config.algorithms:
            tdx.all_reduce(x, algorithm=algorithm)
        tdx.AllGather(world, 48, "float32", algorithm="pull")(x, out=out)
        for call in (tdx.all_gather, tdx.all_to_all, tdx.reduce_scatter):
            call(x)
        tdx.reduce(x, 1)
        tdx.broadcast(x, 0)
        tdx.broadcast(world.zeros(1 << 20, "float32"), 1)
        tdx.all_reduce(world.zeros(1 << 20, "float32"))
        world.synchronize()
        assert not made
        use_kernel[(1,)](x, x, x, world.size, world.handle, VERB="store")
        refused(world, "is outside")
        assert len(made) == 1
    finally:
        executor.Checks = original
    world.barrier()


@worlds(1, 2)
def case_a_wait_for_the_copy_of_a_wrong_peer(world):
    host_only(world.backend)
    wait_at_peer_kernel[(1,)](world.zeros(1, "int32"), world.size, world.handle)
    text = rf"InvalidArgument: peer {world.size} is outside 0\.\.{world.size - 1}"
    refused(world, rf"{text}.*, launched at .*user_mistakes\.py:\d+$")
    world.barrier()


@worlds(1, 2)
@pytest.mark.parametrize(
    "verb", ["put", "get", "notify", "add", "wait", "load", "store", "cas", "broadcast"]
)
def case_local_memory_where_peers_need_a_copy(world, verb):
    host_only(world.backend)
    x = world.zeros(64, "int32")
    local, signal = (world.zeros(64, "int32", symmetric=False) for _ in range(2))
    peer = (world.rank + 1) % world.size
    use_kernel[(1,)](local, x, signal, peer, world.handle, VERB=verb)
    if peer == world.rank and verb != "wait":  # the own copy, wherever it is
        return world.synchronize()
    name = "signal" if verb in ("notify", "add", "wait", "cas") else "x"
    refused(world, rf"argument '{name}', which is not in the symmetric heap.*symmetric=False")
    world.barrier()


@worlds(1, 2)
def case_addresses_beyond_the_heap(world):
    host_only(world.backend)
    x = world.zeros(64, "int32")
    beyond = x.__class__(world, x._block, x._address + (1 << 34), (64,), (4,), x.dtype)
    for verb in ("put", "notify"):
        use_kernel[(1,)](beyond, x, beyond, 0, world.handle, VERB=verb)
        refused(world, "the kernel was given no memory there")
    use_kernel[(1,)](x, x, beyond, 0, world.handle, VERB="wait")
    refused(world, "wait for address 0x[0-9a-f]*: the kernel was given no memory there")
    words_kernel[(1,)](world.zeros(8, "int64", symmetric=False), 0, world.handle)
    refused(world, "argument 'words', which is not in the symmetric heap")
    world.barrier()


@worlds(2, 3)
def case_a_view_made_by_peer(world):
    host_only(world.backend)
    x = world.zeros(64, "int32")
    other = (world.rank + 1) % world.size
    for verb in ("put", "get", "notify"):
        use_kernel[(1,)](x.peer(other), x, x.peer(other), other, world.handle, VERB=verb)
        refused(world, rf"is in the heap of rank {other} already: pass the own array, not its")
    for arguments in ((x.peer(other), x), (x, x.peer(other))):
        for operation in (tdx.put, tdx.get):
            with pytest.raises(InvalidArgument, match="pass the own"):
                operation(*arguments, 0)
    world.barrier()


@worlds(2, 3)
@pytest.mark.parametrize("verb", ["put", "put_signal", "notify", "symm_at"])
def case_symm_at_before_what_goes_to_the_peer(world, verb):
    host_only(world.backend)
    x = world.zeros(64, "int32")
    other = (world.rank + 1) % world.size
    twice_kernel[(1,)](x, other, world.handle, VERB=verb)
    text = f"argument 'x', which is in the heap of rank {other} already: leave out the earlier"
    refused(world, rf"peer {other} has no copy of {text} symm_at.*go to the peer's copy themselves")
    world.barrier()


@worlds(1, 2)
def case_something_else_than_a_handle(world):
    x, channel = world.zeros(64, "int32"), world.channel(1)
    host_only(world.backend)  # while Triton compiles: see tests/aot
    for verb in ("rank", "wait", "put", "no_fault"):
        handle_kernel[(1,)](x, world.rank, VERB=verb)
        refused(world, r"expected the handle of a world or team, got int32.*`world.handle`")
        handle_kernel[(1,)](x, channel, VERB=verb)
        refused(world, r"expected the handle of a world or team, got a channel.*`world.handle`")
        with pytest.raises(InvalidArgument, match=r"'world' is of type World.*; pass its handle"):
            handle_kernel[(1,)](x, world, VERB=verb)
    for verb in ("barrier", "grid_barrier", "epoch"):
        channel_kernel[(1,)](x, x, world.handle, VERB=verb)
        refused(world, r"expected a channel, got pointer<int32>.*`world.channel\(blocks\)`")
        channel_kernel[(1,)](x, world.handle, world.handle, VERB=verb)
        refused(world, r"expected a channel, got the handle.*`world.channel\(blocks\)`")
    world.barrier()


@worlds(1, 2)
def case_a_grid_barrier_of_fewer_programs(world):
    host_only(world.backend)
    x, channel = world.zeros(64, "int32"), world.channel(4)
    channel_kernel[(2,)](x, channel, world.handle, VERB="grid_barrier")
    refused(world, r"grid has 2 programs and the channel is for 4 blocks; launch 4, or make it")
    channel_kernel[(4,)](x, channel, world.handle, VERB="grid_barrier")
    world.barrier()
