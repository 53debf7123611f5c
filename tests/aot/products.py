"""How kernels with a product are called: the cases that are compiled ahead of time."""

from __future__ import annotations

from tests.aot.harness import AMD

__all__ = ["DESCRIBED", "FLOAT8", "POINTER", "PRODUCTS", "product_call"]

POINTER = {"float32": "*fp32", "bfloat16": "*bf16", "float64": "*fp64", "int32": "*i32",
           "float8_e4m3fn": "*fp8e4nv"}  # fmt: skip


def product_call(
    kernel: str, dtype: str, target: str, b_unit: int = 1, described: bool = False,
    shape: tuple[int, int, int] = (4096, 4096, 4096), parts: int = 1, **chosen,
):  # fmt: skip
    """A matmul's kernel as it is chosen for a product of this shape, or for `parts` of them."""
    from tdx.kernels.tiles import choose_tile

    backend = "hip" if target in AMD else "cuda"
    size = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}[dtype]
    promoted = size == 1 and target in ("sm_89", "sm_90")
    tile = choose_tile(backend, target, *shape, size, described, 132, parts, promoted=promoted)
    bm, bn, bk = tile.block_m, tile.block_n, tile.block_k
    values = {
        "BM": bm, "BN": bn, "BK": bk, "GROUP_M": 8, "HAS_BIAS": True, "ACTIVATION": "gelu_tanh",
        "A_UNIT": 1, "B_UNIT": b_unit, "EVEN": not any(extent % 16 for extent in shape[1:]),
        "A_STEP": 1, "B_STEP": 1, "RANKS": 4, "GATHERED": False, "TRACE": False,
        "DESCRIBED": described, "PIECES": 4, "CHUNK": 1024, "SPLIT": 2,
        "OWN_CHUNK": 0, "PHASED": False, "WIDE": False, "PAIRS": size == 2, "SCATTERED": False,
        "BLOCK": 1024, "SAMPLES": 128, "PUSH": True, "UNIT": 16, "SCALED": size == 1, "SCALES": 256,
        "PRECISION": "promoted" if promoted else "ieee",
    }  # fmt: skip
    values |= chosen
    pointer, out = POINTER[dtype], POINTER["bfloat16" if size == 1 else dtype]
    types = {
        **dict.fromkeys(("a", "b", "own", "gathered"), pointer),
        **dict.fromkeys(("c", "bias", "partials", "outgoing", "results"), out),
        **dict.fromkeys(
            ("scale_a", "scale_b", "scales", "own_scales", "total", "sums"), "*fp32"
        ),
        **dict.fromkeys(("x", "slots"), "*i64"),
        **dict.fromkeys(
            ("progress", "epoch", "signals", "credit", "trace", "arrived", "finished", "made"),
            "*i32",
        ),
        "slots": "*i64", "world": "world", "channel": "channel",
        **dict.fromkeys(
            ("rows", "whole", "columns", "depth", "stride_am", "stride_ak", "stride_bk",
             "stride_bn", "chunk_rows", "chunks", "owned", "owned_rows", "line_units", "senders",
             "late", "first", "last"),
            "i32"
        ),
        **dict.fromkeys(values, "constexpr"),
    }  # fmt: skip
    if described:
        kind = pointer[1:]
        rows = f"tensordesc<{kind}[{bm}, {bk}]>"
        types |= dict.fromkeys(("a", "own", "gathered"), rows)
        block = [bn, bk] if b_unit == 0 else [bk, bn]
        types["b"] = f"tensordesc<{kind}{block}>"
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return kernel, types, values, options


