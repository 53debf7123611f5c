"""Lowerings for AMD GPUs. The contracts are those of the public functions that call them.

s_barrier orders no global memory by itself, neither in hardware (stores of other waves) nor for
the compiler; hence a drain ahead of barriers that publish and a fence behind those that acquire.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tdx.language._intrinsic import as_tensor, device_call, is_block, program_threads


@triton.jit
def program_barrier():
    """All threads meet; earlier accesses of each are visible to all."""
    device_call("tdx_drain", "i32", "", ())
    tl.debug_barrier()
    device_call("tdx_after_barrier", "i32", "", ())


@triton.jit
def fence():
    device_call("tdx_fence", "i32", "", ())
    tl.debug_barrier()
    device_call("tdx_after_barrier", "i32", "", ())


@triton.jit
def wait(ptr, value, cmp, control, team, peer, program):
    if is_block(ptr):
        status = device_call(
            "tdx_spin",
            "i32",
            "i64,i32,i32,i64,i32,i32,i32",
            (ptr, value, cmp, control, team, peer, program),
        )
        ok = all_lanes(status)
    else:
        ok = wait_span(ptr, 1, value, cmp, control, team, peer, program)
    return ok


@triton.jit
def wait_span(ptr, count, value, cmp, control, team, peer, program):
    threads: tl.constexpr = program_threads()
    # One lane per thread: lane i polls words i, i + threads, ..., and the minimum over the lanes
    # is the same in every wave.
    status = device_call(
        "tdx_spin_span",
        "i32",
        "i32,i32,i32,i64,i32,i32,i64,i32,i32,i32",
        (tl.arange(0, threads), threads, count, ptr, value, cmp, control, team, peer, program),
    )
    ok = tl.min(status)
    tl.debug_barrier()
    device_call("tdx_after_barrier", "i32", "", ())
    return ok != 0


@triton.jit
def publish(target, value, op: tl.constexpr, when, control):
    device_call("tdx_drain", "i32", "", ())
    if is_block(target):
        fault = device_call("tdx_fault", "i64", "i64", (control,))
        send = (fault == 0) & as_tensor(when).to(tl.int1)
        tl.debug_barrier()
        device_call("tdx_release", "i32", "", ())
        if op == "set":
            tl.atomic_xchg(target, value, mask=send, sem="relaxed", scope="sys")
        else:
            tl.atomic_add(target, value, mask=send, sem="relaxed", scope="sys")
    else:
        may = device_call("tdx_may_publish", "i32", "i32,i64", (when, control))
        tl.debug_barrier()
        device_call("tdx_publish_" + op, "i32", "i64,i32,i32", (target, value, may))


@triton.jit
def store_ll_pair(target, low, high, active):
    device_call("tdx_poke", "i32", "i64,i64,i32", (target, low, active))
    device_call("tdx_poke", "i32", "i64,i64,i32", (target + 8, high, active))


@triton.jit
def peek_ll_pair(ptr, active):
    low = device_call("tdx_peek", "i64", "i64,i32", (ptr, active))
    high = device_call("tdx_peek", "i64", "i64,i32", (ptr + 8, active))
    return low, high


@triton.jit
def all_lanes(status):
    """The minimum over the block, then over the waves, which may disagree at a deadline."""
    threads: tl.constexpr = program_threads()
    mine = tl.min(status.to(tl.int32)) if is_block(status) else status.to(tl.int32)
    lanes = device_call("tdx_per_thread", "i32", "i32,i32", (tl.arange(0, threads), mine))
    ok = tl.min(lanes)
    tl.debug_barrier()
    device_call("tdx_after_barrier", "i32", "", ())
    return ok != 0
