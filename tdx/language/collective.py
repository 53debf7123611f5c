"""Meetings of programs, on the words of a channel.

A channel handle (`world.channel(blocks)` on the host side) is a named tuple with the fields
`words`, `control` and `packed` (see tdx/abi.py). It serves one kernel at a time, alike on ranks, of
at most `blocks` programs (for `grid_barrier` exactly as many), all of them resident at once.
Counters only grow, so nothing is reset and a CUDA graph may replay everything here.

All functions are executed by the whole program, outside of divergent control flow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tdx import abi
from tdx.language import host
from tdx.language._intrinsic import check_channel, is_host
from tdx.language.address import masked_peers, num_ranks, rank, symm_at, team_index
from tdx.language.memory import fence
from tdx.language.signal import _wait_span, program_barrier, program_index, publish

_BLOCKS = tl.constexpr(abi.CHANNEL_PACK_SHIFT)
_HEADER = tl.constexpr(abi.CHANNEL_HEADER_WORDS)
_STATE = tl.constexpr(abi.STATE_WORDS)
_EPOCH = tl.constexpr(abi.STATE_EPOCH)
_BARRIER = tl.constexpr(abi.STATE_BARRIER)
_GRID_COUNT = tl.constexpr(abi.CHANNEL_GRID_COUNT)
_LANES = tl.constexpr(abi.MAX_RANKS)
_PHASE = tl.constexpr(-(1 << 31))


@triton.jit
def num_blocks(channel):
    """Programs per rank that the channel was made for, int32."""
    check_channel(channel)
    return channel.packed >> _BLOCKS


@triton.jit
def epoch(channel):
    """Begin this block's next epoch and return its number, int32, the same in every thread.

    The grid has no more than `num_blocks` programs, which the host tier checks and a GPU does not.

    The first call ever returns 1; the number wraps around after 2**32 calls. Every rank's block b
    counts alike as long as all ranks launch the same kernels on the channel. Costs a local load
    and two barriers of the program; orders nothing between programs; counts also while a fault
    stands. Replay safe: the number is kept in device memory, never in an argument.
    """
    check_channel(channel)
    state = channel.words + _HEADER + program_index() * _STATE + _EPOCH
    program_barrier()
    number = tl.load(state) + 1
    program_barrier()
    tl.store(state, number)
    return number


@triton.jit
def barrier(channel, world):
    """Block b of every rank of `world` meets block b of all the others.

    `world` is the handle of the world or team that the channel belongs to. Returns `ok`, a scalar
    int1, the same in every thread: False when the deadline passed or a fault stands.

    Ordering: everything that any of these programs did before the barrier is visible to all
    threads of all of them after it (release and acquire, system scope). Other blocks are not
    concerned: add `grid_barrier` for a meeting of all blocks of all ranks.
    Fault: while one stands nothing is sent, and `ok` is False unless all peers had arrived.
    """
    check_channel(channel, "barrier")
    me = rank(world)
    size = num_ranks(world)
    block = program_index()
    state = channel.words + _HEADER + block * _STATE + _BARRIER
    pads = channel.words + _HEADER + num_blocks(channel) * _STATE + block * size
    number = tl.load(state) + 1
    peers = tl.arange(0, _LANES)
    targets = symm_at(pads + me, masked_peers(peers, world), world)
    publish(targets, number, "set", peers < size, world.control)  # has the program's barrier
    tl.store(state, number)
    return _wait_span(pads, size, number, "ge", world.control, team_index(world), 0)


@triton.jit
def grid_barrier(channel):
    """All programs of this rank's kernel meet; the grid must be exactly the channel's blocks.

    Returns `ok` as `barrier` does. A program that arrived is counted also when others give up, so
    after a fault the channel is of no use; recovery makes a new one.

    Ordering: everything that any program of the grid did before is visible to all threads of all
    programs after it, and by cumulativity to whoever they notify later.
    Needs co-resident programs: a cooperative launch, or a grid that fits the device. The host tier
    refuses a grid of another number of programs; on a GPU it is given up at the deadline.
    """
    check_channel(channel)
    if is_host():
        programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        host.check_grid(num_blocks(channel), programs)
    fence()
    # The first program adds 2**31 - (blocks - 1), the others 1: when all have come, the sign bit
    # has flipped and the lower bits are as before. Nothing is ever reset.
    first = (1 - num_blocks(channel).to(tl.int64) - _PHASE).to(tl.int32)
    amount = tl.where(program_index() == 0, first, 1)
    count = channel.words + _GRID_COUNT
    before = tl.atomic_add(count, amount, sem="acq_rel", scope="sys")
    goal = (before & _PHASE) ^ _PHASE
    return _wait_span(count, 1, goal, "ge", channel.control, 0, -1)