RAGGED = {"shape": (4096, 4104, 4096)}
FEW_ROWS = {"shape": (16, 7168, 8192)}
SEVERAL_ROWS = {"shape": (128, 7168, 8192)}
SCATTERED_ROWS = {"SCATTERED": True, **SEVERAL_ROWS}
TWO_HALVES = {"shape": (256, 7168, 8192), "parts": 2}
PRODUCTS = {
    "matmul-bf16": ("matmul.matmul_kernel", "bfloat16", {}),
    "matmul-gathered": ("matmul.matmul_kernel", "bfloat16", {"GATHERED": True}),
    "matmul-bf16-bT": ("matmul.matmul_kernel", "bfloat16", {"b_unit": 0}),
    "matmul-bf16-few": ("matmul.matmul_kernel", "bfloat16", FEW_ROWS),
    "matmul-split": ("split_matmul.split_kernel", "bfloat16", SEVERAL_ROWS),
    "consume-bf16": ("chunk_product.consume_kernel", "bfloat16", {}),
    "consume-bf16-ragged": (
        "chunk_product.consume_kernel",
        "bfloat16",
        RAGGED,
    ),
    "consume-fp32": ("chunk_product.consume_kernel", "float32", {}),
    "one_kernel-bf16": ("gathering_product.gather_multiply_kernel", "bfloat16", TWO_HALVES),
    "one_kernel-fp32": ("gathering_product.gather_multiply_kernel", "float32", TWO_HALVES),
    "one_kernel-ragged": (
        "gathering_product.gather_multiply_kernel",
        "bfloat16",
        {**RAGGED, "PUSH": False},
    ),
    "scattered-bf16": ("matmul_reduce_scatter.fused_kernel", "bfloat16", {}),
    "scattered-whole": (
        "matmul_reduce_scatter.fused_kernel",
        "bfloat16",
        {"CHUNK": 512, "OWN_CHUNK": 512, "PHASED": True},
    ),
    "scattered-fp32": ("matmul_reduce_scatter.fused_kernel", "float32", {}),
    "finish-bf16": ("product_first.finish_kernel", "bfloat16", {}),
    "summed-bf16": ("summed_tiles.fused_kernel", "bfloat16", {}),
    "summed-fp32": ("summed_tiles.fused_kernel", "float32", {}),
    "summed-ragged": ("summed_tiles.fused_kernel", "bfloat16", RAGGED),
    "summed-scattered": ("summed_tiles.fused_kernel", "bfloat16", SCATTERED_ROWS),
    "owned-bf16": ("owned_tiles.owned_kernel", "bfloat16", {}),
    "owned-fp32": ("owned_tiles.owned_kernel", "float32", {}),
    "owned-ragged": ("owned_tiles.owned_kernel", "bfloat16", RAGGED),
    "words-product-bf16": ("low_latency_product.low_latency_kernel", "bfloat16", SEVERAL_ROWS),
    "words-product-fp32": ("low_latency_product.low_latency_kernel", "float32", SEVERAL_ROWS),
}
FLOAT8 = {
    "matmul-fp8": ("matmul.matmul_kernel", "float8_e4m3fn", {}),
    "consume-fp8": ("chunk_product.consume_kernel", "float8_e4m3fn", {"b_unit": 0}),
    "one_kernel-fp8": (
        "gathering_product.gather_multiply_kernel",
        "float8_e4m3fn",
        {"b_unit": 0},
    ),
    "scattered-fp8": ("matmul_reduce_scatter.fused_kernel", "float8_e4m3fn", {"b_unit": 0}),
    "summed-fp8": ("summed_tiles.fused_kernel", "float8_e4m3fn", {"b_unit": 0}),
    "owned-fp8": ("owned_tiles.owned_kernel", "float8_e4m3fn", {"b_unit": 0}),
}
BY_DESCRIPTORS = {"described": True}
DESCRIBED = {
    "gathered-described": (
        "matmul.matmul_kernel",
        "bfloat16",
        {"GATHERED": True, **BY_DESCRIPTORS},
    ),
    "gathered-split-described": (
        "split_matmul.split_kernel",
        "bfloat16",
        {"GATHERED": True, **BY_DESCRIPTORS, **SEVERAL_ROWS},
    ),
    "matmul-described": ("matmul.matmul_kernel", "bfloat16", BY_DESCRIPTORS),
    "matmul-described-bT": ("matmul.matmul_kernel", "bfloat16", {"b_unit": 0, **BY_DESCRIPTORS}),
    "matmul-described-fp8": (
        "matmul.matmul_kernel",
        "float8_e4m3fn",
        {"b_unit": 0, **BY_DESCRIPTORS},
    ),
    "matmul-described-few": ("matmul.matmul_kernel", "bfloat16", {**BY_DESCRIPTORS, **FEW_ROWS}),
    "matmul-split-described": (
        "split_matmul.split_kernel",
        "bfloat16",
        {**BY_DESCRIPTORS, **SEVERAL_ROWS},
    ),
    "consume-described": ("chunk_product.consume_kernel", "bfloat16", BY_DESCRIPTORS),
    "one_kernel-described": (
        "gathering_product.gather_multiply_kernel",
        "bfloat16",
        {**BY_DESCRIPTORS, **TWO_HALVES},
    ),
    "one_kernel-described-bT": (
        "gathering_product.gather_multiply_kernel",
        "bfloat16",
        {"b_unit": 0, **BY_DESCRIPTORS, **TWO_HALVES},
    ),
    "scattered-described": ("matmul_reduce_scatter.fused_kernel", "bfloat16", BY_DESCRIPTORS),
    "scattered-whole-described": (
        "matmul_reduce_scatter.fused_kernel",
        "bfloat16",
        {"CHUNK": 512, "OWN_CHUNK": 512, "PHASED": True, **BY_DESCRIPTORS},
    ),
    "words-product-described": (
        "low_latency_product.low_latency_kernel",
        "bfloat16",
        {**BY_DESCRIPTORS, **SEVERAL_ROWS},
    ),
    "summed-described": ("summed_tiles.fused_kernel", "bfloat16", BY_DESCRIPTORS),
    "owned-described": ("owned_tiles.owned_kernel", "bfloat16", BY_DESCRIPTORS),
    "owned-described-2": ("owned_tiles.owned_kernel", "bfloat16", {"RANKS": 2, **BY_DESCRIPTORS}),
    "owned-described-8": ("owned_tiles.owned_kernel", "bfloat16", {"RANKS": 8, **BY_DESCRIPTORS}),
}
PRODUCTS |= FLOAT8 | DESCRIBED
