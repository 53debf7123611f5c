"""Functions of tdx.language with arguments of another kind: the host tier names both."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx.language as tdl
from tests.helpers.cases import host_only, worlds
from tests.helpers.mistakes import refused


@triton.jit
def call_kernel(x, words, signal, n, world, VERB: tl.constexpr):
    me = tdl.rank(world)
    if VERB == "swapped":
        tdl.put_signal(x + 32, x, 8, 1, signal, me, world)
    elif VERB == "signal of 8 bytes":
        tdl.put_signal(x + 32, x, 8, words, 1, me, world)
    elif VERB == "value":
        tdl.put_signal(x + 32, x, 8, signal, signal, me, world)
    elif VERB == "notify":
        tdl.notify(words + 1, me, world, 1)
    elif VERB == "handle":
        tdl.notify(signal, world, world, 1)
    elif VERB == "no pointer":
        tdl.wait(7, world, 1)
    elif VERB == "put":
        tdl.put(x + 32, x, n, me, world)
    elif VERB == "put from":
        tdl.put(x + 32, n, x, me, world)
    elif VERB == "get":
        tdl.get(x, x + 32, 8.0, me, world)
    elif VERB == "get peer":
        tdl.get(x, x + 32, 8, n, world)
    elif VERB == "broadcast":
        tdl.broadcast(x, x, 8, n, world)
    elif VERB == "symm_at":
        tl.store(tdl.symm_at(x, n, world), 1)
    elif VERB == "symm_at of":
        tdl.symm_at(8, me, world)
    elif VERB == "wait_all":
        tdl.wait_all(signal, n, world, 0)
    elif VERB == "first_peer":
        tdl.wait_all(signal, 1, world, 0, first_peer=n)
    elif VERB == "store_ll":
        tdl.store_ll(words, 1, 1, n, world)
    elif VERB == "wait_any":
        tdl.wait_any(signal, n, world, 0, tdl.nothing_done())
    elif VERB == "op":
        tdl.notify(signal, me, world, 1, op="sum")
    elif VERB == "cmp":
        tdl.wait(signal, world, 1, cmp="gt")
    elif VERB == "large":
        tdl.wait(signal, world, 1 << 32)
    elif VERB == "large, found out":
        tdl.notify(signal, me, world, tl.arange(0, 2).to(tl.int64) - (1 << 31) - 1)
    elif VERB == "handle, peer":
        tdl.symm_at(x, world, me)
    elif VERB == "handle of notify":
        tdl.notify(signal, me, n, 1)
    elif VERB == "handle of put":
        tdl.put(x + 32, x, 8, me, n)
    elif VERB == "world, channel":
        tdl.barrier(world, signal)
    elif VERB == "missing":
        tdl.put(x + 32, x, 8, me)


@worlds(1, 2)
@pytest.mark.parametrize(
    ("verb", "text"),
    [
        ("swapped", r"put_signal: signal must be a pointer .*, got 1; the order of the arguments "
         r"is put_signal\(dst, src, numel, signal, value, peer, world\)"),
        ("signal of 8 bytes", "put_signal: signal must point to int32 or uint32 words, got a "
         "pointer to int64, argument 'words'"),
        ("value", r"put_signal: value must be an integer, got pointer<int32>; the order"),
        ("notify", "notify: ptr must point to int32 .*, got a pointer to int64, argument 'words'"),
        ("handle", "notify: peer must be an integer, got the handle of a world or team; the order"),
        ("no pointer", "wait: ptr must be a pointer or a block of pointers, got 7; the order"),
        ("put", r"put: numel must be an integer, got fp32: .*launch the kernel with int\(...\)"),
        ("put from", "put: src must be a pointer or a block of pointers, got fp32"),
        ("get", "get: numel must be an integer, got 8.0"),
        ("get peer", "get: peer must be an integer, got fp32"),
        ("broadcast", "broadcast: root must be an integer, got fp32"),
        ("symm_at", "symm_at: peer must be an integer, got fp32"),
        ("symm_at of", "symm_at: ptr must be a pointer or a block of pointers, got 8"),
        ("wait_all", "wait_all: count must be an integer, got fp32"),
        ("first_peer", "wait_all: first_peer must be an integer, got fp32"),
        ("store_ll", r"store_ll: peer must be an integer, got fp32"),
        ("wait_any", "wait_any: count must be an integer, got fp32"),
        ("op", "notify: op must be 'set' or 'add', got 'sum'"),
        ("cmp", "wait: cmp must be 'ge' or 'eq', got 'gt'"),
        ("large", "wait: value 4294967296 does not fit a signal, which has 32 bits"),
        ("large, found out", "notify: value -2147483649 does not fit a signal"),
        ("handle, peer", r"expected the handle of a world or team, got .*; the order of the "
         r"arguments is symm_at\(ptr, peer, world\)"),
        ("handle of notify", r"expected the handle .*, got fp32: .* is notify\(ptr, peer, world, "),
        ("handle of put", r"expected the handle .*, got fp32: .* is put\(dst, src, numel, peer, "),
        ("world, channel", r"expected a channel, got the handle .* is barrier\(channel, world\)"),
        ("missing", r"put\(\) missing 1 required positional argument: 'world'"),
    ],
)  # fmt: skip
def case_an_argument_of_another_kind(world, verb, text):
    host_only(world.backend)
    x, words, signal = (world.zeros(64, kind) for kind in ("float32", "int64", "int32"))
    call_kernel[(1,)](x, words, signal, np.float32(0), world.handle, VERB=verb)
    refused(world, rf"Error: {text}.* at .*user_arguments\.py:\d+: ")
    assert not x.numpy().any()
    world.barrier()


@worlds(1, 2)
def case_integers_of_any_kind(world):
    """Of NumPy, of 64 bits, Booleans and blocks."""
    host_only(world.backend)
    x, signal = (world.array(np.ones(64, kind)) for kind in ("float32", "int32"))
    kinds_kernel[(1,)](x, signal, np.int64(8), 2**40, True, world.handle)
    assert x.numpy().tolist() == [1] * 64
    assert signal.numpy().tolist() == [8, 1, 1, 5, 7, 7, 1, 1, *[1] * 56]
    world.barrier()


@triton.jit
def kinds_kernel(x, signal, n, large, yes, world):
    me = tdl.rank(world)
    lanes = tl.arange(0, 4)
    tdl.put(x + 32, x, n, (me + large - large).to(tl.int64), world)
    tdl.put_signal(x + 16, x, tl.full((), 4, tl.uint32), signal, n, me, world)
    tdl.notify(signal + 2, me, world, yes)
    tdl.notify(signal + 3, me, world, 5)
    values = tl.where(lanes < 2, 7, 1 << 40)
    tdl.notify(signal + 4 + lanes, lanes * 0 + me, world, values, when=lanes < 2)
    tdl.wait(signal, world, n)
