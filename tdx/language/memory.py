"""Bulk copies by a whole program, and fences. The names mean what they mean in OpenSHMEM.

`dst` and `src` are addresses in this rank's own heap (typed pointers into symmetric arrays; the
side that stays local may be any device memory); `numel` counts elements and may be constexpr or
known at run time. All threads of the program copy together, in 16-byte vectors where both
addresses are so aligned, and every thread must reach the call.

A copy begins and ends with a barrier of the program: it reads what any thread of the program
stored before, and afterwards any thread may overwrite `src`. Copies run also while a fault
stands, because data alone misleads nobody; what announces it (`notify`, `put_signal`) does not.
They keep no state, so a CUDA graph may replay them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tdx.language import amd, host, nvidia
from tdx.language._intrinsic import (
    check_copy,
    check_handle,
    check_signal,
    device_call,
    has_async_proxy,
    is_host,
    is_nvidia,
    program_threads,
    vector_elements,
)
from tdx.language.address import num_ranks, rank, symm_at
from tdx.language.signal import _SET, notify, program_barrier


@triton.jit
def put(dst, src, numel, peer, world):
    """Copy `numel` elements from `src` to `peer`'s copy of `dst`.

    Returns when `src` may be reused. The data is visible at the peer only after it has seen a
    later `notify` of this program (or a store that follows `fence`); `quiet` completes it.
    """
    check_copy("put", dst, src, numel, peer)
    check_handle(world, "put")
    program_barrier()
    _copy(symm_at(dst, peer, world), src, numel)
    program_barrier()


@triton.jit
def get(dst, src, numel, peer, world):
    """Copy `numel` elements from `peer`'s copy of `src` to `dst`.

    On return every thread of the program sees the data. What the peer stored is read only if an
    earlier `wait` or `barrier` of this program ordered it.
    """
    check_copy("get", dst, src, numel, peer)
    check_handle(world, "get")
    program_barrier()
    _copy(dst, symm_at(src, peer, world), numel)
    program_barrier()


@triton.jit
def put_signal(dst, src, numel, signal, value, peer, world, op: tl.constexpr = _SET, when=True):
    """`put`, then `notify` of `signal` at the same peer: who waits for it sees the data.

    `signal` is its address in this rank's heap; `value`, `op` and `when` are those of `notify`.
    With `when` False the data is copied all the same, and the signal is not set.
    """
    check_copy("put_signal", dst, src, numel, peer)
    check_signal("put_signal", signal, value, peer, "signal", when)
    check_handle(world, "put_signal")
    program_barrier()
    _copy(symm_at(dst, peer, world), src, numel)
    notify(signal, peer, world, value, op, when)


@triton.jit
def broadcast(dst, src, numel, root, world):
    """Copy `src` of rank `root` to `dst` on every rank of `world`, the root included.

    The root's program pushes; the programs of other ranks do nothing. Like a `put` it is complete
    at a rank when that rank has seen a later signal of the root, most simply by `tdl.barrier`.
    """
    check_copy("broadcast", dst, src, numel, root, "root")
    check_handle(world, "broadcast")
    if rank(world) == host.checked_root(root, world):
        program_barrier()
        for step in range(num_ranks(world)):
            peer = root + step
            peer = tl.where(peer < num_ranks(world), peer, peer - num_ranks(world))
            _copy(symm_at(dst, peer, world), src, numel)
        program_barrier()


@triton.jit
def fence():
    """All earlier accesses of the program are ordered before all its later ones, system scope.

    For stores that are flags of one's own; `notify` needs no fence before it. Executed by the
    whole program, ends with its barrier. Does not depend on faults.
    """
    if is_host():
        pass  # programs of a process share one thread, and its exchanges order what they publish
    elif is_nvidia():
        nvidia.fence()
    else:
        amd.fence()


@triton.jit
def quiet():
    """All earlier puts of the program have been performed at their destinations.

    Implemented as `fence`: on one host a store that is ordered for every observer is performed.
    """
    fence()


@triton.jit
def fence_async_proxy():
    """Tensor-descriptor loads after this see what a `wait` before it has made visible.

    On NVIDIA sm_90 and later those loads go through another path to memory (the async proxy) than
    the stores of peers; elsewhere this does nothing. Executed by the whole program.
    """
    if has_async_proxy():
        device_call("tdx_fence_async_proxy", "i32", "", ())


@triton.jit
def _copy(dst, src, numel):
    """Several vectors per thread in flight, then one, then a masked tail."""
    line: tl.constexpr = program_threads() * vector_elements(src)
    block: tl.constexpr = 4 * line
    blocks_end = host.checked_count(numel, "numel") // block * block
    lines_end = numel // line * line
    for start in range(0, blocks_end, block):
        lanes = start + tl.arange(0, block)
        tl.store(dst + lanes, tl.load(src + lanes))
    for start in range(blocks_end, lines_end, line):
        lanes = start + tl.arange(0, line)
        tl.store(dst + lanes, tl.load(src + lanes))
    if lines_end < numel:
        lanes = lines_end + tl.arange(0, line)
        tl.store(dst + lanes, tl.load(src + lanes, mask=lanes < numel), mask=lanes < numel)
