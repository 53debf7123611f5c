"""Arrays of others made symmetric: `world.register`.

Every rank maps the memory behind its array into the window, at the same offset on all ranks: own
memory too, which so has two addresses in its own process. Memory can only be mapped in whole
allocations, hence an array has to lie at the same distance from the start of its allocation on
every rank, or a peer's copy would not be one addition away.
"""

from __future__ import annotations

import struct
import weakref
from typing import TYPE_CHECKING, Any

from tdx.runtime import dlpack, foreign
from tdx.runtime.array import Array
from tdx.runtime.block import Block
from tdx.runtime.errors import HeapExhausted, InvalidArgument, TdxError, Unsupported
from tdx.runtime.heap import Heap, HeapFull, format_bytes
from tdx.runtime.signals import Site

if TYPE_CHECKING:
    from tdx.runtime.dlpack import Imported
    from tdx.runtime.world import World

__all__ = ["Registry"]


class Registry:
    """The registered memory of a world: the second eighth of a rank's addresses.

    Holds what was registered until all ranks have dropped or freed it: peers may use it as long.
    """

    def __init__(self, world: World):
        self._world = world
        self._start = world.window.stride // 8
        self._heap = Heap(self._start, self._start, world.window.granularity())
        self._held: dict[int, tuple[int, Imported]] = {}  # offset in the heap -> bytes, memory
        self._blocks: dict[int, weakref.ref[_Registered]] = {}  # offset -> as long as it is in use
        self._first, self._end = 1 << 64, 0  # addresses between which all of it has ever been
        self._count = 0

    def __bool__(self) -> bool:
        """Whether anything is registered."""
        return bool(self._held)

    def register(self, array: Any) -> Array:
        """See `World.register`."""
        world, channels = self._world, self._world.channels
        world.check()
        memory, what = self._agreed(array)
        self._reclaim(what)
        found = channels.together(
            lambda: world.driver.mem_find(memory.address, memory.nbytes), what
        )
        skipped, sizes = self._layouts(memory, found, what)
        offset = self._place(max(map(sum, sizes)), what)
        try:
            pieces = [max(memory.address, start) for start, _ in found]
            world.window.map_found(self._start + offset, pieces, sizes, what)
        except BaseException:
            self._heap.free(offset)
            raise
        self._count += 1
        address = world.window.address(world.rank, self._start + offset) + skipped
        label = f"registered{self._count}"
        block = _Registered(self, offset, address, memory, label)
        self._blocks[offset] = weakref.ref(block)
        self._held[offset] = max(map(sum, sizes)), memory
        self._first = min(self._first, memory.address)
        self._end = max(self._end, memory.address + memory.nbytes)
        site = Site("kernel", label, itemsize=max(4, memory.dtype.itemsize))
        world.note_site(block, self._start + offset + skipped, site)
        strides = dlpack.row_major(memory.shape, memory.dtype.itemsize)
        return Array(world, block, address, memory.shape, strides, memory.dtype)

    def find(self, address: int) -> tuple[int, Block] | None:
        """Where the window has what lies at an address of its owner, if it is registered."""
        if not self._first <= address < self._end:
            return None
        for offset, (_, memory) in [*self._held.items()]:
            begin = address - memory.address
            if 0 <= begin < memory.nbytes and (known := self._blocks.get(offset)):
                block = known()
                if block is not None and not block.freed:
                    return block.address + begin, block
        return None

    def drop(self, offset: int) -> None:
        """Note that this rank no longer uses the block; called by finalizers."""
        self._heap.drop(offset)

    def free(self, offset: int) -> None:
        """Unmap a block that no rank uses any more; alike on all ranks."""
        self._heap.free(offset)
        self._let_go(offset)

    def close(self) -> None:
        """Drop what is held; the window unmaps."""
        self._held.clear()
        self._blocks.clear()

    def _let_go(self, offset: int) -> None:
        nbytes, _ = self._held.pop(offset)
        del self._blocks[offset]
        self._world.window.unmap(self._start + offset, nbytes)

    def _agreed(self, array: Any) -> tuple[Imported, str]:
        """The memory of the array, when all ranks give one of this shape and dtype."""
        world = self._world
        refused: BaseException | None = None
        call = "register"
        try:
            if world.recording is not None:
                raise InvalidArgument(
                    "world.register cannot be recorded in a graph: call it before"
                )
            if isinstance(array, Array):
                raise InvalidArgument(
                    f"world.register takes arrays of others, and {array.name} is tdx's own: "
                    "world.empty(..., symmetric=True) makes symmetric ones"
                )
            stream = world.stream.handle
            memory, home = foreign.describe(world.driver, array, stream)
            _check(memory, world)
            if home is not None:
                foreign.come_after(world.driver, memory, home, stream)
            call = f"register({memory.shape}, {memory.dtype})"
        except Exception as error:
            refused = error
        world.channels.agree(call, refused)
        return memory, call

    def _reclaim(self, what: str) -> None:
        """Unmap what all ranks have dropped."""
        world, channels = self._world, self._world.channels
        mine = self._heap.dropped()
        answers = channels.allgather(struct.pack(f"<{len(mine)}Q", *mine), what)
        agreed = set(mine)
        for theirs in answers:
            agreed &= {offset for (offset,) in struct.iter_unpack("<Q", theirs)}
        if not agreed:
            return
        channels.together(world.driver.synchronize, what)  # nobody uses them any more

        def let_go() -> None:
            self._heap.reclaim(agreed)
            for offset in sorted(agreed):
                self._let_go(offset)

        channels.together(let_go, what)

    def _layouts(
        self, memory: Imported, found: list[tuple[int, int]], what: str
    ) -> tuple[int, list[tuple[int, ...]]]:
        """Bytes before the array in its first piece, and the sizes of each rank's pieces."""
        world = self._world
        skipped = memory.address - found[0][0]
        payload = struct.pack(f"<{1 + len(found)}Q", skipped, *(size for _, size in found))
        answers = world.channels.allgather(payload, what)
        numbers = [struct.unpack(f"<{len(data) // 8}Q", data) for data in answers]
        if len({each[0] for each in numbers}) > 1:
            table = ", ".join(f"rank {rank}: {each[0]}" for rank, each in enumerate(numbers))
            raise Unsupported(
                f"{what}: the arrays do not begin at the same byte of their allocations ({table}), "
                "so a peer's would not be a constant distance away. Let all ranks allocate alike: "
                "register one large array that is allocated first, and use views of it"
            )
        return skipped, [each[1:] for each in numbers]

    def _place(self, nbytes: int, what: str) -> int:
        try:
            return self._heap.allocate(nbytes)
        except HeapFull as full:
            raise HeapExhausted(
                f"{what}: {format_bytes(nbytes)} of addresses are needed for registered memory, "
                f"{format_bytes(full.free)} of {format_bytes(self._heap.limit)} are free, the "
                f"largest run of them {format_bytes(full.largest_free)}; free arrays registered "
                "before"
            ) from None


