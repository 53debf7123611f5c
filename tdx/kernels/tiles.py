"""Tiles of products: what a user may pin, and what is chosen for a product."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tdx.kernels.select import MOST_ELEMENTS, MOST_WARPS, constants, power_of_two, shared_bytes
from tdx.runtime.checks import check_bool, make_ints
from tdx.runtime.errors import InvalidArgument

__all__ = ["FLOAT8_DEPTH", "Config", "check_config", "choose_tile", "splits"]

FLOAT8_DEPTH = 32  # least depth of a tile of float8: what tensor cores take at a time
# the sum of shares costs what two of them gain; each has to fill its pipeline
_FEWEST_SHARES, _MOST_SHARES, _SHARE_DEPTH = 3, 8, 512
_LARGE_STAGES = 5  # of large tiles, which gain nothing by more and spill
_WARP_GROUPS = ("sm_9", "sm_10")  # whose tensor cores multiply 64 rows at a time
_STAGE_BYTES = 48 << 10  # of a and b together: less of it in flight does not fill the pipeline
_PROMOTED_BYTES = 64 << 10  # of float8 sums that are promoted, between which the pipeline drains


@dataclass(frozen=True)
class Config:
    """How a matmul runs; pins the bits of its result.

    Attributes
    ----------
    block_m, block_n, block_k : int
        Rows, columns and depth of a tile, powers of two >= 16; of float8 a depth >= 32.
    group_m : int
        Rows of tiles that are walked through together; they have less than 2**31 tiles.
    num_warps, num_stages : int
        Warps of a block, and depth of the load pipeline.
    split_k : int
        Blocks that share a tile, each with a part of K, up to 16: for products of few rows.
        Nothing is fused with them: more than 1 makes "unfused" the usual algorithm.
    descriptors : bool, optional
        Whether a and b are read through tensor descriptors (TMA). None: where the GPU has them
        (sm_90 and later) and the operands allow it. True, and they do not: Unsupported says why.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    descriptors: bool | None = None
    split_k: int = 1

    def __post_init__(self) -> None:
        make_ints(
            self, "block_m", "block_n", "block_k", "group_m", "num_warps", "num_stages", "split_k"
        )
        if self.descriptors is not None:
            flag = check_bool("descriptors", self.descriptors, ", or None")
            object.__setattr__(self, "descriptors", flag)
        for name in ("block_m", "block_n", "block_k"):
            value = getattr(self, name)
            if value < 16 or value != power_of_two(value):
                raise InvalidArgument(f"{name}={value} must be a power of two >= 16")
        m, n, k = self.block_m, self.block_n, self.block_k
        if max(m * n, m * k, k * n) > MOST_ELEMENTS:
            raise InvalidArgument(
                f"tiles of block_m={m}, block_n={n} and block_k={k}: none of the three products of "
                f"two of them may be above {MOST_ELEMENTS} elements"
            )
        if self.num_warps < 1 or self.num_warps != power_of_two(self.num_warps):
            raise InvalidArgument(f"num_warps={self.num_warps} must be a power of two")
        if self.num_warps > MOST_WARPS:
            raise InvalidArgument(f"num_warps={self.num_warps} must be at most {MOST_WARPS}")
        if self.group_m < 1 or self.num_stages < 1:
            raise InvalidArgument(
                f"group_m={self.group_m} and num_stages={self.num_stages} must be >= 1"
            )
        if self.group_m >= 1 << 31:
            raise InvalidArgument(f"group_m={self.group_m} must be less than 2**31")
        if not 1 <= self.split_k <= 16:
            raise InvalidArgument(f"split_k={self.split_k} must be from 1 to 16")

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of a matrix."""
        return -(-rows // self.block_m) * -(-columns // self.block_n)

    def check_fused(self, algorithm: str) -> None:
        """Raise unless `algorithm`, which fuses a product with communication, can run so."""
        if self.split_k > 1:
            raise InvalidArgument(
                f'split_k={self.split_k} is not for "{algorithm}"; pass algorithm="unfused", or '
                "split_k=1"
            )


def splits(config: object) -> bool:
    """Whether tiles are shared along K, so that nothing is fused with them."""
    return isinstance(config, Config) and config.split_k > 1


def check_config(config: object, fused: str = "") -> None:
    """Raise InvalidArgument unless it is None or a Config, fit for the algorithm `fused`."""
    if isinstance(config, Config):
        if fused:
            config.check_fused(fused)
    elif config is not None:
        raise InvalidArgument(f"config={config!r} must be a tdx.kernels.matmul.Config, or None")


def choose_tile(
    backend: str, arch: str, m: int, n: int, k: int, itemsize: int, described: bool = False,
    blocks: int = 1, parts: int = 1, split: bool = False, sending_us: float = 0,
    promoted: bool = False, ends: Callable[[int, int], float] | None = None,
) -> Config:  # fmt: skip
    """The tile of `parts` products (m, k) . (k, n), no larger than they ask for.

    `described`: tensor descriptors fill it; `blocks`: how many run at once; `split`: whether they
    may share tiles. Of the widths that fit, the one for which `blocks` blocks take least time, tile
    after tile; where there are few tiles of the narrowest, they are shared. `sending_us`: how much
    later than one part the others can begin, because their rows are sent, or how much earlier they
    have to end. `promoted`: sums of float8 are, into as many registers again. `ends`: after how
    many tiles of a block all ends, by height and width, where it is known better.
    """
    limits = constants(backend)
    rows, columns, depth_bytes = limits.tile
    ragged = bool(k % 16 or n % 16)
    crowded = promoted and not described  # addresses and two sums share the registers
    if backend != "host":
        if itemsize == 4:  # IEEE float32 has no tensor cores: its operands need registers
            columns //= 2
        elif itemsize == 1 and backend == "hip":  # gfx942 converts float8, in registers
            depth_bytes //= 2
        if itemsize < 4 and ragged:  # single elements are loaded, each with its own mask
            rows, columns, depth_bytes = rows // 2, columns // 2, depth_bytes // 2
        elif described and itemsize == 2:  # the sums of float8 may need more registers
            columns = limits.described_columns
        elif crowded:
            columns //= 2
    least = FLOAT8_DEPTH if itemsize == 1 else 16
    height = max(16, min(rows, power_of_two(m)))
    if height == 32 and itemsize < 4 and arch.startswith(_WARP_GROUPS):
        height = 64  # fewer rows take longer: the tensor cores' instructions for them are older
    depth = max(least, min(depth_bytes // itemsize, power_of_two(k)))
    width = max(16, min(columns, power_of_two(n)))
    if backend == "host":
        return Config(height, width, depth, num_stages=limits.stages)
    count = parts * -(-m // height)
    narrow = min([width, *limits.tile_times])
    shares = min(_MOST_SHARES, blocks // max(1, count * -(-n // narrow)), k // _SHARE_DEPTH)
    if split and shares >= _FEWEST_SHARES:
        width = narrow
    elif ends is not None:
        shares, times = 1, limits.tile_times
        fit = [each for each in times if each <= width]
        width = min(fit, key=lambda each: ends(height, each) * times[each], default=width)
    else:
        tile_us = limits.tile_us * k * itemsize / 1024
        sending = sending_us / tile_us if tile_us else 0
        width, shares = _width(width, n, count, parts, blocks, limits.tile_times, sending), 1
    if itemsize == 4 or ragged:  # registers are what they lack
        return Config(height, width, depth, num_stages=min(3, limits.stages), split_k=shares)
    if backend == "cuda":  # few rows: as much on its way at a time as there is of large tiles
        most = _PROMOTED_BYTES if promoted else _STAGE_BYTES
        most = most if described else most // 2  # each address takes a register
        while 2 * (height + width) * depth * itemsize <= most and depth < min(k, 256):
            depth *= 2
    fit = (shared_bytes(arch) - 2048) // ((height + width) * depth * itemsize)
    large = height * width * (2 if crowded else 1) > 128 * 64
    warps, stages = (8, _LARGE_STAGES) if large else (4, limits.stages)
    return Config(
        height, width, depth, num_warps=warps, num_stages=max(2, min(limits.stages, stages, fit)),
        split_k=shares,
    )  # fmt: skip


def _width(
    most: int, n: int, count: int, parts: int, blocks: int, times: Mapping[int, float],
    sending: float,
) -> int:  # fmt: skip
    """The best of the widths up to `most`, of `parts` products with `count` rows of tiles."""

    def cost(width: int) -> tuple[float, int]:
        tiles = count * -(-n // width)
        others = tiles - tiles // parts
        turns, late_turns = -(-tiles // blocks), -(-others // blocks)
        late = late_turns * times[width] + sending if others else 0
        return max(turns * times[width], late), -width

    return min((width for width in times if width <= most), key=cost, default=most)
