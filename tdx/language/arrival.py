"""Waiting for whichever of several signals comes first."""

from __future__ import annotations

import triton
import triton.language as tl

from tdx.language import host
from tdx.language._intrinsic import check_integers, check_signal, device_call, is_host
from tdx.language.address import team_index
from tdx.language.signal import program_barrier, program_index

MAX_WAIT_ANY = 1024  # signals a call of wait_any looks at, at most
LANES = tl.constexpr(MAX_WAIT_ANY)  # a multiple of the threads: no two hold the same signal
_NONE = tl.constexpr(1 << 30)


@triton.jit
def nothing_done():
    """What `wait_any` takes as `done` at first: an int32 block, 1 for signals dealt with."""
    return tl.zeros((LANES,), tl.int32)


@triton.jit
def wait_any(ptr, count, world, value, done, first=0):
    """Wait until one of `count` consecutive signals that is not done reaches `value`.

    Parameters
    ----------
    ptr : pointer to int32 or uint32
        The first signal, in this rank's heap.
    count : int or scalar
        1 to 1024 signals, of which at least one is not done: the host tier refuses others.
    world : handle
    value : int or scalar
        32-bit; reached when the signed difference seen - value is not negative.
    done : int32 block of 1024
        Not 0 for signals to leave out; start with `nothing_done()`.
    first : int or scalar
        Of several that are there, the next at or after `first` is taken, going round.

    Returns `(index, done, ok)`: which signal it was, `done` with that signal added, and a scalar
    int1; when it is False, `index` is a valid one but its data is not there. All are the same in
    every thread of the program. A timeout names the last of the signals, going round from `first`.

    Ordering, deadline and fault: as `wait`. Executed by the whole program. Replay safety: that of
    `value`.
    """
    check_signal("wait_any", ptr, value)
    check_integers("wait_any", count=count, first=first)
    lanes = tl.arange(0, LANES)
    open_ = (lanes < count) & (done == 0)
    turn = tl.where(open_, (lanes - first + count) % count, _NONE)
    team = team_index(world)
    if is_host():
        ready, ok = host.wait_any(ptr, value, open_, turn, count, world.control, team)
        best = tl.min(tl.where(ready, turn, _NONE))
    else:
        best, ok = _poll(ptr + lanes, value, open_, turn, world.control, team)
    index = tl.where(ok, (best + first) % count, 0)
    return index, tl.where(lanes == index, 1, done), ok


@triton.jit
def _poll(signals, value, open_, turn, control, team):
    """Lanes look at their own signal; the minimum over all of them is the same in every thread."""
    program = program_index()
    best = _NONE
    polls = 0
    begun = tl.zeros((LANES,), tl.int64)
    patient = True
    while (best == _NONE) & patient:
        ready = device_call("tdx_ready", "i32", "i64,i32,i32", (signals, value, open_))
        best = tl.min(tl.where(ready != 0, turn, _NONE))
        if polls & 63 == 63:  # as often as tdx_patience looks
            last = open_ & (turn == tl.max(tl.where(open_, turn, -1)))
            begun = device_call(
                "tdx_patience_lane",
                "i64",
                "i32,i64,i64,i32,i32,i64,i32,i32",
                (polls, begun, signals, value, last, control, team, program),
            )
            patient = tl.min(begun) >= 0
        polls += 1
    program_barrier()
    return best, best != _NONE
