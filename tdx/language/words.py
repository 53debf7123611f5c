"""Words of data and flag in symmetric memory: the data is its own signal.

A 64-bit word holds 4 bytes of data low and a flag of 32 bits high, and is written at once, so that
who sees the flag has the data: the protocol of NCCL's LL. Packed words hold 7 bytes of data and a
flag of 8 bits, and go in fours: 28 bytes of data in 32. All functions are executed by the whole
program, as those of signal.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from tdx.language import amd, host, nvidia
from tdx.language._intrinsic import (
    as_tensor,
    bits,
    check_handle,
    check_integers,
    check_pointers,
    device_call,
    intrinsic,
    is_host,
    is_nvidia,
)
from tdx.language.address import rank, symm_at, team_index
from tdx.language.signal import _all_lanes, _int32, program_index


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
    check_pointers("store_ll", ptr=ptr)
    check_integers("store_ll", flag=flag, peer=peer)
    check_handle(world, "store_ll")
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
        _store_pair(target, low, high, mask)


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
            data = pair_words(data0, data1)
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
        Lanes without it neither load nor wait, and are ok.

    Returns `(values, ok)`: a tuple of `ranks` blocks, whose own rank's entry is 0, and int1 per
    lane, not the same in every thread: use it as a mask. Ordering, deadline, fault: as load_ll.
    """
    width: tl.constexpr = bits(dtype)
    tl.static_assert(width == 32 or width == 64, "load_ll_all takes a dtype of 4 or 8 bytes")
    tl.static_assert(ranks <= 16, f"load_ll_all takes at most 16 ranks, got {ranks}; use load_ll")
    count: tl.constexpr = width // 32
    words, ok = _load_words_all(ptr, stride, flag, world, ranks, mask, count)
    values = ()
    for p in tl.static_range(ranks):
        value = words[p * count]
        if count == 2:
            value = pair_words(value, words[2 * p + 1])
        values = values + (value.to(dtype, bitcast=True),)  # noqa: RUF005 - Triton has no star
    return values, ok


@triton.jit
def _load_words_all(ptr, stride, flag, world, ranks: tl.constexpr, mask, count: tl.constexpr):
    """`load_ll_all` of 1 or 2 words at each pointer: `ranks * count` int32 blocks, and whether all
    of a lane are there.
    """
    me = rank(world)
    words = ()
    if is_nvidia():
        tag = _int32(flag)
        team = team_index(world)
        bits_ = tl.where(as_tensor(mask).to(tl.int1), ((1 << ranks) - 1) & ~(1 << me), 0)
        at = ptr.to(tl.int64)
        found, ok = _poll(at, stride * 8, 16, tag, 32, bits_, world.control, team, ranks, count)
        for i in tl.static_range(ranks * count):
            words = words + (found[i].to(tl.int32),)  # noqa: RUF005
    else:
        active = as_tensor(mask).to(tl.int1)
        ok = active | True
        kind: tl.constexpr = tl.int32 if count == 1 else tl.int64
        for p in tl.static_range(ranks):
            there = active & (me != p)
            value, come = load_ll(ptr + p * stride, flag, world, there, p, kind, False)
            words = words + (value.to(tl.int32),)  # noqa: RUF005
            if count > 1:
                words = words + ((value >> 32).to(tl.int32),)  # noqa: RUF005
            ok = ok & (come | ~there)
    return words, ok


@triton.jit
def _poll(
    at, stride, gap, tag, shift: tl.constexpr, active, control, team, ranks: tl.constexpr,
    count: tl.constexpr,
):  # fmt: skip
    """Wait for words as nvidia.spin_ll tells: the words, and whether all are there."""
    found = nvidia.spin_ll(at, stride, gap, tag, shift, active, ranks, count)
    missing = found[ranks * count]
    settled = device_call(
        "tdx_settle_all",
        "i32",
        "i32,i64,i64,i64,i32,i32,i32,i32,i32,i64,i32,i32",
        (missing, at, stride, gap, count, shift, tag, active, ranks, control, team,
         program_index()),
    )  # fmt: skip
    late = tl.where(missing != 0, active, 0)
    again = nvidia.spin_ll(at, stride, gap, tag, shift, late, ranks, count, found[:-1])
    # a sender that has given up may have gone on and written the words again in between
    return again[:-1], (settled != 0) & (again[ranks * count] == 0)


