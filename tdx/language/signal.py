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
    bits,
    check_choice,
    check_handle,
    check_signal,
    device_call,
    is_block,
    is_host,
    is_nvidia,
)
from tdx.language.address import num_ranks, rank, symm_at, team_index

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
    check_signal(ptr)
    check_choice(cmp, "ge", "eq")
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
    check_signal(ptr)
    check_choice(cmp, "ge", "eq")
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
    check_signal(ptr)
    check_choice(op, "set", "add")
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
def store_ll(ptr, value, flag, peer, world, mask=True):
    """Store 4 bytes of data and 4 of flag as one word in `peer`'s heap: the data is its own signal.

    Parameters
    ----------
    ptr : pointer, or block of pointers, to int64
        Where the words are, in this rank's heap. A value of 4 bytes takes one word, one of 8
        bytes two consecutive words, of which the first is 16-byte aligned.
    value : scalar or block of a 4- or 8-byte type
    flag : int or scalar
        32-bit value that the words do not hold, in practice an epoch. Zeroed memory holds 0, and an
        epoch comes to 0 after 2**32 calls: write all words that are read in each call of their
        slot, and what they hold is of the call before that used it.
    peer : int or scalar
        Rank of `world`, the own one included.
    world : handle
    mask : bool, scalar or block
        Lanes without it store nothing.

    Ordering: none, and none needed for the data itself; earlier stores of the program are not
    ordered before it. System scope; the flag never arrives before its data.
    Fault: stores also while a fault stands, unless masked by `no_fault`: what a peer gets from a
    rank that gave up looks right to it. Memory used for this holds nothing else, ever.
    Replay safety: that of the flag. Two slots used in turn (by the epoch's parity) let a sender
    run one call ahead where each call waits for every peer.
    """
    target = symm_at(ptr, peer, world)
    tag = _int32(flag).to(tl.int64) << 32
    value = as_tensor(value)
    width: tl.constexpr = bits(value)
    tl.static_assert(width == 32 or width == 64, "store_ll takes values of 4 or 8 bytes")
    if width == 32:
        word = _low(value.to(tl.int32, bitcast=True)) | tag
        _store_word(target, word, mask)
    else:
        pair = value.to(tl.int64, bitcast=True)
        low = (pair & 0xFFFFFFFF) | tag
        high = ((pair >> 32) & 0xFFFFFFFF) | tag
        if is_host():
            _store_word(target, low, mask)
            _store_word(target + 1, high, mask)
        elif is_nvidia():
            nvidia.store_ll_pair(target.to(tl.int64), low, high, _int32(mask))
        else:
            amd.store_ll_pair(target.to(tl.int64), low, high, _int32(mask))


