"""The end of a world: in an orderly way, without the peers, or for a new one."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

from tdx.runtime.agreement import difference
from tdx.runtime.block import Exports
from tdx.runtime.errors import TdxError
from tdx.runtime.mpi_end import skip_mpi_finalize, watch_at_exit
from tdx.runtime.stream import Here, InFlight
from tdx.runtime.window import Window

if TYPE_CHECKING:
    from tdx.runtime.host_channel import HostChannel
    from tdx.runtime.world import World

__all__ = ["close", "disown", "give_up"]


def close(world: World, meet: bool, error: BaseException | None = None) -> None:
    """Close a world; `meet`: after its device and peers, else for `error`. See `World.close`."""
    if world.closed:
        return
    mismatch = world.channels.mismatch
    known = world.faults.raised or mismatch  # the caller has seen it: closing is left to do
    failure: BaseException | None = mismatch
    told, diverged = world.user_region.diverged, None
    try:
        if meet and mismatch is None:
            world.synchronize()
            world.closing = True  # from here on peers may leave
            diverged = difference(world, "close")
    except TdxError as error:
        failure = error
    except BaseException:
        world.closing = False
        raise
    world.closing = True
    if failure is not None or not meet:
        world.faults.halt()
        world.driver.abandon()
        _note_damage(world.channels, failure or world.faults.raised or error)
    _mark(world, "its world is closed")
    held = len(world.exports)
    if world.exports.mapped:
        world.teardown.forget(world.window.close)
        world.exports.when_empty(world.window.close)
    failures = world.teardown.rollback()
    if held:  # said last: it may be made an error
        warnings.warn(
            f"tdx world closed while {held} exported array(s) are still held; "
            "their memory stays until they are dropped",
            ResourceWarning,
            stacklevel=3,
        )
    for other in (None if told else diverged, *failures):
        failure = other if failure is None else failure
    if failure is not None and failure is not known:
        raise failure


def disown(world: World) -> None:
    """In a forked copy of the process, which shares memory with the rank but has no device."""
    world.closed = True
    world.exports.closed = "this process was forked from the rank, whose memory it is"
    page = world.channels.page
    if page is not None:
        page.board.kept = True  # what this copy drops is still counted by the rank


def give_up(world: World) -> None:
    """Close all but the host channel and this rank's own memory, which goes with the world."""
    world.faults.halt()
    world.driver.abandon()
    world.recovered = True
    _mark(world, "its world was given up by world.recover(); x.numpy() of one's own still works")
    world.teardown.forget(world.window.close)
    world.teardown.forget(world.channels.close)
    failures = world.teardown.rollback()
    weakref.finalize(world, _unmap, world.window, world.exports).atexit = False
    if not world.exports.mapped:
        world.window.unmap_peers()
    if failures:
        raise failures[0]


def _mark(world: World, why: str) -> None:
    world.closed, world.recording, world.exports.closed = True, None, why
    world.plans.clear()
    world.captured.clear()
    world.in_flight = InFlight(world.driver)
    world.here = Here()
    world.teardown.add(world.streams.close)


def _unmap(window: Window, exports: Exports) -> None:
    exports.when_empty(window.close)


def _note_damage(channel: HostChannel, why: BaseException | None) -> None:
    """Tell the peers why; remember for the end of the process what became of them."""
    page = channel.page
    if page is None:
        return
    if why is not None:
        text = str(why) if isinstance(why, TdxError) else f"{type(why).__name__}: {why}"
        page.farewell = getattr(why, "origin", None) or (channel.rank, text)
    recovered = page.answer(0)  # the members that others went on with
    if channel.lost() or (recovered and not recovered >> channel.rank & 1):
        skip_mpi_finalize()
    watch_at_exit(page.process(rank) for rank in channel.departed())
