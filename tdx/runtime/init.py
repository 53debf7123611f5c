"""How a world comes up: one transaction, in which a failure on any rank raises on every rank."""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tdx.runtime import backends
from tdx.runtime.checks import as_float, as_int
from tdx.runtime.closing import close, disown
from tdx.runtime.comm import Comm, close_comm, means_mpi, open_comm
from tdx.runtime.config import config
from tdx.runtime.errors import Closed, DriverError, InvalidArgument, TdxError
from tdx.runtime.exchange import Mesh
from tdx.runtime.host_channel import HostChannel
from tdx.runtime.mpi_end import leave_out_if_damaged
from tdx.runtime.outcomes import describe_ranks, is_consequence, pack_error, raise_for_peers
from tdx.runtime.recovery import Survivors
from tdx.runtime.topology import discover
from tdx.runtime.undo import Undo
from tdx.runtime.untraced import stay_untraced
from tdx.runtime.waiting import Notice
from tdx.runtime.world import World

__all__ = ["current_world", "init", "no_world"]

_open: World | None = None
_forked = False  # whether this is a copy of a process that had a world
_POLICIES = ("raise", "abort")
_LONGEST_TIMEOUT_S = 1e6  # epoll waits no longer than 2**31 milliseconds

stay_untraced()  # here, since without a world nothing of tdx can be called


def init(
    comm: Any = None,
    backend: str | None = None,
    heap_bytes: int | None = None,
    timeout_s: float = 30.0,
    on_peer_failure: str = "raise",
) -> World:
    """Bring up the world of all ranks of `comm`. Collective; every rank passes the same values.

    It stays open until it is closed, also when nobody refers to it. One that is still open when
    the process ends is given back then, and ResourceWarning says so.

    Parameters
    ----------
    comm : mpi4py communicator, or object with Get_rank, Get_size, allgather(bytes)
        Used during init only. None: MPI.COMM_WORLD under an MPI launcher, or if mpi4py.MPI was
        imported, else a world of one; refused where torchrun has started several processes.
    backend : {"cuda", "hip", "host"}, optional
        None: the GPUs, if there are any that tdx has a driver for, else the host tier. Of the GPUs
        that a process sees it takes the one of its number among the launcher's processes of the
        host, or, if the launcher tells none, among the ranks there; modulo how many it sees.
    heap_bytes : int, optional
        Hard cap of the symmetric arrays of this rank, in bytes; workspaces of plans lie elsewhere.
        None: the heap grows up to the device's memory.
        On the host tier each array takes 256 bytes more than it has.
    timeout_s : float
        Deadline of every wait, in seconds; 0: none. Not of those for ranks that have not called
        `init` yet, which it waits for without end: then it says so on stderr, once, after
        `timeout_s` (0: 30) seconds.
    on_peer_failure : {"raise", "abort"}
        What survivors of a peer whose process is lost do: their next call raises PeerLost, or the
        process ends at once with exit code 1, without its exit functions. A peer that closed its
        world after an error is not lost: PeerLost in both cases.

    Raises
    ------
    InvalidArgument
        A bad value; ranks that disagree; a world that is open already; a launcher of another MPI,
        or of none; MPI in a forked copy of a process that has had a world.
    Unsupported
        Several hosts, or a backend that is not there yet.
    DriverError, HeapExhausted
        The device or its memory.
    """
    if _forked and means_mpi(comm):
        raise InvalidArgument(f"tdx.init: {no_world()}")
    with Notice(comm, timeout_s) as notice:
        notice.opened = communicator = open_comm(comm)
        try:
            return _make(communicator, backend, heap_bytes, timeout_s, on_peer_failure)
        finally:
            close_comm(communicator)


def current_world() -> World | None:
    """The world that is open in this process, if any."""
    return None if _open is None or _open.closed else _open


def no_world() -> str:
    """What to say to who needs one."""
    if _forked:
        return (
            "this process was forked from a rank, whose MPI it cannot use; start it anew instead: "
            'multiprocessing.get_context("spawn")'
        )
    return "no world is open; call tdx.init() first"


