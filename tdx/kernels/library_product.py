"""Products by cuBLAS, where it is installed and faster than the kernels here.

They are what an operation runs beside its communication in place of its own product: of all rows,
or of rows of one rank, whose arrival a small kernel awaits, or which copies follow.
cuBLAS takes no notice of faults: what such a product has stored after one is of no use.

A rank takes it for the operands that it gets: what it sends, and when, does not depend on it. A
Config pins the bits of a product, and so keeps it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tdx.kernels.library_comparison import take_fastest
from tdx.kernels.operand import Operand
from tdx.kernels.plan_cache import remembered
from tdx.kernels.product import Config, Product
from tdx.runtime.config import config as settings
from tdx.runtime.driver.cublas import ALIGNMENT, Cublas, Gemm, Layout, Unfit, start
from tdx.runtime.errors import DriverError, HeapExhausted, Unsupported
from tdx.runtime.world import World

__all__ = [
    "LibraryProduct",
    "check_library",
    "library_product",
    "may_multiply",
    "refused",
    "start_library",
]

_EACH_ARCH = "sm_90"  # which has scales of rows and columns
# Measured on H100s: least multiplications, and rows if each has a scale. The host takes longer than
# the GPU for few, unless a graph is replayed.
_LEAST, _LEAST_EACH = 1 << 22, 256


class LibraryProduct:
    """A product of one layout, which is called as bind_matmul's kernels are.

    Attributes
    ----------
    memory : list[Array]
        What it uses besides operands, one call at a time.
    """

    def __init__(self, world: World, gemm: Gemm, nbytes: int):
        """`nbytes`: the memory of its largest operand."""
        self._gemm, self._driver = gemm, world.driver
        size = gemm.workspace
        self.memory = [world.empty((size,), "int8", symmetric=False)] if size else []
        self._workspace = self.memory[0]._address if size else 0
        if world.recording is None:
            self._load(world, nbytes)

    def __call__(
        self, stream: int, a: Operand, b: Operand, c: Operand, bias: Operand, scale_a: Operand,
        scale_b: Operand,
    ) -> None:  # fmt: skip
        """Queue it."""
        self.at(
            stream, a.address, b.address, c.address, bias.address, scale_a.address, scale_b.address
        )

    def at(
        self, stream: int, a: int, b: int, c: int, bias: int, scale_a: int, scale_b: int
    ) -> None:
        """Queue it, for operands at these addresses."""
        with self._driver.using():
            self._gemm(stream, a, b, c, bias, scale_a, scale_b, self._workspace)

    def prepare(self, *operands: Any) -> None:
        """Nothing is left to load."""

    def _load(self, world: World, nbytes: int) -> None:
        """Multiply what lies anywhere: cuBLAS loads code as it queues a product.

        Loading may have to wait for kernels that run, which may wait for the product, or for peers.
        Where memory is short the first call does it.
        """
        try:
            scratch = world.empty((nbytes,), "int8", symmetric=False)
        except HeapExhausted:
            return
        self.at(world.driver.current_stream(), *(scratch._address,) * 6)


def start_library(world: World) -> Cublas:
    """The world's cuBLAS. Raises Unsupported with the reason if there is none."""
    cublas, reason = _library_of(world)
    if cublas is None:
        raise Unsupported(reason)
    return cublas


def _library_of(world: World) -> tuple[Cublas | None, str]:
    """The world's cuBLAS, started at first use, or None and why there is none."""
    return remembered(world, "library", "cublas", lambda: _start(world))


def _start(world: World) -> tuple[Cublas | None, str]:
    if world.backend != "cuda":
        return None, f"cuBLAS is for NVIDIA GPUs, not for the {world.backend} backend"
    try:
        with world.driver.using():
            cublas = start()
    except DriverError as error:
        return None, str(error)
    world.teardown.add(_close, world, cublas)
    return cublas, ""


def _close(world: World, cublas: Cublas) -> None:
    with world.driver.using():
        cublas.close()


def may_multiply(world: World, product: Product, config: Config | None) -> bool:
    """Whether cuBLAS is there for a product, if that is faster. Ranks may have to agree on it."""
    if config is not None or product.library is False or _unfit_activation(product):
        return False
    return bool(product.library or settings.cublas) and _library_of(world)[0] is not None


