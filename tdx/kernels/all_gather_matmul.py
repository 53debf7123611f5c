"""All-gather and matrix product in one operation: C = act(gather(A) . B + bias).

A is split over the ranks along its first axis, B is each rank's own.

fused    A kernel, for large parts copy engines, sends the own rows to every peer, chunk by chunk,
         with a signal after each. The product's persistent blocks take the chunks in the order in
         which they arrive, the own ones first, so that communication hides behind computation:
         W ranks, M rows in all, S = M * K * itemsize / W: (W - 1) * S bytes out of each rank,
         2 * M * N * K operations, time about
         max(operations / rate, (W - 1) * S / bandwidth) + the first own chunk.
unfused  All rows are gathered, then multiplied: for few rows, whose product takes as long as it
         takes to read B, which is read for every chunk when fused. gathering.py has both gathers.

Several B (q, k, v; gate and up) share one gather. float8 rows travel with their scales. Bits for
one Config do not depend on the order of arrival: a tile is one block's sum over K.

Ordering: when the operation is complete on a rank's stream, its rows were sent, all rows had come
and A may be reused. Peers write the plan's gathered buffer once this rank enters its next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.call import Call
from tdx.kernels.gathering import GatherFirst, Gathering
from tdx.kernels.matmul import bind_matmul, multiply_rows
from tdx.kernels.operand import check_apart, elements, for_each, operand, overlap
from tdx.kernels.plan import Plan, check_algorithm, plain_shape
from tdx.kernels.product import (
    Config,
    Product,
    ProductOptions,
    blocks_for,
    given_operand,
    takes_options,
)
from tdx.kernels.select import constants, engines_us, follows, gather_chunks, power_of_two
from tdx.kernels.split_matmul import split_memory
from tdx.kernels.tile_product import known, known_strides
from tdx.kernels.tiles import check_config
from tdx.runtime.array import Array
from tdx.runtime.checks import check_int
from tdx.runtime.driver.base import Described
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["ALGORITHMS", "AllGatherMatmul", "all_gather_matmul"]

ALGORITHMS = ("fused", "unfused")

_SIZES = ["rows", "columns", "depth", "chunk_rows", "chunks", "stride_bk", "stride_bn"]


@triton.jit(do_not_specialize=_SIZES)
def consume_kernel(
    own, b, c, bias, scale_b, gathered, scales, progress, epoch, trace, world,
    rows, columns, depth, chunk_rows, chunks, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr,
    EVEN: tl.constexpr, DESCRIBED: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Each block takes its share of the own rows' tiles, then of every chunk's as it arrives."""
    columns = known(columns, EVEN)
    depth = known(depth, EVEN)
    stride_bk, stride_bn = known_strides(stride_bk, stride_bn, B_UNIT, EVEN)
    me = tdl.rank(world)
    units = tdl.num_ranks(world) * chunks
    # tiles go round the blocks over all chunks, in whatever order they come; own ones to the first
    chunk_tiles = tl.cdiv(chunk_rows, BM) * tl.cdiv(columns, BN)
    first_row = me.to(tl.int64) * rows
    multiply_rows(
        own, b, c, bias, scales + first_row, scale_b, 0, first_row, rows, columns, depth,
        depth, 1, stride_bk, stride_bn, 0, tdl.no_fault(world),
        trace, _arrived(progress, units, epoch, TRACE), BM, BN, BK, GROUP_M, PRECISION,
        HAS_BIAS, ACTIVATION, B_UNIT, A_STEP, B_STEP, DESCRIBED, TRACE,
    )  # fmt: skip
    number = tl.load(epoch)
    lanes = tl.arange(0, tdl.MAX_WAIT_ANY)
    done = ((lanes >= me * chunks) & (lanes < (me + 1) * chunks)).to(tl.int32)
    for _ in range(chunks, units):
        unit, done, ok = tdl.wait_any(progress, units, world, number, done, first=me * chunks)
        if DESCRIBED:
            tdl.fence_async_proxy()
        before = (unit - me * chunks + units) % units * chunk_tiles
        begin = (unit % chunks) * chunk_rows
        first_row = (unit // chunks).to(tl.int64) * rows + begin
        multiply_rows(
            gathered, b, c, bias, scales, scale_b, first_row, first_row,
            tl.minimum(chunk_rows, rows - begin), columns, depth,
            depth, 1, stride_bk, stride_bn, before, ok,
            trace, _arrived(progress, units, epoch, TRACE), BM, BN, BK, GROUP_M, PRECISION,
            HAS_BIAS, ACTIVATION, B_UNIT, A_STEP, B_STEP, DESCRIBED, TRACE,
        )  # fmt: skip


@triton.jit
def _arrived(progress, units, epoch, TRACE: tl.constexpr):
    """How many chunks are there; 0 if nobody asks."""
    count = 0
    if TRACE:
        lanes = tl.arange(0, tdl.MAX_WAIT_ANY)
        seen = tl.load(progress + lanes, mask=lanes < units, other=0, volatile=True)
        count = tl.sum(((lanes < units) & (seen - tl.load(epoch) >= 0)).to(tl.int32))
    return count


class AllGatherMatmul(Plan):
    """An all-gather and matrix product of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape_a : tuple
        Of every rank's a: (m, ..., K). The gather runs along the first axis.
    shape_b : tuple, or sequence of tuples
        (K, N) of this rank's b; of several for one gather. K and the number of b are the same on
        every rank, N may differ. (Ranks must make plans together: with the one-line function, all
        change their shapes in the same call.)
    dtype
        float16, bfloat16, float32 or float8_e4m3fn.
    algorithm : {"fused", "unfused"}, optional
        None: "unfused" for few rows, unless one of the next two is given.
    chunks_per_rank : int, optional
        Signals per rank: finer chunks start earlier and cost more signals. For "fused".
    trace : bool
        Record how much had arrived when each tile was computed; see `overlap`. For "fused".
    bias : bool
        Whether calls pass a vector of N elements (one for each b).
    config, team, buffer, activation, out_dtype, allow_tf32
        See ReducedProduct.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted.
    """

    operation = "all_gather_matmul"

    @takes_options(Product.make)
    def __init__(
        self,
        world: World,
        shape_a: Sequence[int],
        shape_b: Any,
        dtype: Any,
        *,
        chunks_per_rank: int | None = None,
        trace: bool = False,
        algorithm: str | None = None,
        config: Config | None = None,
        team: Group | None = None,
        buffer: bool = True,
        **product: Any,
    ):
        with self.agreement(world, team) as shared:
            self.shape_a = plain_shape(shape_a)
            self._single = not shape_b or hasattr(shape_b[0], "__index__")
            self.shapes_b = [plain_shape(s) for s in ([shape_b] if self._single else shape_b)]
            self.product = Product.make(world, dtype, **product)
            self.dtype = self.product.dtype
            check_algorithm(self.operation, algorithm, ALGORITHMS)
            following = chunks_per_rank is not None or trace
            if algorithm == "unfused" and following:
                raise InvalidArgument('chunks_per_rank and trace are for algorithm="fused"')
            self._check()
            *lead, self._depth = self.shape_a
            self._rows, size = elements(lead), self.group.size
            line = self._depth * self.dtype.itemsize
            nbytes = self._rows * line
            if chunks_per_rank is None:
                chunks_per_rank = gather_chunks(world.backend, nbytes, line, size - 1)
            chunks = check_int(chunks_per_rank, "chunks_per_rank", 1, tdl.MAX_WAIT_ANY // size)
            first = not following and follows(world.backend, self._rows, nbytes, size)
            self.algorithm = algorithm or ("unfused" if first else "fused")
            parts = 1 if self.algorithm == "unfused" else size
            check_config(config, "fused" if self.algorithm == "fused" else "")
            rows, self._widest = self._rows * size // parts, max(n for _, n in self.shapes_b)
            first_us = engines_us(world.backend, nbytes * (size - 1) // chunks)
            self.config = self.product.tile(
                config, world, rows, self._widest, self._depth, parts, parts == 1, first_us
            )
            self._traced = trace
            shared.update(a=self.shape_a, count_b=len(self.shapes_b), dtype=self.dtype)
            shared.update(algorithm=self.algorithm)
            if self.algorithm == "fused":  # what the rows of a chunk follow from
                usual = power_of_two(min(rows, constants(world.backend).tile[0]))
                self._multiple = config.block_m if config else usual
                shared.update(chunks_per_rank=chunks, multiple=self._multiple)
        with self.preparation():
            self._build(chunks, buffer)

    def _check(self) -> None:
        if len(self.shape_a) < 2:
            raise InvalidArgument(f"a needs 2 or more axes (m, ..., K), got {self.shape_a}")
        for shape in self.shapes_b:
            if len(shape) != 2 or shape[0] != self.shape_a[-1]:
                raise InvalidArgument(
                    f"b {shape} does not fit a {self.shape_a}: expected ({self.shape_a[-1]}, N)"
                )

    def _build(self, chunks: int, buffer: bool) -> None:
        world, size, depth = self.world, self.group.size, self._depth
        shape = (self._rows, depth)
        scaled, out = self.product.scaled, self.product.out_dtype
        self._gathering: Gathering | GatherFirst
        if self.algorithm == "unfused":
            self._gathering = GatherFirst(self, shape, self.dtype, scaled)
        else:
            multiple = self._multiple if chunks > 1 else 1  # no ragged tile at a chunk's end
            self._gathering = Gathering(self, shape, self.dtype, chunks, multiple, scaled, True)
        self._shown = [operand(world, self._gathering.buffer, "gathered")]
        lead = (size * self.shape_a[0], *self.shape_a[1:-1])
        self.out_shapes = [(*lead, n) for _, n in self.shapes_b]
        self._outs = [self.result_buffer(shape, out, buffer) for shape in self.out_shapes]
        units = size * self._gathering.chunks if self._traced else 0
        self._tiles = partial(self.config.tiles, self._gathering.chunk_rows)  # of a chunk
        self._traces = [
            world.zeros((max(1, units * self._tiles(n)),), "int32", symmetric=False)
            for _, n in self.shapes_b
        ]
        self._kernels: dict[Any, Callable[..., None]] = {}
        self._split = split_memory(world, self.config, size * self._rows, self._widest)
        self._memory += [array._block for array in self._split]
        for i, (_, n) in enumerate(self.shapes_b):
            if self.product.prepares(self.config, (size * self._rows, n, depth, depth, 1, n, 1)):
                self._consumer(i, (n, 1), 0, self.dtype, True)

    def __call__(
        self, a: Any, b: Any, out: Any = None, stream: Any = None, *, bias: Any = None,
        scale_a: Any = None, scale_b: Any = None,
    ) -> Any:  # fmt: skip
        """Queue the operation; returns the product, or a tuple of them for several b.

        `a` is contiguous; b, out, bias, scale_b: single values or sequences as the plan was made.
        Scales: as matmul has them. Without `out`: the plan's own buffers, until its next call.
        """
        try:
            world, product, count = self.world, self.product, len(self.shapes_b)
            x = self.input(a, self.shape_a, self.dtype, "a")
            bs, outs, biases, scales = (
                for_each(value, count, self._single, what)
                for value, what in ((b, "b"), (out, "out"), (bias, "bias"), (scale_b, "scale_b"))
            )
            left, step = product.check_scale(world, scale_a, self.shape_a[:-1], "scale_a", x)
            products = []
            for i, (k, n) in enumerate(self.shapes_b):
                product.check(x, y := operand(world, bs[i], "b"), k, n)
                to = self.output(outs[i], self._outs[i], self.out_shapes[i], product.out_dtype)
                vector = product.check_bias(world, biases[i], n, x)
                right, step_b = product.check_scale(world, scales[i], (n,), "scale_b", x)
                run = self._consumer(i, y.strides, step_b, vector.dtype, not y.address % 16)
                others = (y, *(op for op in (vector, right, left) if op is not x))
                check_apart(self.operation, to, *others, *(p[2] for p in products))
                products.append((run, y, to, vector, right))
            handle = self.begin(stream, x, left, *(op for p in products for op in p[1:]))
        except Exception as error:
            self.refuse(error)
            raise
        if self._rows:
            written = (*self._shown, *(p[2] for p in products))
            first = bool(x.address % 16) or any(overlap(x, to) for to in written)
            scales = left if product.scaled else None
            own = self._gathering.start(self, x, handle, scales, step, first)
            for run, *operands in products:
                if run is not None:
                    run(handle, own, *operands)
            self._gathering.confirm(handle, any(p[0] for p in products))
            self._gathering.join(handle)
        results = [mine if o is None else o for mine, o in zip(self._outs, outs, strict=True)]
        return results[0] if self._single else tuple(results)

    def _consumer(
        self, i: int, strides: tuple[int, ...], step: int, bias: np.dtype, aligned: bool
    ) -> Callable[..., None] | None:
        """The product with b number `i`, so laid out, bound at first use; None if empty."""
        key = (i, strides, step, bias, aligned)
        product, (k, n) = self.product, self.shapes_b[i]
        if key not in self._kernels and n:
            sizes = (self.group.size * self._rows, n, k, k, 1, *strides)
            described = product.described(self.world, self.config, sizes, aligned)
            bind = self._bind_fused if self.algorithm == "fused" else self._bind_unfused
            self._kernels[key] = bind(i, sizes, (1, step), described, bias)
        return self._kernels.get(key)

    def _bind_fused(
        self, i: int, sizes: Sequence[int], steps: tuple[int, int], described: bool, bias: np.dtype
    ) -> Callable[..., None]:
        gathering, product, (_, n, k, *strides) = self._gathering, self.product, sizes
        assert isinstance(gathering, Gathering)
        a, b = product.kinds(self.config, described, sizes)
        own, _ = product.kinds(self.config, described, (self._rows, *sizes[1:]))
        gathered: Any = a.of(gathering.buffer) if isinstance(a, Described) else gathering.buffer
        tiles = self._tiles(n) * gathering.chunks * self.group.size
        return self.bind(
            consume_kernel, blocks_for(self.world, tiles, gathering.blocks),
            (own, b, product.out_dtype, bias, product.scale_dtype),
            gathered, gathering.scales, gathering.progress, gathering.epoch,
            self._traces[i], self.group.handle, self._rows, n, k, gathering.chunk_rows,
            gathering.chunks, *strides[2:], TRACE=self._traced, **product.constants,
            **product.product_constants(self.config, sizes, steps, described),
        )  # fmt: skip

    def _bind_unfused(
        self, i: int, sizes: Sequence[int], steps: tuple[int, int], described: bool, bias: np.dtype
    ) -> Callable[..., None]:
        world, product = self.world, self.product
        others = (product.out_dtype, bias, product.scale_dtype, product.scale_dtype)
        run = bind_matmul(
            world, product, self.config, sizes, steps, described, others, self._split,
            self.group.handle,
        )  # fmt: skip
        gathered = operand(world, self._gathering.buffer, "gathered")
        scales = operand(world, self._gathering.scales, "scales")
        return lambda stream, _, *ops: run(stream, gathered, *ops[:3], scales, ops[3])

    def gathered(self) -> Array:
        """The gathered a of the last call, (size * m, ..., K): valid until the next, or a fault."""
        shape = (self.group.size * self.shape_a[0], *self.shape_a[1:])
        return self._gathering.buffer.reshape(shape)

    def overlap(self) -> tuple[int, int]:
        """(remote tiles computed before the last chunk had arrived, remote tiles) of the last call.

        From counts that the kernel took on the device; needs trace=True and waits for the device.
        """
        units, early, remote = self.group.size * self._gathering.chunks, 0, 0
        for trace in self._traces:
            trace._block.note(self._stream)
            seen = trace.numpy().reshape(self.group.size, -1)[1:]  # the own tiles come first
            remote += int((seen > 0).sum())
            early += int(((seen > 0) & (seen < units)).sum())
        return early, remote


@takes_options(ProductOptions)
def all_gather_matmul(a: Any, b: Any, *, return_gathered: bool = False, **options: Any) -> Any:
    """act(gather(a) . b + bias), overlapped but for few rows. Collective over `team`.

    Parameters
    ----------
    a : tdx array, or array of NumPy or a DLPack producer
        (m, ..., K): this rank's part; the same shape on every rank.
    b : array or sequence of arrays
        (K, N) of this rank, any strides; several share one gather.
    return_gathered : bool
        Return the gathered a as well.
    algorithm : {"fused", "unfused"}, optional
    bias, scale_b, out : optional
        As matmul has them; with several b sequences, one for each.
    scale_a : optional
        As matmul has it, of this rank's a.
    activation, out_dtype, allow_tf32, config, team, stream
        See matmul.

    Returns (size * m, ..., N), or a tuple for several b, in the framework of `a`; with
    return_gathered followed by the gathered a.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    given = ProductOptions(**options)
    single = not isinstance(b, (list, tuple))
    many = [b] if single else list(b)
    call = Call("all_gather_matmul", a, *many, team=given.team, stream=given.stream)
    with call:
        x = call.operand(a, "a")
        ys = [call.operand(y, "b", strided=True) for y in many]
        outs, biases, scales = (
            for_each(getattr(given, what), len(many), single, what)
            for what in ("out", "bias", "scale_b")
        )
        extras = {
            "scale_a": given_operand(call, given.scale_a, "scale_a"),
            "bias": [given_operand(call, each, "bias") for each in biases],
            "scale_b": [given_operand(call, each, "scale_b") for each in scales],
        }
        plan = call.plan(
            AllGatherMatmul, x.shape, tuple(y.shape for y in ys), x.dtype, **given.of_plan
        )
        dtype = plan.product.out_dtype
        targets = [call.target(o, s, dtype) for o, s in zip(outs, plan.out_shapes, strict=True)]
        plan(x, ys, targets, stream=call.stream, **extras)
        if return_gathered:
            whole = plan.gathered()
            targets.append(call.target(None, whole.shape, plan.dtype))
            call.copy(whole, targets[-1])
            plan._gathering.confirm(call.handle())
    return call.finish(targets[0] if len(targets) == 1 and single else tuple(targets))
