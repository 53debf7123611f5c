"""A kernel on the host tier: every program of the grid is a fibre.

Programs start in grid order, x fastest, and at most `multiprocessors` of them are resident.
A program runs until it ends or reaches a scheduling point: a wait that is not satisfied, an
atomic or volatile load that returns what it returned last time, or any load, store or atomic
once its time slice is over. A slice in which nothing new was loaded and no variable changed is
one of a spin loop. Fibres live on the device thread only.
"""

from __future__ import annotations

import contextvars
import inspect
import linecache
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import greenlet
import numpy as np

from tdx.runtime.config import config
from tdx.runtime.driver.host.addresses import Checks
from tdx.runtime.driver.host.bounds import Bounds, address_of, flat
from tdx.runtime.driver.host.device import Device
from tdx.runtime.driver.host.tracebacks import users_part
from tdx.runtime.errors import DriverError, InvalidArgument

__all__ = ["Fibre", "KernelRun", "PreparedKernel"]

_SLICE_S = 2e-3  # a program, or the start of new ones, lets the other streams have a turn after
_DELAYED, _DELAY_S = 0.1, 1e-3  # with a seed: how often a program waits a while, and how long
_REMEMBERED = 64  # addresses whose last value a program remembers, to notice that it spins
_SMALL = 64  # elements of loads that may be those of a spin loop
_STATES = 1024  # more than a spin loop goes through
_NOT_KERNELS = ("triton.", "tdx.runtime.driver.host.")  # modules
_NESTED = 8  # tuples in tuples, and the like, that are looked into
_PARTS = 4096  # of all variables
_PLAIN = (int, float, complex, str, bytes, type(None), type(...), range, slice, np.generic)
_FIXED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class Fibre:
    """One program of a grid."""

    __slots__ = (
        "describe", "gave_up", "index", "loads", "moved", "poll", "run", "seen", "slice_end",
        "spins", "states", "task",
    )  # fmt: skip

    def __init__(self, run: KernelRun, index: tuple[int, int, int]):
        self.run = run
        self.index = index
        self.task = greenlet.greenlet(self._main)
        self.task.gr_context = contextvars.copy_context()  # NumPy's error state is in there
        self.poll: Callable[[], bool] | None = None  # what it waits for
        self.describe: Callable[[], str] | None = None
        self.gave_up = False  # one of its waits did
        self.seen: dict[bytes, bytes] = {}  # atomics since the last store: addresses -> result
        self.loads: dict[bytes, bytes] = {}  # the same of plain loads
        self.states: set[int] = set()  # of its variables, while it loads nothing new
        self.moved = True  # something new in this slice
        self.spins = 0
        self.slice_end = 0.0

    def _main(self) -> None:
        self.run.prepared.function(**self.run.prepared.arguments)

    def resume(self, device: Device) -> None:
        device.running = self
        self.slice_end = time.perf_counter() + _SLICE_S
        self.moved = False
        try:
            self.task.switch()
        finally:
            device.running = None

    def suspend(self) -> None:
        self.task.parent.switch()

    def wait_until(self, poll: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Suspend until `poll()`; it is called by the device thread and must be cheap."""
        if poll():
            self.moved = True
            self.breathe()
            return
        self.poll, self.describe = poll, describe
        self.suspend()
        self.moved = True

    def breathe(self) -> None:
        """A scheduling point, once the slice is over."""
        randomness = self.run.device.random
        if randomness is None:
            over = time.perf_counter() > self.slice_end
        else:
            over = randomness.random() < 0.2
            if randomness.random() < _DELAYED:
                time.sleep(randomness.random() * _DELAY_S)  # peers see what is there, and no more
        if over:
            if self.moved:
                self.states.clear()
            elif not self._new_state():  # work on what was loaded before changes variables
                self.spins += 1
            self.suspend()

    def observe(self, addresses: bytes, result: bytes) -> None:
        """A scheduling point: an atomic that sees the same value again is a spin loop."""
        if self.seen.get(addresses) == result:
            self.spins += 1
            self.suspend()
            return
        if len(self.seen) >= _REMEMBERED:
            self.seen.clear()
        self.seen[addresses] = result
        self.moved = True
        self.breathe()

    def loaded(self, addresses: np.ndarray, result: np.ndarray) -> None:
        """A scheduling point after a plain load."""
        if addresses.size > _SMALL:
            self.moved = True
        else:
            place, value = addresses.tobytes(), result.tobytes()
            if self.loads.get(place) != value:
                if len(self.loads) >= _REMEMBERED:
                    self.loads.clear()
                self.loads[place] = value
                self.moved = True
        self.breathe()

    def stored(self) -> None:
        """A scheduling point after a store: what was seen before is no spin loop."""
        self.seen.clear()
        self.loads.clear()
        self.moved = True
        self.breathe()

    def _new_state(self) -> bool:
        """Whether the kernel's variables have values that they had at no suspension before."""
        values: list[bytes] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not Fibre._main.__code__:
            ours = frame.f_globals.get("__name__", "").startswith(_NOT_KERNELS)
            if not ours and not all(_add_state(v, values) for v in frame.f_locals.values()):
                return True
            frame = frame.f_back
        if len(self.states) >= _STATES:
            self.states.clear()
        before = len(self.states)
        self.states.add(hash(tuple(values)))
        return len(self.states) > before

    def where(self) -> str:
        """The kernel's line at which it is suspended."""
        frame = self.task.gr_frame
        while frame is not None:
            if frame.f_code.co_filename == self.run.prepared.filename:
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                return f"{frame.f_code.co_filename}:{frame.f_lineno}: {line}"
            frame = frame.f_back
        return self.run.prepared.filename


class PreparedKernel:
    """A kernel with its arguments converted, ready to run any number of times.

    Keeps the caller's arguments alive as long as a run of it is queued.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., None],
        arguments: dict[str, Any],
        grid: tuple[int, ...],
        given: dict[str, Any],
        launched: str = "",
    ):
        if not 1 <= len(grid) <= 3 or any(not hasattr(n, "__index__") or n < 0 for n in grid):
            fractions = any(isinstance(n, (float, np.floating)) for n in grid)
            remedy = (
                "divide by // or with triton.cdiv"
                if fractions
                else "give the number of programs along each axis, as in (4,) or (4, 2)"
            )
            raise InvalidArgument(
                f"{name}: the grid must be 1 to 3 integers >= 0, got {grid}: {remedy}"
            )
        self.name = name
        self.function = function
        self.arguments = arguments
        self.grid = tuple(int(n) for n in grid) + (1,) * (3 - len(grid))
        self.programs = self.grid[0] * self.grid[1] * self.grid[2]
        self.filename = inspect.unwrap(function).__code__.co_filename
        self.given = given  # the caller's arguments
        self.launched = launched  # where, "file:line"

    def name_of(self, address: int) -> str:
        """What the caller passed at an address: "argument 'x'", or the address."""
        return self.argument_at(address) or f"address {address:#x}"

    def argument_at(self, address: int) -> str:
        """What the caller passed at an address: "argument 'x'"; "" for nothing."""
        for name, value in flat("", self.given):
            start = address_of(value)
            if start <= address < start + max(1, getattr(value, "nbytes", 1)):
                return f"argument {name!r}"
        return ""

    def indices(self) -> Iterator[tuple[int, int, int]]:
        for z in range(self.grid[2]):
            for y in range(self.grid[1]):
                for x in range(self.grid[0]):
                    yield x, y, z


class KernelRun:
    """One launch of a prepared kernel: an operation of a stream."""

    def __init__(self, device: Device, prepared: PreparedKernel, resident: int, bounds: Bounds):
        self.device = device
        self.prepared = prepared
        self.resident = resident
        self.waiting_to_start = prepared.indices()
        self.started = 0
        self.live: list[Fibre] = []
        self.done = False
        self.bounds = bounds
        self.checks: Checks | None = None  # set once there are pointers that must not be used

    def step(self, device: Device) -> bool:
        moved = False
        order = list(self.live)
        if device.random is not None:
            device.random.shuffle(order)
        for fibre in order:
            if fibre.poll is not None:
                if not fibre.poll():
                    continue
                fibre.poll = fibre.describe = None
            spins = fibre.spins
            self._resume(fibre)
            moved |= fibre.task.dead or fibre.spins <= spins
        until = time.perf_counter() + _SLICE_S
        while len(self.live) < self.resident and time.perf_counter() < until:
            index = next(self.waiting_to_start, None)
            if index is None:
                self.done = not self.live
                break
            self.started += 1
            fibre = Fibre(self, index)
            self.live.append(fibre)
            if device.random is None:  # else the next step resumes the new ones in any order
                self._resume(fibre)
            moved = True
        return moved or self.done

    def _resume(self, fibre: Fibre) -> None:
        try:
            fibre.resume(self.device)
        except Exception as error:
            self.live.remove(fibre)
            self.abandon()
            failure = _failure(fibre, error)
            if config.debug:
                raise failure from error
            raise failure.with_traceback(users_part(error.__traceback__)) from None
        if fibre.task.dead:
            self.live.remove(fibre)

    def abandon(self) -> None:
        """End the suspended programs: their fibres unwind, nothing of them stays."""
        live, self.live = self.live, []
        self.waiting_to_start = iter(())
        self.done = True
        for fibre in live:
            if not fibre.task.dead and self.device.on_device_thread:
                fibre.task.throw()

    def waiting(self) -> list[str]:
        """Who waits for what, one text per blocked program."""
        texts = [
            f"{self.prepared.name}{fibre.index} waits for {fibre.describe()} at {fibre.where()}"
            for fibre in self.live
            if fibre.describe is not None
        ]
        return texts + self._unstarted()

    def spinning(self) -> list[str]:
        """Programs in a spin loop without `wait`, empty when one of them has a deadline."""
        if any(fibre.poll is not None for fibre in self.live):
            return []
        texts = [
            f"{self.prepared.name}{fibre.index} spins at {fibre.where()}" for fibre in self.live
        ]
        return texts + self._unstarted() if texts else []

    def _unstarted(self) -> list[str]:
        rest = self.prepared.programs - self.started
        if not rest:
            return []
        return [
            f"{rest} of {self.prepared.programs} programs of {self.prepared.name} are not started:"
            f" {self.resident} are resident at once (world.device.multiprocessors); launch at most"
            " that many blocks that wait for each other, or raise the environment's"
            " TDX_HOST_MULTIPROCESSORS or tdx.config.host_multiprocessors before tdx.init"
        ]


def _add_state(value: Any, to: list[bytes], depth: int = 0) -> bool:
    """Append what there is to a variable's value; False for a kind of which that is not known."""
    value = getattr(getattr(value, "handle", value), "data", value)  # of a tensor
    if isinstance(value, np.ndarray):
        to.append(value.tobytes())
    elif isinstance(value, _PLAIN):
        to.append(repr(value).encode())
    elif isinstance(value, _FIXED) or hasattr(value, "__wrapped__"):  # a kernel's function
        to.append(repr(id(value)).encode())
    elif depth == _NESTED or len(to) > _PARTS:
        return False
    else:
        if isinstance(value, dict):
            items = [*value.keys(), *value.values()]
        elif isinstance(value, (tuple, list)):
            items = list(value)
        elif hasattr(value, "__dict__"):  # constexpr, Triton's tuple, an aggregate
            items = list(vars(value).values())
        else:
            return False
        to.append(f"{type(value).__name__} of {len(items)}".encode())
        return all(_add_state(item, to, depth + 1) for item in items)
    return True


def _failure(fibre: Fibre, error: Exception) -> DriverError:
    """The error of a program, with the kernel's own source line and where it was launched.

    All that its cause says is in there: with TDX_DEBUG=1 the whole cause is shown too.
    """
    kernel = fibre.run.prepared
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if f.filename == kernel.filename]
    place = f" at {mine[-1].filename}:{mine[-1].lineno}: {mine[-1].line}" if mine else ""
    launch = f", launched at {kernel.launched}" if kernel.launched else ""
    return DriverError(
        f"rank {fibre.run.device.rank}: kernel {kernel.name}, program {fibre.index}: "
        f"{type(error).__name__}: {error}{place}{launch}"
    )
