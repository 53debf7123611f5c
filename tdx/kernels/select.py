"""Which algorithm and which tile for which size: the constants of all operations in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

__all__ = [
    "CONSTANTS", "COSTS", "HELD_ROW_BYTES", "LOW_LATENCY_BYTES", "MOST_ELEMENTS", "MOST_WARPS",
    "MOVEMENT", "STAGING_BYTES", "STEPS_BYTES", "STEP_BYTES", "Movement", "block_bytes",
    "block_elements", "broadcast_algorithm", "broadcast_round_bytes", "cheapest", "constants",
    "engines_us", "follows", "gather_algorithm", "gather_chunks", "movement_algorithm",
    "power_of_two", "push_block", "push_tile", "row_block", "row_words", "shard_block",
    "shared_bytes", "takes_low_latency",
]  # fmt: skip

# what words of data and flag are for; of all ranks' blocks slots take 16 / 7 * W times the bytes
LOW_LATENCY_BYTES, LOW_LATENCY_RANKS = 4 << 20, 16


@dataclass(frozen=True)
class Constants:
    """Limits of one architecture.

    Attributes
    ----------
    low_latency_lanes : tuple[int, int]
        Fewest and most lanes, of 28 bytes, that a block handles at a time where data and flag share
        words: powers of two. On GPUs a lane is a thread.
    block_elements : tuple[int, int]
        Fewest and most elements a block of an elementwise kernel handles at a time.
    blocks : int
        Blocks an elementwise kernel is spread over, if it is large enough.
    tile : tuple[int, int, int]
        Rows, columns and depth in bytes of a matmul's tile.
    described_columns : int
        Most columns of a tile that tensor descriptors fill.
    tile_times : mapping of int to float
        Time of a tile with that many columns, relative to one with the most.
    tile_us : float
        Microseconds of a tile with the most columns for each KiB of depth.
    stages : int
        Greatest depth of a matmul's load pipeline.
    matmul_blocks : int
        Most blocks of a matmul.
    push_blocks : int
        Blocks of a kernel that pushes beside a matmul, for all peers together.
    chunks_per_rank : int
        Pieces in which a rank's part is gathered beside a matmul.
    engine_bytes : int
        Bytes of a chunk from which copy engines gather it beside a matmul.
    engine_us : float
        Microseconds that copy engines take besides the bytes.
    link_bytes_per_us : float
        What they send to all peers together.
    unfused : tuple of tuple[int, int]
        Pairs (rows of a rank, bytes that each rank sends) up to which a matmul and its
        communication follow one another; see `follows`.
    scattered_rows, gathered_rows : int
        Rows that a rank sends to a peer at a time beside a matmul, of partial sums and of finished
        ones, or in phases the least of both: powers of two, not less than the rows of any tile.
    summed_bytes : int
        Bytes of a rank's rows of a product from which copy engines move what is to be summed.
    """

    low_latency_lanes: tuple[int, int]
    block_elements: tuple[int, int]
    blocks: int
    tile: tuple[int, int, int]
    described_columns: int
    tile_times: Mapping[int, float]
    tile_us: float
    stages: int
    matmul_blocks: int
    push_blocks: int
    chunks_per_rank: int
    engine_bytes: int
    engine_us: float
    link_bytes_per_us: float
    unfused: tuple[tuple[int, int], ...]
    scattered_rows: int
    gathered_rows: int
    summed_bytes: int


MOST_ELEMENTS = 1 << 20  # of a block of Triton's
MOST_WARPS = 32  # of a block, on NVIDIA GPUs; AMD's take 16
_NEVER = 1 << 62
# of bfloat16 with 128 rows and a depth of 64 on an H200, all multiprocessors busy
_TILE_TIMES = {256: 1.0, 128: 0.54, 64: 0.43}
_CUDA = Constants(
    low_latency_lanes=(32, 128), block_elements=(1024, 4096), blocks=128,
    tile=(128, 128, 128), described_columns=256, tile_times=_TILE_TIMES, tile_us=5.5, stages=6,
    matmul_blocks=1 << 10, push_blocks=16, chunks_per_rank=8, engine_bytes=2 << 20, engine_us=12,
    link_bytes_per_us=350e3, unfused=((128, _NEVER), (256, 12 << 20)), scattered_rows=1 << 10,
    gathered_rows=1 << 9, summed_bytes=16 << 20,
)  # fmt: skip
CONSTANTS: dict[str, Constants] = {
    # the host tier pays for every interpreted operation, not for bytes: few, large blocks
    "host": Constants(
        low_latency_lanes=(8, 1 << 14), block_elements=(256, 1 << 17), blocks=1,
        tile=(256, 256, 1024), described_columns=256, tile_times={}, tile_us=0, stages=1,
        matmul_blocks=2, push_blocks=1, chunks_per_rank=1, engine_bytes=_NEVER, engine_us=0,
        link_bytes_per_us=1, unfused=(), scattered_rows=1 << 20, gathered_rows=1 << 20,
        summed_bytes=_NEVER,
    ),
    "cuda": _CUDA,
    "hip": replace(_CUDA, described_columns=128, stages=2),
}  # fmt: skip


def shared_bytes(arch: str) -> int:
    """Most shared memory of one block, bytes."""
    if not arch.startswith("sm_"):
        return 64 << 10  # of gfx942; gfx950 has more
    capability = int(arch[3:])
    if capability in (86, 89) or capability >= 120:
        return 99 << 10
    return (227 if capability >= 90 else 163) << 10


STAGING_BYTES = 64 << 20  # most memory of a plan for slots that large arrays pass through
STEPS_BYTES = 128 << 20  # the same where shards do so in several steps
# of an array a step, where each step is reduced before the next one is pushed: of larger ones sums
# hide less, and blocks drift apart, so that more than one rank sends to the same
STEP_BYTES = 32 << 20


HELD_ROW_BYTES = 32 << 10  # most bytes of a row of which a block's registers hold three


@dataclass(frozen=True)
class Cost:
    """Microseconds of a reduction, and for each peer."""

    us: float
    bytes_per_us: float
    peer_us: float = 0


# Of 2 and 4 x H100 and H200 with NVLink (18 links) in a graph, bfloat16; of 4 ranks on 2 cores.
_H200 = {
    "low_latency": Cost(2.4, 285e3), "low_latency_two_shot": Cost(5.0, 335e3),
    "one_shot": Cost(8.0, 330e3), "two_shot": Cost(8.8, 360e3, 0.2), "push": Cost(4.6, 350e3, 0.7),
    "norm_low_latency": Cost(3.9, 290e3), "norm_low_latency_two_shot": Cost(4.7, 320e3),
    "norm_unfused": Cost(5.0, 260e3), "norm_unfused_two_shot": Cost(8.2, 310e3),
    "norm_one_shot": Cost(6.5, 295e3, 0.85), "norm_two_shot": Cost(7.6, 325e3, 1.3),
}  # fmt: skip
COSTS: dict[str, dict[str, Cost]] = {
    "cuda": _H200,
    "hip": _H200,  # not measured
    "host": {
        "low_latency": Cost(4e3, 50), "low_latency_two_shot": Cost(9e3, 50),
        "one_shot": Cost(3e3, 100), "two_shot": Cost(9e3, 100), "push": Cost(4e3, 100),
        "norm_low_latency": Cost(4e3, 50), "norm_low_latency_two_shot": Cost(9e3, 50),
        "norm_unfused": Cost(7e3, 50), "norm_unfused_two_shot": Cost(15e3, 50),
        "norm_one_shot": Cost(3e3, 100), "norm_two_shot": Cost(9e3, 100),
    },
}  # fmt: skip


def cheapest(backend: str, sent: Mapping[str, float], ranks: int) -> str:
    """The algorithm that takes least time, of those for which `sent` has the bytes a rank sends."""

    def us(name: str) -> float:
        cost = COSTS[backend][name]
        return cost.us + cost.peer_us * (ranks - 1) + sent[name] / cost.bytes_per_us

    return min(sent, key=us)


@dataclass(frozen=True)
class Movement:
    """Limits of operations that move data, of one architecture.

    Attributes
    ----------
    low_latency_bytes : int
        Most bytes of a rank that are sent as words of data and flag.
    gather : str
        All-gather algorithm of larger sizes.
    push_shapes : tuple of (int, int, int)
        (bytes for a peer, bytes a block handles at a time, warps) of kernels that push to peers:
        the first entry that is large enough counts. Empty: as `block_bytes` says.
    signal_bytes : int
        What a link carries while a peer answers stores and a signal behind them.
    words_broadcast : tuple[int, int, int]
        Most bytes that a root sends as words of data and flag to its only peer, to each of several,
        and in parts that these pass on.
    words_round : int
        Most bytes of a round of the last.
    scatter_bytes : int
        Most bytes that a root scatters in rounds.
    broadcast_rounds : tuple[int, int]
        Least and most bytes of a round of a pipelined broadcast in both lanes: powers of two from
        512 on. Its staging takes four.
    """

    low_latency_bytes: int
    gather: str
    push_shapes: tuple[tuple[int, int, int], ...]
    signal_bytes: int
    words_broadcast: tuple[int, int, int]
    words_round: int
    scatter_bytes: int
    broadcast_rounds: tuple[int, int] = (4 << 20, 16 << 20)


# measured on two and four H200: small blocks until all multiprocessors have one, then large ones
_PUSH_SHAPES = ((512 << 10, 4 << 10, 8), (16 << 20, 8 << 10, 8), (_NEVER, 16 << 10, 16))

_MOVED = Movement(
    6 << 20, "push", _PUSH_SHAPES, 1 << 20, (8 << 20, 128 << 10, 64 << 20), 8 << 20,
    64 << 20,
)  # fmt: skip
MOVEMENT: dict[str, Movement] = {
    "host": Movement(
        48 << 10, "pull", (), 16 << 20, (48 << 10, 24 << 10, 24 << 10), 24 << 10, 0,
        (64 << 10, 16 << 20),
    ),
    "cuda": _MOVED,
    "hip": _MOVED,  # not measured
}  # fmt: skip


def constants(backend: str) -> Constants:
    """The constants of a backend."""
    return CONSTANTS[backend]


def block_elements(backend: str, numel: int) -> int:
    """Elements a block of an elementwise kernel over `numel` elements handles at a time."""
    limits = constants(backend)
    fewest, most = limits.block_elements
    return min(most, max(fewest, power_of_two(-(-numel // limits.blocks))))


def takes_low_latency(
    nbytes: int, ranks: int, kinds: tuple[np.dtype, ...] = (), most: int = LOW_LATENCY_BYTES
) -> bool:
    """Whether words of data and flag take so many bytes of a rank, or of a block for one.

    `kinds`: the types that travel and are computed with, if any are.
    """
    small = nbytes <= most and ranks <= LOW_LATENCY_RANKS
    return small and all(kind.itemsize in (2, 4) for kind in kinds)


def shard_block(
    backend: str, shard: int, itemsize: int, ranks: int, passes_on: bool = True
) -> tuple[int, int]:
    """Elements a block handles at a time, and its warps, where shards of `shard` are pushed.

    `passes_on`: results are pushed as well.
    """
    if backend == "host":
        return block_elements(backend, shard), 8
    wave = 64 if backend == "hip" else 32
    if not passes_on and itemsize <= 2 and ranks <= 4 and shard >= 4 << 20:
        return 16 << 10, 1024 // wave
    # a thread has the pieces of all ranks in its registers
    most = (8 << 10 if ranks <= 4 else 4 << 10) if itemsize <= 2 else (8 << 10) // itemsize
    spread = power_of_two(-(-shard // 128))
    block = min(most, max((4 << 10) // itemsize, spread))
    if passes_on and itemsize <= 2 and ranks == 2 and shard <= 4 << 20:
        block = min(block, 4 << 10)
    threads = 512 if block == most else 256
    return block, threads // wave


def row_block(
    backend: str, columns: int, itemsize: int, ranks: int, pushed: bool = False
) -> tuple[int, int]:
    """Elements of a row that a block handles at a time, and its warps.

    `pushed`: who normalises rows also pushes rows. Then fewer threads, which meet sooner for each
    row, still keep the links busy.
    """
    row = max(8, power_of_two(columns))
    if backend == "host":
        return row, 8
    threads = 256 if columns * itemsize <= (HELD_ROW_BYTES if pushed else 4 << 10) else 512
    # a thread has the pieces of all ranks in its registers: of 2 vectors of 16 bytes
    few = pushed and ranks <= 2 and threads == 256
    piece = (64 if few else 32) // (1 if ranks <= 4 else 2)
    return min(row, threads * piece // itemsize), threads // (64 if backend == "hip" else 32)


def row_words(backend: str, rows: int, columns: int, itemsize: int, ranks: int) -> tuple[int, int]:
    """The same where data and flag share words, and blocks share rows; `columns`: of one rank.

    As few as leave a block for each of all rows' pieces, of a word for each thread, or two.
    """
    row, limits = max(8, power_of_two(columns)), constants(backend)
    if backend == "host":
        return row, 8
    most = 1024 if ranks <= 2 else 512 if ranks <= 8 else 256  # with all ranks' words in registers
    fair = max(1 << 10, -(-rows * columns * itemsize // limits.blocks))
    words = min(power_of_two(-(-fair // 4)), 2 * most, row * itemsize // 4)
    threads = max(128, min(most, words if words <= 256 or ranks > 4 else words // 2))
    return words * 4 // itemsize, threads // (64 if backend == "hip" else 32)


def block_bytes(backend: str, nbytes: int) -> int:
    """The same for a kernel that moves bytes in words of up to 8."""
    return 8 * block_elements(backend, -(-nbytes // 8))


def push_block(backend: str, nbytes: int) -> tuple[int, int]:
    """Bytes a block of a kernel that pushes `nbytes` to a peer handles at a time, and its warps."""
    for most, block, warps in MOVEMENT[backend].push_shapes:
        if nbytes <= most:
            return block, warps
    return block_bytes(backend, nbytes), 8


def push_tile(backend: str, nbytes: int, warps: int, width: int) -> dict[str, int]:
    """How a kernel of so many warps moves `nbytes` at a time in words of `width` bytes.

    Every word takes a register whatever its width, so narrow ones are moved in GROUP steps.
    """
    most = nbytes // width if backend == "host" else 256 * warps
    block = min(nbytes // width, most)
    return {"BLOCK": block, "GROUP": nbytes // width // block, "num_warps": warps}


def movement_algorithm(backend: str, nbytes: int, ranks: int, large: str) -> str:
    """How blocks of `nbytes` go from rank to rank: "low_latency", or else `large`."""
    small = max(1, ranks - 1) * nbytes <= MOVEMENT[backend].low_latency_bytes
    return "low_latency" if small and takes_low_latency(nbytes, ranks) else large


def broadcast_algorithm(backend: str, nbytes: int, ranks: int) -> str:
    """How `nbytes` of a root are sent to all."""
    two, each, parts = MOVEMENT[backend].words_broadcast
    if ranks <= LOW_LATENCY_RANKS and nbytes <= (two if ranks <= 2 else parts):
        once = nbytes <= (LOW_LATENCY_BYTES if ranks <= 2 else each)
        return "low_latency" if once else "low_latency_scatter"
    return "chain" if ranks <= 2 or nbytes > MOVEMENT[backend].scatter_bytes else "scatter"


def gather_algorithm(backend: str, nbytes: int, ranks: int) -> str:
    """How `nbytes` of every rank are gathered."""
    return movement_algorithm(backend, nbytes, ranks, MOVEMENT[backend].gather)


def follows(backend: str, rows: int, nbytes: int, ranks: int) -> bool:
    """Whether a matmul with `rows` rows of each rank is fused with no gather or scatter of them.

    `nbytes`: of a rank's rows, or of its sums for one other. Fused, b is read once for each rank's
    rows, which few rows do not make up for; and copy engines take a while to begin.
    """
    sent = (ranks - 1) * nbytes
    return ranks > 1 and any(
        rows <= most and sent <= limit for most, limit in constants(backend).unfused
    )


def gather_chunks(backend: str, nbytes: int, depth_bytes: int, peers: int) -> int:
    """In how many pieces the `nbytes` of a rank, rows of `depth_bytes`, are gathered by a matmul.

    Copy engines take several microseconds for each piece, and b is read for each: so few. But the
    first one is to come while the own rows are computed, of which a block may have one tile only.
    """
    limits = constants(backend)
    if nbytes < limits.engine_bytes:
        return limits.chunks_per_rank
    if 2 * limits.engine_bytes <= nbytes < 32 << 20:
        return 1 + (engines_us(backend, nbytes * peers) > limits.tile_us * depth_bytes / 1024)
    return min(limits.chunks_per_rank, max(1, nbytes // (32 << 20)))


def engines_us(backend: str, nbytes: int) -> float:
    """Microseconds until copy engines have sent `nbytes` to peers."""
    return constants(backend).engine_us + nbytes / constants(backend).link_bytes_per_us


def broadcast_round_bytes(backend: str, nbytes: int, ranks: int, chain: bool) -> int:
    """Bytes of a round of a pipelined broadcast, a power of two.

    One peer passes nothing on: few rounds, of which it copies out the last when all is there.
    Several: rounds of c bytes take (nbytes / c + fill) * (c / bandwidth + signal) altogether, if
    nothing hides the signals: least at c = sqrt(nbytes * signal * bandwidth / fill). Lanes of a
    chain hide half of them, which has ranks - 2 rounds to fill.
    """
    fewest, most = MOVEMENT[backend].broadcast_rounds
    if ranks == 2:
        return most if nbytes > most else max(fewest, most // 2)
    fill = 2 * (ranks - 2) if chain else 1
    best = math.isqrt(nbytes * MOVEMENT[backend].signal_bytes // fill)
    return min(most, max(fewest, power_of_two(best)))


def power_of_two(n: int) -> int:
    """The smallest power of two >= n, at least 1."""
    return 1 << max(0, n - 1).bit_length()
