"""The symmetric heap: growth, reclaiming, limits, and failures on one rank only."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

import tdx
from tdx.runtime.agreement import agree
from tdx.runtime.driver.host import HostDriver
from tdx.runtime.errors import (
    Closed,
    CollectiveMismatch,
    HeapExhausted,
    InvalidArgument,
    PeerLost,
)
from tdx.runtime.heap import format_bytes
from tests.helpers.cases import host_only, isolated, worlds

MIB = 1 << 20


@isolated
@worlds(1, 2, 3)
def case_growth_keeps_live_arrays_and_reaches_peers(comm, backend):
    with tdx.init(comm, backend=backend) as world:
        first = world.array(np.full(1000, world.rank, np.int32))
        base, stride, capacity = world.window.base, world.window.stride, _capacity(world)
        large = [world.empty(40 * MIB, "uint8") for _ in range(4)]
        assert _capacity(world) >= 160 * MIB > capacity
        assert (world.window.base, world.window.stride) == (base, stride)
        for number, x in enumerate(large):
            x[-4:] = np.full(4, 10 * world.rank + number, np.uint8)
        world.barrier()
        for rank in range(world.size):
            assert (first.peer(rank).numpy() == rank).all()
            for number, x in enumerate(large):
                assert (x.peer(rank)[-4:].numpy() == 10 * rank + number).all()
        world.barrier()


@isolated
@worlds(1, 2)
def case_dropped_memory_is_reused_before_the_heap_grows(comm, backend):
    with tdx.init(comm, backend=backend) as world:
        capacity = _capacity(world)
        for _ in range(20):
            world.empty(30 * MIB, "uint8")
        assert _capacity(world) == capacity
        gc.disable()
        try:
            if world.rank == 0:
                kept = world.empty(30 * MIB, "uint8")
            else:
                world.empty(30 * MIB, "uint8")
            others = [world.empty(30 * MIB, "uint8") for _ in range(2)]
        finally:
            gc.enable()
        assert _capacity(world) > capacity  # one rank still holds its array
        assert len({x.data_ptr() for x in others}) == 2
        if world.rank == 0:
            assert kept.size == 30 * MIB
        world.barrier()


@isolated
@worlds(1, 2)
def case_a_hard_cap(comm, backend):
    with tdx.init(comm, backend=backend, heap_bytes=MIB) as world:
        gap = world.driver.gap  # behind each array
        x = world.empty(MIB // 2 - gap, "uint8", name="kept")
        behind = f" and {gap} bytes that stay free behind it" if gap else ""
        said = (
            rf"{format_bytes(MIB - gap)} requested for array 'big' \({MIB - gap},\) uint8{behind}, "
            "512 KiB free of 1 MiB, the largest free run "
            f"{format_bytes(MIB // 2 - gap)}, and it grows up to 1 MiB at most; free arrays, or "
            "pass a larger heap_bytes="
        )
        with pytest.raises(HeapExhausted, match=said):
            world.empty(MIB - gap, "uint8", name="big")
        never = (
            rf"requested for array .*{behind}, but it grows up to (1 MiB|{MIB} bytes) at most, so "
            r"that to free what it holds is of no use; use smaller arrays, or pass a larger "
            r"heap_bytes="
        )
        if gap:  # in bytes where rounding hides why it does not fit
            for nbytes in (MIB - gap + 1, MIB):
                with pytest.raises(HeapExhausted, match=f"{nbytes} bytes .* to {MIB} bytes at mos"):
                    world.empty(nbytes, "uint8")
        with pytest.raises(HeapExhausted, match=f"{MIB + 1} bytes requested .* to {MIB} bytes"):
            world.empty(MIB + 1, "uint8")
        with pytest.raises(HeapExhausted, match=f"2 MiB requested .*{behind}, .* to 1 MiB at"):
            world.empty(2 * MIB, "uint8")
        for shape in (MIB - gap + 1, (1 << 20, 1 << 20, 1 << 20)):
            with pytest.raises(HeapExhausted, match=never):
                world.empty(shape, "uint8")
        with pytest.raises(HeapExhausted, match=r"16\.0 TiB .*, but it grows.*smaller arrays$"):
            tdx.AllReduce(world, (1 << 42,), "float32")
        with pytest.raises(HeapExhausted):
            world.empty(1 << 60, "uint8", symmetric=False)
        for _ in range(5):
            world.zeros(MIB // 2 - gap, "uint8")
        x.free()
        assert world.zeros(MIB - gap, "uint8").numpy().sum() == 0
        world.barrier()


@isolated
@worlds(2, 3)
def case_growth_that_fails_on_one_rank(comm, backend):
    host_only(backend)
    with tdx.init(comm, backend=backend) as world:
        x = world.array(np.arange(10))
        for verb in ("mem_create", "mem_map", "mem_import"):
            capacity = _capacity(world)
            with pytest.MonkeyPatch.context() as patch:
                if world.rank == 1:
                    patch.setattr(HostDriver, verb, _exhausted)
                with pytest.raises(HeapExhausted, match="injected"):
                    world.empty(100 * MIB, "uint8")
            assert _capacity(world) == capacity
            world.barrier()
        assert (x.numpy() == np.arange(10)).all()
        assert world.zeros(100 * MIB, "uint8")[-1].numpy() == 0
        world.barrier()


@isolated
@worlds(2, 3)
def case_names_that_are_made_up(comm, backend):
    """They are the same on all ranks, also after a refusal on one."""
    with tdx.init(comm, backend=backend) as world:
        held = [world.empty(30 * MIB, "uint8", name=f"x{i}") for i in range(4)]
        assert world.empty(1, "uint8").name == "array5"
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1:
                patch.setattr(type(world.user_region), "allocate", _exhausted)
                with pytest.raises(HeapExhausted):
                    world.empty(1, "uint8")
        assert world.empty(1, "uint8").name == "array6"
        assert len(held) == 4
        world.barrier()


def _exhausted(*_):
    raise HeapExhausted("injected")


@isolated
@worlds(2)
def case_growth_falls_back_to_what_is_needed(comm, backend):
    """Doubling fails, the size asked for fits."""
    host_only(backend)
    original = HostDriver.mem_create

    def small_only(self, nbytes):
        if nbytes > 20 * MIB:
            raise HeapExhausted("too large")
        return original(self, nbytes)

    with tdx.init(comm, backend=backend) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostDriver, "mem_create", small_only)
        kept = world.empty(60 * MIB, "uint8")
        other = world.zeros(10 * MIB, "uint8")
        assert other[-1].numpy() == 0
        assert kept.size == 60 * MIB
        world.barrier()


@isolated
@worlds(2)
def case_diverging_allocations_are_noticed(comm, backend):
    with tdx.init(comm, backend=backend, timeout_s=5) as world:
        line = sys._getframe().f_lineno + 1
        world.empty(10 + 1000 * world.rank, "uint8")
        place = rf"made at .*heap\.py:{line}"
        text = rf"allocation 1: rank 0: array \(10,\) uint8, {place}; rank 1: array \(1010,\) uint8"
        with pytest.raises(CollectiveMismatch, match=text):
            agree(world, "call")
        with pytest.raises(CollectiveMismatch, match="rank 0: call 0; rank 1: call 1"):
            agree(world, f"call {world.rank}")
        with pytest.raises(CollectiveMismatch, match=text):
            world.barrier()


def _another_shape(world):
    world.zeros((2, 4) if world.rank else (4, 2), "float32", name="a")


def _another_dtype(world):
    world.zeros(4, "int32" if world.rank else "float32", name="a")


def _another_order(world):
    for name in "sa" if world.rank else "as":
        world.zeros(8, "float32", name=name)


def _no_name(world):
    world.zeros(8, "float32", name=None if world.rank else "a")


def _another_array_freed(world):
    arrays = [world.zeros(8, "float32", name=name) for name in "ab"]
    arrays[world.rank].free()


MADE = ", made at .*heap.py:"
DIFFERENT = {
    _another_shape: rf"'a' \(4, 2\) float32{MADE}.*; rank 1: array 'a' \(2, 4\) float32{MADE}",
    _another_dtype: r"rank 0: array 'a' \(4,\) float32.*; rank 1: array 'a' \(4,\) int32",
    _another_order: r"allocation 1: rank 0: array 'a' .*; rank 1: array 's' ",
    _no_name: r"rank 0: array 'a' \(8,\) float32.*; rank 1: array \(8,\) float32",
    _another_array_freed: rf"allocation 3: rank 0: free of array 'a' \(8,\) float32{MADE}.*'b'",
}  # fmt: skip


@isolated
@worlds(2)
@pytest.mark.parametrize("allocate", DIFFERENT)
@pytest.mark.parametrize("at", ["barrier", "close"])
def case_allocations_of_the_same_bytes(comm, backend, allocate, at):
    """Shapes, dtypes, names and order count, also where all ranks have the same offsets."""
    world = tdx.init(comm, backend=backend, timeout_s=5)
    allocate(world)
    with pytest.raises(CollectiveMismatch, match=f"{at}: .*{DIFFERENT[allocate]}"):
        world.barrier() if at == "barrier" else world.close()
    assert world.closed == (at == "close")
    world.close()  # the caller has been told
    with tdx.init(comm, backend=backend) as world:
        world.barrier()


@isolated
@worlds(3)
def case_only_a_team_was_told(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=5)
    team = world.team([0, 1])
    world.zeros(4 + world.rank, "float32")
    if team:
        with pytest.raises(CollectiveMismatch, match=r"allocation 1: rank 0: .*; rank 1: "):
            tdx.AllReduce(world, 8, "float32", team=team)
        world.close()
    else:
        with pytest.raises(CollectiveMismatch, match=r"close: .*; rank 2: "):
            world.close()


@isolated
@worlds(2)
def case_an_error_goes_first(comm, backend):
    """A rank that ends by one closes without the others, whatever it has allocated."""

    def use():
        with tdx.init(comm, backend=backend, timeout_s=20) as world:
            world.zeros(4 + world.rank, "float32")
            if world.rank:
                raise KeyError("here")

    with pytest.raises(KeyError if comm.Get_rank() else PeerLost, match="here"):
        use()


@isolated
@worlds(2)
def case_differences_that_are_forgotten(comm, backend):
    world = tdx.init(comm, backend=backend, timeout_s=5)
    held = [world.zeros(8 if i else 8 + world.rank, "float32") for i in range(100)]
    with pytest.raises(CollectiveMismatch, match="differently; not in the last 64 allocations"):
        world.barrier()
    world.close()
    assert len(held) == 100


@isolated
@worlds(2)
def case_debug_mode_compares_each_allocation(comm, backend):
    tdx.config.debug = True
    world = tdx.init(comm, backend=backend, timeout_s=5)
    world.zeros(8, "float32", name="a")
    world.zeros(8 + world.rank, "float32", symmetric=False)
    text = r"world.empty: .*allocation 2: rank 0: array 'b' \(8,\) .*; rank 1: array 'b' \(9,\)"
    with pytest.raises(CollectiveMismatch, match=text):
        world.array(np.zeros(8 + world.rank), name="b")
    world.close()


@worlds(1, 2)
def case_free(world):
    x = world.zeros(1000, "float32")
    y = x[10:]
    world.barrier()
    x.free()
    for use in (x.numpy, y.numpy, x.data_ptr, x.free, lambda: x.peer(0), lambda: x.__dlpack__()):
        with pytest.raises(Closed, match="freed"):
            use()
    again = world.zeros(1000, "float32")
    with pytest.raises(InvalidArgument, match="own array"):
        again.peer((world.rank + 1) % world.size).free() if world.size > 1 else _refuse()
    world.barrier()


def _refuse():
    raise InvalidArgument("own array")


def _capacity(world):
    return world.user_region.heap.capacity
