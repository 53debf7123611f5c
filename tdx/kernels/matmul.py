"""Matrix product on one rank.

C = act(A . B + bias): A (M, K), B (K, N), any strides, any M, N, K. Accumulates in float32.
float8 inputs have scales, one or one for each row of A and column of B, which multiply the sum.
Persistent blocks walk over the tiles in groups of rows, so that tiles which run together share
columns of B in cache (the grouped order of Triton's matmul tutorial). Where the GPU has tensor
descriptors (TMA) and the operands allow it, those load A and B.

Where K is split, see split_matmul.py; where cuBLAS multiplies instead, library_product.py.

float32 inputs are multiplied as IEEE float32 unless `allow_tf32=True`. For one Config the bits
of a tile depend on its inputs only: not on the rank, the run, or how many blocks there are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.call import Call
from tdx.kernels.library_product import LibraryProduct, check_library, library_product
from tdx.kernels.operand import (
    Operand,
    begin_aligned,
    check_apart,
    check_output,
    enter,
    flattened,
    operand,
)
from tdx.kernels.plan_cache import check_key, check_recording, remembered
from tdx.kernels.product import ACTIVATIONS, Config, Product, blocks_for
from tdx.kernels.product_options import given_operand, given_rows
from tdx.kernels.split_matmul import split_kernel, split_memory
from tdx.kernels.tile_product import grouped_tile, known, known_strides, store_tile, tile_product
from tdx.kernels.tiles import check_config
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Bound
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["ACTIVATIONS", "Config", "bind_matmul", "matmul"]


@triton.jit
def multiply_rows(
    a, b, c, bias, scale_a, scale_b, base, first_row, rows, columns, depth,
    stride_am, stride_ak, stride_bk, stride_bn, before, ok, trace, mark,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr, DESCRIBED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """This block's share of the tiles of `rows` rows: those of a from `base` on, of c from
    `first_row` on. `before`: how many tiles went to blocks before these.

    Nothing is stored unless `ok`. TRACE: `mark` is stored for each tile.
    """
    tiles_m = tl.cdiv(rows, BM)
    tiles_n = tl.cdiv(columns, BN)
    blocks = tl.num_programs(0)
    begin = (tl.program_id(0) + blocks - before % blocks) % blocks
    for tile in range(begin, tiles_m * tiles_n, blocks):
        row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        total = tile_product(
            a, b, scale_a, scale_b, base, row, col, rows, columns, depth,
            stride_am, stride_ak, stride_bk, stride_bn,
            BM, BN, BK, PRECISION, B_UNIT, A_STEP, B_STEP, DESCRIBED,
        )  # fmt: skip
        store_tile(
            c + first_row * columns, total, bias, row, col, rows, columns, columns, ok,
            BM, BN, HAS_BIAS, ACTIVATION, DESCRIBED and BN > 128,
        )  # fmt: skip
        if TRACE:
            tl.store(trace + before + row * tiles_n + col, mark)


_SIZES = ["rows", "columns", "depth", "stride_am", "stride_ak", "stride_bk", "stride_bn"]


@triton.jit(do_not_specialize=_SIZES)
def matmul_kernel(
    a, b, c, bias, scale_a, scale_b, world, rows, columns, depth,
    stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """GATHERED: peers have sent a, and nothing is stored if they did not."""
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_am, stride_ak = known_strides(stride_am, stride_ak, A_UNIT, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    ok = True
    if GATHERED:
        ok = tdl.no_fault(world)
        if DESCRIBED:
            tdl.fence_async_proxy()
    multiply_rows(
        a, b, c, bias, scale_a, scale_b, 0, 0, rows, columns, depth,
        stride_am, stride_ak, stride_bk, stride_bn, 0, ok, world, 0, BM, BN, BK, GROUP_M,
        PRECISION, HAS_BIAS, ACTIVATION, B_UNIT, A_STEP, B_STEP, DESCRIBED, False,
    )  # fmt: skip


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: Any = None,
    out: Any = None,
    allow_tf32: bool = False,
    fast_accum: bool = False,
    library: bool | None = None,
    config: Config | None = None,
    algorithm: str | None = None,
    team: Group | None = None,
    stream: Any = None,
) -> Any:
    """act(a . b + bias) on this rank alone.

    Parameters
    ----------
    a, b : tdx arrays, or arrays of NumPy or a DLPack producer
        (..., K) and (K, N): float16, bfloat16, float32 or float8_e4m3fn. b may be strided (w.T),
        never copied; a of others than tdx is where its leading axes do not lie behind one another.
    bias : array, optional
        (N,), of any floating-point type.
    activation : {"relu", "silu", "gelu", "gelu_tanh"}, optional
    scale_a, scale_b : number or float32 array, optional
        For float8 only: what a and b are to be multiplied by. A number or an array of one
        element; or (...), one for each row of a, and (N,), one for each column of b. None: 1.
    out_dtype, out : optional
        Type of the result, float16, bfloat16 or float32 (None: that of a, of float8 bfloat16), or
        the array it goes to.
    allow_tf32 : bool
        Round float32 inputs to tf32.
    fast_accum : bool
        Sum float8 products as precisely as tensor cores do, see below.
    library : bool, optional
        Whether cuBLAS multiplies. None: where it is installed, is faster, and takes what it is
        given; True: Unsupported says why it does not; False: never. Bits differ.
    config : Config, optional
        Pins the tile of a kernel of tdx, and with it the bits of the result.
    algorithm, team : None
        As the overlapped products have them: there is one algorithm, and no rank but this one.
    stream : optional
        None: the world's current stream for tdx arrays, else the caller's.

    float8 needs sm_89 or later on NVIDIA GPUs, and is fastest with a transposed view as b. Tensor
    cores of sm_89 and sm_90 keep about 14 bits of a sum: by default the sums of 512 products (of
    block_k, if that is more) go on in float32; with fast_accum=True, as with PyTorch's
    use_fast_accum, they sum all.

    Returns (..., N) in the framework of `a`. Raises InvalidArgument, DtypeError, Unsupported.
    """
    call = Call("matmul", a, b, stream=stream)
    world = call.world
    world.check()
    world.group(team)
    if algorithm is not None:
        raise InvalidArgument(f"algorithm={algorithm!r}: a matmul on one rank has only one")
    x, y = given_rows(call, a), call.operand(b, "b", strided=True)
    if len(y.shape) != 2:
        raise InvalidArgument(f"b must have 2 axes (K, N), got shape {y.shape}")
    options = {
        "bias": bias is not None, "activation": activation, "out_dtype": out_dtype,
        "allow_tf32": allow_tf32, "fast_accum": fast_accum, "library": library, "config": config,
    }  # fmt: skip
    aligned = not (x.address | y.address) % 16
    layout = (x.dtype, x.shape, x.strides, y.dtype, y.shape, y.strides, aligned)
    key = (*layout, *options.values())
    check_key("matmul", key, lambda: options)
    ready = remembered(
        world,
        "matmul",
        key,
        lambda: _Prepared(world, x, y, *options.values(), aligned),
    )
    product, shape, n = ready.product, ready.shape, y.shape[1]
    target = call.target(out, shape, product.out_dtype)
    to = check_output(world, target, shape, product.out_dtype)
    vector = product.check_bias(world, given_operand(call, bias, "bias"), n, x)
    left, right = given_operand(call, scale_a, "scale_a"), given_operand(call, scale_b, "scale_b")
    left, step_a = product.check_scale(world, left, shape[:-1], "scale_a", x)
    right, step_b = product.check_scale(world, right, (n,), "scale_b", x)
    if 0 not in to.shape:
        ops = (x, y, to, vector, left, right)
        check_apart("matmul", to, x, y, vector, left, right)
        run, memory = ready.kernel(ops, (step_a, step_b), call.stream)
        handle = call.handle()
        with ready.lock if memory else contextlib.nullcontext():  # that another stream has it
            enter(world, handle, *ops, *memory)
            run(handle, *ops)
    return call.finish(target)


class _Prepared:
    """A product of operands of one layout: the checks done, kernels bound at first use."""

    def __init__(
        self, world: World, x: Operand, y: Operand, bias: bool, activation: str | None,
        out_dtype: Any, allow_tf32: bool, fast_accum: bool, library: bool | None,
        config: Config | None, aligned: bool,
    ):  # fmt: skip
        check_config(config)
        k, n = y.shape
        self.product = Product.make(
            world, x.dtype, bias=bias, activation=activation, out_dtype=out_dtype,
            allow_tf32=allow_tf32, fast_accum=fast_accum, library=library,
            tune=False,  # a shape may not come again
        )  # fmt: skip
        self.product.check(x, y, k, n)
        check_library(world, self.product, config)
        self.shape = (*x.shape[:-1], n)
        rows, *strides = flattened(x)
        self._world, self._aligned, self._pinned = world, aligned, config
        self._sizes = (rows, n, k, *strides, *y.strides)
        usual = Config(16, 16, 16)
        fits = config is not None or self.product.described(world, usual, self._sizes, aligned)
        self._config = self.product.tile(config, world, rows, n, k, described=fits)
        self._described = self.product.described(world, self._config, self._sizes, aligned)
        self._kernels: dict[Any, tuple[Bound, list[Operand]]] = {}
        self.lock = threading.Lock()  # for memory that calls share, from entering to queueing

    def kernel(
        self, ops: Sequence[Operand], steps: tuple[int, int], stream: Any
    ) -> tuple[Bound, list[Operand]]:
        """For operands a, b, c, bias and scales, which lie so many elements apart; its memory."""
        others = (*ops[2 : 3 + self.product.bias], *(ops[4:] if any(steps) else ()))
        aligned = self._aligned and begin_aligned(*others)
        key = (ops[3].dtype, steps, aligned)
        known = self._kernels.get(key)
        if known is None:
            check_recording(self._world, "matmul", stream)
            known = self._kernels[key] = self._bind(ops, steps, aligned)
        return known

    def _bind(
        self, ops: Sequence[Operand], steps: tuple[int, int], aligned: bool
    ) -> tuple[Bound, list[Operand]]:
        world, product = self._world, self.product
        run: Bound | None = library_product(
            world, product, self._pinned, self._sizes, steps, ops[3].dtype, aligned
        )
        if isinstance(run, LibraryProduct):
            memory = run.memory
        else:
            memory = split_memory(world, self._config, *self._sizes[:2])
            run = bind_matmul(
                world, product, self._config, self._sizes, steps, self._described,
                tuple(op.dtype for op in ops[2:]), memory,
            )  # fmt: skip
        return run, [operand(world, array, "memory") for array in memory]


def bind_matmul(
    world: World, product: Product, config: Config, sizes: Sequence[int], steps: tuple[int, int],
    described: bool, others: Sequence[np.dtype], memory: Sequence[Array], senders: Any = None,
) -> Bound:  # fmt: skip
    """matmul_kernel, or split_kernel, for a product of `sizes`, scales with `steps`: see Product.

    `others` are the types of c, bias and scales; `memory` is what split_memory gave; `senders` is
    the handle of the group that sent a.
    """
    tiles = config.tiles(*sizes[:2])
    constants = product.constants | product.product_constants(config, sizes, steps, described)
    constants["GATHERED"] = senders is not None
    kernel: Any = matmul_kernel
    if memory:
        kernel, tiles, constants["SPLIT"] = split_kernel, tiles * config.split_k, config.split_k
    return world.driver.bind(
        kernel, blocks_for(world, tiles), (*product.kinds(config, described, sizes), *others),
        (*memory, senders or world.handle, *sizes), constants,
    )  # fmt: skip
