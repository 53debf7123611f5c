"""What the verbs of tdx.language compile to on each target."""

from __future__ import annotations

import re

import pytest

from tests.aot.assembly import in_loop, in_order, instructions, positions
from tests.aot.harness import AMD, NVIDIA, TARGETS, Job, chosen

MODULE = "tests.aot.kernels"
BLOCK = {"BLOCK": 2048}  # eight elements a thread on AMD, sixteen on NVIDIA
DATA = {"x": "*bf16", "out": "*bf16", "BLOCK": "constexpr"}
SIGNALLED = {**DATA, "signal": "*i32", "world": "world", "value": "i32"}
COPIES = {
    "dst": "*bf16",
    "src": "*bf16",
    "signal": "*i32",
    "world": "world",
    "peer": "i32",
    "n": "i64",
    "value": "i32",
    "OP": "constexpr",
}
LOW_LATENCY = {
    "words": "*i64",
    "world": "world",
    "flag": "i32",
    "n": "i32",
    "BLOCK": "constexpr",
    "WIDE": "constexpr",
}
MATMUL = {
    **dict.fromkeys("abc", "*bf16"),
    **{"signal": "*i32", "world": "world", "epoch": "i32", "K": "i32"},
    **dict.fromkeys(("BM", "BN", "BK", "TOKEN"), "constexpr"),
}


def _notify(kernel: str, op: str):
    extra = {"ok": "i32"} if kernel == "k_notify_block" else {"peer": "i32"}
    return kernel, {**SIGNALLED, **extra, "OP": "constexpr"}, {**BLOCK, "OP": op}, {}


def _low_latency(kind: str, wide: bool):
    types = {**LOW_LATENCY, "x": kind, "out": kind}
    return "k_low_latency", types, {"BLOCK": 128, "WIDE": wide}, {}


def _matmul(token: bool):
    constants = {"BM": 128, "BN": 128, "BK": 64, "TOKEN": token}
    return "k_matmul", MATMUL, constants, {"divisible": ("K",)}


def _peer_store(kind: str, world: str):
    types = {"x": kind, "world": world, "peer": "i32", "BLOCK": "constexpr"}
    return "k_peer_store", types, BLOCK, {}


