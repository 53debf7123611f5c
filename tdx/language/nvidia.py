"""Lowerings for NVIDIA GPUs. The contracts are those of the public functions that call them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from tdx.language._intrinsic import (
    as_tensor,
    device_call,
    has_async_proxy,
    intrinsic,
    is_block,
    unwrap,
)


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
        if op == "set":  # a store twice, by threads that hold the same lane, does no harm
            device_call("tdx_publish_set", "i32", "i64,i32,i32", (target, value, send))
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


_SPINS = 1024  # polls in registers before the deadline and the fault word are looked at


@intrinsic
def spin_ll(base, stride, gap, flag, shift, active, ranks, words, found=(), _semantic=None):
    """Poll the words of several ranks at once, up to a limit: all loads of a poll are in flight
    together. Returns `ranks * words` int64 values and 1 if one is still missing.

    Rank p's words, 1, 2 or 4, are at base + p * stride bytes, the second pair `gap` bytes behind
    the first; their flags of 64 - `shift` bits on top. Only ranks whose bit is set in `active` are
    loaded; the others give 0, or where none is what `found`, such values, holds.
    """
    ranks, words, shift = unwrap(ranks), unwrap(words), unwrap(shift)
    count = ranks * words
    before = list(found)
    wanted = _semantic.to_tensor(unwrap(flag))
    if shift > 32:
        wanted = _semantic.shl(wanted, _semantic.to_tensor(shift - 32))
    operands = [*(_semantic.to_tensor(unwrap(x)) for x in (base, stride, gap)), wanted]
    operands.append(_semantic.to_tensor(unwrap(active)))
    kinds = (core.int64, core.int64, core.int64, core.int32, core.int32)
    operands = [
        x if x.dtype == kind else core.cast(x, kind, _semantic=_semantic)
        for x, kind in zip(operands, kinds, strict=True)
    ]
    first = count + 1 + len(before)
    inputs = [f"${first + i}" for i in range(5)]
    tied = [str(i) for i in range(len(before))]
    return core.inline_asm_elementwise(
        _spin_text(ranks, words, shift, bool(before), inputs),
        ",".join(["=&l"] * count + ["=&r", *tied, "l", "l", "l", "r", "r"]),
        before + operands,
        dtype=(core.int64,) * count + (core.int32,),
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


def _spin_text(ranks: int, words: int, shift: int, kept: bool, inputs: list[str]) -> str:
    """PTX of spin_ll; labels are local to the braces. `kept`: the values hold something before."""
    base, stride, gap, flag, active = inputs
    count, pairs = ranks * words, (words + 1) // 2
    lines = [
        f"{{ .reg .pred want<{ranks}>, bad, miss, more; .reg .b64 at<{ranks * pairs}>;",
        ".reg .b32 bit, wrong, polls; .reg .b32 high<4>;",
        "mov.u32 polls, 0;",
        f"mov.b64 at0, {base};",
    ]
    for p in range(ranks):
        if p:
            lines.append(f"add.s64 at{p * pairs}, at{(p - 1) * pairs}, {stride};")
        if pairs == 2:
            lines.append(f"add.s64 at{2 * p + 1}, at{2 * p}, {gap};")
        lines.append(f"and.b32 bit, {active}, {1 << p}; setp.ne.u32 want{p}, bit, 0;")
    if not kept:
        lines += [f"mov.u64 ${i}, 0;" for i in range(count)]
    lines.append(f"setp.ne.u32 miss, 0, 0; setp.eq.u32 more, {active}, 0; @more bra DONE;")
    lines.append("POLL: setp.ne.u32 miss, 0, 0;")
    for p in range(ranks):
        if words == 1:
            lines.append(f"@want{p} ld.relaxed.sys.global.b64 ${p}, [at{p}];")
        else:
            for i in range(pairs):
                into = f"{{${words * p + 2 * i}, ${words * p + 2 * i + 1}}}"
                lines.append(f"@want{p} ld.relaxed.sys.global.v2.b64 {into}, [at{p * pairs + i}];")
    for p in range(ranks):
        for i in range(words):
            lines.append(f"mov.b64 {{bit, high{i}}}, ${words * p + i};")
        if words == 1:
            lines.append(f"xor.b32 wrong, high0, {flag};")
        for i in range(0, words - 1, 2):  # where either differs from the flag: (a ^ c) | (b ^ c)
            into = "wrong" if i == 0 else "bit"
            lines.append(f"lop3.b32 {into}, high{i}, high{i + 1}, {flag}, 0x7E;")
        if words == 4:
            lines.append("or.b32 wrong, wrong, bit;")
        lines.append(f"setp.ge.u32 bad, wrong, {1 << (shift - 32)};")
        lines.append(f"and.pred bad, bad, want{p}; or.pred miss, miss, bad;")
    lines += [
        f"add.u32 polls, polls, 1; setp.lt.u32 more, polls, {_SPINS};",
        "and.pred more, more, miss; @more bra POLL;",
        f"DONE: selp.u32 ${count}, 1, 0, miss; }}",
    ]
    return "\n".join(lines)


@triton.jit
def all_lanes(status):
    """The minimum within the warp or program, then a vote, as warps may disagree at a deadline."""
    mine = tl.min(status.to(tl.int32)) if is_block(status) else status.to(tl.int32)
    return device_call("tdx_all", "i32", "i32", (mine,)) != 0