def check_library(
    world: World, product: Product, config: Config | None, algorithm: str | None = None,
    algorithms: Sequence[str] = (),
) -> None:  # fmt: skip
    """Raise Unsupported if `product` is to be cuBLAS's, and cannot be.

    `config` and `algorithm`: what the caller asks for; `algorithms`: those that can run with it.
    """
    if not product.library:
        return
    cublas, reason = _library_of(world)
    if config is not None:
        reason = "config pins the tile of a kernel of tdx"
    elif algorithm is not None and algorithm not in algorithms:
        reason = f'"{algorithm}" multiplies in the kernel that communicates; see algorithm='
    else:
        reason = reason or _unfit_activation(product)
    if cublas is None or reason:
        raise refused(reason)


def library_product(
    world: World, product: Product, config: Config | None, sizes: Sequence[int],
    steps: tuple[int, int], bias: np.dtype, aligned: bool, pays: bool | None = None,
) -> LibraryProduct | None:  # fmt: skip
    """The product of `sizes` by cuBLAS; None if one of ours is to run.

    `config`: what the caller pinned; `sizes`, `steps`: see Product; `bias`: its type; `aligned`:
    what cuBLAS reads and writes begins at multiples of 16 bytes; `pays`: whether the operation
    gains by it, None: if the product is large.
    """
    rows, n, k = sizes[:3]
    if not product.scaled:
        steps = (0, 0)  # of what stands in for scales
    if product.library is None:
        if pays is None:
            pays = rows * n * k >= _LEAST
        pays &= not any(steps) or rows >= _LEAST_EACH
        if not (pays and may_multiply(world, product, config)):
            return None
    elif not product.library:
        return None
    cublas, reason = _library_of(world)
    if cublas is not None:
        reason = _unfit(world, product, sizes, steps, bias, aligned)
        if not reason:
            try:
                layout, operands = _layout(product, sizes, steps), _operand_bytes(product, sizes)
                gemm = Gemm(cublas, layout)
                if product.tune:
                    take_fastest(world, gemm, layout, operands)
                return LibraryProduct(world, gemm, max(operands))
            except Unfit as error:
                reason = str(error)
    if product.library:
        raise refused(reason)
    return None


def refused(reason: str) -> Unsupported:
    """What library=True raises if cuBLAS cannot multiply."""
    return Unsupported(f"library=True: {reason}; leave it None for the kernels of tdx")


def _unfit(
    world: World, product: Product, sizes: Sequence[int], steps: tuple[int, int], bias: np.dtype,
    aligned: bool,
) -> str:  # fmt: skip
    """Why cuBLAS cannot make a product, as far as it does not say so itself."""
    rows, n, k, *strides = sizes
    if not min(rows, n, k):
        return "a or b is empty"
    if reason := _unfit_activation(product):
        return reason
    if product.bias and bias != product.out_dtype:
        return f"a bias of {bias} is not of the result's type, {product.out_dtype}"
    if not aligned:
        return f"an operand does not begin at a multiple of {ALIGNMENT} bytes"
    for (step, unit), (lines, length) in ((strides[:2], (rows, k)), (strides[2:], (k, n))):
        if unit != 1:
            step, unit, lines, length = unit, step, length, lines
        if unit != 1 or (step < length and lines > 1):
            return f"strides {strides}: lines of a or b lie into each other, or apart both ways"
    if product.scaled and steps[0] != steps[1]:
        return (
            "a has a scale for each row, as rows have that were gathered first, and b has one for "
            "all, or the other way round"
        )
    if any(steps) and world.device.arch != _EACH_ARCH:
        return f"scales of rows and columns are for {_EACH_ARCH}, not {world.device.arch}"
    return ""


def _unfit_activation(product: Product) -> str:
    if product.activation is None:
        return ""
    return f"activation={product.activation!r} is no part of its products here"


def _operand_bytes(product: Product, sizes: Sequence[int]) -> tuple[int, ...]:
    """The memory of a, b and c, and of the longest vector."""
    rows, n, k, *strides = sizes
    a, b = (
        1 + (lines - 1) * step + (length - 1) * unit
        for lines, length, step, unit in ((rows, k, *strides[:2]), (k, n, *strides[2:]))
    )
    size, out = product.dtype.itemsize, product.out_dtype.itemsize
    return a * size, b * size, rows * n * out, 4 * max(rows, n)


def _layout(product: Product, sizes: Sequence[int], steps: tuple[int, int]) -> Layout:
    rows, n, k, *strides = sizes
    return Layout(
        rows, n, k, product.dtype.name, product.out_dtype.name, tuple(strides),
        product.out_dtype.name if product.bias else None,
        ("each" if any(steps) else "one") if product.scaled else None,
        product.precision != "promoted", product.precision == "tf32",
    )  # fmt: skip
