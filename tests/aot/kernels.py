"""Small kernels that use each verb of tdx.language, for the ahead-of-time tests."""

from __future__ import annotations

import triton
import triton.language as tl

import tdx.language as tdl


@triton.jit
def k_plain(x, n, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + lanes, tl.load(x + lanes, mask=lanes < n) + 1, mask=lanes < n)


@triton.jit
def k_peer_store(x, world, peer, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(tdl.symm_at(x, peer, world) + lanes, tl.load(x + lanes))


@triton.jit
def k_wait(x, out, signal, world, value, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = tdl.wait(signal + tl.program_id(0), world, value, peer=1)
    tl.store(out + lanes, tl.load(x + lanes), mask=ok)


@triton.jit
def k_wait_block(x, out, signal, world, value, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ranks = tl.arange(0, 8)
    ok = tdl.wait(signal + ranks, world, value, "eq", peer=ranks)
    if ok:
        tl.store(out + lanes, tl.load(x + lanes))


@triton.jit
def k_wait_all(x, out, signal, world, value, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = tdl.wait_all(signal, tdl.num_ranks(world), world, value)
    tl.store(out + lanes, tl.load(x + lanes), mask=ok)


@triton.jit
def k_wait_any(x, out, signal, world, value, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    done = tdl.nothing_done()
    for _ in range(4):
        index, done, ok = tdl.wait_any(signal, 4, world, value, done, first=tdl.rank(world))
        tl.store(out + index * BLOCK + lanes, tl.load(x + index * BLOCK + lanes), mask=ok)


@triton.jit
def k_notify(x, out, signal, world, peer, value, BLOCK: tl.constexpr, OP: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(tdl.symm_at(out, peer, world) + lanes, tl.load(x + lanes))
    tdl.notify(signal + tl.program_id(0), peer, world, value, OP)


@triton.jit
def k_notify_block(x, out, signal, world, value, ok, BLOCK: tl.constexpr, OP: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + lanes))
    tdl.notify(signal, tl.arange(0, 8), world, value, OP, when=ok != 0)


@triton.jit
def k_ring(x, out, signal, world, epoch, BLOCK: tl.constexpr):
    """Wait, then pass on: what arrives is stored at the next rank and announced there."""
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = tdl.num_ranks(world)
    after = (tdl.rank(world) + 1) % size
    ok = True
    for step in range(1, size):
        ok = tdl.wait(signal + step, world, epoch, peer=after) & ok
        data = tl.load(x + step * BLOCK + lanes)
        tl.store(tdl.symm_at(out, after, world) + step * BLOCK + lanes, data, mask=ok)
        tdl.notify(signal + step + 1, after, world, epoch, when=ok)


@triton.jit
def k_copies(dst, src, signal, world, peer, n, value, OP: tl.constexpr):
    if OP == "put":
        tdl.put(dst, src, n, peer, world)
    elif OP == "get":
        tdl.get(dst, src, n, peer, world)
    elif OP == "put_signal":
        tdl.put_signal(dst, src, n, signal, value, peer, world)
    else:
        tdl.broadcast(dst, src, n, peer, world)
    tdl.quiet()


@triton.jit
def k_low_latency(x, out, words, world, flag, n, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < n
    me = tdl.rank(world)
    place = words + (2 if WIDE else 1) * lanes
    peer = (me + 1) % tdl.num_ranks(world)
    tdl.store_ll(place, tl.load(x + lanes, mask=mask), flag, peer, world, mask)
    dtype: tl.constexpr = x.dtype.element_ty
    value, ok = tdl.load_ll(place, flag, world, mask, peer, dtype, uniform=False)
    tl.store(out + lanes, value, mask=mask & ok)


@triton.jit
def k_low_latency_uniform(x, out, words, world, flag, n, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, ok = tdl.load_ll(words + lanes, flag, world, lanes < n, dtype=x.dtype.element_ty)
    if ok:
        tl.store(out + lanes, value, mask=lanes < n)


@triton.jit
def k_barrier(x, out, channel, world, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + lanes))
    number = tdl.epoch(channel)
    ok = tdl.barrier(channel, world)
    tl.store(x + lanes, tl.load(out + lanes) + number, mask=ok)


@triton.jit
def k_grid_barrier(x, out, channel, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + lanes))
    ok = tdl.grid_barrier(channel)
    tl.store(x + lanes, tl.load(out + lanes), mask=ok)


@triton.jit
def k_constants(x, out, words, signal, channel, world, BLOCK: tl.constexpr):
    """Literals where other kernels pass run-time values."""
    lanes = tl.arange(0, BLOCK)
    ranks = tl.arange(0, 4)
    ok = tdl.wait(signal + ranks, world, 3) & tdl.wait(signal, world, 1, cmp="eq", peer=0)
    ok = tdl.wait_all(signal, 4, world, BLOCK) & ok
    tdl.store_ll(words, 7, 1, 0, world)
    value, there = tdl.load_ll(words, 1, world)
    value = tdl.consume_token(value, there)
    data = tdl.consume_token(tl.load(x + lanes), ok)
    tl.store(tdl.symm_at(out, 0, world) + lanes, data + value, mask=ok)
    rows, columns = tl.arange(0, 2)[:, None], ranks[None, :]
    tile = tl.load(tdl.symm_at(x + rows, columns, world), mask=columns < 3, other=0)
    tile += tl.load(tdl.symm_at(x + rows, rows * 0 + 1, world))  # one peer in all places
    tl.store(tdl.symm_at(out + rows, columns, world), tile, mask=ok & (columns < 3))
    tdl.put_signal(out, x, 100, signal, 1, 0, world, when=False)
    tdl.broadcast(out, x, BLOCK, 0, world)
    tdl.notify(signal, 0, world)
    tdl.notify(signal + ranks, 0, world, 1, "add", when=ranks < 3)
    if tdl.program_index() < tdl.num_blocks(channel):
        tdl.notify(signal, ranks, world, 1, when=True)


@triton.jit
def k_matmul(
    a,
    b,
    c,
    signal,
    world,
    epoch,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TOKEN: tl.constexpr,
):
    """A matmul that waits for each step's tiles inside its inner loop."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        ok = tdl.wait(signal + k // BK, world, epoch)
        left = a
        right = b
        if TOKEN:
            left = tdl.consume_token(left, ok)
            right = tdl.consume_token(right, ok)
        x = tl.load(left + rows[:, None] * K + (k + inner)[None, :])
        y = tl.load(right + columns[None, :] * K + (k + inner)[:, None])
        total = tl.dot(x, y, total)
    tl.store(c + rows[:, None] * 4096 + columns[None, :], total.to(tl.bfloat16))
