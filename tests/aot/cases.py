"""How tdx's own kernels are called: the cases that are compiled ahead of time."""

from __future__ import annotations

from tests.aot.harness import AMD, Job

__all__ = ["CASES", "DESCRIBED", "FLOAT8", "PRODUCTS", "job", "product_job"]

POINTER = {"float32": "*fp32", "bfloat16": "*bf16", "float64": "*fp64", "int32": "*i32",
           "float8_e4m3fn": "*fp8e4nv"}  # fmt: skip
NO_FUSION = {"enable_fp_fusion": False, "num_warps": 8}


def _all_reduce(algorithm: str, dtype: str, world: str = "world", **chosen):
    pointer = POINTER[dtype]
    types = {
        **dict.fromkeys(("x", "out", "bias", "residual"), pointer),
        "slots": pointer if algorithm == "one_shot" else "*i64",
        **{"channel": "channel", "world": world},
        **dict.fromkeys(("numel", "columns", "vectors"), "i32"),
    }  # fmt: skip
    constants = {"OP": "sum", "HAS_BIAS": False, "HAS_RESIDUAL": False, "BLOCK": 4096, **chosen}
    if algorithm == "low_latency":
        pairs = dtype == "bfloat16"
        constants.update(BLOCK=512 if pairs else 256, PAIRS=pairs, RANKS=8)
    types.update(dict.fromkeys(constants, "constexpr"))
    return f"all_reduce.{algorithm}_kernel", types, constants, NO_FUSION