CASES = {
    "peer_store-bf16": _peer_store("*bf16", "world"),
    "peer_store-fp32": _peer_store("*fp32", "world"),
    "peer_store-team": _peer_store("*bf16", "team"),
    "wait": ("k_wait", SIGNALLED, BLOCK, {}),
    "wait-1-warp": ("k_wait", SIGNALLED, BLOCK, {"options": {"num_warps": 1}}),
    "wait-block": ("k_wait_block", SIGNALLED, BLOCK, {}),
    "wait-any": ("k_wait_any", SIGNALLED, BLOCK, {}),
    "wait-all": ("k_wait_all", SIGNALLED, BLOCK, {}),
    "notify-set": _notify("k_notify", "set"),
    "notify-add": _notify("k_notify", "add"),
    "notify-block-set": _notify("k_notify_block", "set"),
    "notify-block-add": _notify("k_notify_block", "add"),
    "ring": (
        "k_ring",
        {**DATA, "signal": "*i32", "world": "team", "epoch": "i32"},
        BLOCK,
        {},
    ),
    "put": ("k_copies", COPIES, {"OP": "put"}, {}),
    "get": ("k_copies", COPIES, {"OP": "get"}, {}),
    "put_signal": ("k_copies", COPIES, {"OP": "put_signal"}, {}),
    "broadcast": ("k_copies", COPIES, {"OP": "broadcast"}, {}),
    "low_latency-4": _low_latency("*fp32", False),
    "low_latency-8": _low_latency("*i64", True),
    "low_latency-uniform": (
        "k_low_latency_uniform",
        {**LOW_LATENCY, "x": "*fp32", "out": "*fp32"},
        {"BLOCK": 128},
        {},
    ),
    "barrier": ("k_barrier", {**DATA, "channel": "channel", "world": "world"}, BLOCK, {}),
    "grid_barrier": ("k_grid_barrier", {**DATA, "channel": "channel"}, BLOCK, {}),
    "constants": (
        "k_constants",
        {**DATA, "words": "*i64", "signal": "*i32", "channel": "channel", "world": "world"},
        {"BLOCK": 256},
        {},
    ),
    "matmul": _matmul(False),
    "matmul-token": _matmul(True),
    "plain": ("k_plain", {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, BLOCK, {}),
    "plain-without-library": (
        "k_plain",
        {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"},
        BLOCK,
        {"library": False},
    ),
}
WAITING = [c for c in CASES if c.startswith(("wait", "ring", "barrier", "grid", "matmul"))]
DATA_STORE = {"sm": r"^(@%p\d+ )?st\.global\.v4", "gf": r"^global_store_dwordx4"}
SIGNAL = {
    "notify-set": {"sm": r"st\.release\.sys\.global\.b32", "gf": r"global_store_dword v.*sc0 sc1"},
    "notify-add": {"sm": r"red\.release\.sys\.global\.add", "gf": r"global_atomic_add"},
    "notify-block-set": {
        "sm": r"st\.release\.sys\.global\.b32",
        "gf": r"global_atomic_swap",
    },
    "notify-block-add": {
        "sm": r"(red|atom)\.(release\.sys\.global|global\.sys\.release)\.add",
        "gf": r"global_atomic_add",
    },
    "put_signal": {"sm": r"st\.release\.sys\.global\.b32", "gf": r"global_store_dword v.*sc0 sc1"},
}


def _job(case: str, target: str) -> Job:
    kernel, types, constants, more = CASES[case]
    types = dict(types)
    if kernel == "k_low_latency_uniform":
        del types["WIDE"]
    return Job(MODULE, kernel, types, constants, target, **more)


@pytest.fixture(scope="module")
def outcomes(request, compiler):
    compiler.start(_job(*pair) for pair in chosen(request))
    return compiler


@pytest.fixture
def code(outcomes, case, target):
    outcome = outcomes[_job(case, target)]
    assert not outcome.error
    return outcome.code


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills(outcomes, case, target):
    outcome = outcomes[_job(case, target)]
    assert not outcome.error
    assert (outcome.spills, outcome.stack) == (0, 0)


@pytest.mark.parametrize("case", ["peer_store-bf16", "wait", "notify-set"])
def test_a_number_is_no_handle(compiler, case):
    """What `world.rank` in place of `world.handle` compiles to."""
    kernel, types, constants, more = CASES[case]
    job = Job(MODULE, kernel, {**types, "world": "i32"}, constants, "sm_90", **more)
    error = compiler[job].error
    assert "expected the handle of a world or team, got int32" in error
    assert "`world.handle`" in error


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["peer_store-bf16", "peer_store-fp32", "peer_store-team", "put"])
def test_peers_are_written_in_16_byte_vectors(code, case, target):
    assert positions(code, DATA_STORE[target[:2]])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["peer_store-bf16", "peer_store-team", "notify-set"])
def test_peer_offsets_are_64_bit(code, case, target):
    if target in NVIDIA:
        assert positions(code, r"(mul|mad)\.lo\.s64")
        assert not positions(code, r"cvt\.[us]32\.[us]64")
    else:
        assert positions(code, r"[sv]_mul_hi_[ui]32|v_mad_u64_u32")
        assert not positions(code, r"buffer_(store|load|atomic)")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", WAITING)
def test_wait_polls_with_acquire_in_a_loop(code, case, target):
    if target in NVIDIA:
        assert in_loop(code, r"ld\.acquire\.sys\.global\.b32")
    else:
        assert in_loop(code, r"global_load_dword v\S+ .*sc0 sc1")
        assert in_order(code, r"global_load_dword v.* sc0 sc1", r"buffer_inv sc0 sc1")
    assert positions(code, r"%globaltimer|s_memrealtime")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", WAITING)
