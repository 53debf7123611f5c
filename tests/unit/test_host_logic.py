"""`and`, `or`, `not`, `max`, `min`, loops and the truth of blocks in kernels of the host tier."""

from __future__ import annotations

import importlib
from collections import namedtuple
from enum import IntEnum
from math import floor

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
from tdx.runtime.errors import DriverError

N = tl.constexpr(8)


@pytest.fixture
def world():
    with tdx.init(backend="host", timeout_s=5) as world:
        yield world


@triton.jit
def _masks(out, n, none, YES: tl.constexpr):
    lanes = tl.arange(0, N)
    some = n > 2
    tl.store(out + lanes, 1, mask=(lanes < 3) and some)
    tl.store(out + N + lanes, 1, mask=some and (lanes < 3) and (lanes > 0))
    tl.store(out + 2 * N + lanes, 1, mask=(lanes < 2) or (lanes > 5))
    tl.store(out + 3 * N + lanes, 1, mask=not (lanes < 3))
    mask = YES and (lanes < 4)
    ones = tl.load(out + lanes, mask=lanes < 0, other=tl.full((N,), 1, tl.int32))
    tl.store(out + 4 * N + lanes, ones, mask=mask)
    mask = (lanes < 3) if n > 100 or none else lanes < 5
    tl.store(out + 5 * N + lanes, 1, mask=mask)
    if YES and some and not none:
        tl.store(out + 6 * N + lanes, 1)


@pytest.mark.smoke
def test_masks_are_combined_element_by_element(world):
    out = world.zeros((7, 8), "int32", symmetric=False)
    _masks[(1,)](out, 5, False, True)
    rows = ["11100000", "01100000", "11000011", "00011111", "11110000", "11111000", "11111111"]
    assert out.numpy().tolist() == [[int(digit) for digit in row] for row in rows]


@triton.jit
def _ends(out, n):
    lanes = tl.arange(0, N)
    tl.store(out + lanes, max(lanes - 4, 0))
    tl.store(out + N + lanes, min(lanes, 3))
    tl.store(out + 2 * N + lanes, max(n, 7) + min(2, 3))


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:builtin m")  # Triton would have tl.maximum
def test_the_larger_of_blocks_is_taken_element_by_element(world):
    out = world.zeros((3, 8), "int32", symmetric=False)
    _ends[(1,)](out, 5)
    lanes = np.arange(8)
    wanted = [np.maximum(lanes - 4, 0), np.minimum(lanes, 3), np.full(8, 9)]
    assert (out.numpy() == wanted).all()


@triton.jit
def _lazy(out, pointers, n):
    if n > 0 and tl.load(pointers + n) > 0:  # what must not be loaded for 0
        tl.store(out, 1)


def test_scalars_are_looked_at_in_order(world):
    """As in Python, not as compiled: the second one only if the first does not decide."""
    out = world.zeros(1, "int32", symmetric=False)
    pointers = world.zeros(1, "int32", symmetric=False)
    _lazy[(1,)](out, pointers, 0)
    assert out.numpy()[0] == 0
    _lazy[(1,)](out, pointers, 1)
    with pytest.raises(DriverError, match="load from element 1"):
        world.synchronize()


@triton.jit
def _asks_a_block(out):
    if tl.arange(0, N) < 3:  # the wrong line
        tl.store(out, 1)


@pytest.mark.smoke
def test_a_block_has_no_truth_value(world):
    _asks_a_block[(1,)](world.zeros(1, "int32", symmetric=False))
    with pytest.raises(DriverError, match=r"block of shape \[8\] has no truth.*the wrong line"):
        world.synchronize()


@triton.jit
def _loops(out, n, M: tl.constexpr, WHICH: tl.constexpr):
    if WHICH == "bound":
        for i in range(n / 2):
            tl.store(out, i)
    elif WHICH == "start":
        for i in range(1.5, n):
            tl.store(out, i)
    elif WHICH == "step":
        for i in tl.range(0, n, step=n / 2):
            tl.store(out, i)
    elif WHICH == "constexpr":
        for i in tl.static_range(M / 2):
            tl.store(out, i)
    elif WHICH == "block":
        for i in range(tl.arange(0, N)):
            tl.store(out, i)
    elif WHICH == "static":
        for i in tl.static_range(n):
            tl.store(out, i)
    else:
        for i in range(0, n // 2, tl.num_programs(0)):
            tl.store(out + i, 1)
        for i in tl.range(M, M + n, step=2, loop_unroll_factor=2):
            tl.store(out + i, 2)
        for i in tl.static_range(M, step=3):
            tl.store(out + i, 3)


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("bound", r"range: .* scalar integers, got fp32: divide by //"),
        ("start", r"range: .* scalar integers, got 1\.5"),
        ("step", r"tl\.range: .* scalar integers, got fp32"),
        ("constexpr", r"tl\.static_range: .* scalar integers, got 2\.0"),
        ("block", r"range: .* scalar integers, got <\['?8'?\], int32>"),
        ("static", r"tl\.static_range: .* are constexpr, got int32"),
    ],
)
def test_loops_that_compilers_refuse(world, which, text):
    out = world.zeros(8, "int32", symmetric=False)
    _loops[(1,)](out, 4, 4, which)
    with pytest.raises(DriverError, match=rf"TypeError: {text}.*test_host_logic\.py:\d+: for i in"):
        world.synchronize()
    assert not out.numpy().any()