@triton.jit
def load_ll(
    ptr,
    flag,
    world,
    mask=True,
    peer=-1,
    dtype: tl.constexpr = tl.int32,
    uniform: tl.constexpr = True,
):
    """Wait for words written by `store_ll` into this rank's heap and return their data.

    Parameters
    ----------
    ptr : pointer, or block of pointers, to int64
    flag : int or scalar
        The flag to wait for, compared for equality.
    world : handle
    mask : bool, scalar or block
        Lanes without it neither load nor wait; their data is 0.
    peer : int, scalar or block
        Rank that stores, for the error message only.
    dtype : constexpr dtype of 4 or 8 bytes
        Type of the data; what `store_ll` was given.
    uniform : constexpr bool
        True: `ok` is one scalar int1, the same in every thread (costs a barrier). False: `ok` is
        int1 per lane, free, for use as a mask.

    Returns `(value, ok)`; lanes that are not ok hold no data. All words of a call are loaded at
    once and only missing ones are polled, so one call with a block of several peers is faster
    than several calls.
    Ordering: none beyond the data itself. Deadline and fault: as `wait`.
    """
    width: tl.constexpr = bits(dtype)
    tl.static_assert(width == 32 or width == 64, "load_ll takes a dtype of 4 or 8 bytes")
    tag = _int32(flag)
    team = team_index(world)
    if is_host():
        data, lanes = host.load_ll(ptr, tag, width // 32, mask, world.control, team, peer)
    else:
        active = _int32(mask)
        if width == 32:
            word = device_call("tdx_peek", "i64", "i64,i32", (ptr, active))
            data, lanes = _settle(word, ptr, tag, active, world.control, team, peer)
        else:
            if is_nvidia():
                low, high = nvidia.peek_ll_pair(ptr.to(tl.int64), active)
            else:
                low, high = amd.peek_ll_pair(ptr.to(tl.int64), active)
            data0, ok0 = _settle(low, ptr, tag, active, world.control, team, peer)
            data1, ok1 = _settle(high, ptr + 1, tag, active, world.control, team, peer)
            data = _low(data0) | (data1.to(tl.int64) << 32)
            lanes = ok0 & ok1
    value = data.to(dtype, bitcast=True)
    ok = _all_lanes(lanes) if uniform else lanes
    return value, ok


@triton.jit
def load_ll_all(
    ptr, stride, flag, world, ranks: tl.constexpr, mask=True, dtype: tl.constexpr = tl.int32
):
    """`load_ll` of the words that every other rank stored, all in flight at once.

    Parameters
    ----------
    ptr : block of pointers to int64
        Where rank 0's words are; a value of 8 bytes takes two, the first 16-byte aligned.
    stride : int or scalar
        Words from one rank's slot to the next one's, even.
    flag, world, dtype
        As for load_ll.
    ranks : constexpr int
        Ranks of `world`, at most 16.
    mask : bool, scalar or block
        Lanes without it neither load nor wait.

    Returns `(values, ok)`: a tuple of `ranks` blocks, whose own rank's entry is 0, and int1 per
    lane, not the same in every thread: use it as a mask. Ordering, deadline, fault: as load_ll.
    """
    width: tl.constexpr = bits(dtype)
    tl.static_assert(width == 32 or width == 64, "load_ll_all takes a dtype of 4 or 8 bytes")
    tl.static_assert(ranks <= 16, f"load_ll_all takes at most 16 ranks, got {ranks}; use load_ll")
    me = rank(world)
    values = ()
    if is_nvidia():
        count: tl.constexpr = width // 32
        tag = _int32(flag)
        team = team_index(world)
        bits_ = tl.where(as_tensor(mask).to(tl.int1), ((1 << ranks) - 1) & ~(1 << me), 0)
        at = ptr.to(tl.int64)
        found = nvidia.spin_ll(at, stride * 8, tag, bits_, ranks, count)
        missing = found[ranks * count]
        settled = device_call(
            "tdx_settle_all",
            "i32",
            "i32,i64,i64,i32,i32,i32,i32,i64,i32,i32",
            (missing, at, stride * 8, count, tag, bits_, ranks, world.control, team,
             program_index()),
        )  # fmt: skip
        again = nvidia.spin_ll(at, stride * 8, tag, tl.where(missing != 0, bits_, 0), ranks, count)
        for p in tl.static_range(ranks):
            low = tl.where(missing != 0, again[p * count], found[p * count])
            if count == 1:
                value = low.to(tl.int32)
            else:
                high = tl.where(missing != 0, again[p * count + 1], found[p * count + 1])
                value = _low(low) | (high << 32)
            values = values + (value.to(dtype, bitcast=True),)  # noqa: RUF005 - Triton has no star
        # a sender that has given up may have gone on and written the words again in between
        ok = (settled != 0) & (again[ranks * count] == 0)
    else:
        ok = as_tensor(mask).to(tl.int1)
        for p in tl.static_range(ranks):
            value, there = load_ll(
                ptr + p * stride, flag, world, as_tensor(mask).to(tl.int1) & (me != p), p, dtype,
                False,
            )  # fmt: skip
            values = values + (value,)  # noqa: RUF005
            ok = ok & there
    return values, ok


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
def _settle(word, ptr, flag, active, control, team, peer):
    settled = device_call(
        "tdx_settle",
        "i64",
        "i64,i64,i32,i32,i64,i32,i32,i32",
        (word, ptr, flag, active, control, team, peer, program_index()),
    )
    return settled.to(tl.int32), (settled >> 32) != 0


@triton.jit
def _store_word(target, word, mask):
    if is_host():
        # An exchange, because the interpreter's plain store of 8 bytes need not be atomic.
        tl.atomic_xchg(target, word, mask=_int32(mask) != 0, sem="relaxed", scope="sys")
    else:
        device_call("tdx_poke", "i32", "i64,i64,i32", (target, word, _int32(mask)))


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


@triton.jit
def _low(value):
    return value.to(tl.int64) & 0xFFFFFFFF
