"""Work of frameworks before and after tdx's, still running when the next call is made.

Nothing here waits for the device before a result is read: the frameworks' own copies to the host
do, for one stream. Each test goes through its steps three times, because the first time compiles
and loads, and so waits; the last time must have found the slow kernel running.
"""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
from tdx.runtime.backends import nvidia_gpus
from tests.gpu.neighbours import NAMES, N, neighbour

pytestmark = pytest.mark.gpu

if not nvidia_gpus():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

_STEPS = 500_000  # of late_kernel: some hundredths of a second
_VALUES = (3, 5, 7)  # not 1, for which Triton would compile another kernel


@triton.jit
def late_kernel(x, zeros, value, steps, n, BLOCK: tl.constexpr):
    """x = value, after a chain of loads each of which needs the one before."""
    at = tl.load(zeros, volatile=True)
    for _ in range(steps):
        at = tl.load(zeros + at, volatile=True)
    i = tl.arange(0, BLOCK)
    tl.store(x + i, (value + at + i * 0).to(tl.float32), mask=i < n)


@pytest.fixture(scope="module")
def world():
    with tdx.init(backend="cuda") as world:
        yield world


@pytest.fixture(scope="module", params=NAMES)
def framework(request, world):
    return neighbour(request.param, world)


@pytest.fixture
def late(world):
    """A stream of tdx, an array, and a function that queues a slow kernel there, which fills it."""
    side = world.new_stream()
    with world.on(side):
        x, zeros = world.zeros(N, "float32"), world.zeros(1, "int32")

    def fill(value):
        with world.on(side):
            late_kernel[(1,)](x, zeros, value, _STEPS, N, BLOCK=1024)

    return side, x, fill


@pytest.mark.parametrize("where", ["default", "side"])
def test_a_producer_that_still_runs(world, framework, where):
    """The call reads what the slow kernel is followed by, and does not wait for it on the host.

    JAX shows no stream: there the side stream is the one that tdx is told to use, and the call
    returns when the result is there.
    """
    stream = world.new_stream() if where == "side" and not framework.has_streams else None
    with framework.on(where):
        for value in _VALUES:
            x, runs = framework.late(value)
            before = runs()
            y = tdx.all_reduce(x, stream=stream)
            after = runs()
            z = framework.doubled(y)
            assert type(y) is type(x)
            np.testing.assert_array_equal(framework.numpy(z), np.full(N, 2 * value, "f"))
            np.testing.assert_array_equal(framework.numpy(y), np.full(N, value, "f"))
    assert before
    assert after == framework.has_streams


@pytest.mark.parametrize("where", ["default", "side"])
def test_a_plan_after_a_producer_that_still_runs(world, framework, where):
    plan = tdx.AllReduce(world, N, "float32")
    side = world.new_stream()
    for value in _VALUES:
        with framework.on(where):
            x, runs = framework.late(value)
            before = runs()
            y = plan(x, stream=None if framework.has_streams else side)
            after = runs()
            z = framework.doubled(framework.take(y))
            np.testing.assert_array_equal(framework.numpy(z), np.full(N, 2 * value, "f"))
    assert before
    assert after or not framework.has_streams


@pytest.mark.parametrize("where", ["default", "side"])
def test_a_result_of_tdx_is_taken_at_once(world, framework, late, where):
    """An array of tdx, made on a stream of tdx behind a slow kernel."""
    side, x, fill = late
    with framework.on(where):
        for value in _VALUES:
            fill(value)
            with world.on(side):
                y = tdx.all_reduce(x)
            made = side.record()
            theirs = framework.take(y)
            pending = not made.query()
            z = framework.doubled(theirs)
            np.testing.assert_array_equal(framework.numpy(z), np.full(N, 2 * value, "f"))
            assert framework.address(theirs) == y.data_ptr()
    assert pending or not framework.has_streams


@pytest.mark.parametrize("where", ["default", "side"])
def test_a_result_of_the_framework_is_used_at_once(framework, late, where):
    """An array of the framework, to which tdx adds one that a slow kernel of tdx's fills."""
    side, residual, fill = late
    with framework.on(where):
        x = framework.full(2)
        for value in _VALUES:
            fill(value)
            filled = side.record()
            y = tdx.all_reduce(x, residual=residual)
            pending = not filled.query()
            z = framework.doubled(y)
            assert type(y) is type(x)
            np.testing.assert_array_equal(framework.numpy(z), np.full(N, 2 * value + 4, "f"))
    assert pending == framework.has_streams


@pytest.mark.parametrize("where", ["default", "side"])
def test_tdx_reads_on_its_own_stream_what_still_runs(world, framework, where):
    """A copy into an array of tdx: of an array whose producer runs."""
    for value in _VALUES:
        with framework.on(where):
            x, runs = framework.late(value)
            before = runs()
            y = world.array(x)
        np.testing.assert_array_equal(y.numpy(), np.full(N, value, "f"))
    assert before
