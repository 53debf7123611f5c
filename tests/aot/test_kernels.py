"""What tdx's own kernels compile to on each target."""

from __future__ import annotations

import re

import pytest

from tests.aot.assembly import in_loop, in_order, instructions, positions
from tests.aot.harness import AMD, NVIDIA, TARGETS, Job, compile_jobs

POINTER = {"float32": "*fp32", "bfloat16": "*bf16", "float64": "*fp64", "int32": "*i32"}
NO_FUSION = {"enable_fp_fusion": False, "num_warps": 8}


def _all_reduce(algorithm: str, dtype: str, world: str = "world", **chosen):
    pointer = POINTER[dtype]
    types = {
        **dict.fromkeys(("x", "out", "bias", "residual"), pointer),
        "slots": pointer if algorithm == "one_shot" else "*i64",
        **{"channel": "channel", "world": world},
        **dict.fromkeys(("numel", "columns", "vectors"), "i32"),
    }  # fmt: skip
    constants = {
        "OP": "sum", "HAS_BIAS": False, "HAS_RESIDUAL": False, "BLOCK": 4096, **chosen,
    }  # fmt: skip
    if algorithm == "low_latency":
        pairs = dtype == "bfloat16"
        constants.update(BLOCK=512 if pairs else 256, PAIRS=pairs, RANKS=8)
    types.update(dict.fromkeys(constants, "constexpr"))
    return f"all_reduce.{algorithm}_kernel", types, constants, NO_FUSION


def _pull(word: str = "*i64", unit: int = 16):
    types = {
        **dict.fromkeys(("x", "out", "slots"), word), "channel": "channel", "world": "world",
        "units": "i32", "slot_units": "i32", "UNIT": "constexpr", "BLOCK": "constexpr",
    }  # fmt: skip
    return "all_gather.pull_kernel", types, {"UNIT": unit, "BLOCK": 4096}, {"num_warps": 8}


GATHERING = {"progress": "*i32", "credit": "*i32", "epoch": "*i32", "world": "world"}


def _push():
    types = {
        "gathered": "*i64", **GATHERING, **dict.fromkeys(("units", "chunk_units", "chunks"), "i32"),
        "UNIT": "constexpr", "BLOCK": "constexpr",
    }  # fmt: skip
    return "all_gather.push_kernel", types, {"UNIT": 16, "BLOCK": 4096}, {"num_warps": 8}


def _product(kernel: str, dtype: str, hip: bool, b_unit: int = 1, **chosen):
    """A matmul's kernel as select.py would have it for a large product."""
    from tdx.kernels.select import constants, tile_for

    backend = "hip" if hip else "cuda"
    size = 2 if dtype == "bfloat16" else 4
    bm, bn, bk = tile_for(backend, 4096, 4096, 4096, size)
    values = {
        "BM": bm, "BN": bn, "BK": bk, "GROUP_M": 8, "PRECISION": "ieee", "HAS_BIAS": True,
        "ACTIVATION": "gelu_tanh", "A_UNIT": 1, "B_UNIT": b_unit, "EVEN": True, "TRACE": False,
        **chosen,
    }  # fmt: skip
    pointer = POINTER[dtype]
    types = {
        **dict.fromkeys(("a", "b", "c", "bias", "gathered", "partials"), pointer),
        **dict.fromkeys(("progress", "epoch", "signals", "trace"), "*i32"), "world": "world",
        **dict.fromkeys(
            ("rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn",
             "chunk_rows", "chunks"), "i32"
        ),
        **dict.fromkeys(values, "constexpr"),
    }  # fmt: skip
    options = {"num_warps": 8, "num_stages": constants(backend).stages}
    return kernel, types, values, options


CASES = {
    "one_shot-bf16": _all_reduce("one_shot", "bfloat16"),
    "one_shot-fp32": _all_reduce("one_shot", "float32"),
    "one_shot-fp32-team": _all_reduce("one_shot", "float32", world="team"),
    "one_shot-avg": _all_reduce(
        "one_shot", "bfloat16", OP="avg", HAS_BIAS=True, HAS_RESIDUAL=True
    ),
    "one_shot-max-i32": _all_reduce("one_shot", "int32", OP="max"),
    "low_latency-bf16": _all_reduce("low_latency", "bfloat16"),
    "low_latency-fp32": _all_reduce("low_latency", "float32", OP="avg", HAS_RESIDUAL=True),
    "pull": _pull(),
    "pull-odd": _pull("*i8", 1),
    "push": _push(),
    "enter": ("all_gather.enter_kernel", {**GATHERING, "chunks": "i32"}, {}, {"num_warps": 1}),
    "barrier": (
        "barrier.barrier_kernel", {"channel": "channel", "world": "world"}, {}, {"num_warps": 1},
    ),
}  # fmt: skip
SMALL = {"BM": 64, "BN": 64, "BK": 32}  # what select.py takes for ragged products
PRODUCTS = {
    "matmul-bf16": ("matmul.matmul_kernel", "bfloat16", {}),
    "matmul-bf16-bT": ("matmul.matmul_kernel", "bfloat16", {"b_unit": 0}),
    "consume-bf16": ("all_gather_matmul.consume_kernel", "bfloat16", {}),
    "consume-bf16-ragged": (
        "all_gather_matmul.consume_kernel",
        "bfloat16",
        {"EVEN": False, **SMALL},
    ),
    "consume-fp32": ("all_gather_matmul.consume_kernel", "float32", {}),
    "produce-bf16": ("matmul_reduce_scatter.produce_kernel", "bfloat16", {}),
    "reduce-bf16": ("matmul_reduce_scatter.reduce_kernel", "bfloat16", {}),
}
ALL = [*CASES, *PRODUCTS]
WAITING = [
    "one_shot-bf16", "pull", "push", "barrier", "consume-bf16", "consume-fp32", "reduce-bf16",
]  # fmt: skip
SHARED_LIMIT = {"sm_80": 164 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10,
                "gfx950": 160 << 10}  # fmt: skip
