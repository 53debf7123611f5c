"""Launches on the host tier: asynchronous, refused, failing, leaking nothing, in a world of one."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
from tdx.runtime.driver.host import interpreter
from tdx.runtime.errors import Closed, DriverError, InvalidArgument
from tests.helpers.host_kernels import add, count, nothing, spin

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world():
    with tdx.init(backend="host", timeout_s=5) as world:
        yield world


@pytest.fixture
def settings():
    """tdx.config, put back afterwards."""
    names = ("host_seed", "host_multiprocessors", "launch_blocking")
    before = {name: getattr(tdx.config, name) for name in names}
    yield tdx.config
    for name, value in before.items():
        setattr(tdx.config, name, value)


@triton.jit
def _wrong_shapes(x):
    i = tl.arange(0, 4)
    value = tl.load(x + i)
    tl.store(x + i, value + tl.arange(0, 8))  # the wrong line


@pytest.mark.parametrize("refusals", [1, 100])
def test_a_parser_that_fails_beside_other_threads_is_asked_again(monkeypatch, refusals):
    """CPython's may; not for ever, though."""
    parse, calls = ast.parse, iter(range(refusals))

    def failing(*args, **named):
        if next(calls, None) is not None:
            raise SystemError("AST constructor recursion depth mismatch (before=75, after=48)")
        return parse(*args, **named)

    monkeypatch.setattr(ast, "parse", failing)
    if refusals == 100:
        with pytest.raises(SystemError, match="depth mismatch"):
            interpreter._rewrite(add.fn)
        assert next(calls) < 20
    else:
        assert interpreter._rewrite(add.fn).__name__ == "add"


def test_launches_are_asynchronous(world, settings):
    flag = world.zeros(1, "int32")
    world.synchronize()
    start = time.monotonic()
    spin[(1,)](flag, 1)
    point = world.stream.record()
    assert time.monotonic() - start < 0.5
    assert not point.query()
    with world.on(world.new_stream()):
        count[(1,)](flag)
    point.wait()
    assert point.query()
    settings.launch_blocking = True
    count[(1,)](flag)
    assert world.driver.stream_query(world.stream.handle)


def test_an_error_names_the_line_and_the_device_goes_on(world):
    x, gate = world.array(np.zeros(8, np.float32)), world.zeros(1, "int32")
    spin[(1,)](gate, 1)  # until all are queued
    _wrong_shapes[(2,)](x)
    add[(1,)](x, 8, 1.0, BLOCK=8)  # dropped with the rest of the queue
    with world.on(world.new_stream()):
        count[(1,)](gate)
    place = (
        r"kernel _wrong_shapes, program \(0, 0, 0\).*test_host_launches.py:\d+: .*the wrong line"
    )
    with pytest.raises(DriverError, match=place):
        world.synchronize()
    add[(1,)](x, 8, 1.0, BLOCK=8)
    assert (x.numpy() == 1).all()


class Producer:
    """An array of a library that Triton does not know, such as JAX's."""

    def __dlpack__(self, **_):
        raise AssertionError("nobody asks for the memory")