@intrinsic
def packed_blocks(_semantic=None):
    """Constexpr: how many blocks hold a tile of packed values.

    A block for each of the 7 values in a lane. On the host tier, where every operation costs much
    and an element of it little, one of 8 times as many lanes holds them one after the other, and
    its last eighth is of no use.
    """
    return 1 if _semantic is None else core.constexpr(7)


@triton.jit
def store_packed(ptr, gap, values, flag, peer, world, mask=True):
    """Store 28 bytes of data in four words in `peer`'s heap, each with 8 bits of flag on top.

    Parameters
    ----------
    ptr : block of pointers to int64
        Where the first two words are, in this rank's heap, 16-byte aligned.
    gap : int
        Words from there to the other two: even.
    values : tuple of packed_blocks() blocks of int32
    flag : int or scalar
        Its low 8 bits count. All words that are read in each call of their slot are written in
        each, so that a word never holds a flag that is older than the slot's last call.
    peer, world, mask
        As for store_ll, as are ordering, fault and replay safety.
    """
    target = symm_at(ptr, peer, world)
    if is_host():
        at, words, there = host.pack(target, gap, values[0], flag, mask)
        _store_word(at, words, there)
    else:
        words = _pack(values, _int32(flag) << 24)
        for pair in tl.static_range(2):
            _store_pair(target + pair * gap, words[2 * pair], words[2 * pair + 1], mask)


@triton.jit
def _pack(values, tag):
    words = ()
    for i in tl.static_range(3):
        high = (values[2 * i + 1] & 0xFFFFFF) | tag
        words = words + (pair_words(values[2 * i], high),)  # noqa: RUF005
    # the fourth word takes the bytes that found no place beside the others' flags
    rest = ((values[1] >> 24) & 0xFF) | ((values[3] >> 16) & 0xFF00) | ((values[5] >> 8) & 0xFF0000)
    return words + (pair_words(values[6], rest | tag),)  # noqa: RUF005


@triton.jit
def load_packed(ptr, gap, flag, world, mask=True, peer=-1):
    """Wait for what `store_packed` wrote into this rank's heap.

    Returns `(values, ok)`: the packed_blocks() blocks, and int1 per lane, not the same in every
    thread, or one for all: use it as a mask. Deadline and fault: as load_ll; `peer` is one rank.
    """
    team = team_index(world)
    tag = _int32(flag) & 0xFF
    if is_host():
        values, ok = host.load_packed(ptr, gap, 0, tag, mask, world.control, team, peer, 1)
    else:
        ok = as_tensor(mask).to(tl.int1)
        words = ()
        for pair in tl.static_range(2):
            at = ptr + pair * gap
            if is_nvidia():
                low, high = nvidia.peek_ll_pair(at.to(tl.int64), _int32(mask))
            else:
                low, high = amd.peek_ll_pair(at.to(tl.int64), _int32(mask))
            low, there = _settle_packed(low, at, tag, mask, world.control, team, peer)
            high, come = _settle_packed(high, at + 1, tag, mask, world.control, team, peer)
            words = words + (low, high)  # noqa: RUF005
            ok = ok & there & come
        values = _unpacked(words, 0)
    return values, ok


