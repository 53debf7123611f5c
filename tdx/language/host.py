"""The host tier's lowerings: what the interpreter cannot do with plain Triton operations.

A waiting program must let the other programs of its process run, so waits go to the executor,
`abi.host_executor`, which the runtime of the host tier sets before it launches anything.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from triton.language import core

from tdx import abi
from tdx.language._intrinsic import host_tensor, intrinsic, is_block, unwrap


class Executor(Protocol):
    """What runs the programs of the host tier.

    Addresses are uint64 arrays and `control` the address of the control block. `team` and
    `peers` only describe the wait in a fault record; a peer of -1 is not known.
    """

    def wait(
        self,
        addresses: np.ndarray,
        values: np.ndarray,
        cmp: str,
        control: int,
        team: int,
        peers: np.ndarray,
    ) -> bool:
        """Suspend the calling program until every 32-bit word satisfies its value, acquire.

        "ge": the signed 32-bit difference word - value is not negative; "eq": equal bits. Returns
        False when the deadline passes, having written the fault record, or when a fault stands.
        """

    def wait_any(
        self, addresses: np.ndarray, value: int, last: int, control: int, team: int
    ) -> tuple[np.ndarray, bool]:
        """Suspend until a word reaches `value`; which have, and ok. A fault names `last`."""

    def load_words(
        self,
        addresses: np.ndarray,
        shift: int,
        flag: int,
        mask: np.ndarray,
        control: int,
        team: int,
        peers: np.ndarray,
    ) -> tuple[np.ndarray, bool]:
        """Suspend until each 64-bit word under `mask` has `flag` in its bits from `shift` on.

        Returns the words as uint64, 0 outside the mask, and False on expiry or fault.
        """

    def fault(self, control: int) -> bool:
        """Does a fault stand?"""

    def name_of(self, address: int) -> str:
        """What the running kernel was given at an address: "argument 'x'", or the address."""

    def resident(self) -> int:
        """How many programs of the running kernel there are at once, at most."""

    def distance(
        self, pointers: np.ndarray, peers: np.ndarray, handle: tuple[int, int, int, bool]
    ) -> np.ndarray:
        """Bytes from `pointers` to `peers`' copies, for each of them or one number for all.

        `handle` has the numbers of a world handle. Where there is no such copy the distance leads
        to an address whose use is refused.
        """


@intrinsic
def distance(ptr, peer, world, _semantic=None):
    """Bytes from `ptr` to `peer`'s copy, int64; a block where one number does not do for all."""
    handle = (
        _scalar(world.control), _scalar(world.packed), _scalar(world.stride), unwrap(world.is_team)
    )  # fmt: skip
    steps = _running().distance(_array(ptr), _array(peer).astype(np.int64), handle)
    if is_block(peer):
        return host_tensor(steps.reshape(peer.shape) if steps.size == 1 else steps, like=peer)
    return host_tensor(steps, like=ptr) if steps.size > 1 else host_tensor(steps.reshape(1))


@intrinsic
def check_grid(blocks, programs, _semantic=None):
    """Reject a grid barrier of other than the channel's number of programs: it never ends."""
    wanted, found = _scalar(blocks), _scalar(programs)
    if wanted != found:
        raise ValueError(
            f"grid_barrier: the grid has {found} programs and the channel is for {wanted} blocks; "
            f"launch {wanted}, or make it with world.channel({found})"
        )
    if found > (resident := _running().resident()):
        raise ValueError(
            f"grid_barrier: the grid has {found} programs, of which {resident} are resident at "
            f"once, and those wait for the others: launch at most {resident} "
            "(world.device.multiprocessors), or raise the environment's TDX_HOST_MULTIPROCESSORS "
            "or tdx.config.host_multiprocessors before tdx.init"
        )


@intrinsic
def checked_root(root, world, _semantic=None):
    """`root`, which the host tier rejects if it is no rank of `world`: nobody would send."""
    if _semantic is None:
        size = _scalar(world.packed) >> abi.PACK_SIZE_SHIFT & abi.PACK_FIELD_MASK
        if not 0 <= _scalar(root) < size:
            raise ValueError(
                f"broadcast: root {_scalar(root)} is outside 0..{size - 1}: the handle is of "
                f"{size} ranks"
            )
    return root