@atexit.register
def _at_exit() -> None:
    """A process that ends with an open world must not leave its device thread running."""
    world = _open
    if world is not None and world.process != os.getpid():
        return  # a forked copy: the end of the rank is not its
    if world is None or world.closed:
        leave_out_if_damaged()
    else:
        text = f"{world} was left open at exit: close it, or use `with tdx.init() as world:`"
        with contextlib.suppress(TdxError):
            close(world, meet=False, error=_last_error())
        leave_out_if_damaged()
        warnings.warn(text, ResourceWarning, stacklevel=2)  # last: it may be made an error


def _last_error() -> BaseException:
    """Why the program ends with its world open: the error that ended it, where Python tells."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # at a prompt it ended a command, not the program
        return Closed("the program ended while its world was open")
    return error


def _after_fork() -> None:
    global _forked
    _forked = _open is not None
    if _open is not None and not _open.closed:
        disown(_open)


os.register_at_fork(after_in_child=_after_fork)


def _make(comm: Comm, *settings: Any, device: int | None = None) -> World:
    """The world of the ranks of `comm`, with the settings of `init` from `backend` on.

    device: number of this rank's device; None: as its place on the host says.
    """
    global _open
    undo = Undo()
    try:
        world = _bring_up(comm, settings, undo, device)
    except BaseException as error:
        for failure in undo.rollback():
            error.add_note(f"while undoing: {failure!r}")
        raise
    _open = world
    return world


def _bring_up(comm: Comm, given: tuple[Any, ...], undo: Undo, device: int | None) -> World:
    backend, heap_bytes, timeout_s, on_peer_failure = given
    topology = discover(comm)
    chosen, heap_bytes, timeout_s = _together(
        comm, "tdx.init", lambda: _checked(backend, heap_bytes, timeout_s, on_peer_failure)
    )
    settings = f"backend={chosen}, heap_bytes={heap_bytes}, timeout_s={timeout_s}, " + (
        f"on_peer_failure={on_peer_failure}"
    )
    _agree(comm, settings)
    backends.announce(backend, chosen, topology.rank)
    # by place, so that worlds of one host take different GPUs
    number = topology.place if device is None else device
    driver = _together(
        comm,
        "opening the device",
        lambda: backends.open_driver(chosen, number, topology.local_size),
    )
    undo.add(driver.close)
    _check_devices(comm, driver, number)
    mine = (driver.info.memory_bytes, driver.info.multiprocessors)
    everybody = [struct.unpack("<2Q", each) for each in comm.allgather(struct.pack("<2Q", *mine))]
    # what ranks lay out alike must not depend on whose device it is
    memory, multiprocessors = (min(numbers) for numbers in zip(*everybody, strict=True))
    driver.info = replace(driver.info, multiprocessors=multiprocessors)

    def build() -> World:
        # connecting and the first message need a deadline even when waits have none
        limit = timeout_s or 30.0
        mesh = comm.connect() if isinstance(comm, Survivors) else Mesh.connect(comm, limit)
        channel = HostChannel(mesh, timeout_s)  # the mesh's owner now
        undo.add(channel.close)
        driver.set_timeout(timeout_s)
        driver.install()
        undo.add(driver.uninstall)
        return channel.together(
            lambda: World(topology, channel, driver, heap_bytes, memory, timeout_s, undo),
            "tdx.init",
        )

    world = _all_or_none(comm, build, undo)
    world.faults.abort = on_peer_failure == "abort"
    # a process keeps its device: it may hold other libraries' arrays, and the old world's
    index = driver.info.index
    world.own(undo, lambda survivors: _make(survivors, chosen, *given[1:], device=index))
    return world


def _checked(
    backend: str | None, heap_bytes: Any, timeout_s: Any, on_peer_failure: str
) -> tuple[str, int | None, float]:
    """What was passed to `init` as plain values, with the backend that is meant."""
    config.check()
    if current_world() is not None:
        raise InvalidArgument(f"{_open} is open already; close it before the next tdx.init()")
    heap, timeout = as_int(heap_bytes), as_float(timeout_s)
    if heap_bytes is not None and (heap is None or heap < 256):
        raise InvalidArgument(f"heap_bytes must be an int of 256 bytes or more, got {heap_bytes!r}")
    if timeout is None or not 0 <= timeout <= _LONGEST_TIMEOUT_S:
        raise InvalidArgument(
            f"timeout_s must be a number of seconds in 0..{_LONGEST_TIMEOUT_S:g} (0: no deadline), "
            f"got {timeout_s!r}"
        )
    if on_peer_failure not in _POLICIES:
        raise InvalidArgument(f"on_peer_failure={on_peer_failure!r} is not one of {_POLICIES}")
    return backends.choose(backend), heap, timeout


def _together(comm: Comm, what: str, step: Any) -> Any:
    """Run a local step on every rank; if one fails, every rank raises."""
    result, error = None, None
    try:
        result = step()
    except Exception as caught:  # whatever it is: the peers must not wait for this rank
        error = caught
    outcomes = comm.allgather(pack_error(error))
    if error is not None:
        raise error
    try:
        raise_for_peers(dict(enumerate(outcomes)), what)
    except TdxError:
        close = getattr(result, "close", None)
        if close is not None:
            close()
        raise
    return result


def _all_or_none(comm: Comm, build: Callable[[], World], undo: Undo) -> World:
    """Run `build`, in which ranks wait for each other; if it fails anywhere, every rank raises.

    A rank that fails undoes everything first, so that peers which wait for it notice; the error
    that every rank then raises is the one that came first, not that a peer is gone.
    """
    world, error = None, None
    try:
        world = build()
    except Exception as caught:
        error = caught
        for failure in undo.rollback():
            error.add_note(f"while undoing: {failure!r}")
    conclude = comm.conclude if isinstance(comm, Survivors) else comm.allgather
    outcomes = dict(enumerate(conclude(pack_error(error))))
    causes = {rank: outcome for rank, outcome in outcomes.items() if not is_consequence(outcome)}
    if any(causes.values()):
        if error is not None and causes.get(comm.Get_rank()):
            raise error
        raise_for_peers(causes, "tdx.init")
    if error is not None:
        raise error
    raise_for_peers(outcomes, "tdx.init")
    assert world is not None
    return world


def _check_devices(comm: Comm, driver: Any, number: int) -> None:
    """Raise DriverError on every rank if ranks have one GPU and not all want to share it.

    Or if GPUs do not reach each other. `number`: what this rank's was chosen by.
    """
    info = driver.info
    mine = f"{info.identity}\n{int(config.share_gpu)}\n{number}"
    entries = [entry.decode().split("\n") for entry in comm.allgather(mine.encode())]
    ranks: dict[str, list[int]] = {}
    for rank, (identity, *_) in enumerate(entries):
        ranks.setdefault(identity, []).append(rank)
    shared = [r for identity, r in ranks.items() if identity and len(r) > 1]
    if shared and not all(share == "1" for _, share, _ in entries):
        same = "; ".join(
            f"{describe_ranks(r)} (processes {', '.join(entries[each][2] for each in r)} of the "
            "host)"
            for r in shared
        )
        raise DriverError(
            f"{len(entries)} ranks have {len(ranks)} GPU(s) ({info.name}): {same} would use the "
            "same one, since process i takes GPU i, modulo those that it sees. Start no more "
            "processes on a host than it has GPUs, let CUDA_VISIBLE_DEVICES show each rank a GPU "
            "of its own, or set TDX_SHARE_GPU=1 for all ranks"
        )
    if info.identity:
        _together(comm, "reaching the ranks' GPUs", lambda: driver.check_links(ranks.keys()))


def _agree(comm: Comm, settings: str) -> None:
    """Raise InvalidArgument on every rank unless all passed the same values."""
    given = [text.decode() for text in comm.allgather(settings.encode())]
    if len(set(given)) > 1:
        table = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(given))
        raise InvalidArgument(f"tdx.init: ranks passed different values:\n{table}")
