"""All-gather and matrix product in one operation: C = act(gather(A) . B + bias).

A is split over the ranks along its first axis, B is each rank's own.

W ranks, M rows in all, S = M * K * itemsize / W: (W - 1) * S bytes out of each rank.

fused       A kernel, for large parts copy engines, sends the own rows to every peer, chunk by
            chunk, with a signal after each. The product's persistent blocks take the chunks in the
            order in which they arrive, the own ones first, so that communication hides behind
            computation: 2 * M * N * K operations, time about
            max(operations / rate, (W - 1) * S / bandwidth) + the first own chunk.
one_kernel  The same in one kernel, whose first blocks send: for up to a few thousand rows.
            Workspace: 3 * W * S bytes. See gathering_product.py.
unfused     All rows are gathered, then multiplied: B is read once, not for each rank's rows, which
            counts where they are very few. gathering.py has this gather and that of "fused".

cuBLAS may multiply, beside "fused" for each rank's rows, or behind "unfused": library_product.py.
Several B (q, k, v; gate and up) share one gather. float8 rows travel with their scales. Bits for
one Config do not depend on the order of arrival: a tile is one block's sum over K.

Ordering: when the operation is complete on a rank's stream, its rows were sent, all rows had come
and A may be reused. Peers write the gathered rows once this rank enters its next call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import tdx.language as tdl
from tdx.kernels.chunk_product import bind_chunks, early_tiles
from tdx.kernels.gathered_function import gathered_product
from tdx.kernels.gathering import GatherFirst, Gathering, check_products_apart
from tdx.kernels.gathering_product import GatheringProduct
from tdx.kernels.gathering_turns import choices, end_of_turns, is_compared
from tdx.kernels.library_chunks import bind_library_chunks, library_gains
from tdx.kernels.library_product import check_library, library_product, may_multiply
from tdx.kernels.operand import Operand, begin_aligned, elements, for_each, operand, overlap
from tdx.kernels.plan import Plan, check_algorithm, plain_shape
from tdx.kernels.product import Config, Product, check_loading, usual_output
from tdx.kernels.product_options import (
    ProductOptions,
    options_of,
    product_of,
    shapes_of,
    shared_options,
    takes_options,
)
from tdx.kernels.select import constants, engines_us, follows, gather_chunks, power_of_two
from tdx.kernels.split_matmul import split_memory
from tdx.kernels.tiles import check_config, splits
from tdx.runtime.agreement import unanimous
from tdx.runtime.array import Array
from tdx.runtime.checks import check_bool, check_int
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.stream import NOWHERE, follow, stream_handle
from tdx.runtime.world import World

__all__ = ["ALGORITHMS", "AllGatherMatmul", "all_gather_matmul"]

ALGORITHMS = ("fused", "one_kernel", "unfused")
_FEWEST = 128  # rows of a rank up to which float8 is gathered first; measured on two H100s


class AllGatherMatmul(Plan):
    """An all-gather and matrix product of one shape and dtype, ready to be called.

    Parameters
    ----------
    world : World
    shape_a : tuple
        Of every rank's a: (m, ..., K). The gather runs along the first axis.
    shape_b : tuple, or sequence of tuples
        (K, N) of this rank's b; of several for one gather. K and the number of b are the same on
        every rank, N may differ.
    dtype
        float16, bfloat16, float32 or float8_e4m3fn.
    algorithm : {"fused", "one_kernel", "unfused"}, optional
        None: by rows, N and K of all ranks; "fused" if one of the next two is given.
    chunks_per_rank : int, optional
        Signals per rank: finer chunks start earlier and cost more signals. For "fused".
    trace : bool
        Record how much had arrived when each tile was computed; see `overlap`. For "fused".
    bias : bool
        Whether calls pass a vector of N elements (one for each b). Default: False.
    activation : {"relu", "silu", "gelu", "gelu_tanh"}, optional
        What is done to the sums, after the bias.
    out_dtype, optional
        Of the products: float16, bfloat16 or float32. None: `dtype`, of float8 bfloat16.
    allow_tf32, fast_accum : bool
        Round float32 inputs to tf32; sum float8 products less precisely. Default: False. See
        tdx.matmul.
    library, tune : bool, optional
        Whether cuBLAS multiplies, beside "fused" or behind "unfused", the same on every rank: see
        tdx.matmul. Whether a plan times its algorithms of equal bits, once; default: True.
    row_scales : bool
        Of float8: whether calls pass a scale for each row of a, or one. Default: False.
    config : tdx.kernels.matmul.Config, optional
        Pins the tile, and with it the bits of the products; as all options alike on every rank.
    team : Team, optional
        The ranks that take part; None: all of the world.
    buffer : bool
        Whether the plan has buffers for its results, for calls without `out`. Default: True.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted.
    """

    operation = "all_gather_matmul"
    usual_result = staticmethod(usual_output)

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
        row_scales: bool = False,
        config: Config | None = None,
        team: Group | None = None,
        buffer: bool = True,
        **product: Any,
    ):
        with self.agreement(world, team) as shared:
            self.shape_a = plain_shape(shape_a)
            self._single, self.shapes_b = shapes_of(self.shape_a, shape_b)
            self.product, self._pinned = product_of(self, dtype, product), config
            self.dtype, self._traced = self.product.dtype, check_bool("trace", trace)
            self._row_scales = self.product.check_row_scales(row_scales)
            check_algorithm(self.operation, algorithm, ALGORITHMS)
            check_library(world, self.product, config, algorithm, ("fused", "unfused"))
            following = chunks_per_rank is not None or trace
            if algorithm not in (None, "fused") and following:
                raise InvalidArgument('chunks_per_rank and trace are for algorithm="fused"')
            if trace and self.product.library:
                raise InvalidArgument("trace is of a kernel of tdx, not with library=True")
            *lead, self._depth = self.shape_a
            self._rows, size = elements(lead), self.group.size
            self._widest = max(n for _, n in self.shapes_b)
            nbytes = self._rows * (line := self._depth * self.dtype.itemsize)
            if chunks_per_rank is None:
                chunks_per_rank = gather_chunks(world.backend, nbytes, line, size - 1)
            chunks = check_int(chunks_per_rank, "chunks_per_rank", 1, tdl.MAX_WAIT_ANY // size)
            more = {"trace": trace, "row_scales": self._row_scales, "chunks_per_rank": chunks}
            shared.update(a=self.shape_a, count_b=len(self.shapes_b), given_algorithm=algorithm)
            shared.update(shared_options(self, self.product, config, self._widest, product, **more))
            self.agree_on(shared)
            self.algorithm = algorithm or self._choose(nbytes, chunks, config, following)
            check_config(config, "" if self.algorithm == "unfused" else self.algorithm)
            parts = 1 if self.algorithm == "unfused" else size
            rows = self._rows * size // parts
            first_us = engines_us(world.backend, nbytes * (size - 1) // chunks)
            ends = partial(end_of_turns, world, rows, self._widest, size)
            self.config = self.product.tile(
                config, world, rows, self._widest, self._depth, parts, parts == 1, first_us,
                ends=ends if self.algorithm == "one_kernel" else None,
            )  # fmt: skip
            shared.update(algorithm=self.algorithm)
            if self.algorithm == "fused":  # what the rows of a chunk follow from
                usual = power_of_two(min(rows, constants(world.backend).tile[0]))
                usual = config.block_m if config else usual
                self._multiple = 1 if chunks == 1 else usual  # no ragged tile at a chunk's end
        with self.preparation():
            self._build(chunks, buffer)

    def _choose(self, nbytes: int, chunks: int, config: Config | None, following: bool) -> str:
        backend, rows, size = self.world.backend, self._rows, self.group.size
        if following or splits(config):
            return "fused" if following else "unfused"
        engines = size > 1 and nbytes // chunks >= constants(backend).engine_bytes
        if self.product.library:
            return "fused" if engines and not follows(backend, rows, nbytes, size) else "unfused"
        if is_compared(backend, rows, nbytes, size) and not self.product.scaled:  # not measured
            what = (self.world, self.product, rows, self._widest, self._depth, size)
            usual, other, gains = choices(*what)
            if size == 2:
                gains = engines and library_gains(*what) and may_multiply(*what[:2], config)
            return other if unanimous(self.group, self.call, gains) else usual
        large = self.product.scaled and rows > _FEWEST and nbytes >= constants(backend).engine_bytes
        return "fused" if large or not follows(backend, rows, nbytes, size) else "unfused"

    def _build(self, chunks: int, buffer: bool) -> None:
        world, size, depth = self.world, self.group.size, self._depth
        shape = (self._rows, depth)
        scaled, out = self.product.scaled, self.product.out_dtype
        self._gathering: Gathering | GatherFirst | GatheringProduct
        self._called_on = NOWHERE  # the stream of the last call, recorded or not
        self._pusher = -1  # number of the b whose kernel sends rows, also if it is empty
        if self.algorithm == "one_kernel":
            self._pusher = next((i for i, (_, n) in enumerate(self.shapes_b) if n), 0)
            self._gathering = GatheringProduct(self, shape, self.product, self._pusher)
        elif self.algorithm == "unfused":
            self._gathering = GatherFirst(self, shape, self.dtype, scaled)
        else:
            parts = (chunks, self._multiple)
            self._gathering = Gathering(self, shape, self.dtype, *parts, scaled, True)
        self._shown = [operand(world, self._gathering.buffer, "gathered")]
        self.out_shapes = [
            (size * self.shape_a[0], *self.shape_a[1:-1], n) for _, n in self.shapes_b
        ]
        self._outs = [self.result_buffer(shape, out, buffer) for shape in self.out_shapes]
        if self._single:
            self.result = (self.out_shapes[0], out)
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
                self._load(i, (n, 1), 0, self.product.bias_dtype, True, True)

    def __call__(
        self, a: Any, b: Any, out: Any = None, stream: Any = None, *, bias: Any = None,
        scale_a: Any = None, scale_b: Any = None,
    ) -> Any:  # fmt: skip
        """Queue the operation; returns the product, or a tuple of them for several b.

        `a` is contiguous; b, out, bias, scale_b: single values or sequences as the plan was made.
        Scales: as matmul has them. Without `out`: the plan's own buffers, until its next call.
        """
        result, given = self._outs[0] if out is None else out, (bias, scale_a, scale_b)
        same = self.again_with(stream, b, a, result, *given) if self._single else None
        if same is None:
            handle, x, scales, step, first, products, outs = self._begin(stream, a, b, out, *given)
        else:
            handle, (y, x, to, vector, scales, right), (key, step, first) = same
            vector, right = (x if op is None else op for op in (vector, right))
            products, outs = [(self._kernels.get(key), y, to, vector, right)], [out]
        self._called_on = handle
        if self._rows:
            own = self._gathering.start(self, x, handle, scales, step, first)
            for run, *operands in products:
                if run is not None:
                    run(handle, own, *operands)
            self._gathering.confirm(handle, any(p[0] for p in products))
            self._gathering.join(handle)
        if self._single:
            return result
        return tuple(mine if o is None else o for mine, o in zip(self._outs, outs, strict=True))

    def _begin(
        self, stream: Any, a: Any, b: Any, out: Any, bias: Any, scale_a: Any, scale_b: Any
    ) -> tuple[int, Operand, Operand | None, int, bool, list[Any], list[Any]]:
        """Check a call and begin it: stream, a, scales and their step, copied first?, products,
        and for each what was given as out."""
        try:
            world, product, count = self.world, self.product, len(self.shapes_b)
            x = self.input(a, self.shape_a, self.dtype, "a")
            bs, outs, biases, scales = (
                for_each(value, count, self._single, what)
                for value, what in ((b, "b"), (out, "out"), (bias, "bias"), (scale_b, "scale_b"))
            )
            left, step = product.check_scale(world, scale_a, self.shape_a[:-1], "scale_a", x)
            step |= self._row_scales and left.shape == self.shape_a[:-1]  # also of one row
            if product.scaled and self._row_scales != step:
                given = "a scale for each row" if step else "one for all rows"
                raise InvalidArgument(
                    f"scale_a has {given}; the plan was made with row_scales={self._row_scales}"
                )
            products: list[Any] = []
            for i, (k, n) in enumerate(self.shapes_b):
                product.check(x, y := operand(world, bs[i], "b"), k, n)
                to = self.output(outs[i], self._outs[i], self.out_shapes[i], product.out_dtype)
                vector = product.check_bias(world, biases[i], n, x)
                right, step_b = product.check_scale(world, scales[i], (n,), "scale_b", x)
                others = [op for op, used in ((vector, product.bias), (right, step_b)) if used]
                aligned = (begin_aligned(y), begin_aligned(y, to, *others))
                key = (i, y.strides, step_b, vector.dtype, *aligned)
                products.append((key, y, to, vector, right))
            check_products_apart(self.operation, self._shown[0], x, left, products)
            ops = (x, left, *(op for p in products for op in p[1:]))
            if any(self._lacks(*p[0]) for p in products):
                check_loading(self, stream, *ops)
            products = [(self._load(*key), *rest) for key, *rest in products]
            handle = self.begin(stream, *ops)
        except Exception as error:
            self.refuse(error)
            raise
        written = (*self._shown, *(p[2] for p in products))
        first = bool(x.address % 16) or any(overlap(x, to) for to in written)
        each = (left, right) if product.scaled else (None, None)
        if self._single and product.takes_as_given(scale_a, scale_b):
            self.note(y, (x, to, None if bias is None else vector, *each), (key, step, first))
        return handle, x, each[0], step, first, products, outs

    def _lacks(self, *key: Any) -> bool:
        """Whether _load has to bind a kernel."""
        return key not in self._kernels and (self.shapes_b[key[0]][1] > 0 or key[0] == self._pusher)

    def _load(
        self, i: int, strides: tuple[int, ...], step: int, bias: np.dtype, aligned: bool,
        all_aligned: bool,
    ) -> Callable[..., None] | None:  # fmt: skip
        """The product with b number `i`, so laid out, bound at first use; None if empty.

        `aligned`: b begins at a multiple of 16 bytes; `all_aligned`: all that cuBLAS reads does.
        """
        key = (i, strides, step, bias, aligned, all_aligned)
        if self._lacks(*key):
            product, config, (k, n) = self.product, self.config, self.shapes_b[i]
            sizes = (self.group.size * self._rows, n, k, k, 1, *strides)
            slots = 2 if self.algorithm == "one_kernel" else 1  # one descriptor is of both
            whole = (slots * sizes[0], *sizes[1:])
            layout = (sizes, (1, step), product.described(self.world, config, whole, aligned), bias)
            gathering = self._gathering
            if isinstance(gathering, GatheringProduct):
                run = gathering.bind(self, product, config, i, *layout)
            elif isinstance(gathering, Gathering):
                steps, trace = (int(self._row_scales), step), (self._traces[i], self._traced)
                library = None if self._traced else bind_library_chunks(
                    self, gathering, product, self._pinned, sizes, steps, bias, all_aligned
                )  # fmt: skip
                run = library or bind_chunks(self, gathering, product, config, *trace, *layout)
            else:
                whole = library_product(
                    self.world, product, self._pinned, sizes, (1, step), bias, all_aligned
                )
                run = gathering.bind(self, product, config, self._split, *layout, whole)
            self._kernels[key] = run
        return self._kernels.get(key)

    def gathered(self, stream: Any = None) -> Array:
        """The gathered a of the last call, (size * m, ..., K): valid until the next, or a fault.

        With "one_kernel" this queues a copy: on `stream`, else on the last call's stream if tdx
        made that, else on the current stream, behind the call.
        """
        self.world.check()
        gathering, shape = self._gathering, (self.group.size * self.shape_a[0], *self.shape_a[1:])
        if isinstance(gathering, GatheringProduct) and self._stream != NOWHERE:
            if self.world.recording is not None:
                self.world.recording.keep(self)
            handle = self._taking_stream() if stream is None else stream_handle(stream)
            self.follow_recorded(handle, operand(self.world, gathering.buffer, "gathered"))
            gathering.take(handle)
        return gathering.buffer.reshape(shape)

    def _taking_stream(self) -> int:
        driver, here = self.world.driver, self._called_on
        if driver.left_at(here) is None and driver.capturing(here):
            return here  # what is recorded there does not run now
        if driver.left_at(self._stream) is None:
            return self._stream
        follow(driver, self._stream, here := driver.current_stream())  # it may be closed
        return here

    def overlap(self) -> tuple[int, int]:
        """(remote tiles computed before the last chunk had arrived, remote tiles) of the last call.

        Counted on the device; waits for it. InvalidArgument unless the plan has trace=True.
        """
        if not self._traced:
            raise InvalidArgument(f"{self.operation}: overlap() needs a plan with trace=True")
        for trace in self._traces:
            trace._block.note(self._stream)
        return early_tiles(self._traces, self.group.size, self._gathering.chunks)


@takes_options(ProductOptions)
def all_gather_matmul(a: Any, b: Any, *, return_gathered: bool = False, **options: Any) -> Any:
    """act(gather(a) . b + bias), overlapped but for few rows. Collective over `team`.

    Parameters
    ----------
    a : tdx array, or array of NumPy or a DLPack producer
        (m, ..., K): this rank's part; the same shape on every rank.
    b : array or sequence of arrays
        (K, N) of this rank, any strides; several share one gather. N may differ between ranks, each
        with one N of every other rank in all calls; other combinations need plans.
    return_gathered : bool
        Return the gathered a as well; of float8 without its scales.
    algorithm : {"fused", "one_kernel", "unfused"}, optional
    bias, scale_b, out : optional
        As matmul has them; with several b sequences, one for each.
    scale_a : optional
        As matmul has it, of this rank's a: one for each row on every rank, or on none.
    activation, out_dtype, allow_tf32, fast_accum, library, config, team, stream
        See matmul.

    Returns (size * m, ..., N), or a tuple for several b, in the framework of `a`; with
    return_gathered followed by the gathered a.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    given = options_of(all_gather_matmul, options)
    return gathered_product(AllGatherMatmul, a, b, return_gathered, given)
