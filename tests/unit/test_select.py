"""Choices of algorithm, block and tile."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from tdx.kernels import all_reduce, all_reduce_rms_norm
from tdx.kernels.all_reduce import Config as AllReduceConfig
from tdx.kernels.all_reduce_rms_norm import Config as NormConfig
from tdx.kernels.copying import VECTOR
from tdx.kernels.operand import byte_units
from tdx.kernels.packed import low_latency_elements, low_latency_lanes, packed_bytes
from tdx.kernels.product import blocks_for
from tdx.kernels.scattered_rows import Parts
from tdx.kernels.select import (
    CONSTANTS,
    COSTS,
    LOW_LATENCY_BYTES,
    MOVEMENT,
    STAGING_BYTES,
    STEPS_BYTES,
    block_bytes,
    block_elements,
    broadcast_algorithm,
    broadcast_round_bytes,
    cheapest,
    follows,
    gather_algorithm,
    gather_chunks,
    movement_algorithm,
    power_of_two,
    push_block,
    push_tile,
    row_words,
    shard_block,
    shared_bytes,
)
from tdx.kernels.shards import Steps
from tdx.kernels.tiles import FLOAT8_DEPTH, Config, choose_tile
from tdx.runtime import dtypes
from tdx.runtime.errors import InvalidArgument


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (1023, 1024)])
def test_power_of_two(n, power):
    assert power_of_two(n) == power


@pytest.mark.parametrize("backend", CONSTANTS)
@pytest.mark.parametrize("numel", [0, 1, 1000, 1 << 20, 1 << 33])
def test_blocks_are_powers_of_two_within_limits(backend, numel):
    fewest, most = CONSTANTS[backend].block_elements
    block = block_elements(backend, numel)
    assert fewest <= block <= most
    assert block == power_of_two(block)
    assert block_bytes(backend, 8 * numel) == 8 * block
    for itemsize in (2, 4):
        elements, warps = low_latency_elements(backend, numel, itemsize)
        lanes, same = low_latency_lanes(backend, numel * itemsize)
        assert (elements, warps) == (lanes * 4 // itemsize, same)
        assert 2 <= elements == power_of_two(elements)


@pytest.mark.parametrize("backend", MOVEMENT)
@pytest.mark.parametrize("nbytes", [1, 1000, 1 << 18, 1 << 20, 1 << 26, 1 << 33])
def test_moved_blocks_are_the_same_bytes_whatever_the_words(backend, nbytes):
    size, warps = push_block(backend, nbytes)
    for width in (1, 2, 4, 8):
        tile = push_tile(backend, size, warps, width)
        assert tile["BLOCK"] * tile["GROUP"] * width == size
        assert tile["BLOCK"] == power_of_two(tile["BLOCK"])
        assert backend == "host" or tile["BLOCK"] <= 8 * 32 * tile["num_warps"]
    fewest, most = CONSTANTS[backend].low_latency_lanes
    lanes, warps = low_latency_lanes(backend, nbytes)
    assert fewest <= lanes == power_of_two(lanes) <= most
    assert backend == "host" or warps == max(1, lanes // (64 if backend == "hip" else 32))


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_movement_by_size(backend):
    small = MOVEMENT[backend].low_latency_bytes // 7
    assert movement_algorithm(backend, small, 8, "push") == "low_latency"
    assert movement_algorithm(backend, small + 1, 8, "push") == "push"
    alone = min(7 * small, LOW_LATENCY_BYTES)
    assert movement_algorithm(backend, alone, 2, "push") == "low_latency"
    assert movement_algorithm(backend, alone + 7, 2, "push") == "push"
    assert movement_algorithm(backend, 8, 17, "push") == "push"
    assert gather_algorithm(backend, small, 8) == "low_latency"
    assert gather_algorithm(backend, 1 << 30, 8) == "push"


@pytest.mark.parametrize("backend", MOVEMENT)
def test_broadcast_by_size(backend):
    two, each, parts = MOVEMENT[backend].words_broadcast
    once = min(two, LOW_LATENCY_BYTES)
    assert broadcast_algorithm(backend, once, 2) == "low_latency"
    assert two == once or broadcast_algorithm(backend, two, 2) == "low_latency_scatter"
    assert broadcast_algorithm(backend, two + 1, 2) == "chain"
    assert broadcast_algorithm(backend, each, 3) == "low_latency"
    passed_on = "low_latency_scatter" if parts > each else "chain"
    assert broadcast_algorithm(backend, each + 1, 8) == passed_on
    most = MOVEMENT[backend].scatter_bytes
    assert broadcast_algorithm(backend, max(parts, most) + 1, 8) == "chain"
    assert broadcast_algorithm(backend, 8, 17) == ("scatter" if most else "chain")
    assert broadcast_algorithm(backend, 1 << 40, 2) == "chain"


@pytest.mark.parametrize("backend", MOVEMENT)
def test_rounds_of_a_broadcast_grow_with_the_root_of_the_size(backend):
    fewest, most = MOVEMENT[backend].broadcast_rounds
    for chain in (True, False):
        rounds = [broadcast_round_bytes(backend, 1 << shift, 3, chain) for shift in range(0, 40)]
        assert rounds == sorted(rounds)
        assert (rounds[0], rounds[-1]) == (fewest, most)
        assert all(size == power_of_two(size) for size in rounds)
    assert broadcast_round_bytes("cuda", 64 << 20, 4, False) == 8 << 20
    assert broadcast_round_bytes("cuda", 256 << 20, 4, True) == 8 << 20
    two = [broadcast_round_bytes(backend, 1 << shift, 2, True) for shift in range(0, 40)]
    assert set(two) == {most // 2, most}


@pytest.mark.parametrize("backend", CONSTANTS)
@pytest.mark.parametrize("shard", [0, 1, 1000, 1 << 20, 1 << 33])
def test_blocks_of_shards_are_valid(backend, shard):
    for itemsize in (1, 2, 4, 8):
        for ranks in (1, 4, 8):
            config = AllReduceConfig("two_shot", *shard_block(backend, shard, itemsize, ranks))
            assert config.block * itemsize <= 8 << 20


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("shard", [0, 1, 15, 17, 12345, 1 << 22, (1 << 28) + 1])
@pytest.mark.parametrize("least", [None, 1, 7])
@pytest.mark.parametrize("ahead", [True, False])
def test_steps_cover_a_shard_within_bounded_memory(ranks, shard, least, ahead):
    steps = Steps.make(shard, 2 * ranks * shard, least, ahead)
    assert steps.elements == steps.vectors * VECTOR
    assert (
        (steps.count - 1) * steps.elements < max(1, shard) <= max(1, steps.count * steps.elements)
    )
    assert steps.slots * ranks * 2 * steps.elements <= STEPS_BYTES + 4 * ranks * 2 * VECTOR
    assert steps.slots >= (4 if ahead and steps.count > 1 else 2)
    if least is None and 4 * ranks * shard <= STAGING_BYTES:
        assert steps.count == 1


def test_the_cheapest_algorithm_follows_the_size():
    """The figures of 4 x H100: words with flags for small arrays, fewest bytes for large ones."""

    def chosen(nbytes):
        sent = {
            "low_latency": packed_bytes(3 * nbytes),
            "low_latency_two_shot": packed_bytes(1.5 * nbytes),
            "one_shot": 3 * nbytes, "two_shot": 1.5 * nbytes,
        }  # fmt: skip
        return cheapest("cuda", sent, 4)

    assert chosen(4 << 10) == "low_latency"
    assert chosen(256 << 10) == "low_latency"
    assert chosen(512 << 10) == "low_latency_two_shot"
    assert chosen(8 << 20) == "two_shot"
    assert cheapest("cuda", {"one_shot": 1e3}, 4) == "one_shot"
    assert all(set(COSTS[backend]) == set(COSTS["cuda"]) for backend in CONSTANTS)


def test_norms_follow_the_size():
    """The figures of 2 and 4 GPUs, as far as a plan's slots stay within their bound."""

    def chosen(rows, columns, ranks):
        kind = dtypes.resolve("bfloat16")
        return all_reduce_rms_norm.choose("cuda", rows, columns, kind, ranks).algorithm

    assert chosen(16, 4096, 2) == chosen(1, 8192, 2) == chosen(16, 8192, 2) == "low_latency"
    assert chosen(1, 8192, 4) == chosen(4, 8192, 4) == "low_latency"
    assert chosen(16, 8192, 4) == chosen(32, 8192, 4) == "low_latency_two_shot"
    assert {chosen(rows, 8192, 4) for rows in (64, 128)} == {"unfused_two_shot"}
    assert chosen(256, 8192, 4) == chosen(512, 8192, 4) == "two_shot"
    assert chosen(64, 8192, 2) == chosen(128, 8192, 2) == chosen(128, 4096, 2) == "unfused"
    assert chosen(256, 8192, 2) == "one_shot"
    assert chosen(16, 32768, 2) == "one_shot"  # a row is more than a block has registers for
    assert chosen(2048, 4096, 2) == "two_shot"
    assert chosen(2048, 4096, 4) == "two_shot"
    assert chosen(2048, 4096, 1) == "one_shot"
    assert chosen(8192, 8192, 1) == "two_shot"


