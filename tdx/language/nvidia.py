"""Lowerings for NVIDIA GPUs. The contracts are those of the public functions that call them."""

from __future__ import annotations

import triton
import triton.language as tl

from tdx.language._intrinsic import as_tensor, device_call, has_async_proxy, is_block


@triton.jit
def program_barrier():
    """All threads meet; earlier accesses of each are visible to all."""
    tl.debug_barrier()


@triton.jit
def fence():
    _complete_descriptor_stores()
    device_call("tdx_fence", "i32", "", ())
    tl.debug_barrier()


@triton.jit
def wait(ptr, value, cmp, control, team, peer, program):
    if is_block(ptr):
        # Every warp holds all words of a small block, so that its own minimum needs no barrier;
        # warps may still disagree at the deadline, hence the vote.
        status = device_call(
            "tdx_spin",
            "i32",
            "i64,i32,i32,i64,i32,i32,i32",
            (ptr, value, cmp, control, team, peer, program),
        )
        ok = device_call("tdx_all", "i32", "i32", (tl.min(status),))
    else:
        ok = _wait_span(ptr, 1, value, cmp, control, team, peer, program)
    _keep_loads_below(ok)
    return ok != 0


@triton.jit
def wait_span(ptr, count, value, cmp, control, team, peer, program):
    ok = _wait_span(ptr, count, value, cmp, control, team, peer, program)
    _keep_loads_below(ok)
    return ok != 0


@triton.jit
def _wait_span(ptr, count, value, cmp, control, team, peer, program):
    ok = device_call(
        "tdx_wait_span",
        "i32",
        "i64,i32,i32,i32,i64,i32,i32,i32",
        (ptr, count, value, cmp, control, team, peer, program),
    )
    return ok


@triton.jit
def _keep_loads_below(ok):
    """Never executed, as ok is 0 or 1: a barrier that Triton sees keeps its software pipeliner from
    moving the loads of later iterations above the wait. The wait's own barrier is invisible to it.
    """
    if ok == 2:
        tl.debug_barrier()


@triton.jit
def publish(target, value, op: tl.constexpr, when, control):
    _complete_descriptor_stores()
    if is_block(target):
        fault = device_call("tdx_fault", "i64", "i64", (control,))
        send = (fault == 0) & as_tensor(when).to(tl.int1)
        tl.debug_barrier()
        if op == "set":
            tl.atomic_xchg(target, value, mask=send, sem="release", scope="sys")
        else:
            tl.atomic_add(target, value, mask=send, sem="release", scope="sys")
    else:
        may = device_call("tdx_may_publish", "i32", "i32,i64", (when, control))
        tl.debug_barrier()
        device_call("tdx_publish_" + op, "i32", "i64,i32,i32", (target, value, may))


@triton.jit
def _complete_descriptor_stores():
    """Tensor-descriptor stores are asynchronous: Triton waits until their source may be reused,
    this waits until they are written.
    """
    if has_async_proxy():
        device_call("tdx_complete_bulk_stores", "i32", "", ())


@triton.jit
def store_ll_pair(target, low, high, active):
    """Two data-and-flag words by one 16-byte store."""
    tl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.s32 p, $4, 0;
        @p st.relaxed.sys.global.v2.b64 [$1], {$2, $3}; mov.u32 $0, 0; }""",
        "=r,l,l,l,r",
        [target, low, high, active],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def peek_ll_pair(ptr, active):
    """Two data-and-flag words by one 16-byte load; 0 where inactive."""
    return tl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.u64 $0, 0; mov.u64 $1, 0;
        @p ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2]; }""",
        "=&l,=&l,l,r",
        [ptr, active],
        dtype=(tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )


@triton.jit
def all_lanes(status):
    """The minimum within the warp or program, then a vote, as warps may disagree at a deadline."""
    mine = tl.min(status.to(tl.int32)) if is_block(status) else status.to(tl.int32)
    return device_call("tdx_all", "i32", "i32", (mine,)) != 0