@intrinsic
def checked_count(count, name, _semantic=None):
    """`count`, rejected if it is negative: on the host tier always, on a GPU if it is constexpr."""
    known = unwrap(count) if _semantic is not None else _scalar(count)
    if not isinstance(known, core.tensor) and known < 0:
        raise ValueError(f"{unwrap(name)} is {known}: it must be 0, for nothing at all, or more")
    return count


@intrinsic
def wait(ptr, value, cmp, control, team, peer, ranks, _semantic=None):
    """True (scalar) when every word at `ptr` satisfies `value`."""
    addresses, values, peers = np.broadcast_arrays(_array(ptr), _array(value), _array(peer))
    size = _scalar(ranks)
    if ((peers < -1) | (peers >= size)).any():
        wrong = next(int(p) for p in peers.ravel() if not -1 <= p < size)
        raise ValueError(f"peer {wrong} is outside 0..{size - 1}: the handle is of {size} ranks")
    ok = _running().wait(
        addresses.ravel().astype(np.uint64),
        values.ravel().astype(np.int64),
        unwrap(cmp),
        _scalar(control),
        _scalar(team),
        peers.ravel().astype(np.int64),
    )
    return host_tensor(np.array([bool(ok)]))


@intrinsic
def wait_span(ptr, count, value, cmp, control, team, peer, _semantic=None):
    """`wait` for `count` consecutive words, of consecutive peers."""
    lanes = np.arange(_scalar(checked_count(count, "count")), dtype=np.int64)
    ok = _running().wait(
        (_scalar(ptr) + 4 * lanes).astype(np.uint64),
        np.full(lanes.shape, _scalar(value), np.int64),
        unwrap(cmp),
        _scalar(control),
        _scalar(team),
        _scalar(peer) + lanes,
    )
    return host_tensor(np.array([bool(ok)]))


@intrinsic
def wait_any(ptr, value, active, turn, count, control, team, _semantic=None):
    """Which of the active words from `ptr` on reached `value` (a block), once any has; and ok.

    A fault names that of the highest `turn`.
    """
    lanes = np.flatnonzero(_array(active))
    signals, most = _scalar(count), _array(active).size
    if not 0 <= signals <= most:
        raise ValueError(
            f"wait_any: count is {signals}: it takes 1 to {most} signals (MAX_WAIT_ANY); wait for "
            "more of them in several calls"
        )
    if not lanes.size and not _running().fault(_scalar(control)):  # a fault says more
        done = f"all {signals} signals are done" if signals else "count is 0"
        raise ValueError(
            f"wait_any: nothing is left to wait for: {done}; call it once for each signal"
        )
    ready = np.zeros(_array(active).shape, bool)
    addresses = (_scalar(ptr) + 4 * lanes).astype(np.uint64)
    seen, ok = _running().wait_any(
        addresses,
        _scalar(value),
        int(addresses[_array(turn)[lanes].argmax()]) if lanes.size else 0,
        _scalar(control),
        _scalar(team),
    )
    ready[lanes] = seen
    return host_tensor(ready, like=active), host_tensor(np.array([bool(ok)]))


@intrinsic
def load_ll(ptr, flag, words, mask, control, team, peer, _semantic=None):
    """The data of `words` (1 or 2) data-and-flag words at each pointer, int32 or int64, and ok."""
    here = _array(ptr).astype(np.uint64)
    at = np.stack([here + np.uint64(8 * i) for i in range(unwrap(words))])
    parts, ok = _load_words(at, 32, flag, _array(mask), control, team, _array(peer))
    low = parts & np.uint64(0xFFFFFFFF)
    if len(low) == 1:
        value = host_tensor(low[0].astype(np.uint32).view(np.int32), like=ptr)
    else:
        value = host_tensor((low[0] | low[1] << np.uint64(32)).view(np.int64), like=ptr)
    return value, host_tensor(np.full(here.shape, ok), like=ptr)