@triton.jit
def load_packed_all(ptr, gap, stride, flag, world, whose, ranks: tl.constexpr, mask=True):
    """`load_packed` of what the ranks in `whose` stored, all in flight at once: see load_ll_all.

    `whose` has a bit for each rank. Returns `(values, ok)`: a tuple of `ranks * packed_blocks()`
    blocks of int32, rank by rank, those of ranks outside `whose` of no use, and int1 per lane, or
    one for all.
    """
    team = team_index(world)
    tag = _int32(flag) & 0xFF
    active = tl.where(as_tensor(mask).to(tl.int1), whose, 0)
    if is_host():
        values, ok = host.load_packed(ptr, gap, stride, tag, active, world.control, team, 0, ranks)
    elif is_nvidia():
        at = ptr.to(tl.int64)
        words, ok = _poll(at, stride * 8, gap * 8, tag, 56, active, world.control, team, ranks, 4)
        values = ()
        for p in tl.static_range(ranks):
            values = values + _unpacked(words, 4 * p)
    else:
        ok = as_tensor(mask).to(tl.int1)
        values = ()
        for p in tl.static_range(ranks):
            there = as_tensor(mask).to(tl.int1) & ((whose >> p) & 1 != 0)
            found, come = load_packed(ptr + p * stride, gap, flag, world, there, p)
            values = values + found
            ok = ok & (come | ~there)
    return values, ok


@triton.jit
def _unpacked(words, first: tl.constexpr):
    """The 7 values of 4 bytes in four packed words, those from number `first` on."""
    rest = (words[first + 3] >> 32).to(tl.int32)
    values = ()
    for i in tl.static_range(3):
        word = words[first + i]
        over = ((rest >> (8 * i)) & 0xFF) << 24
        values = values + (word.to(tl.int32), ((word >> 32).to(tl.int32) & 0xFFFFFF) | over)  # noqa: RUF005
    return values + (words[first + 3].to(tl.int32),)  # noqa: RUF005


@triton.jit
def _settle_packed(word, ptr, tag, mask, control, team, peer):
    """The word at `ptr`, of which `word` was loaded, once its flag is right; and whether it is."""
    there = as_tensor(mask).to(tl.int1)
    come = ((word >> 56).to(tl.int32) & 0xFF) == tag
    settled = device_call(
        "tdx_settle",
        "i64",
        "i64,i64,i32,i32,i32,i64,i32,i32,i32",
        (word, ptr, 56, tag, _int32(mask), control, team, peer, program_index()),
    )
    late = there & ~come & ((settled >> 32) != 0)
    again = device_call("tdx_peek", "i64", "i64,i32", (ptr, _int32(late)))
    word = tl.where(late, again, word)
    # a sender that has given up may have gone on and written the word again in between
    return word, (((word >> 56).to(tl.int32) & 0xFF) == tag) | ~there


@triton.jit
def pair_words(low, high):
    """Two values of 4 bytes as one of 8, int64."""
    high = high.to(tl.int32, bitcast=True).to(tl.int64)
    return _low(low.to(tl.int32, bitcast=True)) | (high << 32)


@triton.jit
def _settle(word, ptr, flag, active, control, team, peer):
    settled = device_call(
        "tdx_settle",
        "i64",
        "i64,i64,i32,i32,i32,i64,i32,i32,i32",
        (word, ptr, 32, flag, active, control, team, peer, program_index()),
    )
    return settled.to(tl.int32), (settled >> 32) != 0


@triton.jit
def _store_pair(target, low, high, mask):
    """Two consecutive words, on NVIDIA GPUs by one store."""
    if is_host():
        _store_word(target, low, mask)
        _store_word(target + 1, high, mask)
    elif is_nvidia():
        nvidia.store_ll_pair(target.to(tl.int64), low, high, _int32(mask))
    else:
        amd.store_ll_pair(target.to(tl.int64), low, high, _int32(mask))


@triton.jit
def _store_word(target, word, mask):
    if is_host():
        # An exchange, because the interpreter's plain store of 8 bytes need not be atomic.
        tl.atomic_xchg(target, word, mask=_int32(mask) != 0, sem="relaxed", scope="sys")
    else:
        device_call("tdx_poke", "i32", "i64,i64,i32", (target, word, _int32(mask)))


@triton.jit
def _low(value):
    return value.to(tl.int64) & 0xFFFFFFFF