class _Registered(Block):
    """A piece of the registered memory, at the same offset of every rank's heap."""

    symmetric = True

    def __init__(self, registry: Registry, offset: int, address: int, memory: Imported, name: str):
        world = registry._world
        super().__init__(world.driver, world.exports, address, memory.nbytes, name)
        self.stream = world.stream.handle  # the producer's work was ordered before it
        self._memory = memory  # also when the world is closed, while a consumer holds the block
        self._registry = registry
        self._channels = world.channels
        self._offset = offset
        self._finalizer = weakref.finalize(self, registry.drop, offset)
        self._finalizer.atexit = False

    def free(self) -> None:
        """Give up the memory on all ranks; it is its owner's alone when this returns."""
        self.check()
        refused: TdxError | None = None
        try:
            self.driver.synchronize()
            super().free()
        except TdxError as error:
            refused = error
        try:
            self._channels.agree(f"free({self.name})", refused)
        except BaseException:
            self.freed = False
            raise
        self._finalizer.detach()
        self._registry.free(self._offset)


def _check(memory: Imported, world: World) -> None:
    info = world.driver.info
    if memory.device[0] != info.dlpack_type:
        raise Unsupported(
            f"world.register: the array is on DLPack device {memory.device}, the world on "
            f"{world.backend}; copy it with world.array(x)"
        )
    if memory.device[0] != dlpack.CPU and memory.device[1] != info.index:
        raise Unsupported(
            f"world.register: the array is on GPU {memory.device[1]}, this rank's world on GPU "
            f"{info.index}"
        )
    if memory.readonly or memory.copied:
        raise InvalidArgument(
            "world.register: the array is read-only, or its producer hands out a copy; peers "
            "would write into it: pass a writable array"
        )
    if not memory.size:
        raise InvalidArgument("world.register: the array has no elements, and so no memory")
    if not memory.contiguous:
        raise InvalidArgument(
            f"world.register: the array of shape {memory.shape} and strides {memory.strides} is "
            "not contiguous; register the whole of it and take a view of the result"
        )