def _shards(kernel: str, dtype: str, ranks: int = 4, world: str = "world", **chosen):
    """A kernel of two_shot.py or reduce_scatter.py as select.py would have it for 64 MiB."""
    from tdx.kernels.select import shard_block

    pointer, size = POINTER[dtype], 2 if dtype == "bfloat16" else 4
    words = "low_latency" in kernel
    block, warps = shard_block("cuda", (64 << 20) // size // ranks, size, ranks)
    values = {
        "OP": "sum", "HAS_BIAS": False, "HAS_RESIDUAL": False, "RANKS": ranks, "SLOTS": 4,
        "WHOLE": True, "COPY": False, "ROOTED": False, "UNIT": 16, "PAIRS": size == 2,
        "RESULT_PAIRS": size == 2, "BLOCK": 1024 // size if words else block, **chosen,
    }  # fmt: skip
    types = {
        **dict.fromkeys(("x", "out", "bias", "residual", "staging", "results"), pointer),
        "signals": "*i32", "words": "*i64", "channel": "channel", "world": world,
        **dict.fromkeys(
            ("numel", "columns", "units", "shard_vectors", "step_vectors", "slot_vectors", "steps",
             "root"), "i32"
        ),
        **dict.fromkeys(values, "constexpr"),
    }  # fmt: skip
    return kernel, types, values, {**NO_FUSION, "num_warps": 8 if words else warps}


def _norm(algorithm: str, dtype: str, columns: int = 8192, ranks: int = 4, **chosen):
    """A kernel of rms_norm_kernels.py as select.py would have it for rows of `columns`."""
    from tdx.kernels.select import row_block

    pointer, size = POINTER[dtype], 2 if dtype == "bfloat16" else 4
    words = algorithm == "low_latency"
    block, warps = row_block("cuda", columns, size, ranks, words, chosen.get("SLOTS") == 2)
    values = {
        "EPS": 1e-6, "HAS_BIAS": True, "HAS_RESIDUAL": True, "RANKS": ranks, "SLOTS": 4,
        "PIECES": -(-columns // block), "PAIRS": size == 2, "EVEN": columns % 16 == 0,
        "BLOCK": block, **chosen,
    }  # fmt: skip
    names = ("x", "out", "kept", "weight", "bias", "residual", "staging", "results")
    types = {
        **dict.fromkeys(names, pointer), "slots": "*i64" if words else pointer,
        "signals": "*i32", "channel": "channel", "world": "world",
        **dict.fromkeys(
            ("rows", "columns", "slot_vectors", "row_vectors", "shard", "step", "steps"), "i32"
        ),
        **dict.fromkeys(values, "constexpr"),
    }  # fmt: skip
    kernel = f"rms_norm_kernels.{algorithm}_kernel"
    return kernel, types, values, {**NO_FUSION, "num_warps": warps}


def _pull(word: str = "*i64", unit: int = 16):
    types = {
        **dict.fromkeys(("x", "out", "slots"), word), "channel": "channel", "world": "world",
        "units": "i32", "slot_units": "i32", "UNIT": "constexpr", "BLOCK": "constexpr",
    }  # fmt: skip
    return "all_gather.pull_kernel", types, {"UNIT": unit, "BLOCK": 4096}, {"num_warps": 8}


GATHERING = {"progress": "*i32", "credit": "*i32", "epoch": "*i32", "world": "world"}


def _push(scaled: bool = False):
    values = {"UNIT": 16, "BLOCK": 4096, "SCALED": scaled, "SCALES": 1024}
    sizes = ("units", "chunk_units", "chunks", "rows", "chunk_rows")
    types = {
        "gathered": "*i64", "scales": "*fp32", **GATHERING, **dict.fromkeys(sizes, "i32"),
        **dict.fromkeys(values, "constexpr"),
    }  # fmt: skip
    return "gathering.push_kernel", types, values, {"num_warps": 8}


def _take(even: bool = True):
    values = {"CHUNK": 512, "BLOCK": 4096, "EVEN": even}
    sizes = dict.fromkeys(("rows", "whole", "columns", "chunks"), "i32")
    types = {
        **dict.fromkeys(("c", "results"), "*bf16"), "progress": "*i32", "epoch": "*i32",
        "world": "world", **sizes, **dict.fromkeys(values, "constexpr"),
    }  # fmt: skip
    return "matmul_all_reduce.take_kernel", types, values, {"num_warps": 8}


def _summed(own_chunk: int = 0):
    """The tile is what choose_tile gives for 4096 rows of 8192 columns."""
    values = {"BM": 128, "BN": 256, "WIDTH": 64, "HAS_BIAS": True, "ACTIVATION": "none",
              "EVEN": True, "CHUNK": 512, "OWN_CHUNK": own_chunk}  # fmt: skip
    types = {
        **dict.fromkeys(("c", "bias", "partials", "outgoing"), "*bf16"),
        **dict.fromkeys(("finished", "made", "signals", "credit", "epoch"), "*i32"),
        "world": "world", **dict.fromkeys(("rows", "whole", "columns", "chunks"), "i32"),
        **dict.fromkeys(values, "constexpr"),
    }  # fmt: skip
    return "library_sums.sum_kernel", types, values, {"num_warps": 8}


def _moved(kernel: str, word: str, constants, sizes, options=None):
    """A kernel that moves words of a type: its constants and run-time sizes."""
    types = {
        **dict.fromkeys(("x", "out", "stage"), word), "slots": "*i64", "places": "*i64",
        "read": "*i32", "sent": "*i32", "channel": "channel", "world": "world",
        **dict.fromkeys(sizes, "i32"), **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    return kernel, types, constants, options or {"num_warps": 8}


def _pushed(word: str = "*i64", unit: int = 16, each: bool = True, own_first: bool = False):
    return _tiled("pushing.push_kernel", word, unit, (), {"EACH": each, "OWN_FIRST": own_first})


def _scattered(word: str = "*i64", unit: int = 16):
    sizes = ("root", "lane_units", "part_units", "rounds")
    return _tiled("broadcast.scatter_kernel", word, unit, sizes, {"LANES": 2})


def _tiled(kernel: str, word: str, unit: int, sizes, chosen):
    from tdx.kernels.select import push_block, push_tile

    width = int(word[2:]) // 8
    tile = push_tile("cuda", *push_block("cuda", 1 << 26), width)
    options = {"num_warps": tile.pop("num_warps")}
    constants = {**chosen, **tile, "WIDTH": width, "UNIT": unit}
    return _moved(kernel, word, constants, ("direct", "units", "round_units", *sizes), options)


def _words(kernel: str, word: str, **more):
    width = int(word[2:]) // 8
    constants = {"WIDTH": width, "BLOCK": 256 if width == 8 else 512, **more}
    return _moved(f"{kernel}.low_latency_kernel", word, constants, ("root", "count", "vectors"))


def _product(
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
        "A_STEP": 1, "B_STEP": 1, "RANKS": 4, "ONE_SHOT": False, "GATHERED": False, "TRACE": False,
        "DESCRIBED": described, "PIECES": 4, "CHUNK": 1024, "OWN_CHUNK": 0, "SPLIT": 2,
        "WIDE": False, "PAIRS": size == 2, "SCATTERED": False, "BLOCK": 1024, "SAMPLES": 128,
        "PUSH": True, "SENDERS": 16, "UNIT": 16, "SCALED": size == 1, "SCALES": 256,
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
             "stride_bn", "chunk_rows", "chunks", "owned", "owned_rows", "line_units"),
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
    "two_shot-bf16": _shards("two_shot.two_shot_kernel", "bfloat16"),
    "two_shot-bf16-8": _shards("two_shot.two_shot_kernel", "bfloat16", 8),
    "two_shot-fp32-team": _shards("two_shot.two_shot_kernel", "float32", world="team"),
    "two_shot-copy": _shards("two_shot.two_shot_kernel", "bfloat16", WHOLE=False, COPY=True),
    "two_shot-avg": _shards(
        "two_shot.two_shot_kernel", "float32", OP="avg", HAS_BIAS=True, HAS_RESIDUAL=True,
        WHOLE=False, COPY=True,
    ),
    "two_shot-copy-2": _shards("two_shot.two_shot_kernel", "bfloat16", 2, WHOLE=False, COPY=True),
    "two_shot-buffer": _shards("two_shot.two_shot_kernel", "bfloat16", COPY=True),
    "two_shot-root": _shards(
        "two_shot.two_shot_kernel", "bfloat16", WHOLE=False, COPY=True, ROOTED=True
    ),
    "words-two_shot-bf16": _shards("two_shot.low_latency_two_shot_kernel", "bfloat16"),
    "words-two_shot-fp32": _shards(
        "two_shot.low_latency_two_shot_kernel", "float32", OP="avg", HAS_RESIDUAL=True
    ),
    "scatter-bf16": _shards("reduce_scatter.push_kernel", "bfloat16"),
    "scatter-fp32-8": _shards("reduce_scatter.push_kernel", "float32", 8),
    "scatter-odd": _shards("reduce_scatter.push_kernel", "bfloat16", UNIT=1, BLOCK=4096),
    "words-scatter-bf16": _shards("reduce_scatter.low_latency_kernel", "bfloat16"),
    "norm-one_shot": _norm("one_shot", "bfloat16"),
    "norm-one_shot-fp32-odd": _norm("one_shot", "float32", 5001, HAS_RESIDUAL=False),
    "norm-two_shot": _norm("two_shot", "bfloat16", SLOTS=2),
    "norm-two_shot-2": _norm("two_shot", "bfloat16", ranks=2, SLOTS=2),
    "norm-two_shot-8": _norm("two_shot", "bfloat16", ranks=8),
    "words-norm-bf16": _norm("low_latency", "bfloat16"),
    "words-norm-fp32": _norm("low_latency", "float32", 4096, 8),
    "words-norm-2-bf16": _norm("low_latency", "bfloat16", 8192, 2),
    "words-norm-many-bf16": _norm("low_latency", "bfloat16", 32768, 4),
    "words-norm-16-bf16": _norm("low_latency", "bfloat16", 8192, 16),
    "pull": _pull(),
    "pull-odd": _pull("*i8", 1),
    "push": _push(),
    "push-scaled": _push(scaled=True),
    "push-all": _pushed(),
    "push-one": _pushed(each=False, own_first=True),
    "push-odd": _pushed("*i8", 1),
    "words-i64": _words("low_latency", "*i64", EACH=True, RANKS=4),
    "words-i16": _words("low_latency", "*i16", EACH=False, RANKS=8),
    "root-words-i64": _words("broadcast", "*i64"),
    "root-words-i8": _words("broadcast", "*i8"),
    "broadcast-scatter": _scattered(),
    "broadcast-scatter-odd": _scattered("*i16", 1),
    "put-signal": (
        "one_sided.signal_kernel",
        {"signal": "*i32", "world": "world", "peer": "i32", "value": "i32"}, {}, {"num_warps": 1},
    ),
    "grant": (
        "copy_push.grant_kernel",
        {**GATHERING, **dict.fromkeys(("finished", "sent"), "*i32"),
         **dict.fromkeys(("peer", "word", "chunks", "count"), "i32")}, {}, {"num_warps": 1},
    ),
    "confirm": (
        "copy_push.confirm_kernel",
        {"progress": "*i32", "epoch": "*i32", "world": "world", "units": "i32"},
        {},
        {"num_warps": 1},
    ),
    "arrive": (
        "library_chunks.arrive_kernel",
        {"progress": "*i32", "epoch": "*i32", "world": "world", "peer": "i32", "chunks": "i32"},
        {},
        {"num_warps": 1},
    ),
    "done": (
        "library_sums.done_kernel",
        {"finished": "*i32", "world": "world",
         **dict.fromkeys(("owner", "chunks", "tiles", "last_tiles"), "i32")}, {}, {"num_warps": 1},
    ),
    "sum": _summed(),
    "sum-whole": _summed(512),
    "take": _take(),
    "take-rows": (
        "gathering_product.take_kernel",
        {"out": "*i64", "slots": "*i64", "epoch": "*i32", "world": "world", "row_units": "i32",
         "UNIT": "constexpr", "BLOCK": "constexpr"},
        {"UNIT": 16, "BLOCK": 4096},
        {"num_warps": 8},
    ),
    "take-odd": _take(even=False),
    "enter": ("copy_push.enter_kernel", {**GATHERING, "chunks": "i32"}, {}, {"num_warps": 1}),
    "barrier": (
        "barrier.barrier_kernel", {"channel": "channel", "world": "world"}, {}, {"num_warps": 1},
    ),
}  # fmt: skip
RAGGED = {"shape": (4096, 4104, 4096)}
FEW_ROWS = {"shape": (16, 7168, 8192)}
SEVERAL_ROWS = {"shape": (128, 7168, 8192)}
SCATTERED_ROWS = {"ONE_SHOT": True, "SCATTERED": True, **SEVERAL_ROWS}
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
    "scattered-whole": ("matmul_reduce_scatter.fused_kernel", "bfloat16", {"OWN_CHUNK": 512}),
    "scattered-fp32": ("matmul_reduce_scatter.fused_kernel", "float32", {}),
    "finish-bf16": ("product_first.finish_kernel", "bfloat16", {}),
    "fused-bf16": ("summed_tiles.fused_kernel", "bfloat16", {}),
    "fused-fp32": ("summed_tiles.fused_kernel", "float32", {}),
    "fused-one_shot-ragged": (
        "summed_tiles.fused_kernel",
        "bfloat16",
        {"ONE_SHOT": True, **RAGGED},
    ),
    "words-product-bf16": ("low_latency_product.low_latency_kernel", "bfloat16", SEVERAL_ROWS),
    "words-product-fp32": ("low_latency_product.low_latency_kernel", "float32", SEVERAL_ROWS),
    "fused-scattered": ("summed_tiles.fused_kernel", "bfloat16", SCATTERED_ROWS),
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
    "fused-fp8": ("summed_tiles.fused_kernel", "float8_e4m3fn", {"b_unit": 0}),
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
        {"OWN_CHUNK": 512, **BY_DESCRIPTORS},
    ),
    "words-product-described": (
        "low_latency_product.low_latency_kernel",
        "bfloat16",
        {**BY_DESCRIPTORS, **SEVERAL_ROWS},
    ),
    "fused-described": ("summed_tiles.fused_kernel", "bfloat16", BY_DESCRIPTORS),
}
PRODUCTS |= FLOAT8 | DESCRIBED


def job(case: str, target: str) -> Job:
    """A case on a target."""
    if case in CASES:
        return _job(*CASES[case], target)
    name, dtype, chosen = PRODUCTS[case]
    return product_job(name, dtype, target, **chosen)


def product_job(kernel: str, dtype: str, target: str, **chosen) -> Job:
    """A kernel with a product on a target, as `_product` has it."""
    return _job(*_product(kernel, dtype, target, **chosen), target)


def _job(kernel: str, types, constants, options, target: str) -> Job:
    if target in AMD and options["num_warps"] == 16:
        options = {**options, "num_warps": 8}  # as many threads: waves are twice as wide
    module, name = kernel.split(".")
    return Job(f"tdx.kernels.{module}", name, types, constants, target, options)
