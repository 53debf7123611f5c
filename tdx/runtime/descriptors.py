"""Open files handed from rank to rank, by the host channel."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tdx.runtime.errors import PeerLost, PeerTimeout, TdxError
from tdx.runtime.frames import members_of, require_uncut
from tdx.runtime.outcomes import pack_error
from tdx.runtime.unix_sockets import close_fds

if TYPE_CHECKING:
    from tdx.runtime.host_channel import HostChannel

__all__ = ["exchange_fds"]


def exchange_fds(
    channel: HostChannel, fd: int | Mapping[int, int] | None, what: str,
    members: Sequence[int] | None = None, timeout_s: float | None = None,
) -> list[int | None]:  # fmt: skip
    """Every member's descriptor, in the order of members; None for ranks that gave none.

    `fd`, one for all or one for each member, stays the caller's. The caller owns every
    descriptor returned, its own entry being a duplicate; all are close-on-exec. If one does
    not arrive, every rank raises.
    """
    copies: list[int] = []  # used up from the end
    try:
        peers = [
            rank for rank in members_of(members, channel.rank, channel.size) if rank != channel.rank
        ]
        for rank in (channel.rank, *reversed(peers)):
            given = fd[rank] if isinstance(fd, Mapping) else fd
            if given is not None:
                copies.append(os.dup(given))
    except OSError as error:
        close_fds(copies)
        refused = TdxError(f"{what}: the descriptor {fd} cannot be duplicated: {error}")
        channel.agree(what, refused, members)
    received = f"{what}: receiving"
    try:
        messages = channel.exchange(what, b"", members, timeout_s, copies)
    except (PeerLost, PeerTimeout) as error:
        channel.post(received, pack_error(error), members)  # peers may have come as far as that
        raise
    try:
        channel.together(lambda: require_uncut(messages), received, members, timeout_s)
    except BaseException:
        for message in messages.values():
            message.discard()
        raise
    return [message.fd for message in messages.values()]