_LENGTH, _WIDTH = 3, tl.constexpr(8)
_TABLE = np.arange(4)
_Kind = IntEnum("_Kind", "FIRST")
_Pair = namedtuple("_Pair", "left right")


def _plain(x):
    return x


@triton.jit
def _globals(out, WHICH: tl.constexpr):
    pair = _Pair(1, tl.cdiv(_WIDTH, 8))
    tl.store(out + tl.arange(0, _WIDTH), pair.left)
    if WHICH == "number":
        tl.store(out, _LENGTH)
    elif WHICH == "array":
        tl.store(out, _TABLE[1])
    elif WHICH == "enum":
        tl.store(out, _Kind.FIRST)


@triton.jit
def _functions(out, WHICH: tl.constexpr):
    tl.store(out, floor(2.0) if WHICH == "built in" else _plain(2))


@pytest.mark.parametrize(
    ("kernel", "which", "text"),
    [
        (_globals, "number", r"_LENGTH is a global int, .*: write _LENGTH = tl\.constexpr"),
        (_globals, "array", "_TABLE is a global ndarray"),
        (_globals, "enum", "_Kind is a plain function or class"),
        (_functions, "", "_plain is a plain function .*: use @triton.jit"),
        (_functions, "built in", "floor is a plain function"),
    ],
)
def test_globals_that_compilers_refuse(world, kernel, which, text):
    out = world.zeros(8, "int32", symmetric=False)
    kernel[(1,)](out, which)
    with pytest.raises(DriverError, match=rf"NameError: {text}.*test_host_logic\.py:\d+: tl\.st"):
        world.synchronize()


def test_globals_that_compilers_take(world):
    """Also others in a branch that they do not see."""
    out = world.zeros(8, "int32", symmetric=False)
    _globals[(1,)](out, "none")
    assert (out.numpy() == 1).all()


def test_a_global_is_mended(world, monkeypatch):
    """As one does at a prompt."""
    out = world.zeros(8, "int32", symmetric=False)
    _globals[(1,)](out, "number")
    with pytest.raises(DriverError, match="_LENGTH is a global int"):
        world.synchronize()
    monkeypatch.setitem(globals(), "_LENGTH", tl.constexpr(3))
    _globals[(1,)](out, "number")
    assert out.numpy().tolist() == [3, *[1] * 7]


def test_names_that_are_imported_late(world, tmp_path, monkeypatch):
    """Triton's functions are the interpreter's by then."""
    (tmp_path / "late_kernel.py").write_text(
        "import triton\n"
        "from triton.language import arange, load, static_range, store, sum\n"
        "@triton.jit\n"
        "def late(out):\n"
        "    for i in static_range(2):\n"
        "        store(out + arange(0, 4) + 4 * i, sum(load(out + arange(0, 4)), 0) + 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    out = world.zeros(8, "int32", symmetric=False)
    importlib.import_module("late_kernel").late[(1,)](out)
    assert out.numpy().tolist() == [1] * 4 + [5] * 4


def test_a_captured_number(world):
    length = 3

    @triton.jit
    def captured(out):
        tl.store(out, length)

    captured[(1,)](world.zeros(8, "int32", symmetric=False))
    with pytest.raises(DriverError, match="NameError: length is a global int"):
        world.synchronize()


@triton.jit
def _returns(out, n, WHICH: tl.constexpr):
    if n == 0:
        return
    for i in tl.static_range(4):
        if WHICH == "static" and i == 2:
            return
        tl.store(out + i, 1)
    for i in range(n):
        if WHICH == "for" and i == 2:
            return
    while n > 0:
        if WHICH == "while":
            return
        n -= 1
    tl.store(out + 7, 1)


@pytest.mark.parametrize("which", ["for", "while"])
def test_returns_that_compilers_refuse(world, which):
    out = world.zeros(8, "int32", symmetric=False)
    _returns[(1,)](out, 4, which)
    with pytest.raises(DriverError, match=r"TypeError: `return` inside a loop.*py:\d+: return"):
        world.synchronize()


@pytest.mark.parametrize(("which", "n"), [("static", 4), ("none", 0), ("none", 4)])
def test_returns_that_compilers_take(world, which, n):
    out = world.zeros(8, "int32", symmetric=False)
    _returns[(1,)](out, n, which)
    wanted = (
        [0] * 8
        if n == 0
        else [1, 1, 0, 0, *[0] * 4]
        if which == "static"
        else [1] * 4 + [0, 0, 0, 1]
    )
    assert out.numpy().tolist() == wanted


def test_loops_that_compilers_take(world):
    out = world.zeros(8, "int32", symmetric=False)
    _loops[(1,)](out, 4, 4, "right")
    assert out.numpy().tolist() == [3, 1, 0, 3, 2, 0, 2, 0]
