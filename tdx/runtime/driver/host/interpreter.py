"""Stock Triton on the host tier: kernels decorated before or after run on our device.

`take_over` patches, once and for the life of the process: `JITFunction.run` (a launch) queues
the kernel on the device's current stream, `JITFunction.__call__` (a device function) runs the
function rewritten for the interpreter, and `triton.language` computes with NumPy. Compiling
for a GPU no longer works in such a process: one family of backends per process.

The interpreter's internals are used here, in builder.py, operators.py and rewriting.py, its memory
operations in executor.py.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tdx import abi
from tdx.runtime.checks import is_array
from tdx.runtime.driver.host import logic
from tdx.runtime.driver.host.addresses import HandleView
from tdx.runtime.driver.host.bounds import address_of
from tdx.runtime.driver.host.builder import HostBuilder, HostReduceOps, HostScanOps
from tdx.runtime.driver.host.device import Device
from tdx.runtime.driver.host.kernel import PreparedKernel
from tdx.runtime.driver.host.operators import shorten
from tdx.runtime.driver.host.rewriting import LOGIC, Transformer, refuse_globals
from tdx.runtime.errors import Closed, InvalidArgument, Unsupported

__all__ = ["HostTritonDriver", "prepare", "set_launcher", "take_over"]

Launcher = Callable[[PreparedKernel, dict[str, Any]], None]

_PARSE_TRIES = 5

_builder: HostBuilder | None = None
_launcher: Launcher | None = None
_rewritten: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = weakref.WeakKeyDictionary()
_rewriting = threading.Lock()


class _NoScope:
    """Stands in for the interpreter's patch scope: our patches stay."""

    def set_attr(self, *_: Any) -> None:
        pass

    def restore(self) -> None:
        pass


def set_launcher(device: Device | None, launcher: Launcher | None) -> None:
    """Where launches go from now on; None: no world is open."""
    global _launcher
    _launcher = launcher
    if _builder is not None:
        _builder.device = device


def take_over() -> None:
    """Route every launch of this process to the host tier; repeated calls do nothing."""
    global _builder
    if _builder is not None:
        return
    _builder = HostBuilder()
    interpreter.interpreter_builder = _builder
    interpreter.interpreter_semantic = TritonSemantic(_builder)
    interpreter.ReduceOps = HostReduceOps
    abi.host_handle = TensorHandle
    interpreter.ScanOps = HostScanOps
    _patch_language()
    interpreted = interpreter.InterpretedFunction
    for kind in (JITFunction, interpreted):  # the second: decorated under TRITON_INTERPRET=1
        kind.run = _launch
        kind.__call__ = _call


def _patch_language() -> None:
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: _NoScope()
    # Triton 3.6 converts with int(array), which NumPy 2.4 refuses for arrays of one dimension
    tl.tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, (JITFunction, interpreter.InterpretedFunction)):
            setattr(tl.tensor, name, _method(member))
    tl.tensor.__bool__ = logic.truth
    for name in ("range", "static_range"):
        for module in (tl, tl.core):
            setattr(module, name, logic.iterator(name))
    shorten()


def _method(function: Any) -> Callable[..., Any]:
    return lambda *args, **named: function(*args, **named)


class _Rewriter(interpreter.FunctionRewriter):
    """Compiles the rewritten source against the kernel's own globals and closure."""

    ast_transformer = Transformer()

    def _compile_and_exec(self, transformed_ast: Any) -> Any:
        raw = self.fn
        names = raw.__code__.co_freevars
        definition = transformed_ast.body[0]
        # these were evaluated where the kernel was defined, and are taken from there
        definition.decorator_list, definition.returns = [], None
        _strip(definition.args)
        refuse_globals(definition, raw)
        outer = ast.parse(f"def outer({', '.join(names)}):\n    return {definition.name}")
        outer.body[0].body.insert(0, definition)  # type: ignore[attr-defined]
        module = compile(ast.fix_missing_locations(outer), filename=self.filename, mode="exec")
        outer_code = next(c for c in module.co_consts if hasattr(c, "co_name"))
        code = next(
            c for c in outer_code.co_consts if getattr(c, "co_name", None) == definition.name
        )
        cells = dict(zip(names, raw.__closure__ or (), strict=True))
        closure = tuple(cells[name] for name in code.co_freevars)
        scope = raw.__globals__
        scope[LOGIC] = logic
        for name in ("interpreter_semantic", "_InterpreterComparison"):  # 3.6 has no second
            if hasattr(interpreter, name):
                scope[name] = getattr(interpreter, name)
        function = types.FunctionType(code, scope, raw.__name__, raw.__defaults__, closure)
        function.__kwdefaults__ = raw.__kwdefaults__
        function.__qualname__ = raw.__name__  # which Python's messages say
        return function


