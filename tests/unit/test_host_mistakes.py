"""What the host tier shows of a kernel that failed, or that somebody interrupts."""

from __future__ import annotations

import os
import signal
import threading
import traceback

import numpy as np
import pytest
import triton
import triton.language as tl

import tdx
import tdx.language as tdl
from tdx.runtime.errors import DriverError


@triton.jit
def _copy_beyond(x, y, world):
    tdl.put(x + 4, y, 8, tdl.rank(world), world)


@triton.jit
def _helped(x, y, world):
    _copy_beyond(x, y, world)


@triton.jit
def _wait_kernel(signals, world):
    tdl.wait(signals + 1, world, 1 + tl.program_id(0), peer=0)


@pytest.fixture
def debug():
    yield lambda wanted: setattr(tdx.config, "debug", wanted)
    tdx.config.debug = False


@pytest.mark.parametrize("wanted", [False, True])
def test_an_error_shows_the_users_lines(debug, wanted):
    debug(wanted)
    with tdx.init(backend="host", timeout_s=5) as world:
        x = world.zeros(8, "float32")
        _helped[(1,)](x, x, world.handle)
        with pytest.raises(DriverError) as caught:
            x.numpy()
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    text = "\n".join(lines)
    assert "InvalidArgument: store to element 8 of argument 'x'" in lines[-1]
    assert text.index(", in numpy") > 0
    assert text.index(", in _helped") < text.rindex(", in _copy_beyond")
    internal = ("interpreter.py", "kernel.py", "memory.py", "semantic.py", "direct cause")
    assert [part in text for part in internal] == [wanted] * len(internal)
    frames = sum(line.startswith('  File "') for line in lines)
    assert wanted or frames < 10


@pytest.fixture
def interruptible():
    """SIGINT as in a terminal: a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("timeout_s", [0, 60])
def test_an_interrupted_wait_tells_who_waits_for_what(capfd, timeout_s):
    world = tdx.init(backend="host", timeout_s=timeout_s)
    signals = world.zeros(4, "int32", name="ready")
    _wait_kernel[(2,)](signals, world.handle)
    for _ in range(2):  # told once
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            world.synchronize()
    world.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    head, *lines = capfd.readouterr().err.splitlines()
    assert head == "waiting programs of rank 0:"
    for program, line in enumerate(lines):
        text = f"  _wait_kernel({program}, 0, 0) waits for ready[1] >= {program + 1} (is 0) from "
        assert line.startswith(f"{text}peer 0 at {__file__}:")
    assert len(lines) == 2


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_that_nothing_waits_at_is_silent(capfd):
    with tdx.init(backend="host", timeout_s=60) as world:
        busy = threading.Event()
        world.driver.device.enqueue(world.stream.handle, lambda: _Held(busy))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            world.synchronize()
        busy.set()
        assert world.array(np.ones(1)).numpy() == 1
    assert capfd.readouterr().err == ""


class _Held:
    """Work that is not done before an event."""

    def __init__(self, event):
        self.event, self.done = event, False

    def step(self, device):
        self.done = self.event.is_set()
        return self.done

    def abandon(self):
        pass
