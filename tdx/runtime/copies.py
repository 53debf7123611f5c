"""Copies into arrays and the ordering of exports, for every kind of source."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.runtime import dlpack
from tdx.runtime.config import config
from tdx.runtime.errors import Unsupported
from tdx.runtime.stream import DEFAULT_STREAM, NOWHERE, finished, follow

if TYPE_CHECKING:
    from tdx.runtime.array import Array
    from tdx.runtime.block import Block
    from tdx.runtime.dlpack import Imported
    from tdx.runtime.world import World

__all__ = ["Copies"]

_HOST_MEMORY = (dlpack.CPU, dlpack.CUDA_HOST, dlpack.ROCM_HOST)


class Copies:
    """Copies of one world, on the streams of the arrays."""

    def __init__(self, world: World):
        self._world = world
        self._driver = world.driver

    def stream_for(self, block: Block) -> int:
        """Where a copy into the block is queued."""
        if self._world.recording is not None:
            return self._driver.current_stream()  # another one would not be recorded
        return block.settled(self._world.stream.handle)

    def source(self, producer: Any, stream: int) -> Imported:
        """Memory of a NumPy array or DLPack producer, ready for a copy on `stream`."""
        # a stream that is recorded cannot wait for what runs now
        return dlpack.import_array(producer, None if self._world.recording else stream)

    def copy(self, target: Array, source: Array | Imported) -> None:
        """Copy equal shapes and dtypes; `target` is not empty."""
        block = target._block
        stream = self.stream_for(block)
        recording = self._world.recording
        if recording is not None:
            recording.keep(target, source)
            recording.before_replay(block.enter)
            if not isinstance(source, dlpack.Imported):
                recording.before_replay(source._block.enter)
        block.enter(stream)
        if not isinstance(source, dlpack.Imported):
            source._block.check()
            source._block.enter(stream)
            self._rows(target, source._address, source.strides, stream)
        elif source.device[0] in _HOST_MEMORY:
            self._from_host(target, source, stream)
        elif source.device[0] == self._driver.info.dlpack_type:
            self._rows(target, source.address, source.strides, stream)
            self._driver.stream_synchronize(stream)  # the producer may reuse its memory
        else:
            raise Unsupported(
                f"the source is on DLPack device {source.device}, the array on "
                f"{target.__dlpack_device__()}; copy it to the host first"
            )

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
                self._driver.copy_in(target._address, source.address, target.nbytes, stream)
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
                    f"{block.name} is exported with stream=-1, as mpi4py does, while work on it is "
                    "pending: the consumer may see what was there before. "
                    "`with world.mpi(x):` waits for the work",
                    RuntimeWarning,
                    stacklevel=3,
                )
        else:
            for used in block.last:
                follow(self._driver, used, DEFAULT_STREAM if stream is None else int(stream))

    def _is_pending(self, block: Block) -> bool:
        return any(
            # what is recorded does not run now
            not self._driver.capturing(used) and not finished(self._driver, used)
            for used in block.last
            if used != NOWHERE
        )


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
