"""Offsets of the heap: placement, reclaiming, and what ranks compare."""

from __future__ import annotations

import gc
import random
import threading

import pytest

from tdx.runtime.errors import Closed, InvalidArgument
from tdx.runtime.heap import Call, Heap, HeapFull, Made, first_difference, format_bytes


def check_layout(heap):
    """Blocks are aligned, do not overlap, and leave exactly the free bytes."""
    end = 0
    for offset, size in sorted(heap.blocks.items()):
        assert offset >= end
        assert offset % heap.alignment == 0
        assert size % heap.alignment == 0
        end = offset + size
    assert end <= heap.capacity
    assert heap.used == sum(heap.blocks.values()) == heap.capacity - heap.free_bytes
    assert heap.largest_free <= heap.free_bytes


def test_blocks_are_aligned_and_first_fit():
    heap = Heap(8192, 8192)
    assert [heap.allocate(n) for n in (1, 256, 257)] == [0, 256, 512]
    heap.free(256)
    assert heap.allocate(100) == 256
    assert heap.used == 1024


def test_empty_arrays_have_offsets_of_their_own():
    heap = Heap(1024, 1024)
    assert [heap.allocate(0) for _ in range(4)] == [0, 256, 512, 768]
    with pytest.raises(HeapFull):
        heap.allocate(0)


def test_freed_neighbours_merge():
    heap = Heap(1024, 1024)
    offsets = [heap.allocate(256) for _ in range(4)]
    for offset in (offsets[0], offsets[2], offsets[1], offsets[3]):
        heap.free(offset)
    assert heap.largest_free == 1024
    assert heap.allocate(1024) == 0


def test_a_gap_lies_behind_each_block():
    heap = Heap(2048, 4096, gap=256)
    assert [heap.allocate(n) for n in (0, 256, 1)] == [0, 256, 768]
    assert heap.largest_free == 2048 - 1280 - 256
    with pytest.raises(HeapFull) as caught:
        heap.allocate(heap.largest_free + 1)
    heap.extend(caught.value.shortfall)
    assert heap.allocate(513) == 1280
    check_layout(heap)


def test_the_block_that_an_offset_is_in():
    heap = Heap(4096, 4096, gap=256)
    offsets = [heap.allocate(n) for n in (300, 0, 256)]
    assert offsets == [0, 768, 1024]
    found = [heap.block_at(at) for at in (0, 299, 300, 768, 1023, 1024, 1279, 1280, 4000)]
    assert found == [(0, 300), (0, 300), None, None, None, (1024, 256), (1024, 256), None, None]
    heap.free(0)
    assert heap.block_at(0) is None
    heap.drop(1024)
    assert heap.block_at(1024) == (1024, 256)
    heap.reclaim([1024])
    assert heap.block_at(1024) is None


def test_full_heap_tells_by_how_much_to_grow():
    heap = Heap(1024, 4096)
    first = heap.allocate(512)
    heap.allocate(256)
    heap.free(first)
    before = heap.digest
    with pytest.raises(HeapFull) as caught:
        heap.allocate(1000)
    full = caught.value
    assert (full.requested, full.free, full.largest_free) == (1000, 768, 512)
    assert heap.digest == before
    heap.extend(full.shortfall)
    assert heap.allocate(1000) == 768
    assert heap.free_bytes == 512


def test_growth_stops_at_the_limit():
    heap = Heap(0, 1000)
    assert heap.limit == 768
    heap.extend(768)
    assert heap.largest_free == 768
    with pytest.raises(InvalidArgument, match="limit 768"):
        heap.extend(256)
    with pytest.raises(InvalidArgument, match="multiple of 256"):
        heap.extend(100)


@pytest.mark.parametrize("arguments", [(-1, 10), (20, 10), (0, 0, 3), (0, 0, 0)])
def test_bad_sizes(arguments):
    with pytest.raises(InvalidArgument):
        Heap(*arguments)


def test_bad_frees():
    heap = Heap(1024, 1024)
    offset = heap.allocate(300)
    with pytest.raises(InvalidArgument, match="no block begins at offset 256"):
        heap.free(256)
    heap.free(offset)
    with pytest.raises(Closed, match="freed before"):
        heap.free(offset)
    with pytest.raises(InvalidArgument, match="-1 bytes"):
        heap.allocate(-1)


def test_dropped_blocks_stay_until_reclaimed():
    heap = Heap(1024, 1024)
    a, b, c = (heap.allocate(256) for _ in range(3))
    heap.drop(c)
    heap.drop(a)
    heap.drop(a)
    assert heap.dropped() == (a, c)
    assert heap.used == 768
    assert heap.reclaim([a, c]) == 512
    assert heap.dropped() == ()
    assert sorted(heap.blocks) == [b]
    with pytest.raises(InvalidArgument, match="in use on this rank"):
        heap.reclaim([b])