def test_arguments_that_are_refused_at_the_launch(world):
    x = world.zeros(4, "float32")
    for arguments, text in [
        ((np.zeros(4), 4, 1.0, 4), r"of type ndarray, .*world\.array\(x\)"),
        ((Producer(), 4, 1.0, 4), r"'x' is of type Producer, .*; make it .* world\.array\(x\)"),
        (([1.0], 4, 1.0, 4), "of type list, which is not a kernel argument$"),
        ((Producer, 4, 1.0, 4), "of type type, which is not a kernel argument$"),
        (("text", 4, 1.0, 4), "str"),
        ((x, 2**64, 1.0, 4), "64 bits"),
        ((x, 4), "missing"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            add[(1,)](*arguments)
    with pytest.raises(InvalidArgument, match="unknown_option"):
        add[(1,)](x, 4, 1.0, 4, unknown_option=1)
    for grid in [(1, 2, 3, 4), (-1,), ()]:
        with pytest.raises(InvalidArgument, match=r"grid .* along each axis, as in \(4,\) or"):
            add[grid](x, 4, 1.0, 4)
    for grid in (2.0,), (np.float32(1),):
        with pytest.raises(InvalidArgument, match=r"add: the grid must be .* integers .*cdiv"):
            add[grid](x, 4, 1.0, 4)
    for grid in 3, np.int64(3), lambda _: 3:  # on GPUs Triton takes its length
        with pytest.raises(InvalidArgument, match=r"tuple .*, got .*3.*write add\[\(3,\)\]"):
            add[grid](x, 4, 1.0, 4)
    add[(0,)](x, 4, 1.0, 4)
    add[[np.int64(1)]](x, 0, 1.0, 4)
    add[(1,)](x, 4, 1.0, BLOCK=4, num_warps=4, num_stages=2, enable_fp_fusion=False)
    assert (x.numpy() == 1).all()


def test_a_launch_without_a_world():
    with tdx.init(backend="host") as world:
        x = world.zeros(4, "float32", symmetric=False)
    with pytest.raises(Closed, match="no world is open"):
        nothing[(1,)]()
    for use in (x.numpy, x.data_ptr, x.free, lambda: world.empty(1, "int8"), world.synchronize):
        with pytest.raises(Closed):
            use()
    with pytest.raises(Closed):
        world.stream.synchronize()
    world.close()


def test_launches_leak_nothing(world):
    x = world.zeros(8, "float32")

    def state():
        gc.collect()
        device = world.driver.device
        return (
            threading.active_count(), len(os.listdir("/proc/self/fd")), len(device.events),
            len(device.streams), len(world.driver._local), _lines("/proc/self/maps"),
            len(gc.get_objects()),
        )  # fmt: skip

    def burst(count):
        for _ in range(count // 100):
            for _ in range(100):
                add[(1,)](x, 8, 1.0, BLOCK=8)
            world.synchronize()

    burst(100)
    before = state()
    memory = _resident_kib()
    burst(10_000)
    assert _resident_kib() - memory < 20_000
    after = state()
    assert after[:5] == before[:5]
    assert abs(after[5] - before[5]) < 20
    assert after[6] - before[6] < 200


def test_worlds_leak_nothing():
    def burst(count):
        for _ in range(count):
            with tdx.init(backend="host", heap_bytes=1 << 20) as world:
                x = world.zeros(8, "float32")
                add[(1,)](x, 8, 1.0, BLOCK=8)
                assert x.numpy()[0] == 1
        gc.collect()
        return (
            threading.active_count(), len(os.listdir("/proc/self/fd")), len(gc.get_objects())
        )  # fmt: skip

    before, maps, memory = burst(20), _lines("/proc/self/maps"), _resident_kib()
    after = burst(1000)
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 200
    assert _lines("/proc/self/maps") - maps < 20
    assert _resident_kib() - memory < 20_000


def test_an_empty_kernel_is_launched_quickly(world):
    for _ in range(100):
        nothing[(1,)]()
    world.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        nothing[(1,)]()
        world.synchronize()
    each = (time.perf_counter() - start) / 200
    assert each < 5e-3, f"{each * 1e6:.0f} µs"


@pytest.mark.parametrize("interpret", ["", "1"])
def test_kernels_defined_before_tdx_is_imported(interpret):
    """Also with Triton's own interpreter asked for."""
    code = """
import numpy as np, triton, triton.language as tl
@triton.jit
def helper(x):
    return x * 2
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.sort(helper(tl.load(x + i, mask=i < n))), mask=i < n)
import tdx
for _ in range(2):
    with tdx.init(backend="host") as world:
        x = world.array(np.arange(8, dtype=np.float32)[::-1].copy())
        kernel[(1,)](x, 8, BLOCK=8)
        assert x.numpy().tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(code)
        script.flush()
        done = subprocess.run(
            [sys.executable, script.name],
            env={**os.environ, "TRITON_INTERPRET": interpret or "0", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr


def test_user_kernels_with_tritons_interpreter_asked_for():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/ranks/cases/user_kernels.py", "-k", "w1"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def _lines(path):
    with open(path) as file:
        return sum(1 for _ in file)


def _resident_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
