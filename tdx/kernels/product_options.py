"""What products are given: options of functions and plans, and shapes.

`matmul` documents the options of the one-line functions.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, TypeVar

from tdx.kernels.call import Call
from tdx.kernels.operand import Operand, flattened
from tdx.kernels.plan import Plan, group_of, plain_shape, post_refusal
from tdx.kernels.product import Product
from tdx.kernels.tiles import Config, check_config
from tdx.runtime.checks import check_flag
from tdx.runtime.errors import InvalidArgument, TdxError
from tdx.runtime.group import Group
from tdx.runtime.init import current_world

__all__ = [
    "ProductOptions",
    "given_operand",
    "given_rows",
    "options_of",
    "product_of",
    "shapes_of",
    "shared_options",
    "takes_options",
]

F = TypeVar("F", bound=Callable[..., Any])

_OF_PRODUCTS = inspect.getfullargspec(Product.make).kwonlyargs
_DEFAULTS = inspect.getfullargspec(Product.make).kwonlydefaults or {}


@dataclass(kw_only=True)
class ProductOptions:
    """Options of the one-line functions, as `matmul` has them."""

    bias: Any = None
    activation: str | None = None
    scale_a: Any = None
    scale_b: Any = None
    out_dtype: Any = None
    out: Any = None
    allow_tf32: bool = False
    fast_accum: bool = False
    library: bool | None = None
    config: Config | None = None
    algorithm: str | None = None
    team: Group | None = None
    stream: Any = None

    @property
    def of_plan(self) -> dict[str, Any]:
        """Those that a plan is made with."""
        return {
            "bias": self.bias is not None,
            "activation": self.activation,
            "out_dtype": self.out_dtype,
            "allow_tf32": self.allow_tf32,
            "fast_accum": self.fast_accum,
            "library": self.library,
            "tune": False,  # a shape may not come again
            "config": self.config,
            "algorithm": self.algorithm,
        }


def takes_options(source: Any) -> Callable[[F], F]:
    """Name the keywords of `source` in the signature of a function that passes them on to it."""
    named = [p for p in inspect.signature(source).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = own.replace(parameters=kept + named)  # type: ignore[attr-defined]
        return function

    return decorate


def options_of(function: Any, options: Mapping[str, Any]) -> ProductOptions:
    """The options that `function`, which takes_options of ProductOptions, was given."""
    try:
        return ProductOptions(**options)
    except TypeError:
        error, world = _unknown(function, options), current_world()
        if world is not None:
            name = function.__name__
            with contextlib.suppress(TdxError):
                post_refusal(world, group_of(world, options.get("team"), name), name, error)
        raise error from None


def _unknown(function: Any, options: Mapping[str, Any]) -> TypeError:
    """What is to be raised for options of which one is none of `function`."""
    parameters = inspect.signature(function).parameters
    known = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    unknown = next(name for name in options if name not in known)
    return TypeError(
        f"{function.__name__}() has no option {unknown!r}; it takes {', '.join(known)}"
    )


def product_of(plan: Plan, dtype: Any, options: Mapping[str, Any]) -> Product:
    """The product of `dtype` inputs of a plan that was given these options."""
    bias = check_flag(plan.operation, "bias", options.get("bias", False))
    if not options.keys() <= {*_OF_PRODUCTS}:
        raise _unknown(type(plan), options)
    return Product.make(plan.world, dtype, **{**options, "bias": bias})


def shared_options(
    plan: Plan, product: Product, config: Config | None, columns: int, options: Mapping[str, Any],
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """What ranks agree on of `options`, as product_of takes them, `config` and those in `more`.

    Raises what this rank can tell of `config` alone, for a product of so many columns.
    """
    check_config(config)
    tile = None
    if config is not None:
        product.tile(config, plan.world, 1, columns, 1)
        fields = asdict(config)
        sides = " x ".join(str(fields.pop(name)) for name in ("block_m", "block_n", "block_k"))
        tile = f"[{sides}, {', '.join(f'{name} {value}' for name, value in fields.items())}]"
    flags = ("allow_tf32", "fast_accum", "tune")
    given = [name for name in flags if options.get(name, _DEFAULTS[name])]
    return {
        "dtype": product.dtype, "out_dtype": product.out_dtype, "bias": product.bias,
        "activation": product.activation, "library": product.library, **more,
        "flags": f"[{', '.join(given)}]", "config": tile,
    }  # fmt: skip


def shapes_of(a: tuple[int, ...], b: Any) -> tuple[bool, list[tuple[int, ...]]]:
    """The shapes that `b`, one or a sequence of them, stands for beside that of a; whether one."""
    if len(a) < 2:
        raise InvalidArgument(f"a needs 2 or more axes (m, ..., K), got {a}")
    try:
        given = list(b)
    except TypeError:
        raise InvalidArgument(
            f"shape {b!r} of b must be (K, N), or a sequence of such shapes"
        ) from None
    if not given:
        raise InvalidArgument("there is no b: pass one, or a sequence of one or more")
    single = hasattr(given[0], "__index__")
    shapes = [plain_shape(shape) for shape in ([given] if single else given)]
    for shape in shapes:
        if len(shape) != 2 or shape[0] != a[-1]:
            raise InvalidArgument(f"b {shape} does not fit a {a}: expected ({a[-1]}, N)")
    return single, shapes


def given_operand(call: Call, x: Any, what: str) -> Any:
    """An option of a one-line function as its plan takes it: numbers and None as they are."""
    return x if x is None or isinstance(x, Real) else call.operand(x, what)


def given_rows(call: Call, a: Any) -> Operand:
    """`a` of a one-line function; a copy where its leading axes do not lie behind one another.

    A tdx array is not copied: flattened() says what is wrong with it.
    """
    op = call.operand(a, "a", strided=True)
    if not op.contiguous:
        try:
            flattened(op)
        except InvalidArgument:
            return call.operand(a, "a")
    return op
