"""tdx.language on the host tier's lowerings, under Triton's own interpreter.

The interpreter is chosen when Triton is imported, so the cases run in a child process: this file
run as a script with a case's name. Ranks are slices of one buffer, and their kernels run one
after the other; a stand-in executor polls in place.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
CASES = (
    "arithmetic", "team_table", "wait", "notify", "timeout", "fault_stands", "low_latency",
    "copies", "barrier", "grid_barrier", "epoch", "token",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_host_lowering(case):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    import tdx.language as tdl
    from tdx import abi
    from tdx.language import host

    tl.tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])


class World(NamedTuple):
    control: Any
    packed: Any
    stride: Any
    is_team: Any


class Channel(NamedTuple):
    words: Any
    control: Any
    packed: Any


class Pointer:
    """A kernel argument that Triton's interpreter accepts."""

    def __init__(self, address, dtype):
        self.address, self.dtype = address, dtype

    def data_ptr(self):
        return self.address

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Pointer(self.address, self.dtype)

    def set_(self, *_):
        return self

    copy_ = set_

    def storage_offset(self):
        return 0

    def size(self):
        return ()

    stride = size


class Spinner:
    """An executor for one program at a time."""

    def __init__(self, timeout_s=0.2):
        self.timeout_s = timeout_s
        self.record = None

    def wait(self, addresses, values, cmp, control, team, peers):
        deadline = time.monotonic() + self.timeout_s
        while True:
            seen = [ctypes.c_int32.from_address(int(a)).value for a in addresses]
            left = np.subtract(seen, values, dtype=np.int64).astype(np.int32)  # wraps
            if all(x == 0 if cmp == "eq" else x >= 0 for x in left):
                return True
            if self.fault(control):
                return False
            if time.monotonic() > deadline:
                ctypes.c_int64.from_address(control).value = abi.FAULT_TIMEOUT
                first = next(i for i, x in enumerate(left) if x < 0 or cmp == "eq")
                self.record = (team, int(peers[first]), int(values[first]), seen[first])
                return False
            time.sleep(1e-4)

    def load_words(self, addresses, shift, flag, mask, control, team, peers):
        assert shift == 32
        words = np.zeros(len(addresses), np.uint64)
        for i in np.flatnonzero(mask):
            if not self.wait([int(addresses[i]) + 4], [flag], "eq", control, team, [peers[i]]):
                return words, False
            words[i] = ctypes.c_uint64.from_address(int(addresses[i])).value
        return words, True

    def distance(self, pointers, peers, handle):
        control, packed, stride, is_team = handle
        me = packed >> abi.PACK_RANK_SHIFT & abi.PACK_FIELD_MASK
        row = abi.CONTROL_TABLE + (packed >> abi.PACK_TEAM_SHIFT) * abi.MAX_RANKS
        table = (ctypes.c_int64 * abi.MAX_RANKS).from_address(control + 8 * row)
        ranks = np.array(table) if is_team else np.arange(abi.MAX_RANKS)
        return (ranks[peers] - ranks[me]) * stride

    def fault(self, control):
        return ctypes.c_int64.from_address(control).value != 0


class Bench:
    """`size` heaps of one buffer, a control block each, and their handles."""

    def __init__(self, size, words=4096, team=0, ranks=None):
        self.stride = words * 4
        self.heaps = np.zeros((size, words), np.int32)
        self.controls = np.zeros((size, abi.CONTROL_WORDS), np.int64)
        self.size, self.team = size, team
        row = abi.CONTROL_TABLE + team * abi.MAX_RANKS
        self.ranks = ranks or list(range(size))
        self.controls[:, row : row + len(self.ranks)] = self.ranks
        self.executor = abi.host_executor = Spinner()
        abi.host_handle = TensorHandle

    def world(self, rank):
        control = Pointer(self.controls[self.ranks[rank]].ctypes.data, tl.int64)
        packed = abi.pack_handle(rank, len(self.ranks), self.team)
        return World(control, packed, self.stride, tl.constexpr(self.team != 0))

    def at(self, rank, word=0, dtype=None):
        heap = self.heaps[self.ranks[rank]]
        return Pointer(heap.ctypes.data + 4 * word, dtype or tl.int32)

    def channel(self, rank, blocks, word=0):
        world = self.world(rank)
        return Channel(self.at(rank, word), world.control, abi.pack_channel(blocks))


