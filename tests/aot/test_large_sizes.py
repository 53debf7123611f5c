"""Kernels for more than 2**31 elements: Triton compiles run-time sizes above that as i64."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tdx import abi
from tests.aot.assembly import positions
from tests.aot.cases import job
from tests.aot.test_kernels import LOAD, SHARED_LIMIT, STORE

MOVED = [
    "one_shot-bf16", "two_shot-bf16", "two_shot-copy", "two_shot-buffer", "scatter-bf16",
    "scatter-odd", "pull", "pull-odd", "push-all", "push-one", "push-odd", "broadcast-chain",
    "broadcast-chain-odd", "broadcast-scatter", "broadcast-scatter-odd", "two_shot-2",
    "two_shot-copy-2",
]  # fmt: skip
VECTORS = [case for case in MOVED if "odd" not in case]
CASES = [*MOVED, "matmul-bf16", "scattered-bf16"]
COUNTS = {"numel", "columns", "units", "rows"}  # of a whole array; others are parts of it
PARTS = COUNTS | {
    "whole", "depth", "vectors", "shard_vectors", "step_vectors", "slot_units", "round_units",
    "lane_units", "part_units", "stride_am", "stride_ak", "stride_bk", "stride_bn",
}  # fmt: skip
WIDE = {"counts": COUNTS, "parts": PARTS}


def asked(case, wide):
    known = job(case, "sm_90")
    types = {name: "i64" if name in WIDE[wide] else kind for name, kind in known.signature.items()}
    return dataclasses.replace(known, signature=types)


@pytest.fixture(scope="module")
def outcomes(compiler):
    compiler.start(asked(case, wide) for case in CASES for wide in WIDE)
    return compiler


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("case", CASES)
def test_they_need_as_little_as_for_small_sizes(outcomes, case, wide):
    outcome = outcomes[asked(case, wide)]
    assert not outcome.error
    assert outcome.stack <= (64 if case.startswith(("two_shot", "scatter-", "push")) else 0)
    assert outcome.shared <= SHARED_LIMIT["sm_90"]
    if case in VECTORS:
        assert positions(outcome.code, LOAD["sm"])
        assert positions(outcome.code, STORE["sm"])


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("case", CASES)
def test_no_size_is_truncated(outcomes, case, wide):
    code = outcomes[asked(case, wide)].ttgir
    assert not re.findall(r"arith\.trunci \S+ : i64 to i32.*", code)
    # words with flags are halved: one for each rank
    lanes = re.findall(r"arith\.trunci .*tensor<(\d+)xi64.*xi32", code)
    assert set(map(int, lanes)) <= {abi.MAX_RANKS}


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("case", MOVED)
def test_offsets_are_64_bit(outcomes, case, wide):
    """Of all elements; signals, and words for each rank, lie close to each other."""
    code = outcomes[asked(case, wide)].ttgir
    lanes = re.findall(r"tt\.addptr .*tensor<(\d+)x!tt\.ptr.*, tensor<\d+xi32", code)
    assert set(map(int, lanes)) <= {abi.MAX_RANKS}
    scalars = re.findall(r"tt\.addptr .* : !tt\.ptr<(\w+)>, i32", code)
    assert set(scalars) <= {"i32", "i64"}
    assert re.search(r"tt\.addptr .*tensor<\d{3,}x!tt\.ptr.*, tensor<\d+xi64", code)
