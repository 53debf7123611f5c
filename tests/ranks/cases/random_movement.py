"""Random movements of bytes one after another, checked where they run.

As random_operations.py, whose TDX_TEST_OPERATIONS counts here too: inputs are hashed bytes of any
element type, outputs hold a byte before that no input has, and a kernel counts what differs.
"""

from __future__ import annotations

import contextlib

import triton

import tdx
import tdx.language as tdl
from tdx.runtime import dtypes
from tests.helpers.cases import limit, worlds
from tests.helpers.hashed import check_moved_kernel, fill_bytes_kernel, poison_bytes_kernel
from tests.helpers.movement import MOVES, many_rounds
from tests.ranks.cases.random_operations import OPERATIONS, PLANS, run_in_turn

_DTYPES = ("int8", "bool", "float8_e4m3fn", "bfloat16", "uint16", "float32", "int64", "complex64")
_GRID = (4,)


@triton.jit(do_not_specialize=["value"])
def wait_kernel(signal, world, value):
    tdl.wait(signal, world, value)


class Bytes:
    """Arrays of any type seen as bytes: filled, poisoned and checked by kernels."""

    source = first = 0  # part p of the result comes from rank source + p, from byte `first` on
    part = 0  # bytes

    def fill(self, world, x, salt):
        x = x.view("int8")
        fill_bytes_kernel[_GRID](x, world.rank, salt, x.size, BLOCK=1024)

    def poison(self, out):
        out = out.view("int8")
        poison_bytes_kernel[_GRID](out, out.size, BLOCK=1024)

    def check(self, out, wrong, salt):
        out = out.view("int8")
        check_moved_kernel[_GRID](
            out, wrong, self.source, self.first, self.part, salt, out.size, BLOCK=1024
        )


class Movement(Bytes):
    """A plan of a collective chosen at random, the same on every rank, with its arrays.

    Addresses and, every third time, whether results are in symmetric memory depend on the rank.
    """

    def __init__(self, world, rng, largest):
        self.move = MOVES[rng.integers(len(MOVES))]
        operation, rank, ranks = self.move.operation, world.rank, world.size
        dtype = _DTYPES[rng.integers(len(_DTYPES))]
        item = dtypes.resolve(dtype).itemsize
        count = max(1, int(largest ** rng.random()) // item)
        root = int(rng.integers(ranks))
        staged = rng.integers(2) and count * item < 1 << 16  # so in several rounds
        with many_rounds() if staged else contextlib.nullcontext():
            self.plan = self.move.plan(world, (count,), dtype, root)
        self.part = count * item
        self.source = root if operation == "broadcast" else 0
        self.first = rank * self.part if operation == "all_to_all" else 0
        wide = count if operation == "broadcast" else count * ranks
        begin, step = (int(v) for v in rng.integers(9, size=2))
        shift = (begin + rank * step) % 9
        where = rng.integers(3)
        shared = world.empty(wide + 9, dtype)
        local = world.empty(wide + 9, dtype, symmetric=False)
        symmetric = where == 0 or (where == 1 and rank % 2 == 0)
        self.out = (shared if symmetric else local)[shift : shift + wide]
        given = count * ranks if operation == "all_to_all" else count
        kind = ("apart", "apart", "in place", "buffer")[rng.integers(4)]
        self.given = None if kind == "buffer" else self.out
        if kind == "buffer":
            self.out = self.plan._out
        if kind == "in place":
            own = rank * count if operation == "all_gather" else 0
            self.x = self.out[own : own + given]
        else:
            self.x = world.empty(given + 9, dtype, bool(rng.integers(2)))[begin : begin + given]

    def run(self, world, wrong, salt):
        self.poison(self.out)
        self.fill(world, self.x, salt)
        self.plan(self.x, self.given)
        self.check(self.out, wrong, salt)


class OneSided(Bytes):
    """A put to a rank chosen at random, with a signal or barriers; or a get."""

    def __init__(self, world, rng, largest):
        self.kind = ("put", "signalled put", "get")[rng.integers(3)]
        dtype = _DTYPES[rng.integers(len(_DTYPES))]
        count = max(1, int(largest ** rng.random()) // dtypes.resolve(dtype).itemsize)
        mine, theirs = (slice(v, v + count) for v in map(int, rng.integers(9, size=2)))
        get = self.kind == "get"
        self.x = world.empty(count + 9, dtype, get or bool(rng.integers(2)))[mine]
        self.out = world.empty(count + 9, dtype, not get or bool(rng.integers(2)))[theirs]
        self.signal = world.zeros(1, "int32") if self.kind == "signalled put" else None
        self.part = self.x.nbytes
        self.peers = [int(p) for p in rng.permutation(world.size)]  # whom each rank acts on
        world.barrier()  # signals are zero

    def run(self, world, wrong, salt):
        self.poison(self.out)
        self.fill(world, self.x, salt)
        tdx.barrier()  # what peers write to is poisoned, and what they read is there
        peer = self.peers[world.rank]
        if self.kind == "get":
            self.source = peer
            tdx.get(self.out, self.x, peer)
        else:
            self.source = self.peers.index(world.rank)
            tdx.put(self.out, self.x, peer, signal=self.signal, value=salt + 1)
        if self.signal is None:
            tdx.barrier()  # what was put is there, and what was got may be overwritten
        else:
            wait_kernel[(1,)](self.signal, world.handle, salt + 1, num_warps=1)
        self.check(self.out, wrong, salt)


@limit(max(60, OPERATIONS / 500))
@worlds(2, 3, 4)
def case_movements(world, rng):
    largest = 3000 if world.backend == "host" else 3_000_000
    operations = [
        (Movement if rng.integers(3) else OneSided)(world, rng, largest)
        for _ in range(min(PLANS, OPERATIONS))
    ]
    wrong = run_in_turn(world, rng, operations)
    last = operations[0]  # that the check sees a single wrong byte
    last.run(world, wrong, OPERATIONS)
    assert wrong.numpy()[0] == 0
    world.barrier()
    given = last.out.view("int8").numpy()
    given[-1] = -128
    last.out.view("int8").copy_from(given)
    last.check(last.out, wrong, OPERATIONS)
    assert wrong.numpy()[0] == 1
    world.barrier()
