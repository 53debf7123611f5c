"""What reductions and their configurations refuse before anything is compiled."""

from __future__ import annotations

import pytest

from tdx.kernels.all_reduce import Config
from tdx.kernels.matmul import Config as MatmulConfig
from tdx.kernels.reduction import check_types
from tdx.runtime import dtypes
from tdx.runtime.errors import DtypeError, InvalidArgument, Unsupported


def check(dtype: str, out: str, arch: str, op: str = "sum") -> None:
    check_types("all_reduce", dtypes.resolve(dtype), dtypes.resolve(out), op, arch)


@pytest.mark.parametrize("arch", ["host", "sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("out", ["float8_e4m3fn", "float8_e5m2"])
def test_float64_is_not_rounded_to_float8(arch, out):
    """No GPU does that in one step; refused on the host tier too, so that programs move."""
    with pytest.raises(DtypeError, match=f"out_dtype {out} is for inputs of at most 32 bits"):
        check("float64", out, arch)
    check("float64", "bfloat16", arch)
    check("float32", "float8_e5m2", arch)


@pytest.mark.parametrize(("dtype", "out"), [("float8_e4m3fn",) * 2, ("float32", "float8_e4m3fn")])
def test_float8_that_the_architecture_does_not_have(dtype, out):
    with pytest.raises(Unsupported, match="float8_e4m3fn needs sm_89 or later, not sm_86"):
        check(dtype, out, "sm_86")
    for arch in ("sm_89", "sm_90", "sm_120", "gfx942", "host"):
        check(dtype, out, arch)


@pytest.mark.parametrize("values", [{"block": 1 << 21}, {"block": 1024, "num_warps": 64}])
def test_blocks_that_no_gpu_runs(values):
    with pytest.raises(
        InvalidArgument, match=r"at most 1048576 for one_shot, and num_warps=\d+ at most"
    ):
        Config("one_shot", **values)


def test_blocks_of_words():
    """The host tier has 8 lanes' values in a block."""
    Config("low_latency", 1 << 17)
    with pytest.raises(InvalidArgument, match="at most 131072 for low_latency"):
        Config("low_latency", 1 << 18)
    with pytest.raises(InvalidArgument, match="block=1 must be a power of two >= 2"):
        Config("low_latency", 1)


def test_threads_have_registers_for_a_tile_of_words():
    dtype = dtypes.resolve("float32")
    config = Config("low_latency", 2048, 8)
    Config.check(config, "all_reduce", None, dtype, "host")
    Config.check(config, "all_reduce", None, dtypes.resolve("float16"), "cuda")
    with pytest.raises(InvalidArgument, match=r"2048 lanes .* 1024 at most; pass block=1024 or"):
        Config.check(config, "all_reduce", None, dtype, "cuda")


def test_tiles_of_a_product():
    MatmulConfig(1024, 1024, 16)
    with pytest.raises(InvalidArgument, match=r"block_m=2048, block_n=1024 .* 1048576 elements"):
        MatmulConfig(2048, 1024, 16)


def test_warps_of_a_product():
    with pytest.raises(InvalidArgument, match="num_warps=64 must be at most 32"):
        MatmulConfig(16, 16, 16, num_warps=64)
