"""What tdx's own kernels compile to on each target."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.aot.assembly import in_loop, in_order, instructions, positions
from tests.aot.cases import CASES, job
from tests.aot.harness import AMD, NVIDIA, TARGETS, chosen
from tests.aot.products import DESCRIBED, FLOAT8, PRODUCTS

ALL = [*CASES, *PRODUCTS]
WITH_DESCRIPTORS = ("sm_90", "sm_100")
# Others of the same kernel are compiled for every target: these for one of each vendor.
VARIANTS = [
    "one_shot-fp32-team", "one_shot-max-i32", "low_latency-16-bf16", "two_shot-fp32-team",
    "two_shot-bf16-8", "two_shot-copy-2", "two_shot-buffer", "words-two_shot-fp32",
    "words-two_shot-wide", "words-two_shot-alike", "low_latency-added-bf16", "norm-rows-pieces",
    "scatter-2", "scatter-fp32-8", "scatter-odd", "scatter-ragged", "norm-one_shot-fp32-odd",
    "norm-two_shot-2", "norm-two_shot-8", "norm-two_shot-4096", "norm-two_shot-fp32",
    "norm-two_shot-16384", "norm-two_shot-2-32768", "norm-two_shot-fp32-65536-8",
    "words-norm-many-bf16", "words-norm-2-bf16",
    "words-norm-fp32-8", "words-norm-16-bf16", "words-norm-pieces", "words-norm-two_shot-many",
    "words-norm-two_shot-2", "words-norm-two_shot-8", "words-norm-two_shot-pieces", "pull-odd",
    "push-odd", "words-i16", "root-words-i8", "passed-words-i8", "broadcast-chain-odd",
    "broadcast-scatter-odd", "take-odd", "sum-whole", "take-rows", "matmul-gathered",
    "consume-bf16-ragged", "one_kernel-ragged", "one_kernel-fp32", "scattered-fp32", "summed-fp32",
    "owned-fp32", "owned-ragged",
    "words-product-fp32",
]  # fmt: skip
TAKEN = [
    (case, target)
    for case in ALL
    for target in TARGETS
    if (case not in FLOAT8 or target != "sm_80")
    and (case not in DESCRIBED or target in WITH_DESCRIPTORS)
    and (case not in VARIANTS or target in ("sm_90", "gfx942"))
]
WAITING = [
    "one_shot-bf16", "two_shot-bf16", "scatter-bf16", "pull", "push", "push-scaled", "push-all",
    "push-one", "root-words-i32", "broadcast-chain",
    "broadcast-scatter", "passed-words-i32", "two_shot-2", "barrier", "grant", "confirm", "take",
    "arrive", "sum", "sum-whole",
    "consume-bf16", "consume-fp32", "scattered-bf16", "norm-one_shot", "norm-two_shot",
    "summed-bf16", "summed-ragged", "owned-bf16", "owned-ragged", "one_kernel-bf16",
]  # fmt: skip
MOVING_VECTORS = [
    "one_shot-bf16", "one_shot-fp32", "one_shot-fp32-team", "one_shot-avg", "two_shot-bf16",
    "two_shot-bf16-8", "two_shot-fp32-team", "two_shot-copy", "two_shot-copy-2", "two_shot-buffer",
    "two_shot-root", "scatter-bf16", "scatter-fp32-8", "norm-one_shot", "norm-two_shot",
    "norm-two_shot-2", "norm-two_shot-8", "norm-two_shot-4096", "norm-two_shot-fp32",
    "norm-two_shot-16384", "norm-two_shot-2-32768", "norm-two_shot-fp32-65536-8", "pull", "push",
    "push-all", "push-one", "broadcast-chain", "broadcast-scatter", "two_shot-2", "sum", "take",
    "take-rows", "one_kernel-bf16", "one_kernel-fp8", "summed-bf16", "owned-bf16",
    "owned-described", "owned-described-2", "owned-described-8",
]  # fmt: skip
GIVES_UP = ("two_shot", "scatter-", "norm-two_shot")
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10,
                "gfx950": 160 << 10}  # fmt: skip
LOAD = {"sm": r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64",
        "gf": r"(global|buffer)_load_dwordx4"}  # fmt: skip
STORE = {"sm": r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64",
         "gf": r"(global|buffer)_store_dwordx4"}  # fmt: skip


@pytest.fixture(scope="module")
def outcome_of(request, compiler):
    compiler.start(job(*pair) for pair in chosen(request))
    return lambda case, target: compiler[job(case, target)]


@pytest.fixture
def outcome(outcome_of, case, target):
    found = outcome_of(case, target)
    assert not found.error
    return found


@pytest.mark.parametrize(("case", "target"), TAKEN)
def test_compiles_without_spills(outcome, case, target):
    if target in AMD:  # scalar registers are spilled to vector registers, not to memory
        assert (outcome.stack, positions(outcome.code, r"vgpr_spill_count: [1-9]")) == (0, [])
    elif case.startswith(("low_latency", "push-", "words", "root-words", "passed-words")):
        assert outcome.stack <= 64  # the frame of a call on the slow path
    elif case.startswith(("two_shot", "scatter-", "norm-two_shot", "one_kernel")) or (
        ("fp32" in case and case in PRODUCTS) or case in DESCRIBED
    ):
        assert outcome.stack <= 64  # the assembler gives up some so that two blocks fit
    else:
        assert outcome.stack == 0
    assert outcome.shared <= SHARED_LIMIT[target]


@pytest.mark.parametrize(("case", "target"), [pair for pair in TAKEN if pair[0] in MOVING_VECTORS])
def test_bodies_move_16_byte_vectors(outcome, case, target):
    code = outcome.code
    assert positions(code, LOAD[target[:2]])
    assert positions(code, STORE[target[:2]])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case", ["matmul-bf16", "matmul-bf16-bT", "consume-bf16", "scattered-bf16", "scattered-whole",
             "summed-bf16", "owned-bf16", "one_kernel-bf16"],
)  # fmt: skip
def test_products_use_tensor_cores_and_wide_loads(outcome, case, target):
    code = outcome.code
    unit = {"sm_80": r"mma\.sync", "sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma"}
    assert positions(code, unit.get(target, r"v_mfma"))
    if target in NVIDIA:
        assert positions(code, r"cp\.async\.cg\.shared\.global.*0x10")
        assert not positions(code, r"cp\.async\.ca")
    else:
        assert positions(code, r"(global|buffer)_load(_lds)?_dwordx4")


@pytest.mark.parametrize(
    "case", ["broadcast-chain", "broadcast-chain-odd", "broadcast-scatter", "broadcast-scatter-odd"]
)
def test_copies_need_no_shared_memory(outcome_of, case):
    """What is loaded stays with its thread until it is stored."""
    assert outcome_of(case, "sm_90").ttgir.count("convert_layout") == 0


@pytest.mark.parametrize("target", TARGETS)
def test_who_adds_the_parts_of_a_split_product_sees_them(outcome_of, target):
    """The count of blocks comes behind a barrier of the stores, and acquires."""
    code = outcome_of("matmul-split", target).code
    if target in NVIDIA:
        store, load = r"st\.global\.v4\.b32", r"ld\.global\.cg\.v4\.b32"
        assert in_order(code, store, r"bar\.sync", r"atom\.global\.gpu\.acq_rel\.add", load)
    else:
        store, load = r"global_store_dwordx4|buffer_store_dwordx4", r"(global|buffer)_load_dwordx4"
        assert in_order(code, store, r"s_barrier", r"global_atomic_add", load)


@pytest.mark.parametrize("target", WITH_DESCRIPTORS)
@pytest.mark.parametrize("case", DESCRIBED)
def test_described_products_load_by_descriptors(outcome, case, target):
    code = outcome.code
    load = r"cp\.async\.bulk\.tensor\.2d\.shared\S*\.global"
    unit = {"sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma"}[target]
    assert positions(code, r"mma\.sync" if case.endswith("-few") else unit)
    assert positions(code, load)
    assert not positions(code, r"cp\.async\.c[ag]")
    if case.startswith(("consume", "one_kernel")):
        # what a peer has stored and signalled, these loads see
        assert in_order(code, r"ld\.acquire\.sys", r"fence\.proxy\.async;", load)
    if "gathered" in case:  # a kernel before it has seen the signals
        assert in_order(code, r"fence\.proxy\.async;", load)


@pytest.mark.parametrize(("case", "target"), [pair for pair in TAKEN if pair[0] in FLOAT8])
def test_products_of_float8_use_tensor_cores(outcome, case, target):
    """gfx942, which has another kind of float8, converts to float16."""
    unit = {"sm_90": r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3", "sm_100": r"tcgen05\.mma\S*f8f6f4",
            "gfx942": r"v_mfma_f32_\S*f16", "gfx950": r"v_mfma_f32_\S*f8f6f4"}  # fmt: skip
    assert positions(outcome.code, unit[target])
    if target == "sm_90" and case != "matmul-fp8":  # whose b has to be turned first
        # a step waits for the one before it; only where float32 takes over do all end
        assert "pendings = 1" in outcome.ttgir
        promotion = r"scf\.if .*\n.*warp_group_dot_wait .*pendings = 0.*\n.*arith\.addf .*f32"
        assert re.search(promotion, outcome.ttgir)


def test_float8_of_sm_89_is_promoted_too(outcome_of):
    outcome = outcome_of("matmul-fp8", "sm_89")
    assert (outcome.error, outcome.stack) == ("", 0)
    assert positions(outcome.code, r"mma\.sync\S*\.f32\.e4m3\.e4m3\.f32")
    assert re.search(r"scf\.if .*\n.*arith\.addf .*f32", outcome.ttgir)


def test_float8_is_not_taken_before_sm_89(outcome_of):
    """Why matmul refuses it there."""
    assert "fp8e4nv not supported" in outcome_of("matmul-fp8", "sm_80").error


@pytest.mark.parametrize(("case", "target"), [pair for pair in TAKEN if pair[0] in WAITING])
def test_waits_are_loops_that_acquire(outcome, case, target):
    code = outcome.code
    if target in NVIDIA:
        assert in_loop(code, r"ld\.acquire\.sys\.global\.b32")
    else:
        assert in_loop(code, r"global_load_dword v\S+ .*sc0 sc1")
        assert in_order(code, r"global_load_dword v.* sc0 sc1", r"buffer_inv sc0 sc1")
    assert positions(code, r"%globaltimer|s_memrealtime")


@pytest.mark.parametrize("case", ["one_kernel-described", "one_kernel-described-bT"])
def test_products_of_gathered_rows_are_pipelined(outcome_of, case):
    """Of the own rows and of a peer's: loads are on their way while tensor cores work."""
    loops = outcome_of(case, "sm_90").ttgir.split("scf.for")
    for rows in ("own", "gathered"):
        copy = rf"isAsync = true.*async_tma_copy_global_to_local %{rows}\["
        assert any(re.search(copy, loop, re.DOTALL) for loop in loops)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [
    "one_shot-bf16", "two_shot-bf16", "scatter-bf16", "pull", "push", "push-all", "root-words-i32",
    "broadcast-chain", "broadcast-scatter", "passed-words-i32", "two_shot-2", "put-signal",
    "enter", "grant", "grant-all", "scattered-bf16", "scattered-whole",
    "norm-two_shot", "summed-bf16", "owned-bf16", "one_kernel-bf16",
])  # fmt: skip
def test_signals_release(outcome, case, target):
    pattern = r"(st|red|atom)\S*\.release|release\S*\.sys|buffer_wbl2 sc0 sc1"
    assert positions(outcome.code, pattern)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case", ["one_shot-avg", "low_latency-fp32", "two_shot-avg", "norm-one_shot"]
)
def test_sums_are_not_contracted(outcome, case, target):
    """Division may use fused operations inside; no product of ours is fused with a sum."""
    code = outcome.code
    if target in NVIDIA:
        assert not positions(code, r"\bfma\.rn\.(ftz\.)?f32")
    else:
        added = [line for line in instructions(code) if re.match(r"v_(mad|mac|fmac)_f32", line)]
        assert len(added) <= 4 * 64, added  # the steps of exact division


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("case", ["words-i32", "root-words-i32", "passed-words-i32"])
def test_words_with_flags_travel_in_pairs(outcome):
    """14 bytes of data and two flags by one store of 16 bytes."""
    assert positions(outcome.code, r"st\.relaxed\.sys\.global\.v2\.b64")


