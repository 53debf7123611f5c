"""The products of gathered rows by cuBLAS: the own ones, then each rank's when they are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.gathering import Gathering
from tdx.kernels.gathering_turns import leaves_idle
from tdx.kernels.library_product import library_product, refused
from tdx.kernels.operand import Operand
from tdx.kernels.plan import Plan
from tdx.kernels.product import Config, Product
from tdx.runtime.world import World

__all__ = ["bind_library_chunks", "library_gains"]

# Least elements of a rank's result: fewer tiles leave multiprocessors idle at the end of each
# rank's rows. Measured on H100s; float8 gains by it at any size.
_LEAST = 24 << 20


@triton.jit(do_not_specialize=["peer", "chunks"])
def arrive_kernel(progress, epoch, world, peer, chunks):
    """Wait until all chunks of `peer` are there."""
    tdl.wait_all(progress + peer * chunks, chunks, world, tl.load(epoch), first_peer=-chunks)


def library_gains(
    world: World, product: Product, rows: int, columns: int, depth: int, ranks: int
) -> bool:  # fmt: skip
    """Whether cuBLAS takes less time for `rows` rows of each rank, one rank after the other."""
    return rows * columns >= _LEAST or leaves_idle(world, product, rows, columns, depth, ranks)


def bind_library_chunks(
    plan: Plan, gathering: Gathering, product: Product, config: Config | None,
    sizes: Sequence[int], steps: tuple[int, int], bias: np.dtype, aligned: bool,
) -> Callable[..., None] | None:  # fmt: skip
    """What runs them, of the own rows, b, c, bias and scales of b; None if a kernel of ours is to.

    `config`: what the caller pinned; `sizes`, `steps`: see Product, with the rows of all ranks.
    Only beside copy engines: a kernel that pushes would need multiprocessors that cuBLAS takes.
    """
    size, me = plan.group.size, plan.group.rank
    rows, n, k = sizes[0] // size, *sizes[1:3]
    if not gathering.engines:
        if product.library:
            raise refused('no copy engine sends parts so short; pass algorithm="unfused"')
        return None
    part = rows * k * product.dtype.itemsize  # bytes from one rank's rows to the next one's
    out = rows * n * product.out_dtype.itemsize
    aligned = aligned and not any(x % 16 for x in (part, out, 4 * rows * steps[0]))
    pays = product.scaled or library_gains(plan.world, product, rows, n, k, size)
    multiply = library_product(
        plan.world, product, config, (rows, *sizes[1:]), steps, bias, aligned, pays
    )
    if multiply is None:
        return None
    plan.use(multiply.memory)
    gathered, scales = gathering.buffer._address, gathering.scales._address
    others = [(me - hop) % size for hop in range(1, size)]  # as they come
    arrivals = [
        plan.bind(
            arrive_kernel, 1, (), gathering.progress, gathering.epoch, plan.group.handle, peer,
            gathering.chunks, num_warps=1,
        )
        for peer in others
    ]  # fmt: skip

    def run(
        stream: int, own: Operand, b: Operand, c: Operand, vector: Operand, right: Operand
    ) -> None:
        def rank(number: int, begin: int) -> None:
            multiply.at(
                stream, begin, b.address, c.address + number * out, vector.address,
                scales + 4 * number * rows, right.address,
            )  # fmt: skip

        rank(me, own.address)
        for peer, arrival in zip(others, arrivals, strict=True):
            arrival(stream)
            rank(peer, gathered + peer * part)

    return run