@intrinsic
def pack(target, gap, values, flag, mask, _semantic=None):
    """Pointers, words and mask of what store_packed stores, for blocks as packed_blocks tells."""
    data = _array(values).astype(np.int32).view(np.uint32).astype(np.uint64).reshape(8, -1)[:7]
    tops = data[1:6:2] >> np.uint64(24)
    rest = tops[0] | tops[1] << np.uint64(8) | tops[2] << np.uint64(16)
    highs = np.stack([*(data[1:6:2] & np.uint64(0xFFFFFF)), rest])
    tag = np.uint64((_scalar(flag) & 0xFF) << 24)
    words = (data[::2] | (highs | tag) << np.uint64(32)).view(np.int64).ravel()
    at = (_array(target).astype(np.uint64) + _offsets(gap)[:, None]).ravel()
    there = np.broadcast_to(_array(mask) != 0, data.shape[1:])
    kind = target.type.scalar
    pointers = core.tensor(abi.host_handle(at, kind), core.block_type(kind, [at.size]))
    return pointers, host_tensor(words, like=target), host_tensor(np.tile(there, 4), like=target)


@intrinsic
def load_packed(ptr, gap, stride, flag, active, control, team, first, ranks, _semantic=None):
    """What load_packed_all returns, for `ranks` ranks from `first` on.

    Their words are `stride` apart, and `active` has a bit for each, the first the lowest.
    """
    ranks = unwrap(ranks)
    steps = np.arange(ranks, dtype=np.uint64)[:, None, None]
    lanes = _array(ptr).astype(np.uint64)
    at = lanes + steps * np.uint64(8 * _scalar(stride)) + _offsets(gap)[:, None]
    there = _array(active).astype(np.int64) >> steps.astype(np.int64) & 1
    who = _scalar(first) + steps.astype(np.int64)
    parts, ok = _load_words(at, 56, flag, there, control, team, who)
    values = np.zeros((ranks, 8, lanes.size), np.uint64)
    values[:, :7:2] = parts & np.uint64(0xFFFFFFFF)
    rest = parts[:, 3] >> np.uint64(32)
    for i in range(3):
        top = (rest >> np.uint64(8 * i) & np.uint64(0xFF)) << np.uint64(24)
        values[:, 2 * i + 1] = parts[:, i] >> np.uint64(32) & np.uint64(0xFFFFFF) | top
    blocks = values.astype(np.uint32).view(np.int32).reshape(ranks, -1)
    return tuple(host_tensor(block, like=ptr) for block in blocks), host_tensor(np.array([ok]))


def _offsets(gap):
    """Bytes from the pointers of packed words to each of the four."""
    second = 8 * _scalar(gap)
    return np.array([0, 8, second, second + 8], np.uint64)


def _load_words(addresses, shift, flag, mask, control, team, peer):
    """The words at `addresses`, 0 outside the mask, once their flags are right; and ok."""
    addresses, active, peers = np.broadcast_arrays(addresses, mask, peer)
    words, ok = _running().load_words(
        addresses.ravel().astype(np.uint64),
        shift,
        _scalar(flag),
        active.ravel() != 0,
        _scalar(control),
        _scalar(team),
        peers.ravel().astype(np.int64),
    )
    return np.asarray(words, np.uint64).reshape(addresses.shape), bool(ok)


@intrinsic
def no_fault(control, _semantic=None):
    """True (scalar) while no fault stands."""
    return host_tensor(np.array([not _running().fault(_scalar(control))]))


def _running() -> Executor:
    if abi.host_executor is None:
        raise RuntimeError(
            "tdx.language runs on the CPU only inside the host tier: call "
            'tdx.init(backend="host") before launching the kernel'
        )
    return abi.host_executor


def _array(value: Any) -> np.ndarray:
    return value.handle.data if isinstance(value, core.tensor) else np.array([unwrap(value)])


def _scalar(value: Any) -> int:
    return int(_array(value).reshape(-1)[0])
