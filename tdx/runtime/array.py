"""Arrays: typed views of blocks, exchanged with everybody through DLPack. No arithmetic."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.runtime import dlpack, dtypes
from tdx.runtime.block import Block
from tdx.runtime.checks import as_int, has_elements
from tdx.runtime.copies import host_array, span
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported
from tdx.runtime.graph import hold
from tdx.runtime.shapes import address_of, complete_shape, is_broadcast, stand_in

if TYPE_CHECKING:
    from tdx.runtime.world import World

__all__ = ["Array"]

# dtypes that __cuda_array_interface__ can express
_CAI_KINDS = "biufc"


class Array:
    """Device memory with a shape and an element type. Made by a world.

    Attributes
    ----------
    shape, strides : tuple[int, ...]
        Extents, and distances in bytes.
    dtype : np.dtype
        ml_dtypes' for bfloat16 and float8.
    symmetric : bool
        Whether every rank has the array at the same heap offset.
    name : str
        As given to the world, or made up from the allocation's number.
    owner_rank : int
        Whose memory this is: the own rank, or r after `peer(r)`.
    """

    __slots__ = (
        "_address", "_block", "dtype", "operand", "owner_rank", "shape", "strides", "world",
    )  # fmt: skip

    def __init__(
        self,
        world: World,
        block: Block,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        owner_rank: int | None = None,
    ):
        self.world = world
        self._block = block
        self._address = address
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.owner_rank = world.rank if owner_rank is None else owner_rank
        self.operand: Any = None  # what operations make of the array, once they have

    # ---- what it is
    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def symmetric(self) -> bool:
        return self._block.symmetric

    @property
    def name(self) -> str:
        return self._block.name

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        expected = dlpack.row_major(self.shape, self.itemsize)
        dims = zip(self.shape, self.strides, expected, strict=True)
        return self.size == 0 or all(n == 1 or s == right for n, s, right in dims)

    @property
    def T(self) -> Array:
        """The array with its axes reversed, a view."""
        return self._view(self._address, self.shape[::-1], self.strides[::-1], self.dtype)

    def stride(self) -> tuple[int, ...]:
        """Strides in elements, as `TensorDescriptor.from_tensor` asks for them."""
        return tuple(s // self.itemsize for s in self.strides)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-dimensional array")
        return self.shape[0]

    def __repr__(self) -> str:
        kind = "symmetric" if self.symmetric else "local"
        peer = f" of rank {self.owner_rank}" if self.owner_rank != self.world.rank else ""
        return f"<tdx.Array {self.name}{peer}: {self.shape} {self.dtype}, {kind}>"

    def data_ptr(self) -> int:
        """Address of the first element; what makes the array a kernel argument.

        Notes that the stream of this thread's latest launch, or of `world.on`, uses the array.
        Raises Closed after free or close.
        """
        if self._block.last[0] != self.world.here.launching:
            self._note_launch()
        return self._address

    def _note_launch(self) -> None:
        self._block.check()
        driver = self.world.driver
        stream = driver.launch_stream()
        if driver.recorded_elsewhere(stream):
            hold(self.world, self._block)
            return
        self._block.note(stream)
        if self.world.recording is not None:
            self.world.recording.keep(self)
            self.world.recording.before_replay(self._block.note)

    # ---- views
    def peer(self, rank: int) -> Array:
        """The same array in rank `rank`'s heap; InvalidArgument for local arrays."""
        self._block.check()
        if not self.symmetric:
            raise InvalidArgument(f"{self._block.title} is local; only symmetric arrays have peers")
        rank, ranks = self.world.check_rank(rank), self._block.ranks
        if ranks is not None and rank not in ranks:
            raise InvalidArgument(
                f"{self._block.title} is there on the ranks of a team, {list(ranks)}, not on "
                f"rank {rank}"
            )
        window = self.world.window
        address = self._address + (rank - self.owner_rank) * window.stride
        return self._view(address, self.shape, self.strides, self.dtype, rank)

    def __getitem__(self, index: Any) -> Array:
        """A view by integers, slices, `...` and None, as NumPy's basic indexing."""
        carrier = stand_in(self.shape, self.strides, self.itemsize)
        parts = []  # with Python's ints: NumPy copies for an index that is an array
        for part in index if isinstance(index, tuple) else (index,):
            plain = part is None or part is Ellipsis or isinstance(part, slice)
            parts.append(part if plain else as_int(part))
            if not plain and parts[-1] is None:
                raise InvalidArgument(
                    f"index {part!r}: arrays take integers, slices, ... and None; "
                    "copy with .numpy() for anything else"
                )
        if not any(part is Ellipsis for part in parts):
            parts.append(Ellipsis)  # else NumPy would read an element when all axes are given
        view = carrier[tuple(parts)]
        offset = address_of(view) - address_of(carrier) if view.size else 0
        return self._view(self._address + offset, view.shape, view.strides, self.dtype)

    def __setitem__(self, index: Any, source: Any) -> None:
        """Copy into a view, see `copy_from`; a number, of Python or NumPy, fills the view."""
        view = self[index]
        scalar = isinstance(source, np.generic) or (type(source) is np.ndarray and not source.ndim)
        if scalar and source.dtype != view.dtype and source.dtype in dtypes.SUPPORTED:
            source = source.item()  # it fits, or not, as a number of Python does
        if scalar or isinstance(source, numbers.Number):
            source = np.full(view.shape, host_array(source, view.dtype))
        view.copy_from(source)

    def reshape(self, *shape: int | Sequence[int]) -> Array:
        """A view of a contiguous array with another shape; one extent may be -1."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        if not self.is_contiguous:
            raise InvalidArgument(
                f"{self._block.title} of shape {self.shape} and strides {self.strides} is "
                "not contiguous and cannot be reshaped without a copy, as world.array(x, "
                "symmetric=False) makes one"
            )
        new = complete_shape(self.size, wanted)
        return self._view(self._address, new, dlpack.row_major(new, self.itemsize), self.dtype)

    def view(self, dtype: Any) -> Array:
        """The same bytes as another element type; the last axis takes up the difference."""
        new = dtypes.resolve(dtype)
        if new.itemsize == self.itemsize:
            return self._view(self._address, self.shape, self.strides, new)
        row = self.shape[-1] * self.itemsize if self.shape else 0
        if not self.shape or self.strides[-1] != self.itemsize or row % new.itemsize:
            raise InvalidArgument(
                f"{self._block.title} of shape {self.shape} {self.dtype} cannot be seen as {new}: "
                f"the last axis must be contiguous and its {row} bytes a multiple of {new.itemsize}"
            )
        shape = (*self.shape[:-1], row // new.itemsize)
        strides = (*self.strides[:-1], new.itemsize)
        if any(stride % new.itemsize for stride in strides):
            raise InvalidArgument(f"strides {self.strides} are no multiples of {new.itemsize}")
        return self._view(self._address, shape, strides, new)

    def _view(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        owner_rank: int | None = None,
    ) -> Array:
        owner = self.owner_rank if owner_rank is None else owner_rank
        return Array(self.world, self._block, address, shape, strides, dtype, owner)

    # ---- copies
    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy on the host, made after the array's pending work. Raises a pending fault.

        Also after `world.recover()`, for what was left in this rank's own memory.
        """
        world = self.world
        low, nbytes = span(self.shape, self.strides, self.itemsize)
        is_left = world.recovered and self.owner_rank == world.rank and not self._block.freed
        if not is_left:
            self._block.check()
        contiguous = self.is_contiguous
        staging = np.empty(self.shape, self.dtype) if contiguous else np.empty(nbytes, np.uint8)
        if is_left:
            world.driver.read(staging.ctypes.data, self._address + low, nbytes)
        else:
            stream = self._block.settled(world.stream.handle)
            to = staging.ctypes.data
            with world.surfacing():
                world.driver.copy_out(to, self._address + low, nbytes, stream, staging)
            world.check()
        if contiguous:
            return staging
        return np.ndarray(self.shape, self.dtype, staging, -low, self.strides).copy()

    def copy_from(self, source: Any) -> Array:
        """Fill the array from a tdx array, or one of NumPy or another library.

        `source` must have this array's shape and dtype. Returns the array. The copy is ordered
        on the array's stream; host memory may be changed when the call returns.

        Raises InvalidArgument (shape, or what is no array), DtypeError, Unsupported (a device).
        """
        self._block.check()
        copies, in_order = self.world.copies, False
        if not isinstance(source, Array):
            stream = copies.stream_for(self._block)
            source, in_order = copies.source(source, stream, self.dtype)
        if source.dtype != self.dtype:
            raise DtypeError(
                f"{self._block.title} has dtype {self.dtype}, the source {source.dtype}; convert "
                "it first"
            )
        if (given := tuple(source.shape)) != self.shape:
            advice = f"; pass np.broadcast_to(source, {self.shape})"
            raise InvalidArgument(
                f"{self._block.title} has shape {self.shape}, the source {given}: shapes must be "
                f"equal, there is no broadcasting{advice * is_broadcast(given, self.shape)}"
            )
        if self.size:
            copies.copy(self, source, in_order)
        return self

    # ---- exchange with others
    def __dlpack_device__(self) -> tuple[int, int]:
        info = self.world.driver.info
        return info.dlpack_type, 0 if info.dlpack_type == dlpack.CPU else info.index

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule, zero-copy, ordered after the array's pending work."""
        self._block.check()
        dlpack.check_request(self.__dlpack_device__(), dl_device, copy)
        self.world.copies.order_export(self._block, stream)
        owner, released = self._block.export()
        try:
            return dlpack.capsule(
                owner,
                self._address,
                self.shape,
                self.strides,
                self.dtype,
                self.__dlpack_device__(),
                max_version,
                released=released,
            )
        except BaseException:
            released()
            raise

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if (
            self.world.backend == "host"
            or self.dtype.kind not in _CAI_KINDS
            or self.dtype.isbuiltin != 1
        ):
            raise AttributeError(
                f"__cuda_array_interface__ does not exist for {self.dtype} on the "
                f"{self.world.backend} backend; use DLPack"
            )
        self._block.check()
        self._block.scatter()  # the consumer does not say on which stream it will read
        return {
            "version": 3,
            "shape": self.shape,
            "strides": None if self.is_contiguous else self.strides,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "stream": self._block.settled(self.world.stream.handle),
        }

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """On the host tier a NumPy view of the same memory, after the array's pending work."""
        self._block.check()
        if self.world.backend != "host":
            raise TypeError("the array is in GPU memory; x.numpy() copies it to the host")
        if copy is False and dtype is not None and np.dtype(dtype) != self.dtype:
            raise ValueError(
                f"{self._block.title} has dtype {self.dtype}; as {dtype} it must be copied"
            )
        if copy:
            view = self.numpy()
        else:
            with self.world.surfacing():
                self._block.wait(self.world.stream.handle)
            self.world.check()
            owner, released = self._block.export()
            view = dlpack.numpy_view(
                owner, self._address, self.shape, self.strides, self.dtype, released
            )
        return view if dtype is None else view.astype(dtype, copy=False)

    def free(self) -> None:
        """Give the memory back; for a symmetric array on every rank in the same order.

        That is compared with the other ranks' calls when a plan, a channel or a team is made, and
        in `world.barrier()` and `world.close()`.

        Views become unusable. Raises Closed when freed already, InvalidArgument for a view of
        a part, and while a consumer of an export or a graph still holds the memory.
        """
        if self.symmetric and self.owner_rank != self.world.rank:
            raise InvalidArgument("a peer's array is freed by freeing the own array")
        if self.nbytes != self._block.nbytes:
            raise InvalidArgument(
                f"this is a view of {self.nbytes} of the {self._block.nbytes} bytes of "
                f"{self._block.title}; free the whole array"
            )
        self._block.free()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self._block.title} is memory of this process and cannot be pickled or deep-copied: "
            "pass x.numpy() on, or make a copy with world.array(x)"
        )

    def __bool__(self) -> bool:
        raise Unsupported("the truth of an array is not defined; use x.size or x.numpy()")

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if not has_elements(other):
            return NotImplemented
        raise TypeError(
            "arrays do not compare, neither by == nor by !=: x.numpy() == y compares elements, and "
            "x is y asks for the same array"
        )

    def __contains__(self, value: object) -> bool:
        raise TypeError("arrays do not search their elements: ask `value in x.numpy()`")
