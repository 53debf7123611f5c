"""The binary contract between the host runtime and device code: layouts of what both touch.

A leaf: imports nothing of tdx, so that `tdx.language` and `tdx.runtime` share one copy.

Handle (a kernel argument, a NamedTuple): `control` is the address of the control block,
`packed` holds rank, size and team index in one int32 that is never 1 and never a multiple of
16 (Triton would specialise on those, and ranks would run different binaries), `stride` is the
distance in bytes between the heaps of neighbouring ranks, always above 2**32 so that its type
is int64 everywhere, and `is_team` (constexpr) says whether peers go through the team table.
"""

from __future__ import annotations

MAX_RANKS = 64  # team tables have this many entries
MAX_TEAMS = 63  # besides the world itself, whose team index is 0

# packed handle word: marker 0b101 in bits 0-2, rank in 3-10, size in 11-18, team index in 19-30
PACK_MARKER = 5
PACK_RANK_SHIFT = 3
PACK_SIZE_SHIFT = 11
PACK_TEAM_SHIFT = 19
PACK_FIELD_MASK = 0xFF
MIN_STRIDE_BYTES = 1 << 33

# control block: 64-bit words in memory of the own device, one block per world
CONTROL_FAULT = 0  # 0: none; else the kind of a fault, whose record is complete
CONTROL_RECORD = 1  # address of the host-visible fault record
CONTROL_TIMEOUT_NS = 2  # deadline of every wait in nanoseconds; 0: none
CONTROL_CLAIM = 3  # 1 once a wait has given up, and writes the record; exchanged
CONTROL_TABLE = 16  # + team index * MAX_RANKS + team rank -> world rank
CONTROL_WORDS = CONTROL_TABLE + (MAX_TEAMS + 1) * MAX_RANKS

# fault record: 64-bit words, host-visible; the state is stored last, with release
RECORD_STATE = 0  # 0: empty; 1: complete
RECORD_KIND = 1
RECORD_TEAM = 2  # team index of the handle the waiting kernel used
RECORD_PEER = 3  # team rank waited for; -1: not known
RECORD_SIGNAL = 4  # address of the signal
RECORD_EXPECTED = 5
RECORD_SEEN = 6
RECORD_PROGRAM = 7  # linear program id
RECORD_WORDS = 16

FAULT_TIMEOUT = 1  # kinds of fault
FAULT_HOST = 2  # raised by the host: a peer is lost, the world is closing

# channel: 32-bit words in symmetric memory. A header, then a state per block, then per block
# one pad per rank of the team, written by that rank.
CHANNEL_GRID_COUNT = 0  # blocks that arrived at the grid barrier
CHANNEL_HEADER_WORDS = 8
STATE_EPOCH = 0  # within a block's state: epochs begun by tdl.epoch
STATE_BARRIER = 1  # barriers begun by tdl.barrier
STATE_WORDS = 4
CHANNEL_PACK_MARKER = 5  # packed channel word: marker in bits 0-2, blocks above
CHANNEL_PACK_SHIFT = 3


def pack_handle(rank: int, size: int, team: int) -> int:
    """The handle's `packed` word."""
    return PACK_MARKER | rank << PACK_RANK_SHIFT | size << PACK_SIZE_SHIFT | team << PACK_TEAM_SHIFT


def pack_channel(blocks: int) -> int:
    """The channel handle's `packed` word."""
    return CHANNEL_PACK_MARKER | blocks << CHANNEL_PACK_SHIFT


def channel_words(blocks: int, ranks: int) -> int:
    """32-bit words of a channel."""
    return CHANNEL_HEADER_WORDS + blocks * (STATE_WORDS + ranks)


# set by the host driver while it is open: what interpreted device code calls to wait
host_executor = None
# what holds the data of an interpreted tensor; set when the host tier takes over Triton
host_handle = None
