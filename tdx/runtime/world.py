"""The world: this process's view of all ranks, their symmetric memory and its own device."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tdx.runtime import dlpack, dtypes
from tdx.runtime.agreement import agree
from tdx.runtime.allocation import allocate_symmetric, allocate_user
from tdx.runtime.array import Array
from tdx.runtime.block import Block, Exports, LocalBlock
from tdx.runtime.board import PLAN_KEY
from tdx.runtime.checks import check_kind
from tdx.runtime.closing import close
from tdx.runtime.copies import Copies
from tdx.runtime.errors import Closed, DriverError, InvalidArgument, TdxError
from tdx.runtime.faults import Faults
from tdx.runtime.group import Group, Outsider, Team, agree_on_team, make_handle
from tdx.runtime.mpi_access import mpi_access
from tdx.runtime.recovery import recover
from tdx.runtime.registration import Registry
from tdx.runtime.shapes import check_shape
from tdx.runtime.signals import Channel, Site, Sites, Usage, agreed_channel
from tdx.runtime.stream import InFlight, Stream, Streams, stream_handle
from tdx.runtime.undo import Undo
from tdx.runtime.window import Region, RuntimeRegions, Window

if TYPE_CHECKING:
    from tdx.runtime.driver.base import Driver
    from tdx.runtime.graph import Graph
    from tdx.runtime.host_channel import HostChannel
    from tdx.runtime.recovery import Survivors
    from tdx.runtime.topology import Topology

__all__ = ["World"]

_FIRST_USER_BYTES = 64 << 20


class World(Group):
    """Made by `tdx.init`; closed by `close` or at the end of a `with` block.

    For programs: empty, zeros, array, register, team, channel, new_stream, on, barrier, mpi,
    synchronize, check, recover and close. The other methods are for tdx.kernels.

    Attributes
    ----------
    rank, size, local_rank : int
        Number of this process, how many there are, and its number on this host.
    backend : str
        "host", "cuda" or "hip".
    device : DeviceInfo
        The device of this rank.
    stream : Stream
        Where work on tdx arrays goes that names no stream, outside of `on`. In a program that
        uses PyTorch on GPUs it stands for PyTorch's current stream.
    handle : Handle
        The kernel argument through which device functions know rank, size, stride, fault word.
    timeout_s : float
        Deadline of every wait in seconds; 0: none.
    """

    def __init__(
        self,
        topology: Topology,
        channel: HostChannel,
        driver: Driver,
        heap_bytes: int | None,
        memory_bytes: int,
        timeout_s: float,
        undo: Undo,
    ):
        self.world = self
        self.rank = topology.rank
        self.size = topology.size
        self.local_rank = topology.local_rank
        self.ranks = tuple(range(topology.size))
        self.index = 0
        self.timeout_s = timeout_s
        self.channels = channel
        self.driver = driver
        self.here = driver.here
        self.device = driver.info
        self.backend = driver.info.backend
        self.closing = self.closed = False
        self.recovered = False  # closed by recover(), so that arrays can still be read
        self.recording: Graph | None = None
        self.plans: dict[Any, Any] = {}  # one-line functions keep their plans here
        self.process = os.getpid()
        self.exports = Exports()
        self.captured: dict[int, Any] = {}  # see graph.hold
        self._sites = Sites()
        self._teams: dict[int, tuple[int, ...]] = {0: self.ranks}
        self._plans_made: dict[int, int] = {}  # group -> how many
        self._allocations = 0
        self.streams = Streams(driver, self.check)
        self.in_flight = InFlight(driver)

        self.window = Window(driver, channel, self.rank, self.size)
        undo.add(self.window.close)
        limit = min(heap_bytes or memory_bytes, self.window.stride // 2) // 256 * 256
        self.runtime_regions = RuntimeRegions(
            self.window, memory_bytes, lambda group: self.plans.pop(group, None)
        )
        self.runtime_regions.of(self)
        start = self.window.stride // 2
        first = min(_FIRST_USER_BYTES, limit)
        self.user_region = Region(self.window, "user", start, first, limit, self.ranks)
        if heap_bytes:
            self.user_region.larger = ", or pass a larger heap_bytes= to tdx.init"
        self.registry = Registry(self)
        undo.add(self.registry.close)
        self.stream = self.new_stream()
        driver.set_default_stream(self.stream.own)
        self.faults = Faults(self, timeout_s)
        undo.add(self.faults.close)
        self.copies = Copies(self)
        self.handle = make_handle(self, self.rank, self.size, 0)

    def empty(
        self, shape: Any, dtype: Any, symmetric: bool = True, name: str | None = None
    ) -> Array:
        """An array with undefined contents.

        Parameters
        ----------
        shape : int or sequence of int
        dtype
            Anything with a dtype tdx has: NumPy's, ml_dtypes', names, Triton's, torch's.
        symmetric : bool
            True: at the same heap offset on every rank; every rank makes the same calls in the
            same order. False: local device memory.
        name : str, optional
            For messages. Of a symmetric array the same on every rank.

        Raises HeapExhausted (on every rank), InvalidArgument, DtypeError, Closed. Whether ranks
        allocate symmetric arrays alike is compared when a plan, a channel or a team is made, in
        `barrier` and `close`, and with `tdx.config.debug` at once: CollectiveMismatch.
        """
        self.check()
        kind = dtypes.resolve(dtype)
        extents = check_shape(shape)
        check_kind(symmetric, name)
        if not symmetric:
            array = self.local(extents, kind, name or "array")
            array._block.named = bool(name)
            return array
        array = allocate_user(self, extents, kind, name, self._allocations + 1)
        self._allocations += 1  # a refused one does not count: ranks number arrays alike
        return array

    def local(self, shape: tuple[int, ...], dtype: np.dtype, name: str) -> Array:
        """`empty` in local memory, of a shape and dtype that have been checked."""
        size, driver = dtype.itemsize, self.driver
        nbytes = math.prod(shape) * size
        block = LocalBlock(driver, self.exports, nbytes, name, driver.current_stream())
        strides = dlpack.row_major(shape, size)
        return Array(self, block, block.address, shape, strides, dtype, self.rank)

    def zeros(
        self, shape: Any, dtype: Any, symmetric: bool = True, name: str | None = None
    ) -> Array:
        """An array of zeros; see `empty`. The fill is queued on the current stream.

        A peer may read or signal a symmetric array only after this rank has filled it: call
        `world.barrier()` before the first kernel that lets peers do so.
        """
        array = self.empty(shape, dtype, symmetric, name)
        self.copies.fill_zero(array)
        return array

    def array(self, source: Any, symmetric: bool = True, name: str | None = None) -> Array:
        """A copy of a tdx array, or of one of NumPy or another library; see `empty`."""
        if isinstance(source, Array):
            return self.empty(source.shape, source.dtype, symmetric, name).copy_from(source)
        stream = self.driver.current_stream()
        memory, in_order = self.copies.source(source, stream)
        array = self.empty(memory.shape, memory.dtype, symmetric, name)
        if array.size:
            array._block.enter(stream)
            self.copies.copy(array, memory, in_order)
        return array

    def allocate_runtime(
        self, group: Group, shape: tuple[int, ...], dtype: np.dtype, site: Site
    ) -> Array:
        """A zeroed array, symmetric in the group, outside the user's heap."""
        region, label = self.runtime_regions.of(group), f"{site.operation} {site.signal}"
        array = allocate_symmetric(self, region, shape, dtype, label, site)
        self.copies.fill_zero(array)
        return array

    def usage_of_plan(self, group: Group, call: str) -> Usage:
        """What counts the calls of a new plan, in sight of the peers."""
        number = self._plans_made[group.index] = self._plans_made.get(group.index, 0) + 1
        page = self.channels.page
        return Usage(page.board if page else None, PLAN_KEY | group.index << 32 | number, call)

    def note_site(self, block: Block, offset: int, site: Site) -> None:
        """Let messages name the signals of a block, at `offset` of the heap, by `site`."""
        self._sites.add(offset, block.nbytes, site)
        weakref.finalize(block, self._sites.remove, offset, site).atexit = False

    def register(self, array: Any) -> Array:
        """Memory of somebody else as a symmetric array: contiguous, writable. Collective.

        Every rank gives an array of the same shape and dtype: on a GPU one of any library over
        memory of cuMemCreate, on the host tier a NumPy array over a file that is mapped shared;
        the error says which allocators give such. The result is the same memory at another
        address (use one of the two in a kernel) and keeps `array` alive. Its producer's pending
        work comes first; later work on `array` is the caller's to order. `x.free()`, which is
        collective here, gives the memory back to its owner, as does dropping it on all ranks,
        at the next call.

        Raises Unsupported (memory that cannot be exported, or lies differently in the ranks'
        allocations) on every rank, CollectiveMismatch, InvalidArgument, HeapExhausted, Closed.
        """
        return self.registry.register(array)

    def team(self, ranks: Sequence[int]) -> Team | Outsider:
        """A team of the given world ranks, in that order. Called by every rank of the world.

        Members get the team, others what is false (`if team:`) and refused as `team=`. Raises
        InvalidArgument, CollectiveMismatch, Unsupported (more than 63 teams).
        """
        self.check()
        members = agree_on_team(self, ranks, len(self._teams))
        index = len(self._teams)
        self._teams[index] = members
        self.faults.set_table(index, members)
        return Team(self, members, index) if self.rank in members else Outsider(self.rank, members)

    def group(self, team: Group | None) -> Group:
        """The group for a `team=` argument: None is the world itself."""
        if team is None:
            return self
        if isinstance(team, Outsider):
            raise InvalidArgument(
                f"team={team!r}: only members call with team=, so ask `if team:` before"
            )
        if not isinstance(team, Group) or team.world is not self:
            raise InvalidArgument(f"team={team!r} is not a team of this world")
        return team

    def team_ranks(self, index: int) -> tuple[int, ...]:
        """World ranks of team `index`; empty when there is no such team."""
        return self._teams.get(index, ())

    def channel(self, blocks: int, team: Group | None = None) -> Channel:
        """Signals with a device-side epoch, for kernels of one's own with `blocks` blocks.

        Called by every rank of the team; pass the result to the kernel. Raises InvalidArgument,
        CollectiveMismatch.
        """
        self.check()
        return agreed_channel(self, self.group(team), blocks)

    def meet(self, what: str, group: Group | None = None) -> None:
        """Wait for this rank's device, then for all ranks of the group."""
        self.synchronize()
        self.channels.barrier(what, members=(group or self).ranks)

    def signal_site(self, address: int) -> tuple[Site, int, str]:
        """To whom the signal at an address belongs, which word it is there, and its name."""
        return self._sites.locate(address, self.window)

    def new_stream(self, priority: int = 0) -> Stream:
        """A stream of this world's device; a lower number is a higher priority."""
        self.check_open()
        return self.streams.new(priority)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """In the block this thread's plain launches and calls on tdx arrays go to `stream`."""
        self.check()
        with self.driver.working_on(stream_handle(stream)):
            yield

    def barrier(self) -> None:
        """Host barrier: after this rank's pending work, wait for all ranks.

        Raises a pending fault, PeerTimeout, PeerLost, CollectiveMismatch (also for ranks that have
        not allocated alike).
        """
        self.check()
        self.synchronize()
        agree(self, "barrier")

    def mpi(
        self, *arrays: Array, gpu_aware: bool | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Hand arrays to MPI: `with world.mpi(x): comm.Send(x, dest=1)`.

        When the block begins, this rank's pending work on the arrays is done; only their streams
        are waited for. Work that is queued after the block comes after what MPI did in it:
        requests of nonblocking calls must be completed inside. Yields the array, or a tuple of
        several. Works for any library of the host that takes DLPack or
        `__cuda_array_interface__`. What peers do to the arrays is not waited for.

        gpu_aware : bool, optional
            On GPUs: whether MPI takes their memory. None: as MPI itself says.

        Raises InvalidArgument (no array of this rank and world, inside of a graph), Unsupported
        (an MPI that does not take GPU memory, or does not say so), a pending fault, Closed.
        """
        return mpi_access(self, arrays, gpu_aware)

    def synchronize(self) -> None:
        """Wait for all streams of this rank's device. Raises a pending fault, DriverError."""
        self.check_open()
        with self.surfacing():
            self.driver.synchronize()
        self.in_flight.release()
        self.faults.check()

    def check(self) -> None:
        """Raise a pending fault without waiting for anything; Closed after `close`."""
        self.check_open()
        self.faults.check()

    @contextlib.contextmanager
    def surfacing(self) -> Iterator[None]:
        """A fault that stands explains a failing driver call better than its own error."""
        try:
            yield
        except DriverError:
            self.faults.check()
            raise

    def check_open(self) -> None:
        """Raise Closed if the world is closed."""
        if not self.closed:
            return
        if self.recovered:
            raise Closed(
                "this world was given up by world.recover(): use all of the new one instead"
            )
        if self.process != os.getpid():
            raise Closed(
                f"this process was forked from rank {self.rank}, whose world it is; start it anew "
                'instead: multiprocessing.get_context("spawn")'
            )
        raise Closed("the world is closed; call tdx.init() for a new one")

    def recover(self) -> World:
        """A new world of the ranks that are there, after any error, or without one.

        Collective; ranks whose calls wait for this one raise PeerTimeout or CollectiveMismatch
        within two seconds, to call it as well. Ranks keep their order and device, and are numbered
        anew; memory, epochs and channels are fresh. This rank's pending work ends first, at its
        deadline at the latest. Ranks that are gone, or silent for `timeout_s` seconds, are left
        out; all others end in the same new world, or raise. A rank lost meanwhile costs a round.

        The old world is closed, whatever the outcome; `x.numpy()` of an array of it still gives
        what this rank's memory held last. That memory is returned with the last such array.

        Raises PeerLost (attribute ranks: the others) where this rank came too late and was left
        out, Closed, and what `tdx.init` raises.
        """
        self.check_open()
        return recover(self, self._bring_up)

    def close(self) -> None:
        """Wait for the device and for the other ranks, then give everything back. Collective.

        Arrays, plans, streams and graphs of the world cannot be used afterwards. Memory that a
        consumer of an export still holds stays until it is dropped, and ResourceWarning says so;
        of symmetric memory the whole heap does. Repeated calls do nothing.

        Raises a fault or CollectiveMismatch that no call has raised yet (also for ranks that have
        not allocated alike), PeerTimeout, PeerLost. The world is closed all the same.
        """
        close(self, meet=True)

    def own(self, teardown: Undo, bring_up: Callable[[Survivors], World]) -> None:
        """Take over how to undo what init did, which `close` runs, and how to do it again."""
        self.teardown = teardown
        self._bring_up = bring_up

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
            return
        # peers may never come: do not wait for them, and let the error through
        with contextlib.suppress(TdxError):
            close(self, meet=False, error=error)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<tdx.World rank {self.rank} of {self.size}, {self.backend}{state}>"