@pytest.mark.parametrize("backend", CONSTANTS)
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 100, 5120, 8192, 65536])
def test_blocks_of_rows_with_flags_are_valid(backend, columns):
    """On GPUs as many as there are multiprocessors, if they take so much; of few words a thread."""
    for rows, itemsize, ranks in itertools.product((1, 3, 16, 100, 9999), (2, 4), (2, 4, 8, 16)):
        block, warps = row_words(backend, rows, columns, itemsize, ranks)
        config = NormConfig("low_latency", block, warps)
        assert config.block <= max(8, power_of_two(columns))
        if backend != "host":
            threads = warps * (64 if backend == "hip" else 32)
            assert block * itemsize <= 8 * threads <= 8 << 10
            whole = block >= columns or threads == (1024, 512, 512, 256)[(2, 4, 8, 16).index(ranks)]
            assert whole or rows * columns <= block * CONSTANTS[backend].blocks


@pytest.mark.parametrize("backend", CONSTANTS)
@pytest.mark.parametrize(
    ("kind", "travels"),
    [("bfloat16", "float32"), ("float8_e5m2", "float32"), ("float64", "float32"),
     ("bfloat16", "bfloat16")],
)  # fmt: skip
def test_slots_of_one_shot_are_bounded(backend, kind, travels):
    """Also where results are wider than inputs (out_dtype, bias), so that two shots send more."""
    dtype, wide = dtypes.resolve(kind), dtypes.resolve(travels)
    most = STAGING_BYTES // 2 // dtype.itemsize
    for ranks in (1, 2, 3, 4, 8):
        for numel in (most + 1, 2 * most, 1 << 31, 1 << 36):
            assert all_reduce.choose(backend, numel, dtype, wide, ranks).algorithm == "two_shot"
    asked = all_reduce.choose(backend, 2 * most, dtype, wide, 2, "one_shot")
    assert asked.algorithm == "one_shot"


