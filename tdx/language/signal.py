"""Signals: 32-bit words in symmetric memory, by which kernels of different ranks meet.

A notifier stores data into a peer's heap, then notifies; the peer waits, then reads the data:

    tl.store(tdl.symm_at(buffer, peer, world) + lanes, x)      # on the notifying rank
    tdl.notify(signals + me, peer, world, epoch)

    ok = tdl.wait(signals + sender, world, epoch, peer=sender)     # on the peer
    x = tl.load(buffer + lanes, mask=ok)

Values should only grow (`tdl.epoch` counts): a waiter that looks late then still sees enough, and
nothing needs resetting, also when a CUDA graph is replayed. `ge` compares by signed 32-bit
difference, so that a counter may wrap around; a signal must then never be 2**31 behind what is
waited for, so set those that count calls in every call.

All functions here are executed by the whole program: every thread must reach them, outside of
divergent control flow and of warp-specialised regions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tdx.language import amd, host, nvidia
from tdx.language._intrinsic import (
    as_tensor,
    check_choice,
    check_handle,
    check_integers,
    check_signal,
    device_call,
    is_block,
    is_host,
    is_nvidia,
)
from tdx.language.address import num_ranks, symm_at, team_index

_GE = tl.constexpr("ge")  # Triton 3.6 takes no plain str as a default
_SET = tl.constexpr("set")


@triton.jit
def wait(ptr, world, value, cmp: tl.constexpr = _GE, peer=-1):
    """Wait until the signal at `ptr`, in this rank's heap, reaches `value`.

    Parameters
    ----------
    ptr : pointer, or block of pointers, to int32 or uint32
        One signal or several; all must be satisfied. Different threads poll different signals.
    world : handle
    value : int, scalar or block
        32-bit value or one per signal.
    cmp : "ge" or "eq"
        "ge": signed 32-bit difference seen - value is not negative. "eq": equal; safe only when
        nobody overwrites the signal before this rank has seen it.
    peer : int, scalar or block
        Rank of `world` that notifies, for the error message only; -1: not known.

    Returns `ok`, a scalar int1 that is the same in every thread of the program.

    Ordering: when `ok`, every later access of every thread of the program sees what the notifier's
    program stored before its notify (acquire, system scope).
    Deadline: False when the world's timeout passes; the first waiter of the rank to give up
    writes the fault record. While a fault stands, a wait that is not satisfied returns False
    almost at once. Carry `ok` on as a predicate: as `when` of notify and as a mask of stores.
    Replay safety: that of the value; use `tdl.epoch`.
    """
    check_signal("wait", ptr, value, peer)
    check_choice("wait: cmp", cmp, "ge", "eq")
    program = program_index()
    team = team_index(world)
    if is_host():
        ok = host.wait(ptr, value, cmp, world.control, team, peer, num_ranks(world))
    elif is_nvidia():
        ok = nvidia.wait(ptr, value, cmp == "eq", world.control, team, peer, program)
    else:
        ok = amd.wait(ptr, value, cmp == "eq", world.control, team, peer, program)
    return ok


@triton.jit
def wait_all(ptr, count, world, value, cmp: tl.constexpr = _GE, first_peer=0):
    """Wait until `count` consecutive signals starting at `ptr` all reach `value`.

    As `wait` with a block of pointers, for a count known only at run time (0 is satisfied). Signal
    i belongs to rank `first_peer` + i of `world`. Ordering, deadline and `ok` are those of `wait`.
    """
    check_signal("wait_all", ptr, value)
    check_integers("wait_all", count=count, first_peer=first_peer)
    check_choice("wait_all: cmp", cmp, "ge", "eq")
    return _wait_span(ptr, count, value, cmp, world.control, team_index(world), first_peer)


@triton.jit
def notify(ptr, peer, world, value=1, op: tl.constexpr = _SET, when=True):
    """Set, or add to, `peer`'s copy of the signal at `ptr`.

    Parameters
    ----------
    ptr : pointer, or block of pointers, to int32 or uint32
        The signal's address in this rank's heap.
    peer : int, scalar or block
        Rank of `world`, the own one included. A block of peers, or of pointers, notifies each.
    world : handle
    value : int, scalar or block
    op : "set" or "add"
        "add" is atomic with respect to other notifies and wraps around.
    when : bool, scalar or, with a block of signals, block
        Nothing is sent where it is False.

    Ordering: all earlier accesses of all threads of the program happen before the signal changes
    (release, system scope); a single signal is sent by one thread. It orders nothing of other
    programs: signal from each program, or meet by `tdl.grid_barrier` first.
    Fault: nothing is sent while a fault stands.
    Replay safety: "set" with a value from `tdl.epoch`; "add" if the waiter's value counts all.
    """
    check_signal("notify", ptr, value, peer, when=when)
    check_handle(world, "notify")
    check_choice("notify: op", op, "set", "add")
    publish(symm_at(ptr, peer, world), value, op, when, world.control)


@triton.jit
def publish(target, value, op: tl.constexpr, when, control):
    """`notify` for an address that is already the peer's."""
    if is_host():
        send = host.no_fault(control) & as_tensor(when).to(tl.int1)
        if op == "set":
            tl.atomic_xchg(target, value, mask=send, sem="release", scope="sys")
        else:
            tl.atomic_add(target, value, mask=send, sem="release", scope="sys")
    elif is_nvidia():
        nvidia.publish(target, value, op, when, control)
    else:
        amd.publish(target, value, op, when, control)


@triton.jit
def no_fault(world, uniform: tl.constexpr = True):
    """Whether no fault stands on this rank, a scalar int1.

    For what a kernel stores for its peers before its first wait: where an earlier call of the rank
    gave up, a peer may only now come to that call, and must not find data of a later one, which
    was computed from what did not arrive.

    Parameters
    ----------
    world : handle
    uniform : bool
        The same in every thread of the program. False: each thread looks for itself, and none
        waits for others; for masks only.
    """
    check_handle(world)
    if is_host():
        clear = host.no_fault(world.control)
    else:
        clear = device_call("tdx_fault", "i64", "i64", (world.control,)) == 0
        if uniform:
            clear = _all_lanes(clear)
    return clear


@triton.jit
def program_index():
    """Linear index of this program in its grid, int32, first axis fastest."""
    plane = tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    return tl.program_id(0) + tl.num_programs(0) * plane


@triton.jit
def program_barrier():
    """All threads of the program meet, and see each other's earlier accesses."""
    if is_nvidia():
        nvidia.program_barrier()
    elif not is_host():
        amd.program_barrier()


@triton.jit
def _wait_span(ptr, count, value, cmp: tl.constexpr, control, team, peer):
    program = program_index()
    if is_host():
        ok = host.wait_span(ptr, count, value, cmp, control, team, peer)
    elif is_nvidia():
        ok = nvidia.wait_span(ptr, count, value, cmp == "eq", control, team, peer, program)
    else:
        ok = amd.wait_span(ptr, count, value, cmp == "eq", control, team, peer, program)
    return ok


@triton.jit
def _all_lanes(lanes):
    if is_host():
        ok = tl.min(lanes.to(tl.int32)) != 0 if is_block(lanes) else lanes
    elif is_nvidia():
        ok = nvidia.all_lanes(lanes)
    else:
        ok = amd.all_lanes(lanes)
    return ok


@triton.jit
def _int32(value):
    return as_tensor(value).to(tl.int32)
