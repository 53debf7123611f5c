"""What the products that are summed over ranks have in common: plans, operands, functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from tdx.kernels.call import Call
from tdx.kernels.library_product import check_library, may_multiply
from tdx.kernels.operand import (
    Operand,
    begin_aligned,
    check_apart,
    elements,
    flattened,
    operand,
)
from tdx.kernels.plan import Plan, check_algorithm, plain_shape
from tdx.kernels.plan_cache import known_plan
from tdx.kernels.product import Config, Product, check_loading, usual_output
from tdx.kernels.product_options import (
    ProductOptions,
    given_operand,
    given_rows,
    product_of,
    shared_options,
    takes_options,
)
from tdx.runtime import dtypes
from tdx.runtime.array import Array
from tdx.runtime.driver.base import Bound
from tdx.runtime.errors import DtypeError, InvalidArgument
from tdx.runtime.group import Group
from tdx.runtime.world import World

__all__ = ["OneKernel", "ReducedProduct", "Way", "check_fused", "reduced_product"]


class Way(Protocol):
    """Workspaces and kernels of one algorithm. Part of a plan, which it does not hold."""

    def bind(self, plan: Any, *layout: Any) -> Bound:
        """The product for operands so laid out.

        `layout`: strides, steps between scales, the bias' dtype, whether a and b, and with them
        scales of rows and columns, begin at multiples of 16 bytes.
        """

    def run(self, plan: Any, multiply: Bound, handle: int, ops: tuple[Operand, ...]) -> None:
        """Queue a call, with that product."""


class OneKernel:
    """Base of ways that are one kernel. `_shared`, `_named`: its arguments behind the operands."""

    kernel: ClassVar[Any]
    _blocks: int
    _shared: tuple[Any, ...]
    _named: dict[str, Any]

    def run(self, plan: Any, multiply: Bound, handle: int, ops: tuple[Operand, ...]) -> None:
        """Queue a call."""
        multiply(handle, *ops)

    def bind(self, plan: Any, *layout: Any) -> Bound:
        """The kernel for operands so laid out."""
        strides, steps, bias, aligned, _ = layout
        product, config, sizes = plan.product, plan.config, plan._sizes(strides)
        described = product.described(plan.world, config, sizes, aligned)
        scale, kinds = product.scale_dtype, product.kinds(config, described, sizes)
        return plan.bind(
            self.kernel, self._blocks, (*kinds, scale, scale, product.out_dtype, bias),
            *self._shared, *sizes, **product.constants, **self._named,
            **product.product_constants(config, sizes, steps, described),
        )  # fmt: skip


class ReducedProduct(Plan):
    """Base of plans for the sum of a . b over ranks, which document the parameters.

    K_local may differ between ranks. Bias and activation apply once, after the reduction.
    """

    algorithms: ClassVar[tuple[str, ...]]
    with_library: ClassVar[tuple[str, ...]]  # those of them that cuBLAS can multiply for
    usual_result = staticmethod(usual_output)
    splits_rows: ClassVar[bool] = False  # does each rank get a part of a's first axis?
    same_tile: bool  # do ranks meet tile by tile?
    out_shape: tuple[int, ...]
    _way: Way

    @takes_options(Product.make)
    def __init__(
        self,
        world: World,
        shape_a: Sequence[int],
        shape_b: Sequence[int],
        dtype: Any,
        *,
        partial_dtype: Any = None,
        algorithm: str | None = None,
        config: Config | None = None,
        team: Group | None = None,
        buffer: bool = True,
        **product: Any,
    ):
        with self.agreement(world, team) as shared:
            self.shape_a, self.shape_b = plain_shape(shape_a), plain_shape(shape_b)
            self.product = product_of(self, dtype, product)
            self.dtype = self.product.dtype
            out = self.product.out_dtype
            self.partial_dtype = out if partial_dtype is None else dtypes.resolve(partial_dtype)
            self._check(algorithm)
            check_library(world, self.partial_product, config, algorithm, self.with_library)
            self.pinned = config
            self._has_library: bool | None = None
            asked = shared_options(
                self, self.product, config, self.shape_b[1], product,
                partial_dtype=self.partial_dtype,
            )  # fmt: skip
            shared.update(a=(*self.shape_a[:-1], "K"), n=self.shape_b[1])
            shared.update(given_algorithm=algorithm, **asked)
            self.agree_on(shared)
            self.config, self.algorithm = self._choose(config, algorithm)
            self.result = (self.out_shape, out)
            shared.update(algorithm=self.algorithm)
            if self._has_library is not None:
                shared.update(cublas=self._has_library)
            if self.same_tile:
                tile = self.config
                shared.update(tile=(tile.block_m, tile.block_n, tile.group_m))
        with self.preparation():
            self._out = self.result_buffer(self.out_shape, out, buffer)
            self._way = self._build()
            self._kernels: dict[Any, Bound] = {}  # by layout, see Way
            usual = (self.shape_a[-1], 1, self.shape_b[1], 1)
            if 0 not in self.out_shape and self.product.prepares(self.config, self._sizes(usual)):
                layout = (usual, (0, 0), self.product.bias_dtype, True, True)
                self._kernels[layout] = self._way.bind(self, *layout)

    def __call__(
        self, a: Any, b: Any, out: Any = None, stream: Any = None, *, bias: Any = None,
        scale_a: Any = None, scale_b: Any = None,
    ) -> Any:  # fmt: skip
        """Queue the operation; returns `out`, or the plan's buffer when it is None.

        bias, scale_a, scale_b: as matmul has them.
        """
        result = self._out if out is None else out
        same = self.again_with(stream, b, a, result, bias, scale_a, scale_b)
        if same is None:
            handle, run, ops = self._begin(stream, a, b, out, bias, scale_a, scale_b)
        else:
            handle, (y, x, to, *given), layout = same
            vector, left, right = (x if op is None else op for op in given)
            run, ops = self._kernels[layout], (x, y, left, right, to, vector)
        if run is not None:
            self._way.run(self, run, handle, ops)
        return result

    def _begin(
        self, stream: Any, a: Any, b: Any, out: Any, *given: Any
    ) -> tuple[int, Bound | None, tuple[Operand, ...]]:
        """Check a call and begin it; `given`: bias, scale_a, scale_b."""
        try:
            ops, strides, steps = self._operands(a, b, out, *given)
            x, y, left, right, to, vector = ops
            check_apart(self.operation, to, x, y, left, right, vector)
            scales = (left, right) if any(steps) else ()
            aligned = (begin_aligned(x, y), begin_aligned(x, y, *scales))
            layout = (strides, steps, vector.dtype, *aligned)
            run = None
            if 0 not in to.shape:
                run = self._kernels.get(layout)
                if run is None:
                    check_loading(self, stream, *ops)
                    run = self._kernels[layout] = self._way.bind(self, *layout)
            handle = self.begin(stream, *ops)
        except Exception as error:
            self.refuse(error)
            raise
        extras = [
            None if x is None else op for x, op in zip(given, (vector, left, right), strict=True)
        ]
        if run is not None and self.product.takes_as_given(*given[1:]):
            self.note(y, (x, to, *extras), layout)
        return handle, run, ops

    def has_library(self) -> bool:
        """Whether cuBLAS may multiply: on all ranks or none, where the algorithm depends on it."""
        self._has_library = may_multiply(self.world, self.partial_product, self.pinned)
        return self._has_library

    @property
    def is_for_library(self) -> bool | None:
        """True if the algorithm was chosen because cuBLAS multiplies."""
        return self._has_library or None

    @property
    def partial_product(self) -> Product:
        """The product before it is summed."""
        return replace(self.product, out_dtype=self.partial_dtype, bias=False, activation=None)

    def _choose(self, config: Config | None, algorithm: str | None) -> tuple[Config, str]:
        """Check the shapes; the tile and the algorithm. Sets `out_shape` and `same_tile`."""
        raise NotImplementedError

    def _build(self) -> Way:
        """Allocate what the algorithm needs."""
        raise NotImplementedError

    def _check(self, algorithm: str | None) -> None:
        out = self.product.out_dtype
        check_algorithm(self.operation, algorithm, self.algorithms)
        if self.partial_dtype not in (out, dtypes.resolve("float32")):
            allowed = " or ".join(dict.fromkeys(("float32", str(out))))
            raise DtypeError(f"partial_dtype {self.partial_dtype} must be {allowed}")
        if len(self.shape_b) != 2 or len(self.shape_a) < 2:
            raise InvalidArgument(
                f"a and b need shapes (..., K) and (K, N), got {self.shape_a} and {self.shape_b}"
            )
        if self.shape_a[-1] != self.shape_b[0]:
            raise InvalidArgument(f"a {self.shape_a} and b {self.shape_b} differ in K")
        first, rows, size = self.shape_a[0], elements(self.shape_a[:-1]), self.group.size
        if self.splits_rows and first % size:
            remedy = "pad it" if rows % size else f"give it as ({rows}, {self.shape_a[-1]})"
            raise InvalidArgument(
                f"a's first axis, {first}, is no multiple of the {size} ranks; {remedy}"
            )

    def _sizes(self, strides: Sequence[int]) -> tuple[int, ...]:
        """The product of operands with these strides: see Product.described."""
        k, n = self.shape_b
        return (elements(self.shape_a[:-1]), n, k, *strides)

    def _operands(
        self, a: Any, b: Any, out: Any, bias: Any, scale_a: Any, scale_b: Any
    ) -> tuple[tuple[Operand, ...], tuple[int, ...], tuple[int, int]]:
        """Check what a call was given: the operands, the strides, the steps between scales.

        The operands are a, b, scale_a, scale_b, out and bias; strides are those of a, with its
        leading axes taken together, and of b.
        """
        world, product = self.world, self.product
        x, y = operand(world, a, "a"), operand(world, b, "b")
        if x.shape != self.shape_a:
            raise InvalidArgument(f"a has shape {x.shape}, the plan takes {self.shape_a}")
        product.check(x, y, *self.shape_b)
        _, *strides = flattened(x)
        to = self.output(out, self._out, self.out_shape, product.out_dtype)
        vector = product.check_bias(world, bias, self.shape_b[1], x)
        left, step_a = product.check_scale(world, scale_a, x.shape[:-1], "scale_a", x)
        right, step_b = product.check_scale(world, scale_b, y.shape[1:], "scale_b", x)
        return (x, y, left, right, to, vector), (*strides, *y.strides), (step_a, step_b)


def check_fused(config: Config | None, algorithm: str, most: int | None = None) -> None:
    """Raise unless a given `config` will do, with tiles at most `most` rows high, as chunks are."""
    if config is not None:
        config.check_fused(algorithm)
    if config is not None and most is not None and config.block_m > most:
        raise InvalidArgument(f'block_m={config.block_m} must be <= {most} for "{algorithm}"')


def reduced_product(
    kind: type[ReducedProduct], a: Any, b: Any, partial_dtype: Any, options: ProductOptions
) -> Any:
    """The one-line function of a plan."""
    if type(a) is Array and type(b) is Array:
        of_plan = {"partial_dtype": partial_dtype, **options.of_plan}
        extras = {name: getattr(options, name) for name in ("bias", "scale_a", "scale_b")}
        arrays, layout = (a, b, options.out, *extras.values()), (a.shape, b.shape, a.dtype)
        known = known_plan(kind, options.team, layout, of_plan, *arrays)
        if known is not None:
            out = known.fresh_result() if options.out is None else options.out
            return known(a, b, out, options.stream, **extras)
    call = Call(kind.operation, a, b, options.out, team=options.team, stream=options.stream)
    with call:
        x, y = given_rows(call, a), call.operand(b, "b", strided=True)
        extras = {
            name: given_operand(call, given, name)
            for name in ("bias", "scale_a", "scale_b")
            if (given := getattr(options, name)) is not None
        }
        plan = call.plan(
            kind, x.shape, y.shape, x.dtype, partial_dtype=partial_dtype, **options.of_plan
        )
        target = call.target(options.out, plan.out_shape, plan.product.out_dtype)
        plan(x, y, target, stream=call.stream, **extras)
    return call.finish(target)