def test_wider_results_keep_two_ranks_in_one_shot():
    """As the figures of H200s say, up to the bound."""
    kinds = dtypes.resolve("bfloat16"), dtypes.resolve("float32")
    sizes = (1 << 10, 4 << 20, 16 << 20, (16 << 20) + 1)
    found = [all_reduce.choose("cuda", size, *kinds, 2).algorithm for size in sizes]
    assert found == ["low_latency", "one_shot", "one_shot", "two_shot"]


@pytest.mark.parametrize("backend", CONSTANTS)
def test_tiles_fit_the_product(backend):
    tile = choose_tile(backend, "sm_80", 4096, 4096, 4096, 2)
    assert (tile.block_m, tile.block_n) == CONSTANTS[backend].tile[:2]
    tile = choose_tile(backend, "sm_80", 1, 1, 1, 2)
    assert (tile.block_m, tile.block_n, tile.block_k) == (16, 16, 16)
    for shape in [(1, 4096, 4096), (4096, 17, 33), (100, 100, 100)]:
        for itemsize in (1, 2, 4):
            tile = choose_tile(backend, "sm_90", *shape, itemsize)
            assert tile.block_k >= (FLOAT8_DEPTH if itemsize == 1 else 16)


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (8192, 7168, 8192, (128, 256, 64, 8, 4)), (2048, 7168, 4096, (128, 128, 64, 8, 5)),
        (2048, 4096, 7168, (128, 256, 64, 8, 4)), (512, 7168, 8192, (128, 256, 64, 8, 4)),
        (128, 7168, 8192, (128, 64, 128, 4, 4)), (16, 7168, 8192, (16, 64, 256, 4, 5)),
        (64, 7168, 8192, (64, 64, 128, 4, 6)),
    ],
)  # fmt: skip
def test_tiles_that_were_best_on_an_h200(m, n, k, tile):
    """Of 132 multiprocessors; bfloat16 through tensor descriptors."""
    assert choose_tile("cuda", "sm_90", m, n, k, 2, True, 132) == Config(
        *tile[:3], num_warps=tile[3], num_stages=tile[4]
    )


