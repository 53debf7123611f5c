"""All-gather and matrix product in one: C = act(gather(A) . B + bias), overlapped.

A is split over the ranks along its first axis, B is each rank's own. A push kernel on a stream of
its own sends the own rows to every peer, chunk by chunk, with a signal after each (all_gather.py).
The product's persistent blocks take the chunks in the order in which they arrive, the own ones
first, so that communication hides behind computation:

    W ranks, M rows in all, S = M * K * itemsize / W:
    (W - 1) * S bytes out of each rank, 2 * M * N * K operations,
    time about max(operations / rate, (W - 1) * S / bandwidth) + the first own chunk

Several B (q, k, v; gate and up) share one gather. Bits for one Config do not depend on the order
of arrival: a tile is one block's sum over K.

Ordering: when the operation is complete on a rank's stream, its rows were sent, all rows had
arrived, and A may be reused. The gathered buffer is the plan's: peers write it again once this
rank has entered its next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

import tdx.language as tdl
from tdx.kernels.all_gather import Gathering
from tdx.kernels.matmul import (
    Config,
    Epilogue,
    blocks_for,
    check_bias,
    check_product,
    choose,
    grouped_tile,
    no_scales,
    store_tile,
    tile_constants,
    tile_product,
)
from tdx.kernels.operand import Operand, operand
from tdx.kernels.plan import Call, Plan, cached, world_of
from tdx.runtime.array import Array
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["AllGatherMatmul", "all_gather_matmul"]

_SIZES = ["rows", "columns", "depth", "chunk_rows", "chunks", "stride_bk", "stride_bn"]


@triton.jit(do_not_specialize=_SIZES)
def consume_kernel(
    gathered, b, c, bias, progress, epoch, trace, world,
    rows, columns, depth, chunk_rows, chunks, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """Each block takes its share of every chunk's tiles, chunks in order of arrival."""
    me = tdl.rank(world)
    number = tl.load(epoch)
    units = tdl.num_ranks(world) * chunks
    tiles_n = tl.cdiv(columns, BN)
    done = tdl.nothing_done()
    for turn in range(0, units):
        unit, done, ok = tdl.wait_any(progress, units, world, number, done, first=me * chunks)
        arrived = 0
        if TRACE:
            arrived = _arrived(progress, units, number)
        begin = (unit % chunks) * chunk_rows
        height = tl.minimum(chunk_rows, rows - begin)
        first_row = (unit // chunks).to(tl.int64) * rows + begin
        tiles_m = tl.cdiv(height, BM)
        # tiles go round the blocks over all chunks, whatever the order of their arrival
        before = unit * tl.cdiv(chunk_rows, BM) * tiles_n
        blocks = tl.num_programs(0)
        start = (tl.program_id(0) + blocks - before % blocks) % blocks
        for tile in range(start, tiles_m * tiles_n, blocks):
            row, col = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            total = tile_product(
                gathered + first_row * depth, b, row, col, height, columns, depth,
                depth, 1, stride_bk, stride_bn, BM, BN, BK, PRECISION,
            )  # fmt: skip
            store_tile(
                c + first_row * columns, total, bias, row, col, height, columns, columns, ok,
                BM, BN, HAS_BIAS, ACTIVATION,
            )  # fmt: skip
            if TRACE:
                at = (unit * tl.cdiv(chunk_rows, BM) + row) * tiles_n + col
                tl.store(trace + at, arrived)


@triton.jit
def _arrived(progress, units, number):
    """How many chunks are there."""
    lanes = tl.arange(0, 1024)
    seen = tl.load(progress + lanes, mask=lanes < units, other=0, volatile=True)
    return tl.sum(((lanes < units) & (seen - number >= 0)).to(tl.int32))


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
        float16, bfloat16 or float32.
    bias : bool
        Whether calls pass a vector of N elements (one for each b).
    activation : {"relu", "silu", "gelu", "gelu_tanh"}, optional
    out_dtype, optional
    allow_tf32 : bool
    chunks_per_rank : int
        Signals per rank: finer chunks start earlier and cost more signals.
    trace : bool
        Record how much had arrived when each tile was computed; see `overlap`.
    config : Config, optional
    team : Team, optional

    Raises InvalidArgument, DtypeError, CollectiveMismatch, HeapExhausted.
    """

    operation = "all_gather_matmul"

    def __init__(
        self,
        world: World,
        shape_a: Sequence[int],
        shape_b: Any,
        dtype: Any,
        *,
        bias: bool = False,
        activation: str | None = None,
        out_dtype: Any = None,
        allow_tf32: bool = False,
        chunks_per_rank: int = 1,
        trace: bool = False,
        config: Config | None = None,
        team: Group | None = None,
    ):
        self.shape_a = tuple(shape_a)
        self._single = not shape_b or isinstance(shape_b[0], int)
        self.shapes_b = [tuple(shape_b)] if self._single else [tuple(s) for s in shape_b]
        self._chunks, self._traced = chunks_per_rank, trace

        def check() -> None:
            self.epilogue = Epilogue.make(dtype, bias, activation, out_dtype, allow_tf32)
            if len(self.shape_a) < 2:
                raise InvalidArgument(f"a needs 2 or more axes (m, ..., K), got {self.shape_a}")
            for shape in self.shapes_b:
                if len(shape) != 2 or shape[0] != self.shape_a[-1]:
                    raise InvalidArgument(
                        f"b of shape {shape} does not fit a of shape {self.shape_a}: "
                        f"expected ({self.shape_a[-1]}, N)"
                    )
            units = world.group(team).size * chunks_per_rank
            if chunks_per_rank < 1 or units > tdl.MAX_WAIT_ANY:
                raise InvalidArgument(
                    f"chunks_per_rank={chunks_per_rank} must be >= 1 and give at most "
                    f"{tdl.MAX_WAIT_ANY} chunks in all, got {units}"
                )

        from tdx.runtime.dtypes import resolve

        call = (
            f"all_gather_matmul(a={self.shape_a}, {len(self.shapes_b)} x b, dtype={dtype}, "
            f"bias={bias}, activation={activation}, out_dtype={out_dtype}, "
            f"chunks_per_rank={chunks_per_rank})"
        )
        self._config = config
        self._resolve = resolve
        self._given_dtype = dtype
        super().__init__(world, call, team, check)

    def _build(self) -> None:
        self.dtype = self._resolve(self._given_dtype)
        *lead, self._depth = self.shape_a
        rows = 1
        for extent in lead:
            rows *= extent
        self._rows = rows
        self._gathering = Gathering(self, (rows, self._depth), self.dtype, self._chunks)
        widest = max(n for _, n in self.shapes_b)
        height = self._gathering.chunk_rows
        self.config = self._config or choose(self.world.backend, height, widest, self._depth)
        self.out_shapes = [
            (self.group.size * self.shape_a[0], *self.shape_a[1:-1], n) for _, n in self.shapes_b
        ]
        self._outs = [self.local(shape, self.epilogue.out_dtype) for shape in self.out_shapes]
        self._traces = [self._trace_buffer(n) for _, n in self.shapes_b]

    def _trace_buffer(self, columns: int) -> Array:
        tiles = self._tiles(columns) * self.group.size * self._gathering.chunks
        return self.world.zeros((max(1, tiles) if self._traced else 1,), "int32", symmetric=False)

    def _tiles(self, columns: int) -> int:
        """Tiles of one chunk."""
        config = self.config
        return -(-self._gathering.chunk_rows // config.block_m) * -(-columns // config.block_n)

    def __call__(
        self, a: Any, b: Any, out: Any = None, *, bias: Any = None, stream: Any = None
    ) -> Any:
        """Queue the operation; returns the product, or a tuple of them for several b.

        `a` is contiguous; b, out and bias are single values or sequences as the plan was made.
        Without `out` the plan's own buffers are returned, overwritten by its next call.
        """
        x = self.input(a, self.shape_a, self.dtype, "a")
        flat = Operand(x.pointer, (self._rows, self._depth), (self._depth, 1), x.array)
        many = [b] if self._single else list(b)
        given = [out] if self._single or out is None else list(out)
        vectors = [bias] if self._single or bias is None else list(bias)
        count = len(self.shapes_b)
        if len(many) != count:
            raise InvalidArgument(f"the plan was made for {count} b, got {len(many)}")
        given = given if len(given) == count else [None] * count
        vectors = vectors if len(vectors) == count else [None] * count
        products = []
        for i, (k, n) in enumerate(self.shapes_b):
            y = operand(self.world, many[i], "b")
            check_product(flat, y, k, n, self.dtype)
            to = self.output(given[i], self._outs[i], self.out_shapes[i], self.epilogue.out_dtype)
            vector = check_bias(self.world, vectors[i], self.epilogue.bias, n, x)
            products.append((y, to, vector, self._traces[i]))
        handle = self.begin(stream, x, *(op for p in products for op in p[:3]))
        if self._rows and self._depth:
            self._gathering.start(flat, handle)
            for y, to, vector, trace in products:
                self._consume(handle, y, to, vector, trace)
            self._gathering.join(handle)
        results = tuple(
            self._outs[i] if given[i] is None else given[i] for i in range(count)
        )
        return results[0] if self._single else results

    def _consume(self, stream: int, y: Operand, to: Operand, vector: Operand, trace: Array) -> None:
        gathering = self._gathering
        k, n = y.shape
        if not n:
            return
        tiles = self._tiles(n) * gathering.chunks * self.group.size
        self.launch(
            consume_kernel, blocks_for(self.world, tiles), stream, gathering.buffer, y.pointer,
            to.pointer, vector.pointer, gathering.progress, gathering.epoch, trace,
            self.group.handle, self._rows, n, k, gathering.chunk_rows, gathering.chunks,
            *y.strides, TRACE=self._traced, **self.epilogue.constants,
            **tile_constants(self.config),
        )  # fmt: skip

    def gathered(self) -> Array:
        """The gathered a of the last call, (size * m, ..., K): valid until the next call."""
        shape = (self.group.size * self.shape_a[0], *self.shape_a[1:])
        return self._gathering.buffer.reshape(shape)

    def overlap(self) -> tuple[int, int]:
        """(remote tiles computed before the last chunk had arrived, remote tiles) of the last call.

        From counts that the kernel took on the device; needs trace=True and waits for the device.
        """
        gathering = self._gathering
        units = self.group.size * gathering.chunks
        early = remote = 0
        for (_, n), trace in zip(self.shapes_b, self._traces, strict=True):
            counts = trace.numpy().reshape(self.group.size, -1)
            del n
            for source in range(self.group.size):
                if source != self.group.rank:
                    seen = counts[source][counts[source] > 0]
                    remote += seen.size
                    early += int((seen < units).sum())
        return early, remote


def all_gather_matmul(
    a: Any,
    b: Any,
    *,
    return_gathered: bool = False,
    bias: Any = None,
    activation: str | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: Any = None,
    out: Any = None,
    allow_tf32: bool = False,
    config: Config | None = None,
    algorithm: str | None = None,
    team: Group | None = None,
    stream: Any = None,
) -> Any:
    """act(gather(a) . b + bias), the gather overlapped with the product. Collective over `team`.

    Parameters
    ----------
    a : tdx array, or array of NumPy or a DLPack producer
        (m, ..., K): this rank's part; the same shape on every rank.
    b : array or sequence of arrays
        (K, N) of this rank, any strides; several share one gather.
    return_gathered : bool
        Return the gathered a as well.
    bias : array or sequence, optional
        (N,) for each b.
    activation : {"relu", "silu", "gelu", "gelu_tanh"}, optional
    out_dtype, out, allow_tf32, config
        See matmul.
    algorithm : {None, "fused"}
    team, stream : optional

    Returns (size * m, ..., N), or a tuple for several b, in the framework of `a`; with
    return_gathered followed by the gathered a.

    Raises InvalidArgument, DtypeError, Unsupported, CollectiveMismatch, HeapExhausted, and a
    pending fault.
    """
    world = world_of(a, b)
    group = world.group(team)
    call = Call(world, group, a, "all_gather_matmul")
    single = not isinstance(b, (list, tuple))
    with call.posting_refusals():
        no_scales(scale_a, scale_b)
        if algorithm not in (None, "fused"):
            raise InvalidArgument(f"algorithm={algorithm!r} is not one of None, 'fused'")
        source = call.readable(a)
        x = operand(world, source, "a")
        shapes = [operand(world, y, "b").shape for y in ([b] if single else b)]
        options = {
            "bias": bias is not None, "activation": activation, "out_dtype": out_dtype,
            "allow_tf32": allow_tf32, "config": config,
        }  # fmt: skip
        plan = cached(
            world,
            group,
            ("all_gather_matmul", x.shape, tuple(shapes), single, x.dtype, *options.values()),
            lambda: AllGatherMatmul(
                world, x.shape, shapes[0] if single else shapes, x.dtype, team=team, **options
            ),
        )
        if out is None:
            made = [call.result(s, plan.epilogue.out_dtype) for s in plan.out_shapes]
            out = made[0] if single else tuple(made)
        plan(source, b, out, bias=bias, stream=stream)
        if return_gathered:
            whole = call.result(plan.gathered().shape, plan.dtype)
            call.copy(plan.gathered(), whole, stream)
            out = (out, whole) if single else (*out, whole)
    return call.finish(out)


