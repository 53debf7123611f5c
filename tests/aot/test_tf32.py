"""Products of float32: on tensor cores with allow_tf32=True, and only then."""

from __future__ import annotations

import pytest

from tests.aot.assembly import positions
from tests.aot.cases import product_job

FEW = {"shape": (128, 2048, 2048)}
KERNELS = {
    "matmul.matmul_kernel": {},
    "split_matmul.split_kernel": FEW,
    "chunk_product.consume_kernel": {},
    "gathering_product.gather_multiply_kernel": {"shape": (256, 7168, 8192), "parts": 2},
    "matmul_reduce_scatter.fused_kernel": {},
    "summed_tiles.fused_kernel": {},
    "owned_tiles.owned_kernel": {},
    "low_latency_product.low_latency_kernel": FEW,
}
TAKEN = [
    *((kernel, "sm_90") for kernel in KERNELS),
    ("matmul.matmul_kernel", "sm_80"), ("chunk_product.consume_kernel", "sm_80"),
]  # fmt: skip
ROUNDED = {
    "sm_80": r"^mma\.sync\.aligned\S*\.f32\.tf32\.tf32\.f32",
    "sm_90": r"^wgmma\.mma_async\S*\.f32\.tf32\.tf32",
}


def asked(kernel, target, precision):
    return product_job(kernel, "float32", target, PRECISION=precision, **KERNELS[kernel])


@pytest.fixture(scope="module")
def outcomes(compiler):
    compiler.start(asked(*pair, precision) for pair in TAKEN for precision in ("tf32", "ieee"))
    return compiler


@pytest.mark.parametrize(("kernel", "target"), TAKEN)
def test_tf32_is_for_those_who_allow_it(outcomes, kernel, target):
    rounded, exact = (outcomes[asked(kernel, target, name)] for name in ("tf32", "ieee"))
    assert (rounded.error, exact.error) == ("", "")
    assert positions(rounded.code, ROUNDED[target])
    assert rounded.stack == 0
    assert not positions(exact.code, r"tf32|\bw?g?mma\.")
    assert positions(exact.code, r"^fma\.rn\.f32")