@pytest.mark.parametrize("case", ["enter", "grant", "count"])
def test_what_runs_beside_cublas_takes_few_registers(outcome_of, case):
    """Of a multiprocessor's 65536 its blocks of 384 threads have 168 each: a warp has 32 each."""
    assert 0 < outcome_of(case, "sm_90").registers <= 32


@pytest.mark.parametrize("case", ["low_latency-fp32", "words-norm-bf16"])
def test_threads_that_share_words_meet_before_results_are_stored(compiler, case):
    """They send what is in x, and results may go there."""
    asked = job(case, "sm_90")
    constants = {**asked.constexprs, "BLOCK": 32}
    if "LANES" in constants:  # blocks that share a row would have a barrier anyway
        constants["LANES"] = 1
    alone, shared = compiler[asked], compiler[replace(asked, constexprs=constants)]
    pushed, stored = r"st\.relaxed\.sys\.global", r"st\.global\.b(16|32)"
    assert (alone.error, shared.error) == ("", "")
    assert in_order(shared.code, pushed, r"bar\.sync", stored)
    assert case != "low_latency-fp32" or not in_order(alone.code, pushed, r"bar\.sync")


@pytest.mark.parametrize(("case", "target"), TAKEN)
def test_floats_are_not_added_in_any_order(outcome_of, case, target):
    """By atomic operations: bits would depend on which block comes first."""
    adds = r"(atom|red)\.\S*\.(b?f16(x2)?|f32|f64)\b|(atomic|ds_\w*add)_\w*b?f(16|32|64)"
    assert not positions(outcome_of(case, target).code, adds)


@pytest.mark.parametrize("target", TARGETS)
def test_peer_offsets_are_64_bit(outcome_of, target):
    code = outcome_of("one_shot-bf16", target).code
    if target in NVIDIA:
        assert positions(code, r"(mul|mad)\.lo\.s64")
    else:
        assert not positions(code, r"buffer_(store|load|atomic)_")
