"""Copies into arrays and the ordering of exports, for every kind of source."""

from __future__ import annotations

import itertools
import math
import reprlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.runtime import dlpack, foreign
from tdx.runtime.config import config
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported
from tdx.runtime.graph import hold
from tdx.runtime.stream import (
    DEFAULT_STREAM,
    NOWHERE,
    before_which,
    finished,
    follow,
    follow_recorded,
)  # fmt: skip

if TYPE_CHECKING:
    from tdx.runtime.array import Array
    from tdx.runtime.block import Block
    from tdx.runtime.dlpack import Imported
    from tdx.runtime.world import World

__all__ = ["Copies", "host_array", "span"]

_HOST_MEMORY = (dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST)


class Copies:
    """Copies of one world, on the streams of the arrays."""

    def __init__(self, world: World):
        self._world = world
        self._driver = world.driver

    def stream_for(self, block: Block) -> int:
        """Where a copy into the block is queued."""
        here = self._driver.current_stream()
        if self._world.recording is not None or self._driver.recorded_elsewhere(here):
            return here  # another one would not be recorded
        return block.settled(here)

    def fill_zero(self, array: Array) -> None:
        """Queue zeros for all of a fresh array on the current stream."""
        if not array.size:
            return
        world, block = self._world, array._block
        stream = self._driver.current_stream()
        if world.recording is not None:
            world.recording.keep(array)
            world.recording.before_replay(block.enter)
        elif self._driver.recorded_elsewhere(stream):
            hold(world, block)
        self._enter(stream, block)
        self._driver.fill(array._address, 0, array.nbytes, stream)

    def _enter(self, stream: int, *blocks: Block) -> None:
        if self._world.recording is not None or self._driver.recorded_elsewhere(stream):
            follow_recorded(self._driver, stream, blocks)
        for block in blocks:
            block.enter(stream)

    def source(self, given: Any, stream: int, dtype: Any = None) -> tuple[Imported, bool]:
        """Memory of somebody's array, or of numbers, ready for a copy on `stream`.

        Also whether its owner works on `stream`: then it is not used for anything else before the
        copy is done. `dtype`: of numbers that have none of their own.
        """
        # a stream that is recorded cannot wait for what runs now
        asked = None if self._world.recording else before_which(self._world, stream)
        found, home = foreign.describe(self._driver, host_array(given, dtype), asked)
        info = self._driver.info
        if found.device[0] not in (*_HOST_MEMORY, info.dlpack_type):
            raise Unsupported(
                f"the source is on DLPack device {found.device}, and this rank's arrays on "
                f"{(info.dlpack_type, info.index)}; copy it to the host first"
            )
        if home is not None and found.size:
            foreign.come_after(self._driver, found, home, stream)
        return found, home == stream and found.device[1] == info.index

    def copy(self, target: Array, source: Array | Imported, in_order: bool = False) -> None:
        """Copy equal shapes and dtypes; `target` is not empty. `in_order`: as `source` says."""
        block = target._block
        stream = self.stream_for(block)
        if _overlap(target, source):
            # pieces of a copy are in no order: what is read must not have been written
            block.enter(stream)
            with self._world.on(stream):
                apart = self._world.local(target.shape, target.dtype, "copy")
                self.copy(apart, source, in_order)
            source = apart
        recording, blocks = self._world.recording, [block]
        if not isinstance(source, dlpack.Imported):
            source._block.check()
            blocks.append(source._block)
        if recording is None and self._driver.recorded_elsewhere(stream):
            hold(self._world, *blocks)
        if recording is not None:
            recording.keep(target, source)
            for each in blocks:
                recording.before_replay(each.enter)
        self._enter(stream, *blocks)
        if not isinstance(source, dlpack.Imported):
            self._rows(target, source._address, source.strides, stream)
        elif source.device[0] in _HOST_MEMORY:
            self._from_host(target, source, stream)
        else:
            self._rows(target, source.address, source.strides, stream)
            if not in_order:
                self._driver.stream_synchronize(stream)  # the producer may reuse its memory

    def _from_host(self, target: Array, source: Imported, stream: int) -> None:
        size = source.dtype.itemsize
        if not source.contiguous:
            view = dlpack.numpy_view(
                source.owner, source.address, source.shape, source.strides, source.dtype
            )
            packed = np.ascontiguousarray(view)
            source = dlpack.import_array(packed)
        if target.is_contiguous:
            with self._world.surfacing():
                self._driver.copy_in(
                    target._address, source.address, target.nbytes, stream, source.owner
                )
            return
        strides = dlpack.row_major(source.shape, size)
        if self._driver.info.dlpack_type == dlpack.CPU:
            self._rows(target, source.address, strides, stream)
            with self._world.surfacing():
                self._driver.stream_synchronize(stream)
            return
        staging = self._driver.alloc(target.nbytes, stream)
        try:
            self._driver.copy_in(staging, source.address, target.nbytes, stream)
            self._rows(target, staging, strides, stream)
        finally:
            self._driver.free(staging, stream)

    def _rows(self, target: Array, address: int, strides: tuple[int, ...], stream: int) -> None:
        for to, at, pitches, width, rows in _pieces(
            target.shape, target.strides, strides, target.itemsize
        ):
            if rows == 1:
                self._driver.copy(target._address + to, address + at, width, stream)
            else:
                self._driver.copy_2d(
                    target._address + to, pitches[0], address + at, pitches[1], width, rows, stream
                )

    def order_export(self, block: Block, stream: Any) -> None:
        """Order a consumer after the block's pending work.

        A consumer in host memory gets finished data, whatever it asked for. On a GPU None means
        the legacy default stream and -1 that the consumer wants no ordering: in debug mode a
        warning says so if there is something to order.
        """
        if self._driver.info.dlpack_type == dlpack.CPU:
            with self._world.surfacing():
                block.wait(self._world.stream.handle)
            self._world.check()
        elif stream == -1:
            if config.debug and self._is_pending(block):
                warnings.warn(
                    f"{block.title} is exported with stream=-1, as mpi4py does, while work on it "
                    "is pending: the consumer may see what was there before. "
                    "`with world.mpi(x):` waits for the work",
                    RuntimeWarning,
                    stacklevel=3,
                )
        else:
            consumer = DEFAULT_STREAM if stream is None else int(stream)
            if self._driver.recorded_elsewhere(consumer) or self._is_recorded(consumer):
                return  # neither runs it now, nor can it wait for what does
            for used in block.last:
                if used != consumer and not self._is_recorded(used):
                    follow(self._driver, used, consumer)
            self._driver.instead_of(self._world.stream.own)  # from now on PyTorch's is known
            if self._driver.left_at(consumer) is not None:
                block.scatter()
            else:
                block.last[:] = [*(s for s in block.last if s not in (consumer, NOWHERE)), consumer]

    def _is_pending(self, block: Block) -> bool:
        return any(
            not self._is_recorded(used) and not finished(self._driver, used)
            for used in block.last
            if used != NOWHERE
        )

    def _is_recorded(self, stream: int) -> bool:
        """Whether what is queued there does not run now."""
        return self._driver.left_at(stream) is None and self._driver.capturing(stream)


