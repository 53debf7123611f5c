"""The one-line function of an all-gather and product."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

from tdx.kernels.call import Call
from tdx.kernels.operand import for_each
from tdx.kernels.plan_cache import known_plan
from tdx.kernels.product_options import ProductOptions, given_operand
from tdx.runtime.array import Array
from tdx.runtime.checks import check_bool
from tdx.runtime.errors import InvalidArgument

if TYPE_CHECKING:
    from tdx.kernels.all_gather_matmul import AllGatherMatmul

__all__ = ["gathered_product"]


def gathered_product(
    kind: type[AllGatherMatmul], a: Any, b: Any, return_gathered: bool, given: ProductOptions
) -> Any:
    """What tdx.all_gather_matmul documents, by plans of `kind`."""
    single = not isinstance(b, (list, tuple))
    many = [b] if single else list(b)
    alone = len(many) == 1  # then there is one plan for it, and for a sequence of it
    if type(a) is Array and type(b) is Array and return_gathered is False:
        layout, extras = (a.shape, b.shape, a.dtype), (given.bias, given.scale_a, given.scale_b)
        of_plan = {**given.of_plan, "row_scales": _has_row_scales(a, given.scale_a)}
        known = known_plan(kind, given.team, layout, of_plan, a, b, given.out, *extras)
        if known is not None:
            out = known.fresh_result() if given.out is None else given.out
            named = dict(zip(("bias", "scale_a", "scale_b"), extras, strict=True))
            return known(a, b, out, given.stream, **named)
    call = Call(kind.operation, a, *many, team=given.team, stream=given.stream)
    with call:
        wanted = check_bool("return_gathered", return_gathered)
        x = call.operand(a, "a")
        ys = [call.operand(y, "b", strided=True) for y in many]
        outs, biases, scales = (
            for_each(getattr(given, what), len(many), single, what)
            for what in ("out", "bias", "scale_b")
        )
        missing = sum(each is None for each in biases)
        if 0 < missing < len(many):
            raise InvalidArgument(
                f"bias: {missing} of {len(many)} are None; pass one for each b, or for none"
            )
        left = given_operand(call, given.scale_a, "scale_a")
        vectors = [given_operand(call, each, "bias") for each in biases]
        rights = [given_operand(call, each, "scale_b") for each in scales]
        shapes = ys[0].shape if alone else tuple(y.shape for y in ys)
        of_plan = {**given.of_plan, "bias": not missing, "row_scales": _has_row_scales(x, left)}
        plan = call.plan(kind, x.shape, shapes, x.dtype, **of_plan)
        dtype = plan.product.out_dtype
        targets = [call.target(o, s, dtype) for o, s in zip(outs, plan.out_shapes, strict=True)]
        y, to, vector, right = ((v[0] if alone else v) for v in (ys, targets, vectors, rights))
        plan(x, y, to, call.stream, bias=vector, scale_a=left, scale_b=right)
        if wanted:
            whole = plan.gathered(call.handle())
            targets = [*targets, call.target(None, whole.shape, plan.dtype)]
            call.copy(whole, targets[-1])
            plan._gathering.confirm(call.handle())
    return call.finish(targets[0] if len(targets) == 1 and single else tuple(targets))


def _has_row_scales(a: Any, scale: Any) -> bool:
    """Whether a call passes a scale for each row of `a`."""
    if a.dtype.itemsize > 1:  # no float8: the plan says that there are no scales
        return False
    if scale is None or isinstance(scale, Real):
        return False
    shape = tuple(getattr(scale, "shape", ()))  # see Product.check_scale
    return math.prod(shape) != 1 or (shape == a.shape[:-1] and shape != (1,))