LOAD = {"sm": r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", "gf": r"global_load_dwordx4"}
STORE = {"sm": r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64", "gf": r"global_store_dwordx4"}


def _job(case: str, target: str) -> Job:
    if case in CASES:
        kernel, types, constants, options = CASES[case]
    else:
        name, dtype, chosen = PRODUCTS[case]
        kernel, types, constants, options = _product(name, dtype, target in AMD, **chosen)
    module, name = kernel.split(".")
    return Job(f"tdx.kernels.{module}", name, types, constants, target, options)


@pytest.fixture(scope="module")
def outcomes():
    return compile_jobs([_job(case, target) for case in ALL for target in TARGETS], timeout_s=900)


@pytest.fixture
def outcome(outcomes, case, target):
    found = outcomes[_job(case, target)]
    assert not found.error
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ALL)
def test_compiles_without_spills(outcome, case, target):
    if target in AMD:  # scalar registers are spilled to vector registers, not to memory
        assert (outcome.stack, positions(outcome.code, r"vgpr_spill_count: [1-9]")) == (0, [])
    elif case.startswith("low_latency"):
        assert outcome.stack <= 64  # the frame of a call on the slow path
    elif case.endswith("fp32") and case in PRODUCTS:
        assert outcome.stack <= 64  # the assembler gives up some so that two blocks fit
    else:
        assert outcome.stack == 0
    assert outcome.shared <= SHARED_LIMIT[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "case", ["one_shot-bf16", "one_shot-fp32", "one_shot-fp32-team", "one_shot-avg", "pull", "push"]
)
def test_bodies_move_16_byte_vectors(outcome, case, target):
    code = outcome.code
    assert positions(code, LOAD[target[:2]])
    assert positions(code, STORE[target[:2]])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["matmul-bf16", "matmul-bf16-bT", "consume-bf16", "produce-bf16"])
def test_products_use_tensor_cores_and_wide_loads(outcome, case, target):
    code = outcome.code
    unit = {"sm_80": r"mma\.sync", "sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma"}
    assert positions(code, unit.get(target, r"v_mfma"))
    if target in NVIDIA:
        assert positions(code, r"cp\.async\.cg\.shared\.global.*0x10")
        assert not positions(code, r"cp\.async\.ca")
    else:
        assert positions(code, r"(global|buffer)_load(_lds)?_dwordx4")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", WAITING)
def test_waits_are_loops_that_acquire(outcome, case, target):
    code = outcome.code
    if target in NVIDIA:
        assert in_loop(code, r"ld\.acquire\.sys\.global\.b32")
    else:
        assert in_loop(code, r"global_load_dword v\S+ .*sc0 sc1")
        assert in_order(code, r"global_load_dword v.* sc0 sc1", r"buffer_inv sc0 sc1")
    assert positions(code, r"%globaltimer|s_memrealtime")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["one_shot-bf16", "pull", "push", "enter", "produce-bf16"])
def test_signals_release(outcome, case, target):
    pattern = r"(st|red|atom)\S*\.release|release\S*\.sys|buffer_wbl2 sc0 sc1"
    assert positions(outcome.code, pattern)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["one_shot-avg", "low_latency-fp32"])
def test_sums_are_not_contracted(outcome, case, target):
    """Division may use fused operations inside; no product of ours is fused with a sum."""
    code = outcome.code
    if target in NVIDIA:
        assert not positions(code, r"\bfma\.rn\.(ftz\.)?f32")
    else:
        added = [line for line in instructions(code) if re.match(r"v_(mad|mac|fmac)_f32", line)]
        assert len(added) <= 4 * 64, added  # the steps of exact division


@pytest.mark.parametrize("target", TARGETS)
def test_peer_offsets_are_64_bit(outcomes, target):
    code = outcomes[_job("one_shot-bf16", target)].code
    if target in NVIDIA:
        assert positions(code, r"(mul|mad)\.lo\.s64")
    else:
        assert not positions(code, r"buffer_(store|load|atomic)_")