def _strip(args: ast.arguments) -> None:
    """Remove defaults and annotations, but keep which parameters may be left out."""
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    args.defaults = [ast.Constant(None) for _ in args.defaults]
    args.kw_defaults = [None if d is None else ast.Constant(None) for d in args.kw_defaults]


def _interpreted(function: Any) -> Callable[..., Any]:
    """The Python function of a jitted one, rewritten for the interpreter."""
    raw = function.fn
    rewritten = _rewritten.get(raw)
    if rewritten is None:
        with _rewriting:
            rewritten = _rewritten[raw] = _rewrite(raw)
    return rewritten


def _rewrite(raw: Any) -> Callable[..., Any]:
    # while another thread parses, as the formatting of a traceback does, CPython 3.11 and 3.12
    # may fail with "AST constructor recursion depth mismatch" (CPython issue 106905)
    for _ in range(_PARSE_TRIES - 1):
        with contextlib.suppress(SystemError):
            return _Rewriter(raw).rewrite_ast()
    return _Rewriter(raw).rewrite_ast()


def _call(self: Any, *args: Any, **named: Any) -> Any:
    device = _builder.device if _builder is not None else None
    if device is None or device.running is None:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")
    return _interpreted(self)(*args, **named)


def _launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
    if warmup:
        return
    if _launcher is None:
        raise Closed(
            f"{self.fn.__name__}: no world is open; call tdx.init() before launching kernels"
        )
    options = {name: named.pop(name) for name in list(named) if name not in self.arg_names}
    unknown = sorted(set(options) - _launch_options())
    if unknown:
        raise InvalidArgument(
            f"{self.fn.__name__}: {', '.join(unknown)} is neither an argument of the kernel nor a "
            "launch option of Triton"
        )
    for hook in getattr(self, "pre_run_hooks", ()):
        hook(*args, **named, **options)
    _launcher(prepare(self, args, named, grid, _caller()), options)