def test_all_threads_agree_on_the_outcome_of_a_wait(code, case, target):
    if target in NVIDIA and case != "wait-any":
        assert positions(code, r"bar\.red\.and\.pred")
    elif target in NVIDIA:
        assert in_order(code, r"st\.shared", r"bar\.sync", r"ld\.shared")
    elif case != "wait-1-warp":
        assert in_order(code, r"ds_write", r"s_barrier", r"ds_read")


@pytest.mark.parametrize("target", NVIDIA)
def test_a_wait_that_succeeds_costs_one_barrier(outcomes, target):
    code = outcomes[_job("wait", target)].code
    barriers = [instructions(code)[i] for i in positions(code, r"\bbar\.")]
    assert sum("bar.red" in line for line in barriers) == 1
    skipped = positions(code, r"^@%p\d+ bra")
    assert all(i - 1 in skipped for i in positions(code, r"^bar\.sync"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", SIGNAL)
def test_data_is_stored_before_the_signal(code, case, target):
    kind = target[:2]
    signal = SIGNAL[case][kind]
    assert in_order(code, DATA_STORE[kind], r"bar\.sync|s_barrier", signal)
    if target in AMD:
        drained = (DATA_STORE[kind], r"s_waitcnt vmcnt\(0\)$", r"s_barrier")
        written_back = (r"buffer_wbl2 sc0 sc1", r"s_waitcnt vmcnt\(0\)$", signal)
        assert in_order(code, *drained, *written_back)
    elif target != "sm_80":
        assert in_order(code, DATA_STORE[kind], r"cp\.async\.bulk\.wait_group 0", r"bar\.sync")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", SIGNAL)
def test_the_fault_word_is_read_before_the_barrier_of_a_notify(code, case, target):
    fault = r"ld\.relaxed\.sys\.global\.b64|global_load_dwordx2 .*sc0 sc1"
    lines = instructions(code)
    barriers = positions(code, r"bar\.sync|s_barrier")
    signals = positions(code, SIGNAL[case][target[:2]])
    last = max(b for b in barriers if b < signals[-1])
    assert [i for i in positions(code, fault) if i < last], lines


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", ["matmul", "matmul-token"])
def test_no_load_moves_above_the_wait_of_its_iteration(outcomes, case, target):
    ttgir = outcomes[_job(case, target)].ttgir
    assert "async_copy" not in ttgir
    wait = re.search(r"tdx_(wait|spin)_span", ttgir).start()
    loads = [m.start() for m in re.finditer(r"= tt\.load .*tensor<\d+x\d+x", ttgir)]
    assert loads
    assert min(loads) > wait > ttgir.index("scf.for")


@pytest.mark.parametrize("target", TARGETS)
def test_data_and_flag_are_one_access(outcomes, target):
    narrow = outcomes[_job("low_latency-4", target)].code
    wide = outcomes[_job("low_latency-8", target)].code
    if target in NVIDIA:
        assert positions(narrow, r"st\.relaxed\.sys\.global\.b64")
        assert in_loop(narrow, r"ld\.relaxed\.sys\.global\.b64")
        assert positions(wide, r"st\.relaxed\.sys\.global\.v2\.b64")
        assert positions(wide, r"ld\.relaxed\.sys\.global\.v2\.b64")
    else:
        for code in (narrow, wide):
            assert positions(code, r"global_store_dwordx2 .*sc0 sc1")
            assert in_loop(code, r"global_load_dwordx2 .*sc0 sc1")


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_without_verbs_are_unchanged(outcomes, target):
    with_library = outcomes[_job("plain", target)].code
    assert instructions(with_library) == instructions(
        outcomes[_job("plain-without-library", target)].code
    )