@pytest.mark.parametrize(
    ("m", "n", "k", "shares"),
    [
        (16, 1792, 8192, 4), (16, 2304, 4096, 3), (16, 7168, 8192, 1), (64, 4096, 7168, 1),
        (128, 4096, 2048, 1), (16, 64, 1024, 1), (16, 64, 2048, 4), (0, 64, 1024, 1),
        (16, 0, 1024, 1),
    ],
)  # fmt: skip
def test_few_tiles_are_shared(m, n, k, shares):
    """As far as there are blocks, and each has enough to do."""
    tile = choose_tile("cuda", "sm_90", m, n, k, 2, True, 132, split=True)
    assert tile.split_k == shares
    assert choose_tile("cuda", "sm_90", m, n, k, 2, True, 132).split_k == 1
    assert choose_tile("host", "", m, n, k, 2, True, 8, split=True).split_k == 1


@pytest.mark.parametrize("m", [1, 16, 64, 4096])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_tiles_can_be_described(m, itemsize):
    """Tensor descriptors take sides of up to 256."""
    tile = choose_tile("cuda", "sm_90", m, 4096, 8192, itemsize, True, 132)
    assert max(tile.block_m, tile.block_n, tile.block_k) <= 256


def test_limits_of_products_beside_a_gather():
    """As measured on H200s; see docs/benchmarks."""
    limits = CONSTANTS["cuda"]
    assert limits.engine_bytes == 2 << 20
    assert gather_chunks("cuda", (2 << 20) - 1, 16 << 10, 3) == limits.chunks_per_rank
    chunks = [gather_chunks("cuda", n << 20, 16 << 10, 1) for n in (2, 16, 64, 1 << 10)]
    assert chunks == [1, 1, 2, 8]
    assert gather_chunks("host", 1 << 40, 16 << 10, 1) == 1


def test_the_first_chunk_comes_while_own_tiles_are_computed():
    """Parts of 4 ranks, rows of 8192 and 4096 bfloat16: with one chunk blocks had to wait."""
    chunks = [gather_chunks("cuda", n << 20, 16 << 10, 3) for n in (2, 4, 16, 32, 64)]
    assert chunks == [1, 1, 2, 1, 2]
    assert [gather_chunks("cuda", n << 20, 8 << 10, 3) for n in (2, 4, 8)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("m", "sending_us", "width"), [(256, 0, 256), (256, 48, 128), (1024, 84, 256), (2048, 84, 256)]
)
def test_tiles_are_narrower_where_sending_would_show(m, sending_us, width):
    """Of products of 4 ranks, m rows each: as much as possible is done while others' rows come."""
    tile = choose_tile("cuda", "sm_90", m, 7168, 8192, 2, True, 132, 4, sending_us=sending_us)
    assert tile.block_n == width
    alone = choose_tile("cuda", "sm_90", m, 7168, 8192, 2, True, 132, 1, sending_us=sending_us)
    assert alone == choose_tile("cuda", "sm_90", m, 7168, 8192, 2, True, 132)


