"""How tdx's own kernels are called: the cases that are compiled ahead of time."""

from __future__ import annotations

from tests.aot.harness import AMD, Job
from tests.aot.products import POINTER, PRODUCTS, product_call

__all__ = ["CASES", "job", "product_job"]

NO_FUSION = {"enable_fp_fusion": False, "num_warps": 8}
_LANES = 128  # of packed words, as select.py has them for large arrays


def _all_reduce(algorithm: str, dtype: str, world: str = "world", **chosen):
    pointer = POINTER[dtype]
    types = {
        **dict.fromkeys(("x", "out", "bias", "residual"), pointer),
        "slots": pointer if algorithm == "one_shot" else "*i64",
        **{"channel": "channel", "world": world},
        **dict.fromkeys(("numel", "columns", "vectors"), "i32"),
    }  # fmt: skip
    constants = {"OP": "sum", "HAS_BIAS": False, "HAS_RESIDUAL": False, "BLOCK": 4096, **chosen}
    options = NO_FUSION
    if algorithm == "low_latency":
        pairs = dtype == "bfloat16"
        constants.update(BLOCK=_LANES * (2 if pairs else 1), PAIRS=pairs)
        constants.setdefault("RANKS", 8)
        options = {**NO_FUSION, "num_warps": _LANES // 32}
    types.update(dict.fromkeys(constants, "constexpr"))
    module = "all_reduce" if algorithm == "one_shot" else "all_reduce_words"
    return f"{module}.{algorithm}_kernel", types, constants, options


def _shards(kernel: str, dtype: str, ranks: int = 4, world: str = "world", **chosen):
    """A kernel of two_shot.py or reduce_scatter.py as select.py would have it for 64 MiB."""
    from tdx.kernels.select import shard_block

    pointer, size = POINTER[dtype], 2 if dtype == "bfloat16" else 4
    words = "low_latency" in kernel
    block, warps = shard_block("cuda", (64 << 20) // size // ranks, size, ranks)
    values = {
        "OP": "sum", "HAS_BIAS": False, "HAS_RESIDUAL": False, "RANKS": ranks,
        "SLOTS": 4 if ranks == 2 else 2, "AHEAD": int(ranks == 2),
        "WHOLE": True, "COPY": False, "ROOTED": False, "UNIT": 16, "PAIRS": size == 2,
        "ALIKE": False, "RESULT_PAIRS": size == 2, "EVEN": True,
        "BLOCK": _LANES * 4 // size if words else block, **chosen,
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
    return kernel, types, values, {**NO_FUSION, "num_warps": _LANES // 32 if words else warps}


def _norm(algorithm: str, dtype: str, columns: int = 8192, ranks: int = 4, **chosen):
    """A kernel of rms_norm_kernels.py as select.py would have it for rows of `columns`."""
    from tdx.kernels.select import HELD_ROW_BYTES, row_block

    size = 2 if dtype == "bfloat16" else 4
    block, warps = row_block("cuda", columns, size, ranks, algorithm == "two_shot")
    values = {"PIECES": -(-columns // block), "BLOCK": block, **chosen}
    if algorithm == "two_shot":
        values["HELD"] = columns * size <= HELD_ROW_BYTES
    return _norm_call(f"rms_norm_kernels.{algorithm}", dtype, columns, ranks, warps, values)


def _norm_words(
    algorithm: str, dtype: str, rows: int, columns: int = 8192, ranks: int = 4, **chosen
):
    """The same for rms_norm_words.py and so many rows."""
    from tdx.kernels.select import power_of_two, row_words

    size, shares = 2 if dtype == "bfloat16" else 4, ranks if algorithm.endswith("two_shot") else 1
    block, warps = row_words("cuda", rows, -(-columns // shares), size, ranks)
    lanes = power_of_two(-(-columns // (block * shares)))
    values = {
        "PIECES": 1, "LANES": lanes, "PAIRS": size == 2, "WIDE": block * size // 4 > 32 * warps,
        "BLOCK": block, **chosen,
    }  # fmt: skip
    return _norm_call(f"rms_norm_words.{algorithm}", dtype, columns, ranks, warps, values)


def _norm_call(kernel: str, dtype: str, columns: int, ranks: int, warps: int, chosen):
    values = {
        "EPS": 1e-6, "HAS_BIAS": True, "HAS_RESIDUAL": True, "RANKS": ranks,
        "EVEN": columns % 16 == 0, **chosen,
    }  # fmt: skip
    pointer = POINTER[dtype]
    names = ("h", "x", "out", "kept", "weight", "bias", "residual", "staging", "results")
    types = {
        **dict.fromkeys(names, pointer), "slots": "*i64" if "words" in kernel else pointer,
        "squares": "*i64", "signals": "*i32", "channel": "channel", "world": "world",
        **dict.fromkeys(
            ("rows", "columns", "slot_vectors", "row_vectors", "share_vectors", "parts", "shard",
             "step", "steps"), "i32"
        ),
        **dict.fromkeys(values, "constexpr"),
    }  # fmt: skip
    return f"{kernel}_kernel", types, values, {**NO_FUSION, "num_warps": warps}


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


def _grant(every: bool = False):
    types = {
        **GATHERING, **dict.fromkeys(("finished", "sent"), "*i32"),
        **dict.fromkeys(("peer", "peers", "word", "chunks", "count"), "i32"), "ALL": "constexpr",
    }  # fmt: skip
    return "copy_push.grant_kernel", types, {"ALL": every}, {"num_warps": 1}


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
              "EVEN": True, "CHUNK": 512, "OWN_CHUNK": own_chunk,
              "PHASED": own_chunk > 0}  # fmt: skip
    types = {
        **dict.fromkeys(("c", "bias", "partials", "outgoing"), "*bf16"),
        **dict.fromkeys(("made", "signals", "credit", "epoch"), "*i32"), "world": "world",
        **dict.fromkeys(("rows", "whole", "columns", "chunks", "first", "last"), "i32"),
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


def _in_rounds(kernel: str, word: str = "*i64", unit: int = 16):
    sizes = ("root", "lane_units", "rounds", *(() if kernel == "chain" else ("part_units",)))
    return _tiled(f"broadcast_rounds.{kernel}_kernel", word, unit, sizes, {"LANES": 2})


def _tiled(kernel: str, word: str, unit: int, sizes, chosen):
    from tdx.kernels.select import push_block, push_tile

    width = int(word[2:]) // 8
    tile = push_tile("cuda", *push_block("cuda", 1 << 26), width)
    options = {"num_warps": tile.pop("num_warps")}
    constants = {**chosen, **tile, "WIDTH": width, "UNIT": unit}
    return _moved(kernel, word, constants, ("direct", "units", "round_units", *sizes), options)


def _words(kernel: str, word: str, **more):
    width = int(word[2:]) // 8
    constants = {"WIDTH": width, "LANES": _LANES, **more}
    options = {"num_warps": _LANES // 32}
    return _moved(kernel, word, constants, ("root", "count", "part", "rounds"), options)


CASES = {
    "one_shot-bf16": _all_reduce("one_shot", "bfloat16"),
    "one_shot-fp32": _all_reduce("one_shot", "float32"),
    "one_shot-fp32-team": _all_reduce("one_shot", "float32", world="team"),
    "one_shot-avg": _all_reduce(
        "one_shot", "bfloat16", OP="avg", HAS_BIAS=True, HAS_RESIDUAL=True
    ),
    "one_shot-max-i32": _all_reduce("one_shot", "int32", OP="max"),
    "low_latency-bf16": _all_reduce("low_latency", "bfloat16"),
    "low_latency-added-bf16": _all_reduce(
        "low_latency", "bfloat16", HAS_BIAS=True, HAS_RESIDUAL=True
    ),
    "low_latency-16-bf16": _all_reduce("low_latency", "bfloat16", RANKS=16),
    "low_latency-fp32": _all_reduce("low_latency", "float32", OP="avg", HAS_RESIDUAL=True),
    "two_shot-bf16": _shards("two_shot.two_shot_kernel", "bfloat16"),
    "two_shot-2": _shards("two_shot.two_shot_kernel", "bfloat16", 2),
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
    "words-two_shot-bf16": _shards("all_reduce_words.low_latency_two_shot_kernel", "bfloat16"),
    "words-two_shot-fp32": _shards(
        "all_reduce_words.low_latency_two_shot_kernel", "float32", OP="avg", HAS_RESIDUAL=True
    ),
    "words-two_shot-wide": _shards(
        "all_reduce_words.low_latency_two_shot_kernel", "bfloat16",
        HAS_BIAS=True, HAS_RESIDUAL=True, RESULT_PAIRS=False,
    ),
    "words-two_shot-alike": _shards(
        "all_reduce_words.low_latency_two_shot_kernel", "bfloat16",
        HAS_BIAS=True, HAS_RESIDUAL=True, ALIKE=True,
    ),
    "scatter-bf16": _shards("reduce_scatter.push_kernel", "bfloat16"),
    "scatter-2": _shards("reduce_scatter.push_kernel", "bfloat16", 2),
    "scatter-fp32-8": _shards("reduce_scatter.push_kernel", "float32", 8),
    "scatter-odd": _shards("reduce_scatter.push_kernel", "bfloat16", UNIT=1, BLOCK=4096),
    "scatter-ragged": _shards("reduce_scatter.push_kernel", "bfloat16", EVEN=False),
    "words-scatter-bf16": _shards("reduce_scatter.low_latency_kernel", "bfloat16"),
    "norm-one_shot": _norm("one_shot", "bfloat16"),
    "norm-one_shot-fp32-odd": _norm("one_shot", "float32", 5001, HAS_RESIDUAL=False),
    "norm-two_shot": _norm("two_shot", "bfloat16"),
    "norm-two_shot-2": _norm("two_shot", "bfloat16", ranks=2),
    "norm-two_shot-4096": _norm("two_shot", "bfloat16", 4096),
    "norm-two_shot-fp32": _norm("two_shot", "float32"),
    "norm-two_shot-16384": _norm("two_shot", "bfloat16", 16384),
    "norm-two_shot-2-32768": _norm("two_shot", "bfloat16", 32768, ranks=2),
    "norm-two_shot-fp32-65536-8": _norm("two_shot", "float32", 65536, ranks=8),
    "norm-two_shot-8": _norm("two_shot", "bfloat16", ranks=8),
    "norm-rows": _norm("rows", "bfloat16", ranks=1),
    "norm-rows-pieces": _norm("rows", "float32", 65001, ranks=1),
    "words-norm-bf16": _norm_words("low_latency", "bfloat16", 1),
    "words-norm-many-bf16": _norm_words("low_latency", "bfloat16", 64),
    "words-norm-2-bf16": _norm_words("low_latency", "bfloat16", 64, ranks=2),
    "words-norm-fp32-8": _norm_words("low_latency", "float32", 64, 4096, 8),
    "words-norm-16-bf16": _norm_words("low_latency", "bfloat16", 16, ranks=16),
    "words-norm-pieces": _norm_words("low_latency", "float32", 1, 65001, 16, PIECES=2),
    "words-norm-two_shot-bf16": _norm_words("low_latency_two_shot", "bfloat16", 16),
    "words-norm-two_shot-many": _norm_words("low_latency_two_shot", "bfloat16", 64),
    "words-norm-two_shot-2": _norm_words("low_latency_two_shot", "bfloat16", 64, ranks=2),
    "words-norm-two_shot-8": _norm_words("low_latency_two_shot", "float32", 64, ranks=8),
    "words-norm-two_shot-pieces": _norm_words(
        "low_latency_two_shot", "float32", 8, 5001, PIECES=2
    ),
    "pull": _pull(),
    "pull-odd": _pull("*i8", 1),
    "push": _push(),
    "push-scaled": _push(scaled=True),
    "push-all": _pushed(),
    "push-one": _pushed(each=False, own_first=True),
    "push-odd": _pushed("*i8", 1, own_first=True),
    "words-i32": _words("low_latency.low_latency_kernel", "*i32", EACH=True, RANKS=4),
    "words-i16": _words("low_latency.low_latency_kernel", "*i16", EACH=False, RANKS=4),
    "root-words-i32": _words("broadcast_words.low_latency_kernel", "*i32"),
    "root-words-i8": _words("broadcast_words.low_latency_kernel", "*i8"),
    "passed-words-i32": _words(
        "broadcast_words.low_latency_scatter_kernel", "*i32", RANKS=4
    ),
    "passed-words-i8": _words(
        "broadcast_words.low_latency_scatter_kernel", "*i8", RANKS=4
    ),
    "broadcast-chain": _in_rounds("chain"),
    "broadcast-chain-odd": _in_rounds("chain", "*i16", 1),
    "broadcast-scatter": _in_rounds("scatter"),
    "broadcast-scatter-odd": _in_rounds("scatter", "*i16", 1),
    "put-signal": (
        "one_sided.signal_kernel",
        {"signal": "*i32", "world": "world", "peer": "i32", "value": "i32"}, {}, {"num_warps": 1},
    ),
    "grant": _grant(),
    "grant-all": _grant(every=True),
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
    "count": (
        "library_sums.count_kernel",
        {"finished": "*i32", "world": "world",
         **dict.fromkeys(("chunks", "tiles", "last_tiles"), "i32")}, {}, {"num_warps": 1},
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


def job(case: str, target: str) -> Job:
    """A case on a target."""
    if case in CASES:
        return _job(*CASES[case], target)
    name, dtype, chosen = PRODUCTS[case]
    return product_job(name, dtype, target, **chosen)


def product_job(kernel: str, dtype: str, target: str, **chosen) -> Job:
    """A kernel with a product on a target, as `product_call` has it."""
    return _job(*product_call(kernel, dtype, target, **chosen), target)


def _job(kernel: str, types, constants, options, target: str) -> Job:
    norm = kernel.startswith("rms_norm_kernels")  # of which select.py gives AMD half the warps
    if target in AMD and (norm or options["num_warps"] >= 16):
        # as many threads: waves are twice as wide
        options = {**options, "num_warps": options["num_warps"] // 2}
    module, name = kernel.split(".")
    return Job(f"tdx.kernels.{module}", name, types, constants, target, options)