if __name__ == "__main__":

    @triton.jit
    def k_arithmetic(out, x, world):
        tl.store(out, tdl.rank(world))
        tl.store(out + 1, tdl.num_ranks(world))
        for peer in range(tdl.num_ranks(world)):
            tl.store(tdl.symm_at(x, peer, world) + tdl.rank(world), 100 + tdl.rank(world))
        peers = tl.arange(0, 4)
        mask = peers < tdl.num_ranks(world)
        tl.store(tdl.symm_at(x + 8, peers, world), peers, mask=mask)

    @triton.jit
    def k_wait(out, signals, world, value, cmp: tl.constexpr, several: tl.constexpr):
        if several:
            ok = tdl.wait(signals + tl.arange(0, 4), world, value, cmp, peer=tl.arange(0, 4) % 2)
        else:
            ok = tdl.wait(signals, world, value, cmp, peer=1)
        tl.store(out, ok.to(tl.int32) + 10)

    @triton.jit
    def k_notify(signals, world, peer, value, op: tl.constexpr, when: tl.constexpr):
        tdl.notify(signals, peer, world, value, op, when)
        tdl.notify(signals + 1, peer, world)
        tdl.notify(signals + 2, tl.arange(0, 2), world, 7, op, when)

    @triton.jit
    def k_store_ll(words, x, peer, world, flag, n, WIDE: tl.constexpr):
        lanes = tl.arange(0, 8)
        if WIDE:
            tdl.store_ll(words + 2 * lanes, tl.load(x + lanes), flag, peer, world, lanes < n)
        else:
            tdl.store_ll(words + lanes, tl.load(x + lanes), flag, peer, world, lanes < n)

    @triton.jit
    def k_load_ll(out, okay, words, world, flag, n, WIDE: tl.constexpr, dtype: tl.constexpr):
        lanes = tl.arange(0, 8)
        step: tl.constexpr = 2 if WIDE else 1
        x, ok = tdl.load_ll(words + step * lanes, flag, world, lanes < n, peer=1, dtype=dtype)
        tl.store(out + lanes, x)
        tl.store(okay, ok.to(tl.int32))

    @triton.jit
    def k_copies(dst, src, signal, n, world, peer, OP: tl.constexpr):
        if OP == "put":
            tdl.put(dst, src, n, peer, world)
        elif OP == "get":
            tdl.get(dst, src, n, peer, world)
        elif OP == "put_signal":
            tdl.put_signal(dst, src, n, signal, 5, peer, world)
        else:
            tdl.broadcast(dst, src, n, peer, world)
        tdl.fence()
        tdl.quiet()
        tdl.fence_async_proxy()

    @triton.jit
    def k_barrier(out, channel, world):
        ok = tdl.barrier(channel, world)
        tl.store(out + tl.program_id(0), ok.to(tl.int32))

    @triton.jit
    def k_grid_barrier(out, channel):
        ok = tdl.grid_barrier(channel)
        tl.store(out, ok.to(tl.int32))

    @triton.jit
    def k_epoch(out, channel):
        first = tdl.epoch(channel)
        tl.store(out + tl.program_id(0), first * 100 + tdl.epoch(channel))

    @triton.jit
    def k_token(out, x):
        tl.store(out, tl.load(tdl.consume_token(x, 1)) + tdl.consume_token(2, 1))

    def case_arithmetic():
        bench = Bench(3)
        for rank in range(3):
            k_arithmetic[(1,)](bench.at(rank, 64), bench.at(rank), bench.world(rank))
        assert bench.heaps[:, 64].tolist() == [0, 1, 2]
        assert bench.heaps[:, 65].tolist() == [3, 3, 3]
        assert bench.heaps[:, :3].tolist() == [[100, 101, 102]] * 3
        assert bench.heaps[:, 8].tolist() == [0, 1, 2]

    def case_team_table():
        bench = Bench(5, team=3, ranks=[4, 1, 3])
        for rank in range(3):
            k_arithmetic[(1,)](bench.at(rank, 64), bench.at(rank), bench.world(rank))
        assert bench.heaps[[4, 1, 3], 64].tolist() == [0, 1, 2]
        assert bench.heaps[[4, 1, 3], :3].tolist() == [[100, 101, 102]] * 3
        assert bench.heaps[[4, 1, 3], 8].tolist() == [0, 1, 2]
        assert not bench.heaps[[0, 2]].any()

    def run_wait(bench, value, cmp="ge", several=False):
        k_wait[(1,)](bench.at(0, 64), bench.at(0), bench.world(0), value, cmp, several)
        return int(bench.heaps[0, 64]) - 10

    def case_wait():
        bench = Bench(2)
        bench.heaps[0, 0] = 5
        assert run_wait(bench, 5)
        assert run_wait(bench, 4)
        assert run_wait(bench, 5, "eq")
        bench.heaps[0, 0] = -(1 << 31) + 2  # two steps past the wrap
        assert run_wait(bench, (1 << 31) - 1)
        bench.heaps[0, :4] = 3
        assert run_wait(bench, 3, several=True)

        def arrive():
            time.sleep(0.05)
            bench.heaps[0, 2] = 4

        bench.heaps[0, :4] = [4, 4, 3, 9]
        threading.Thread(target=arrive).start()
        assert run_wait(bench, 4, several=True)

    def case_timeout():
        bench = Bench(2)
        bench.heaps[0, :4] = [4, 4, 3, 9]
        assert not run_wait(bench, 4, several=True)
        assert bench.executor.record == (0, 0, 4, 3)
        assert bench.controls[0, abi.CONTROL_FAULT] == abi.FAULT_TIMEOUT

    def case_fault_stands():
        bench = Bench(2)
        bench.controls[:, abi.CONTROL_FAULT] = abi.FAULT_HOST
        bench.controls[:, abi.CONTROL_TIMEOUT_NS] = 60 * 10**9
        begun = time.monotonic()
        assert not run_wait(bench, 1)
        assert time.monotonic() - begun < 10
        k_notify[(1,)](bench.at(0), bench.world(0), 1, 3, "set", True)
        assert not bench.heaps[1].any()
        bench.heaps[0, 0] = 1
        assert run_wait(bench, 1)  # satisfied all the same

    def case_notify():
        bench = Bench(2)
        for _ in range(2):
            k_notify[(1,)](bench.at(0), bench.world(0), 1, 3, "set", True)
        assert bench.heaps[:, :4].tolist() == [[0, 0, 7, 0], [3, 1, 7, 0]]
        k_notify[(1,)](bench.at(0), bench.world(0), 1, 3, "add", True)
        assert bench.heaps[:, :4].tolist() == [[0, 0, 14, 0], [6, 1, 14, 0]]
        k_notify[(1,)](bench.at(0), bench.world(0), 1, 3, "add", False)
        assert bench.heaps[:, :4].tolist() == [[0, 0, 14, 0], [6, 1, 14, 0]]

    def case_low_latency():
        for wide, dtype, numpy_type in (
            (False, tl.int32, np.int32),
            (False, tl.float32, np.float32),
            (True, tl.int64, np.int64),
            (True, tl.float64, np.float64),
        ):
            bench = Bench(2)
            x = (np.arange(8) * 3 - 7).astype(numpy_type)
            if wide:
                x = x * numpy_type(1 << 33)
            out, okay = np.full(8, 99, numpy_type), np.zeros(1, np.int32)
            words = [bench.at(rank, 0, tl.int64) for rank in (0, 1)]
            source = Pointer(x.ctypes.data, dtype)
            k_store_ll[(1,)](words[0], source, 1, bench.world(0), -3, 6, wide)
            target = (Pointer(out.ctypes.data, dtype), Pointer(okay.ctypes.data, tl.int32))
            k_load_ll[(1,)](*target, words[1], bench.world(1), -3, 6, wide, dtype)
            assert okay[0] == 1
            assert out.tolist() == [*x[:6].tolist(), 0, 0]
            k_load_ll[(1,)](*target, words[1], bench.world(1), -3, 7, wide, dtype)
            assert okay[0] == 0

    def case_copies():
        for n in (0, 1, 5, 1000, 16390):
            bench = Bench(3, words=1 << 16)
            rng = np.random.default_rng(n)
            bench.heaps[:, :n] = rng.integers(1, 1 << 30, (3, n))
            source = bench.heaps[:, :n].copy()
            place = 20000

            def run(op, rank, peer, bench=bench, n=n, place=place):
                bench.heaps[:, place:] = 0
                ends = (bench.at(rank, place), bench.at(rank), bench.at(rank, 60000))
                k_copies[(1,)](*ends, n, bench.world(rank), peer, op)

            run("put", 1, 2)
            assert (bench.heaps[2, place : place + n] == source[1]).all()
            assert not bench.heaps[:, place + n :].any()
            run("get", 0, 2)
            assert (bench.heaps[0, place : place + n] == source[2]).all()
            run("put_signal", 1, 0)
            assert (bench.heaps[0, place : place + n] == source[1]).all()
            assert bench.heaps[0, 60000] == 5
            run("broadcast", 1, 1)
            assert (bench.heaps[:, place : place + n] == source[1]).all()
            run("broadcast", 0, 1)
            assert not bench.heaps[:, place : place + n].any()

    def case_barrier():
        bench = Bench(3)
        first, state = abi.CHANNEL_HEADER_WORDS, abi.STATE_WORDS
        pads = first + 2 * state
        for number in (1, 2, 3):
            for rank in range(3):  # the others have arrived already
                rows = bench.heaps[rank, pads : pads + 6].reshape(2, 3)
                rows[:] = np.maximum(rows, number)
                k_barrier[(2,)](bench.at(rank, 100), bench.channel(rank, 2), bench.world(rank))
                assert bench.heaps[rank, 100:102].tolist() == [1, 1]
                for block in range(2):
                    assert bench.heaps[rank, pads + 3 * block + rank] == number
                    assert bench.heaps[rank, first + block * state + abi.STATE_BARRIER] == number
        assert bench.heaps[:, pads : pads + 6].tolist() == [[3] * 6] * 3
        k_barrier[(2,)](bench.at(0, 100), bench.channel(0, 2), bench.world(0))
        assert bench.heaps[0, 100:102].tolist() == [0, 0]

    def case_grid_barrier():
        host.check_grid = lambda blocks, programs: None  # one program stands in for all
        for blocks in (1, 2, 5):
            bench = Bench(1)
            others = blocks - 1
            for _ in range(5):
                bench.heaps[0, abi.CHANNEL_GRID_COUNT] += others  # they arrived before
                k_grid_barrier[(1,)](bench.at(0, 100), bench.channel(0, blocks))
                assert bench.heaps[0, 100] == 1
        k_grid_barrier[(1,)](bench.at(0, 100), bench.channel(0, 2))
        assert bench.heaps[0, 100] == 0

    def case_epoch():
        bench = Bench(1)
        for launch in range(3):
            k_epoch[(2,)](bench.at(0, 100), bench.channel(0, 2))
            assert bench.heaps[0, 100:102].tolist() == [202 * launch + 102] * 2

    def case_token():
        bench = Bench(1)
        bench.heaps[0, 0] = 40
        k_token[(1,)](bench.at(0, 1), bench.at(0))
        assert bench.heaps[0, 1] == 42

    globals()[f"case_{sys.argv[1]}"]()