def test_failed_reclaim_has_no_effect():
    heap = Heap(1024, 1024)
    a, b = heap.allocate(1), heap.allocate(1)
    heap.drop(a)
    before = heap.digest
    with pytest.raises(InvalidArgument):
        heap.reclaim([a, b])
    assert heap.dropped() == (a,)
    assert heap.digest == before


def test_drops_do_not_wait_for_the_lock():
    heap = Heap(1024, 1024)
    offset = heap.allocate(1)
    with heap._lock:  # as when garbage collection runs inside allocate
        heap.drop(offset)
    assert heap.dropped() == (offset,)


def test_drops_of_finalizers_in_several_threads():
    heap = Heap(1 << 20, 1 << 20)

    class Owner:
        def __init__(self, offset):
            self.offset = offset
            self.cycle = self

        def __del__(self):
            heap.drop(self.offset)

    def work():
        for _ in range(100):
            Owner(heap.allocate(64))
        gc.collect()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert len(heap.dropped()) == 400
    assert heap.reclaim(heap.dropped()) == 400 * 256
    assert heap.largest_free == heap.capacity


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_keep_the_layout_and_agree(seed):
    rng = random.Random(seed)
    heaps = [Heap(1 << 14, 1 << 16) for _ in range(2)]
    live = []
    for _ in range(2000):
        nbytes = rng.randrange(3000)
        try:
            offsets = {heap.allocate(nbytes) for heap in heaps}
            assert len(offsets) == 1
            live.append(offsets.pop())
        except HeapFull as full:
            with pytest.raises(HeapFull):
                heaps[1].allocate(nbytes)
            if heaps[0].capacity + full.shortfall <= heaps[0].limit and rng.random() < 0.2:
                for heap in heaps:
                    heap.extend(full.shortfall)
        while live and rng.random() < 0.5:
            offset = live.pop(rng.randrange(len(live)))
            kind = rng.random()
            for heap in heaps:
                if kind < 0.5:
                    heap.free(offset)
                else:
                    heap.drop(offset)
                    heap.reclaim(heap.dropped())
    for heap in heaps:
        check_layout(heap)
    assert heaps[0].blocks == heaps[1].blocks
    assert heaps[0].digest == heaps[1].digest
    assert heaps[0].recent == heaps[1].recent
    for offset in live:
        heaps[0].free(offset)
    assert heaps[0].largest_free == heaps[0].capacity


def test_digest_sees_order_but_no_drops():
    a, b = Heap(4096, 4096), Heap(4096, 4096)
    a.allocate(1)
    a.allocate(2)
    b.allocate(2)
    b.allocate(1)
    assert a.digest != b.digest
    assert len(a.digest) == 16
    before = a.digest
    a.drop(0)
    a.dropped()
    assert a.digest == before


def test_what_is_allocated_is_part_of_the_call_and_the_place_is_not():
    a, b, c = (Heap(1024, 1024) for _ in range(3))
    a.allocate(8, Made("array 'x' (2,) int32", "here:1"))
    b.allocate(8, Made("array 'x' (2,) int32", "there:2"))
    c.allocate(8, Made("array 'y' (2,) int32", "here:1"))
    assert a.digest == b.digest != c.digest
    assert first_difference(a.recent, b.recent) is None
    assert first_difference(a.recent, c.recent) == (1, *(f"array '{n}' (2,) int32" for n in "xy"))
    a.free(0, "here:3")
    assert a.recent[-1] == (2, "free of array 'x' (2,) int32", "here:3")


def test_first_difference_names_the_call():
    a, b = Heap(4096, 4096), Heap(4096, 4096)
    assert first_difference(a.recent, b.recent) is None
    for heap in (a, b):
        heap.allocate(16)
    assert first_difference(a.recent, b.recent) is None
    a.allocate(32)
    late = first_difference(a.recent, b.recent)
    assert late == (2, "allocate(32) -> 256", None)
    b.free(0)
    b.allocate(32)
    found = first_difference(a.recent, b.recent)
    assert found is not None
    assert (found.sequence, found.theirs) == (2, "free(0)")


def test_first_difference_compares_only_what_both_remember():
    mine = [Call(n, "same") for n in range(5, 9)]
    theirs = [Call(n, "other" if n < 5 else "same") for n in range(3, 9)]
    assert first_difference(mine, theirs) is None
    assert first_difference([], theirs) == (3, None, "other")


def test_history_is_bounded():
    heap = Heap(1024, 1024)
    for _ in range(100):
        heap.free(heap.allocate(1))
    assert len(heap.recent) == 64
    assert heap.recent[-1].sequence == 200


def test_sizes():
    assert [format_bytes(n) for n in (0, 1023, 1536, 64 << 20, 1 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "64 MiB", "1.0 TiB",
    ]  # fmt: skip
