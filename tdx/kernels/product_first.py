"""A product, then a reduction of it over ranks, then bias and activation: for few rows.

Bits are those of the algorithms that overlap, unless cuBLAS multiplies: each partial is rounded
once, and the ranks' partials are added in float32 from rank 0 upwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.all_reduce import AllReduce
from tdx.kernels.library_product import library_product
from tdx.kernels.matmul import bind_matmul
from tdx.kernels.operand import Operand, elements, operand
from tdx.kernels.reduce_scatter import ReduceScatter
from tdx.kernels.reduced_product import ReducedProduct
from tdx.kernels.split_matmul import split_memory
from tdx.kernels.tile_product import known, store_tile
from tdx.runtime.driver.base import Bound

__all__ = ["ProductFirst", "finish_kernel"]


@triton.jit(do_not_specialize=["rows", "columns"])
def finish_kernel(
    total, c, bias, world, rows, columns,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """c = act(total + bias), rounded once."""
    columns = known(columns, EVEN)
    ok = tdl.no_fault(world)
    tiles_n = tl.cdiv(columns, BN)
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BM) * tiles_n, tl.num_programs(0)):
        row, col = tile // tiles_n, tile % tiles_n
        at = (row * BM + rm).to(tl.int64)[:, None] * columns + col * BN + rn[None, :]
        inside = (rm[:, None] < rows - row * BM) & (rn[None, :] < columns - col * BN)
        value = tl.load(total + at, mask=inside, other=0.0)
        store_tile(
            c, value, bias, row, col, rows, columns, columns, ok, BM, BN, HAS_BIAS, ACTIVATION
        )


class ProductFirst:
    """The kernels and the plan of the `reduction`, whose errors name it. A Way."""

    def __init__(self, plan: ReducedProduct, reduction: type[AllReduce] | type[ReduceScatter]):
        world, product, columns = plan.world, plan.product, plan.shape_b[1]
        self._own = plan.partial_product
        shape = (*plan.shape_a[:-1], columns)
        self._sums = world.empty(shape, plan.partial_dtype, symmetric=False)
        self._memory = split_memory(world, plan.config, elements(shape[:-1]), columns)
        plan._memory.extend(array._block for array in (self._sums, *self._memory))
        self._later = product.bias or product.activation is not None
        self._reduce = reduction(
            world, shape, plan.partial_dtype, team=plan.group, buffer=self._later,
            out_dtype="float32" if self._later else product.out_dtype,
        )  # fmt: skip
        self._finishing: dict[np.dtype, Bound] = {}  # by the type of the bias

    def run(self, plan: Any, multiply: Bound, handle: int, ops: tuple[Operand, ...]) -> None:
        """Queue a call."""
        a, b, scale_a, scale_b, c, bias = ops
        sums = operand(plan.world, self._sums, "sums")
        multiply(handle, a, b, sums, a, scale_a, scale_b)
        if not self._later:
            self._reduce(sums, c, handle)
        else:
            total = operand(plan.world, self._reduce(sums, stream=handle), "total")
            self._finish(plan, bias.dtype)(handle, total, c, bias)

    def bind(self, plan: Any, *layout: Any) -> Bound:
        """The product for operands so laid out."""
        product, (strides, steps, bias, aligned, all_aligned) = self._own, layout
        sizes, scale = plan._sizes(strides), product.scale_dtype
        described = product.described(plan.world, plan.config, sizes, aligned)
        others = (product.out_dtype, plan.dtype, scale, scale)
        if self._later:
            self._finish(plan, bias)
        library = library_product(
            plan.world, product, plan.pinned, sizes, steps, plan.dtype, all_aligned,
            plan.is_for_library,
        )  # fmt: skip
        if library is not None:
            plan.use(library.memory)
            return library
        return bind_matmul(
            plan.world, product, plan.config, sizes, steps, described, others, self._memory
        )

    def _finish(self, plan: Any, bias: np.dtype) -> Bound:
        """What adds a bias of this type, bound at first use."""
        if bias not in self._finishing:
            config, columns = plan.config, plan.shape_b[1]
            rows = elements(plan.out_shape[:-1])
            height, width = min(config.block_m, 64), min(config.block_n, 64)
            tiles = -(-rows // height) * -(-columns // width)
            self._finishing[bias] = plan.bind(
                finish_kernel, plan.blocks_for(tiles),
                (np.dtype("float32"), plan.product.out_dtype, bias), plan.group.handle,
                rows, columns, BM=height, BN=width, EVEN=columns % 16 == 0,
                num_warps=config.num_warps, **plan.product.constants,
            )  # fmt: skip
        return self._finishing[bias]