def _caller() -> str:
    """ "file:line" of whoever launches: the first frame that is neither tdx's nor Triton's."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("tdx.", "triton.")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.cache
def _launch_options() -> frozenset[str]:
    """What `kernel[grid](...)` takes besides arguments, on any GPU: accepted and mostly unused."""
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.nvidia.compiler import CUDAOptions

    names = {field.name for kind in (CUDAOptions, HIPOptions) for field in fields(kind)}
    return frozenset(names | {"device", "stream", "debug", "instrumentation_mode"})


def _check_channels(name: str, arguments: dict[str, Any], grid: tuple[Any, ...]) -> None:
    """Raise InvalidArgument for a channel of other ranks, or of fewer blocks than programs.

    Each program has words there, for each of the ranks.
    """
    for what, value in arguments.items():
        if not (hasattr(value, "words") and hasattr(value, "packed")):
            continue
        handles = {who: v for who, v in arguments.items() if hasattr(v, "is_team")}
        groups = [list(HandleView(address_of(v[0]), *v[1:]).ranks()) for v in handles.values()]
        ranks = list(value.words._block.ranks)
        if groups and ranks not in groups:
            raise InvalidArgument(
                f"{name}: {what} is a channel of ranks {ranks}, and {next(iter(handles))} the "
                f"handle of ranks {groups[0]}: pass that of the team that the channel is for"
            )
        blocks = value.packed >> abi.CHANNEL_PACK_SHIFT
        if all(hasattr(n, "__index__") for n in grid) and math.prod(grid) > blocks:
            raise InvalidArgument(
                f"{name}: a grid of {math.prod(grid)} programs, and {what} is a channel for "
                f"{blocks}: launch no more, or make it with world.channel({math.prod(grid)})"
            )


def prepare(
    kernel: Any, args: tuple[Any, ...], named: dict[str, Any], grid: Any, launched: str = ""
) -> PreparedKernel:
    """Bind and convert the arguments of a launch at `launched`, "file:line"."""
    name = kernel.fn.__name__
    bound = _bind(kernel, name, args, named)
    if callable(grid):
        grid = grid(bound)
    if not hasattr(grid, "__len__"):  # what Triton's launcher asks for
        raise InvalidArgument(
            f"{name}: the grid must be a tuple of 1 to 3 counts, got {grid!r}: write "
            f"{name}[({grid},)](...)"
        )
    grid = tuple(grid)
    _check_channels(name, bound, grid)
    constants = _constants(kernel)
    arguments = {k: v if k in constants else _convert(name, k, v) for k, v in bound.items()}
    return PreparedKernel(name, _interpreted(kernel), arguments, grid, bound, launched)


def _bind(kernel: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    try:
        bound = _signature(kernel.fn).bind(*args, **named)
    except TypeError as error:
        raise InvalidArgument(f"{name}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


@functools.lru_cache(maxsize=256)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _constants(kernel: Any) -> set[str]:
    params = getattr(kernel, "params", None)
    if params is not None:
        return {p.name for p in params if p.is_constexpr}
    notes = getattr(kernel.fn, "__annotations__", {})
    return {n for n, note in notes.items() if "constexpr" in str(note)}


def _convert(kernel: str, name: str, value: Any) -> Any:
    """A launch argument as the interpreter's tensor, typed as the GPU launcher types it."""
    if value is None or isinstance(value, tl.constexpr):
        return value
    if isinstance(value, (bool, np.bool_)):
        return tl.tensor(TensorHandle(np.array([value], np.bool_), tl.int1), tl.int1)
    if isinstance(value, (int, np.integer)):
        return _convert_int(kernel, name, int(value))
    if isinstance(value, (float, np.floating)):
        return tl.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
    if hasattr(value, "data_ptr"):
        kind = triton._utils.type_canonicalisation_dict.get(str(value.dtype).split(".")[-1])
        if kind is None:
            raise InvalidArgument(
                f"{kernel}: argument {name!r} has dtype {value.dtype}, which Triton has not;"
                " pass a .view() of another dtype"
            )
        pointer = tl.pointer_type(tl.str_to_ty(kind, None))
        handle = TensorHandle(np.array([value.data_ptr()], np.uint64), pointer)
        return tl.tensor(handle, pointer)
    if isinstance(value, tuple):
        items = [_convert(kernel, f"{name}[{i}]", item) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, TensorDescriptor):
        return _convert_descriptor(kernel, name, value)
    if isinstance(value, (JITFunction, tl.dtype)):
        return value
    hint = ""
    if is_array(value):
        hint = "; make it a tdx array with world.array(x)"
    elif hasattr(value, "ranks"):
        hint = "; pass its handle"
    raise InvalidArgument(
        f"{kernel}: argument {name!r} is of type {type(value).__name__}, which is not a"
        f" kernel argument{hint}"
    )


def _convert_int(kernel: str, name: str, value: int) -> Any:
    for kind, dtype, low, high in (
        (tl.int32, np.int32, -(2**31), 2**31),
        (tl.int64, np.int64, -(2**63), 2**63),
        (tl.uint64, np.uint64, 0, 2**64),
    ):
        if low <= value < high:
            return tl.tensor(TensorHandle(np.array([value], dtype), kind), kind)
    raise InvalidArgument(f"{kernel}: argument {name!r} = {value} does not fit 64 bits")


def _convert_descriptor(kernel: str, name: str, value: Any) -> Any:
    def convert(items: Any) -> list[Any]:
        return [_convert(kernel, name, item) for item in items]

    strides = convert(value.strides)
    strides[-1] = tl.constexpr(1)
    descriptor = interpreter.interpreter_semantic.make_tensor_descriptor(
        base=_convert(kernel, name, value.base),
        shape=convert(value.shape),
        strides=strides,
        block_shape=[tl.constexpr(n) for n in value.block_shape],
        padding_option=value.padding,
    )
    if hasattr(value, "round_f32_to_tf32"):
        descriptor.handle.round_f32_to_tf32 = value.round_f32_to_tf32
    return descriptor


class HostTritonDriver(DriverBase):
    """Triton's active driver on the host tier; the autotuner takes the first configuration."""

    def __init__(self, synchronize: Callable[[], None]):
        self._synchronize = synchronize

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("the host tier compiles nothing")

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError("the host tier does not use torch")

    def get_device_interface(self) -> Any:
        raise Unsupported(
            "triton.testing.do_bench measures GPUs, not the host tier: take the time around calls "
            "and world.synchronize()"
        )

    def get_empty_cache_for_benchmark(self) -> Any:
        return None

    def clear_cache(self, cache: Any) -> None:
        pass

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def benchmark(call: Any, quantiles: Any = None, **_: Any) -> list[float]:
            # equal times without running: every rank then picks the first configuration
            return [1.0] * (len(quantiles) if quantiles else 1)

        return benchmark
