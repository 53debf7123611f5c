"""Arrays of other libraries, for the runtime: memory, and the stream on which their owner works.

What the frameworks' arrays are is known one layer above, by tdx.interop, which leaves its
`owner_of` here when it is loaded. Without it all that speaks DLPack is taken by that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from tdx.runtime import dlpack
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.stream import DEFAULT_STREAM, after

if TYPE_CHECKING:
    from tdx.runtime.dlpack import Imported
    from tdx.runtime.driver.base import Driver

__all__ = ["ask", "come_after", "describe"]


class _Owner(Protocol):
    """As much of a framework as is asked here; see tdx.interop."""

    def stream_of(self, x: Any) -> int | None: ...

    def describe(self, x: Any, stream: int | None = None) -> Imported: ...


def _nobody(x: Any) -> None:
    """The owner of all arrays as long as nobody else tells."""


_owner_of: Callable[[Any], _Owner | None] = _nobody


def ask(owner_of: Callable[[Any], _Owner | None]) -> None:
    """From now on `owner_of` tells the framework of an array, None for what is none."""
    global _owner_of
    _owner_of = owner_of


def describe(driver: Driver, x: Any, stream: int | None) -> tuple[Imported, int | None]:
    """Memory of `x`, and the stream on which its owner uses it; None for one that shows none.

    Of an owner who shows none the memory is ready for work on `stream` (None: the default one);
    after the others a stream has to `come_after`. Raises InvalidArgument, DtypeError.
    """
    owner = _owner_of(x)
    # with another GPU current producers refuse, or take that one's default stream
    with driver.using():
        if owner is None:
            return dlpack.import_array(x, stream), None
        memory, home = owner.describe(x, stream), owner.stream_of(x)
    return memory, DEFAULT_STREAM if home == 0 else home


def come_after(driver: Driver, memory: Imported, home: int, stream: int) -> None:
    """Later work of `stream` on the memory, of this or another GPU, comes after that of its owner.

    Raises InvalidArgument where another library records the owner's stream `home`, and `stream`
    would read what is not there yet.
    """
    info = driver.info
    on_gpu = memory.device[0] == info.dlpack_type != dlpack.CPU
    if on_gpu and memory.device[1] != info.index:
        driver.wait_elsewhere(memory.device[1], home)
    elif home != stream:
        if driver.recorded_elsewhere(home):
            raise InvalidArgument(
                f"the array's library records its stream {home:#x}, and the array would be read on "
                f"stream {stream:#x} now: make the call before the recording, or put it there by "
                "`with world.on(...)` of the stream that is recorded"
            )
        after(driver, home, stream)