@pytest.mark.parametrize(
    ("rows", "columns", "sent"),
    [(512, 4096, 1024), (512, 28672, 1024), (1024, 4096, 1024), (1024, 8192, 512),
     (2048, 8192, 1024), (1 << 20, 8192, 1 << 16)],
)  # fmt: skip
def test_rows_are_sent_while_others_are_computed(rows, columns, sent):
    plan = SimpleNamespace(
        world=SimpleNamespace(backend="cuda"), group=SimpleNamespace(size=4), shape_b=(64, columns)
    )
    assert Parts.of(plan, rows, whole=False) == Parts(rows, sent, 0)


def test_few_rows_are_not_fused():
    for rows, nbytes, ranks, expected in (
        (128, 1 << 40, 2, True), (128, 1 << 40, 8, True), (256, 4 << 20, 4, True),
        (256, (4 << 20) + 1, 4, False), (256, 12 << 20, 2, True), (257, 1, 2, False),
        (1, 1, 1, False),
    ):  # fmt: skip
        assert follows("cuda", rows, nbytes, ranks) is expected
        assert not follows("host", rows, nbytes, ranks)


def test_parts_are_tiled_as_one_product():
    def width(m, parts):
        return choose_tile("cuda", "sm_90", m, 4096, 4096, 2, True, 132, parts).block_n

    assert width(512, 4) == width(2048, 1) == 256
    assert width(512, 1) == 128


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_stages_fit_into_shared_memory(arch, itemsize):
    for shape in [(4096, 4096, 4096), (16, 4096, 4096), (64, 1000, 999)]:
        tile = choose_tile("cuda", arch, *shape, itemsize, itemsize == 2)
        stage = (tile.block_m + tile.block_n) * tile.block_k * itemsize
        assert 2 <= tile.num_stages <= CONSTANTS["cuda"].stages
        assert tile.num_stages * stage < shared_bytes(arch)


@pytest.mark.parametrize(
    ("multiples", "expected"),
    [
        ((128, 256), ("i8", 16)), ((0, 0), ("i8", 16)), ((64, 1 << 20), ("i8", 8)),
        ((24, 16), ("i8", 1)), ((4, 4096), ("i4", 1)), ((6, 4), ("i2", 1)), ((7, 128), ("i1", 1)),
    ],
)  # fmt: skip
def test_units_divide_everything(multiples, expected):
    assert byte_units(*multiples) == expected


@pytest.mark.parametrize("values", [(8, 16, 16), (16, 24, 16), (16, 16, 0)])
def test_a_tile_must_be_powers_of_two(values):
    with pytest.raises(InvalidArgument, match="power of two >= 16"):
        Config(*values)


@pytest.mark.parametrize(
    "options", [{"num_warps": 3}, {"group_m": 0}, {"group_m": 1 << 31}, {"num_stages": 0}]
)
def test_other_options_of_a_matmul(options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        Config(16, 16, 16, **options)


@pytest.mark.parametrize(
    ("values", "words"),
    [(("ring", 64), "not one of"), (("one_shot", 1), "power of two"), (("one_shot", 96), "power")],
)
def test_all_reduce_config(values, words):
    with pytest.raises(InvalidArgument, match=words):
        AllReduceConfig(*values)


@pytest.mark.parametrize(
    ("arch", "itemsize", "height"),
    [("sm_90", 2, 64), ("sm_100", 2, 64), ("sm_80", 2, 32), ("sm_120", 2, 32), ("sm_90", 4, 32)],
)
def test_tiles_of_few_rows_are_as_high_as_tensor_cores_take(arch, itemsize, height):
    for rows in (17, 32):
        assert choose_tile("cuda", arch, rows, 4096, 1024, itemsize).block_m == height
    assert choose_tile("cuda", arch, 16, 4096, 1024, itemsize).block_m == 16


def test_products_leave_room_for_blocks_that_send():
    """All are resident together, as those that wait for each other have to be."""
    world = SimpleNamespace(backend="cuda", driver=SimpleNamespace(resident_blocks=lambda: 132))
    assert blocks_for(world, 1000, 16) == 116
    assert blocks_for(world, 100, 16) == 100
    assert blocks_for(world, 1000, 132) == 1