def span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """(offset of the lowest byte, bytes up to the highest) of the elements; 0 bytes if none."""
    if 0 in shape:
        return 0, 0
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    low = sum(r for r in reach if r < 0)
    return low, sum(r for r in reach if r > 0) - low + itemsize


def host_array(source: Any, dtype: Any = None) -> Any:
    """Numbers and nested sequences as a NumPy array, of `dtype` if they have none of their own.

    Arrays of all libraries are returned as they are. Raises InvalidArgument, DtypeError.
    """
    is_array = hasattr(source, "__dlpack__") or hasattr(source, "__cuda_array_interface__")
    if is_array and not isinstance(source, np.generic):
        return source
    try:
        found = np.asarray(source, None if hasattr(source, "dtype") else dtype)
    except Exception as error:  # what is in a sequence raises what it likes
        raise InvalidArgument(
            f"{reprlib.repr(source)} cannot be made an array: {error}; pass numbers, nested "
            "sequences of equal lengths, or an array"
        ) from error
    if dtype is not None and np.dtype(dtype).kind in "biu" and not hasattr(source, "dtype"):
        whole = np.asarray(source)
        if whole.dtype.kind in "fc" and not (whole == found).all():
            raise DtypeError(
                f"{reprlib.repr(source)} is not of {np.dtype(dtype)}: pass whole numbers, or "
                "convert them first as you mean it"
            )
    if found.dtype.kind in "OSU":
        raise DtypeError(
            f"{reprlib.repr(source)} would be an array of {found.dtype}, which tdx does not take: "
            "pass numbers of a type that it takes, or nested sequences of them"
        )
    return found


def _overlap(target: Array, source: Array | Imported) -> bool:
    """Whether a byte that is read may have been written before.

    That is told by the ranges of addresses, of equal strides also by the places within a pitch.
    """
    here = source.address if isinstance(source, dlpack.Imported) else source._address
    if source.strides == target.strides:
        run = target.itemsize
        pitch = 0
        for extent, stride in zip(reversed(target.shape), reversed(target.strides), strict=True):
            if stride == run and not pitch:
                run *= extent
            elif extent > 1:
                pitch = math.gcd(pitch, stride)
        behind = (here - target._address) % pitch if pitch else run
        if here == target._address or run <= behind <= pitch - run:
            return False
    low, nbytes = span(target.shape, target.strides, target.itemsize)
    first, count = span(source.shape, source.strides, target.itemsize)
    begin, start = target._address + low, here + first
    return begin < start + count and start < begin + nbytes


def _pieces(
    shape: tuple[int, ...], to: tuple[int, ...], at: tuple[int, ...], itemsize: int
) -> Iterator[tuple[int, int, tuple[int, int], int, int]]:
    """Split a strided copy: (offset to, offset at, their pitches, bytes a row, rows)."""
    axes = [(n, t, a) for n, t, a in zip(shape, to, at, strict=True) if n != 1]
    width = itemsize
    while axes and axes[-1][1] == axes[-1][2] == width:
        width *= axes.pop()[0]
    rows, pitch_to, pitch_at = axes.pop() if axes else (1, 0, 0)
    for index in itertools.product(*(range(n) for n, _, _ in axes)):
        offset_to = sum(i * t for i, (_, t, _) in zip(index, axes, strict=True))
        offset_at = sum(i * a for i, (_, _, a) in zip(index, axes, strict=True))
        yield offset_to, offset_at, (pitch_to, pitch_at), width, rows
