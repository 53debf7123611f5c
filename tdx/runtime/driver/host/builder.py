"""The interpreter's builder with right narrow floats, 16-bit atomics and scheduling points."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import threadpoolctl
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from tdx.runtime.driver.host.device import Device
from tdx.runtime.driver.host.numerics import NARROW, from_float32, to_float32

__all__ = ["HostBuilder", "HostReduceOps", "HostScanOps"]


@functools.cache
def _blas_libraries() -> list[Any]:
    return list(threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers)


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """A tile is too small to share: with several ranks a core, BLAS threads wait for each other."""
    before = [(library, library.get_num_threads()) for library in _blas_libraries()]
    for library, _ in before:
        library.set_num_threads(1)
    try:
        yield
    finally:
        for library, threads in before:
            library.set_num_threads(threads)


def _narrow(handle: TensorHandle) -> bool:
    return handle.dtype.scalar in NARROW


def _wide(handle: TensorHandle) -> np.ndarray:
    """The values of a handle; narrow floats as float32."""
    dtype = handle.dtype.scalar
    return to_float32(handle.data, dtype) if dtype in NARROW else handle.data


def _handle(values: np.ndarray, dtype: Any) -> TensorHandle:
    """Computed float32 values (or a comparison's booleans) as a handle of the narrow type."""
    if values.dtype == np.bool_:
        return TensorHandle(values, tl.int1)
    return TensorHandle(from_float32(values, dtype), dtype)


def _signed(choose: Any, negative: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What `choose` takes; of equal values that with the sign bit `negative`, if there is one."""
    return np.where(x == y, np.where(np.signbit(x) == negative, x, y), choose(x, y))


class HostBuilder(interpreter.InterpreterBuilder):
    """What Triton's interpreted operations call; the running fibre gives the program index."""

    def __init__(self, device: Device | None = None):
        super().__init__()
        self.options: Any
        # overflow checks of every integer operation would double the time of index arithmetic;
        # without debug Triton leaves device_assert out
        self.options = dataclasses.replace(self.options, sanitize_overflow=False, debug=True)
        self.device = device

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        return self.device.running.index  # type: ignore[union-attr]

    @property
    def grid_dim(self) -> tuple[int, ...]:
        return self.device.running.run.prepared.grid  # type: ignore[union-attr]

    def create_assert(self, condition: TensorHandle, message: Any) -> None:
        wrong = condition.data == 0
        if not wrong.any() or self.device.running.gave_up:  # type: ignore[union-attr]
            return  # the error of a wait that gave up says more
        where = ""
        if wrong.size > 1:
            first = np.argwhere(wrong)[0].tolist()
            where = f" for {int(wrong.sum())} of {wrong.size} elements, the first {first}"
        raise AssertionError(
            f"the assertion does not hold{where}" + (f": {message}" if message else "")
        )

    # ---- narrow floats
    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        if _narrow(lhs):
            return _handle(op(_wide(lhs), _wide(rhs)), lhs.dtype.scalar)
        result = super().binary_op(lhs, rhs, op)
        if result.data.dtype == np.bool_:  # stock keeps the operands' type for a comparison
            result.dtype = tl.int1
        return result

    def unary_op(self, arg: TensorHandle, op: Any) -> TensorHandle:
        if _narrow(arg):
            return _handle(op(_wide(arg)), arg.dtype.scalar)
        return super().unary_op(arg, op)

    def ternary_op(
        self, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Any
    ) -> TensorHandle:
        if op is not np.where and _narrow(other):  # a selection moves bits, of pointers too
            return _handle(op(_wide(lhs), _wide(rhs), _wide(other)), other.dtype.scalar)
        return super().ternary_op(lhs, rhs, other, op)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        if _narrow(z):
            exact = np.multiply(_wide(x), _wide(y), dtype=np.float64) + _wide(z)
            return _handle(exact, z.dtype.scalar)
        return super().create_fma(x, y, z)

    # of zeros of both signs GPUs take +0 as the larger one, NumPy the one that comes second
    def create_maximumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, functools.partial(_signed, np.maximum, 0))

    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, functools.partial(_signed, np.fmax, 0))

    def create_minimumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, functools.partial(_signed, np.minimum, 1))

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, functools.partial(_signed, np.fmin, 1))

    def create_fabs(self, arg: TensorHandle) -> TensorHandle:
        return self.unary_op(arg, np.abs) if _narrow(arg) else super().create_fabs(arg)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target or (source not in NARROW and target not in NARROW):
            return super().cast_impl(src, dst_type)
        values = _wide(src)
        if target in NARROW:
            return TensorHandle(from_float32(values, target), target)
        return TensorHandle(values.astype(interpreter._get_np_dtype(target)), target)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        toward_zero = rounding_mode is not None and rounding_mode == ir.ROUNDING_MODE.RTZ
        if toward_zero or not (source in NARROW or target in NARROW):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(from_float32(np.array([value]), tl.bfloat16), tl.bfloat16)

    def create_dot(self, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> TensorHandle:
        if d.data.dtype.kind in "iu":
            return super().create_dot(a, b, d, precision, imprecise)
        # BLAS sums rows in orders that depend on their place in the tile (OpenBLAS with AVX2), on
        # memory order and on the machine: of float32 that shows once in about 1e8 elements so
        left, right = (_wide(x).astype(np.float64, order="C", copy=False) for x in (a, b))
        with _one_blas_thread():
            product = np.matmul(left, right)
        with np.errstate(over="ignore"):
            total = (product + d.data).astype(d.data.dtype, copy=False)
        return TensorHandle(total, d.dtype.scalar)

    # ---- scheduling points
    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        self._check(ptrs, "load from", mask)
        result = super().create_masked_load(ptrs, mask, other, *rest, **named)
        volatile = rest[-1] if rest else named.get("is_volatile")
        fibre = self.device.running if self.device is not None else None
        if volatile is True:
            self._observe(ptrs, result)
        elif fibre is not None:
            fibre.loaded(ptrs.data, result.data)
        return result

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._check(ptrs, "store to", mask)
        result = super().create_masked_store(ptrs, value, mask, *rest)
        fibre = self.device.running if self.device is not None else None
        if fibre is not None:
            fibre.stored()
        return result

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> TensorHandle:
        self._check(ptr, "atomic access to")
        result = super().create_atomic_cas(ptr, cmp, val, sem, scope)
        self._observe(ptr, result)
        return result

    def create_atomic_rmw(
        self, rmw_op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        self._check(ptr, "atomic access to", mask)
        if rmw_op == ir.ATOMIC_OP.FADD and val.data.itemsize == 2:
            result = self._add_16_bit(ptr, val, mask, sem)
        else:
            result = super().create_atomic_rmw(rmw_op, ptr, val, mask, sem, scope)
        self._observe(ptr, result)
        return result

    def create_atomic_poll(
        self, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        self._check(ptr, "atomic access to")
        start = time.perf_counter_ns()
        limit = None if timeout_ns is None else int(np.asarray(timeout_ns.data).reshape(-1)[0])
        mask = TensorHandle(np.ones_like(ptr.data, dtype=bool), tl.int1)
        base: Any = super()

        def match() -> np.ndarray:
            return base.create_masked_load(ptr, mask, None, None, True).data == expected.data

        def finished() -> bool:
            late = limit is not None and time.perf_counter_ns() - start >= limit
            return late or bool(match().all())

        self.device.running.wait_until(finished, lambda: "atomic_poll")  # type: ignore[union-attr]
        return TensorHandle(np.asarray(match()), tl.int1)

    def _add_16_bit(self, ptr: Any, val: Any, mask: Any, sem: Any) -> TensorHandle:
        """A compare-and-swap loop: the interpreter's own 16-bit add is not atomic across ranks."""
        dtype = val.dtype.scalar
        order = self.ir_sem_to_interpreter_sem[sem]
        shape = np.broadcast_shapes(ptr.data.shape, val.data.shape, mask.data.shape)
        addresses = np.broadcast_to(ptr.data, shape).reshape(-1)
        addends = np.broadcast_to(val.data, shape).reshape(-1)
        wanted = np.broadcast_to(mask.data, shape).reshape(-1)
        old = np.zeros(addresses.shape, np.uint16)
        for i in np.flatnonzero(wanted):
            at = addresses[i : i + 1].copy()
            seen = native.load(at, np.ones(1, bool), np.zeros(1, np.uint16), np.dtype(np.uint16))
            while True:
                total = _wide(TensorHandle(_as(seen, dtype), dtype)) + _wide(
                    TensorHandle(addends[i : i + 1].copy(), dtype)
                )
                new = from_float32(total, dtype) if dtype in NARROW else total.view(np.uint16)
                found = native.atomic_cas(at, seen, new, order)
                if found[0] == seen[0]:
                    break
                seen = found
            old[i] = seen[0]
        return TensorHandle(_as(old, dtype).reshape(shape), dtype)

    def _check(self, ptr: TensorHandle, access: str, mask: TensorHandle | None = None) -> None:
        """Refuse to use wrong pointers: such as `tdl.symm_at` makes, and beyond all arrays."""
        fibre = self.device.running if self.device is not None else None
        if fibre is None:
            return
        active = np.True_ if mask is None else mask.data
        if fibre.run.checks is not None:
            fibre.run.checks.check(ptr.data, active)
        element: Any = ptr.get_element_ty()
        fibre.run.bounds.check(ptr.data, active, max(element.primitive_bitwidth // 8, 1), access)

    def _observe(self, ptr: TensorHandle, result: TensorHandle) -> None:
        fibre = self.device.running if self.device is not None else None
        if fibre is not None:
            fibre.observe(ptr.data.tobytes(), result.data.tobytes())


def _as(bits: np.ndarray, dtype: Any) -> np.ndarray:
    """16-bit patterns in the array type the interpreter keeps for `dtype`."""
    return bits if dtype in NARROW else bits.view(np.float16)


def _widened(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors with narrow floats replaced by float32 ones."""

    def widen(t: Any) -> Any:
        if t.dtype not in NARROW:
            return t
        shape = list(t.shape)
        kind = tl.block_type(tl.float32, shape) if shape else tl.float32
        return tl.tensor(TensorHandle(_wide(t.handle), tl.float32), kind)

    return tuple(widen(t) for t in tensors)


def _narrowed(results: Any, sources: tuple[Any, ...]) -> tuple[Any, ...]:
    """Undo _widened on the results of a reduction or scan."""
    results = results if isinstance(results, (list, tuple)) else (results,)
    out = []
    for i, t in enumerate(results):
        source = sources[i].dtype if i < len(sources) else None
        if source in NARROW and t.dtype == tl.float32:
            shape = list(t.shape)
            kind = tl.block_type(source, shape) if shape else source
            t = tl.tensor(TensorHandle(from_float32(t.handle.data, source), source), kind)
        out.append(t)
    return tuple(out)


class HostReduceOps(interpreter.ReduceOps):
    """Reductions of narrow floats in float32, rounded once."""

    def apply_impl(self, tensors: tuple[Any, ...]) -> Any:
        if not any(t.dtype in NARROW for t in tensors):
            return super().apply_impl(tensors)
        return _narrowed(super().apply_impl(_widened(tensors)), tensors)


class HostScanOps(interpreter.ScanOps):
    """Scans of narrow floats in float32, rounded once."""

    def apply_impl(self, tensors: tuple[Any, ...]) -> Any:
        if not any(t.dtype in NARROW for t in tensors):
            return super().apply_impl(tensors)
        return _narrowed(super().apply_impl(_widened(tensors)), tensors)
