"""Bits of reductions that do not change: the host tier and GPUs, all algorithms, all versions."""

from __future__ import annotations

import hashlib

import tdx
from tdx.kernels.all_reduce import Config
from tdx.kernels.all_reduce_rms_norm import Config as NormConfig
from tests.helpers.cases import limit, worlds
from tests.helpers.reference import values

# SHA-256 of the reduction of values(rank, 4099, dtype), first 16 digits
DIGESTS = {
    (2, "float32", "sum"): "16799838f850a8bb", (2, "float32", "avg"): "3a27b082eabc1495",
    (2, "float16", "sum"): "cca197827f3c2886", (2, "float16", "avg"): "485f8ff9e50344c6",
    (2, "bfloat16", "sum"): "8e036b7b4fa30310", (2, "bfloat16", "avg"): "62b6f4925a15183f",
    (2, "float64", "sum"): "5f20c7dddb51d7ba", (2, "float64", "avg"): "e7297f50cf7cf397",
    (3, "float32", "sum"): "3cec00d5722e6274", (3, "float32", "avg"): "8f6947ea609dd1ea",
    (3, "float16", "sum"): "95eeea053eb3fa79", (3, "float16", "avg"): "a0aa360901a8eb38",
    (3, "bfloat16", "sum"): "a1f76ce21aa01b6d", (3, "bfloat16", "avg"): "915e735604a5e1e3",
    (3, "float64", "sum"): "36c52d70b014c0c4", (3, "float64", "avg"): "80e41b6ecbe1d67d",
    (4, "float32", "sum"): "e94655c4e34030c2", (4, "float32", "avg"): "166a14adf224f7d1",
    (4, "float16", "sum"): "11a1139463cb3162", (4, "float16", "avg"): "8775c0d16db50fa5",
    (4, "bfloat16", "sum"): "360d6f6639c7edc4", (4, "bfloat16", "avg"): "87c0f9ac5e053b55",
    (4, "float64", "sum"): "a3f7b4976a8f27cb", (4, "float64", "avg"): "5ffecfa9540bde72",
    (5, "float32", "sum"): "7fb945bcc5e4eb4c", (5, "float32", "avg"): "214305e8bfe6d012",
    (5, "float16", "sum"): "edc2e2d9a710b035", (5, "float16", "avg"): "4692b8a0564757df",
    (5, "bfloat16", "sum"): "4842e48ba8bc7c3e", (5, "bfloat16", "avg"): "32723fab6bccf542",
    (5, "float64", "sum"): "4cf5e446d88b4691", (5, "float64", "avg"): "8a11d07403a1f4c9",
}  # fmt: skip
# of sums: input and output types, and digests for 2, 3, 4 and 5 ranks
FLOAT8 = {
    ("float32", "float8_e4m3fn"): (
        "11dc508b5e14b540", "ff33f45c656b1a3a", "3f2a72f504cb7045", "ff44d424429de8c8",
    ),
    ("float32", "float8_e5m2"): (
        "987df58d61fc6e35", "20f012ba868e71fb", "2537fb736cb7fc18", "53c3d70fa747053a",
    ),
    ("float8_e4m3fn", "float8_e4m3fn"): (
        "eb2cad2b11f84def", "128713d0194ad148", "88bd9e9b5846c3ed", "9477023dc8d8a2e4",
    ),
    ("float8_e5m2", "float8_e5m2"): (
        "4274abf38b651482", "fe8586ee5896d960", "900f9e7739f48390", "fd4db4536b053290",
    ),
}  # fmt: skip
# SHA-256 of reductions of values(rank, (41, 100), dtype) with what is added, the bias being
# values(7, 100, dtype) and the residual values(8, (41, 100), dtype), for 2, 3 and 4 ranks
OTHERS = {
    ("float32", "max", ""): (
        "c2ceae9cc220e393", "aafe09b701936b79", "1f6bf6999c0fecda",
    ),
    ("bfloat16", "min", ""): (
        "7aa317719ba85f35", "99136ac7f1014b18", "7cbc9a1915d02daa",
    ),
    ("float64", "max", ""): (
        "51e131c62faaebdc", "8d8d49726aa93c9e", "17b62cdc78cd8123",
    ),
    ("int32", "sum", ""): (
        "a321685ec784d1c5", "47844d55c812068e", "3893bd98e7003eb5",
    ),
    ("int32", "max", ""): (
        "b6ae5af835f11ff9", "65bd8b1e41394ab5", "ca7a2e1dd6cfe3be",
    ),
    ("int64", "sum", ""): (
        "67fc91f86dcf5687", "a4b86f7b66c2eecf", "f3b31675b50b6282",
    ),
    ("int64", "min", ""): (
        "cb42c54c819632f7", "f8e75075ee01f1e8", "c158f6b336746438",
    ),
    ("float32", "sum", "bias"): (
        "9504dd1de38a9849", "51fbaf1ecd296781", "7c898da08862b6c8",
    ),
    ("float32", "sum", "bias residual"): (
        "c0e0e878645cb820", "95de53200174d964", "353a1d62e5b32030",
    ),
    ("float16", "sum", "bias residual"): (
        "29e1b8bb7cf349df", "dcb10e9070f20e4d", "f550f8e976bef3eb",
    ),
    ("bfloat16", "sum", "bias residual"): (
        "116910630d1f1818", "9f629e45f4494d3c", "e7b0298bf64236e7",
    ),
    ("bfloat16", "avg", "bias residual"): (
        "4b174e7d38afcd07", "3a400720bca0b456", "e9e039849d5a4d4f",
    ),
}  # fmt: skip


