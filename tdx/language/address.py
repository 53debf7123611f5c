"""Who am I, how many are we, and where is a peer's copy of an array.

Every function here takes the world handle, `world.handle` or `team.handle` on the host side: a
named tuple with the fields `control`, `packed`, `stride` and `is_team` (see tdx/abi.py). All of
them are plain arithmetic, executed by every thread, legal anywhere in a kernel, the same in
every replay of a CUDA graph, and unaffected by a standing fault. None orders memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tdx import abi
from tdx.language import host
from tdx.language._intrinsic import (
    bytes_per_element,
    check_handle,
    check_integers,
    check_pointers,
    device_call,
    is_floating,
    is_host,
    multiple_of_16,
)

_FIELD = tl.constexpr(abi.PACK_FIELD_MASK)
_RANK = tl.constexpr(abi.PACK_RANK_SHIFT)
_SIZE = tl.constexpr(abi.PACK_SIZE_SHIFT)
_TEAM = tl.constexpr(abi.PACK_TEAM_SHIFT)
_TABLE = tl.constexpr(abi.CONTROL_TABLE)
_TABLE_ROW = tl.constexpr(abi.MAX_RANKS)


@triton.jit
def rank(world):
    """This rank's number in the world or team, int32: 0 <= rank < num_ranks."""
    check_handle(world)
    return (world.packed >> _RANK) & _FIELD


@triton.jit
def num_ranks(world):
    """Ranks in the world or team, int32."""
    check_handle(world)
    return (world.packed >> _SIZE) & _FIELD


@triton.jit
def team_index(world):
    """Number of the team within its world, int32; 0 is the world itself."""
    check_handle(world)
    return world.packed >> _TEAM


@triton.jit
def heap_distance(peer, world):
    """Bytes from an address in this rank's heap to the same place in `peer`'s, int64.

    `peer` is a rank of the world or team, scalar or block. For a team its world rank is looked
    up in the control block; a peer outside the team gives an unusable distance.
    """
    mine = rank(world)
    if world.is_team:
        table = world.control + _TABLE + team_index(world) * _TABLE_ROW
        ranks = tl.load(table + peer) - tl.load(table + mine)
    else:
        ranks = peer - mine
    return ranks.to(tl.int64) * world.stride


@triton.jit
def symm_at(ptr, peer, world):
    """The pointer to `peer`'s copy of what `ptr` points to.

    Parameters
    ----------
    ptr : pointer or block of pointers
        Into a symmetric array, on the own rank.
    peer : int, constexpr, scalar or block
        Rank of `world`; the own rank is legal and gives `ptr`.
    world : handle

    Returns a pointer of the same type; with a block of peers a block of pointers. Heaps lie at
    large powers of two from each other, so loads and stores through the result are as wide as
    through `ptr`. The arithmetic is 64-bit whatever the stride.

    A peer outside 0..num_ranks - 1, or another rank's and a pointer into other memory than the own
    symmetric heap, gives a pointer that must be masked. `ptr` may be beside its array if what is
    used of the result is within. The host tier refuses its use and says why; a GPU reports
    an illegal address, or stores where it should not.
    """
    check_handle(world, "symm_at")
    check_pointers("symm_at", ptr=ptr)
    check_integers("symm_at", peer=peer)
    size: tl.constexpr = bytes_per_element(ptr)
    if is_host():
        result = ptr + host.distance(ptr, peer, world) // size
    else:
        result = ptr + multiple_of_16(heap_distance(peer, world) // size)
    return result


@triton.jit
def masked_peers(lanes, world):
    """`lanes` as peers, for a block of which those from num_ranks on are masked.

    On the host tier they become the last rank, else all accesses would be checked from there on.
    """
    return tl.minimum(lanes, num_ranks(world) - 1) if is_host() else lanes


@triton.jit
def consume_token(value, token):
    """`value`, in a way that no use of it can be scheduled before `token` is known.

    `token` is what a wait returned (a scalar); `value` is an integer, a pointer or a block of
    them or of floats, and is returned unchanged. `wait` already orders every later access of the
    program, so this is needed only where loads are software-pipelined across iterations of a
    loop that waits.
    """
    if is_host():
        result = value
    elif is_floating(value):
        result = tl.where(_zero(token) == 0, value, 0.0)  # a sum would change the sign of -0.0
    else:
        result = value + _zero(token) * 16  # 16 times 0, so that the compiler keeps the alignment
    return result


@triton.jit
def _zero(token):
    return device_call("tdx_zero", "i32", "i32", (token,))