def digest(array):
    return hashlib.sha256(array.numpy().tobytes()).hexdigest()[:16]


def has_words(x):
    """Whether there are algorithms by words of data and flag."""
    return x.itemsize in (2, 4)


def check_reduce(x, op, stored):
    root = x.world.size - 1
    for algorithm in ("two_shot", "low_latency")[: 1 + has_words(x)]:
        result = tdx.reduce(x, root, op, algorithm=algorithm)
        if result is not None:
            assert digest(result) == stored, (x.dtype, op, "reduce", algorithm)


@worlds(2, 3, 4, 5)
def case_bits_are_those_stored(world):
    rows = -(-4099 // world.size)
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        whole = world.array(values(world.rank, rows * world.size, dtype))
        words = dtype != "float64"
        for op in ("sum", "avg"):
            stored = DIGESTS[world.size, dtype, op]
            for algorithm in Config.algorithms:
                if words or not algorithm.startswith("low_latency"):
                    result = tdx.all_reduce(whole[:4099], op, algorithm=algorithm)
                    assert digest(result) == stored, (dtype, op, algorithm)
            for algorithm in ("push", "low_latency")[: 1 + words]:
                part = tdx.reduce_scatter(whole, op, algorithm=algorithm)
                result = tdx.all_gather(part)[:4099]
                assert digest(result) == stored, (dtype, op, "reduce_scatter", algorithm)
            check_reduce(whole[:4099], op, stored)


@worlds(2, 3, 4, 5)
def case_bits_of_float8_are_those_stored(world):
    """Sums of float32 rounded to 8 bits, and of 8 bits."""
    rows = -(-4099 // world.size)
    for dtype, out in FLOAT8:
        whole = world.array(values(world.rank, rows * world.size, dtype))
        stored, words = FLOAT8[dtype, out][world.size - 2], dtype == "float32"
        for algorithm in ("one_shot", "two_shot", "copy_engine", "low_latency"):
            if words or algorithm != "low_latency":
                result = tdx.all_reduce(whole[:4099], out_dtype=out, algorithm=algorithm)
                assert digest(result) == stored, (dtype, out, algorithm)
        for algorithm in ("push", "low_latency")[: 1 + words]:
            part = tdx.reduce_scatter(whole, out_dtype=out, algorithm=algorithm)
            assert digest(tdx.all_gather(part)[:4099]) == stored, (dtype, out, algorithm)


@worlds(2, 3, 4)
@limit(240)  # on a GPU some ninety kernels are compiled
def case_bits_of_others_are_those_stored(world):
    """Of max, min, integers, and sums with a bias or residual: those of norms are the same."""
    for (dtype, op, added), of_sizes in OTHERS.items():
        stored = of_sizes[world.size - 2]
        x = world.array(values(world.rank, (41, 100), dtype))
        known = {"bias": values(7, 100, dtype), "residual": values(8, (41, 100), dtype)}
        extras = {name: world.array(known[name]) for name in added.split()}
        for algorithm in Config.algorithms:
            if added and algorithm == "copy_engine":
                continue
            if has_words(x) or not algorithm.startswith("low_latency"):
                result = tdx.all_reduce(x, op, algorithm=algorithm, **extras)
                assert digest(result) == stored, (dtype, op, added, algorithm)
        if not added:
            check_reduce(x, op, stored)
        elif "residual" in extras and op == "sum":
            weight = world.array(values(9, 100, dtype))
            for algorithm in NormConfig.algorithms:
                _, h = tdx.all_reduce_rms_norm(x, weight, algorithm=algorithm, **extras)
                assert digest(h) == stored, (dtype, added, "norm", algorithm)
