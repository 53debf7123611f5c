"""One memory in several hands: arrays of tdx that frameworks see, and of PyTorch that tdx sees."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

import tdx
from tdx.runtime.backends import nvidia_gpus
from tdx.runtime.errors import InvalidArgument, Unsupported
from tests.gpu.neighbours import NAMES, N, neighbour
from tests.helpers.commands import ROOT, tdx_environment
from tests.helpers.frameworks import missing

pytestmark = pytest.mark.gpu

if not nvidia_gpus():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the newer name is the second
_REGISTERED = """
import numpy as np
import torch

import tdx

n = 3 << 20
with tdx.init(backend="cuda") as world:
    theirs = torch.arange(n, dtype=torch.int32, device="cuda")
    x = world.register(theirs)
    assert (x.symmetric, x.shape, x.dtype) == (True, (n,), np.int32)
    assert x.data_ptr() != theirs.data_ptr()
    assert (x.numpy() == np.arange(n)).all()
    theirs += 5  # by its owner
    torch.cuda.synchronize()
    assert (x.numpy() == np.arange(n) + 5).all()
    x.copy_from(np.arange(n, dtype=np.int32)[::-1])
    world.synchronize()
    assert (theirs.cpu().numpy() == np.arange(n)[::-1]).all()
    y = tdx.all_reduce(theirs)  # its symmetric address is used
    assert (y.cpu().numpy() == np.arange(n)[::-1]).all()
    tdx.all_reduce(y, out=theirs)
    world.synchronize()
    assert (x.numpy() == np.arange(n)[::-1]).all()
    world.barrier()
    x.free()
    theirs.fill_(7)  # still its owner's
    assert (theirs.cpu().numpy() == 7).all()
print("fine")
"""


@pytest.fixture
def world():
    with tdx.init(backend="cuda") as world:
        yield world


def test_frameworks_see_one_array(world):
    """The same address in all of them, and whoever writes, the others see it."""
    for name in NAMES:
        if why := missing(name, "cuda"):
            pytest.skip(why)
    frameworks = {name: neighbour(name, world) for name in NAMES}
    x = world.array(np.arange(N, dtype=np.float32))
    theirs = {name: framework.take(x) for name, framework in frameworks.items()}
    for name, framework in frameworks.items():
        assert framework.address(theirs[name]) == x.data_ptr()

    def seen(expected):
        world.synchronize()  # of the whole GPU: they write on streams of their own
        np.testing.assert_array_equal(x.numpy(), expected)
        for name, framework in frameworks.items():
            # not of the array itself: JAX keeps what it has copied to the host once
            doubled = framework.numpy(framework.doubled(theirs[name]))
            np.testing.assert_array_equal(doubled, 2 * expected)
            total = tdx.all_reduce(theirs[name])
            assert type(total) is type(theirs[name])
            np.testing.assert_array_equal(framework.numpy(total), expected)

    seen(np.arange(N, dtype=np.float32))
    for value, name in enumerate(("torch", "cupy", "torch"), 2):
        frameworks[name].fill(theirs[name], value)
        seen(np.full(N, value, np.float32))
    x.copy_from(np.arange(N, dtype=np.float32)[::-1])
    seen(np.arange(N, dtype=np.float32)[::-1])
    for name in ("torch", "cupy"):
        tdx.all_reduce(frameworks[name].full(9), out=theirs[name])
        seen(np.full(N, 9, np.float32))
        frameworks[name].fill(theirs[name], 0)


@pytest.mark.parametrize("name", ["torch", "jax"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_exported_memory_outlives_its_array(world, name, symmetric):
    framework = neighbour(name, world)
    x = world.array(np.arange(N, dtype=np.float32), symmetric=symmetric)
    exported = framework.take(x)
    assert framework.address(exported) == x.data_ptr()
    del x
    gc.collect()
    others = [world.zeros(N, np.float32, symmetric=symmetric) for _ in range(100)]
    np.testing.assert_array_equal(framework.numpy(exported), np.arange(N))
    del others


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_exported_memory_outlives_its_world(name):
    with tdx.init(backend="cuda") as own:
        framework = neighbour(name, own)
        x = own.array(np.arange(N, dtype=np.float32))
        y = own.array(np.arange(N, dtype=np.float32), symmetric=False)
        z = tdx.all_reduce(framework.full(6))  # of the framework's own kind
        kept = [framework.take(x), framework.take(y)]
        del x, y
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            own.close()
    for exported in kept:
        doubled = framework.doubled(exported)
        np.testing.assert_array_equal(framework.numpy(doubled), 2 * np.arange(N))
        np.testing.assert_array_equal(framework.numpy(exported), np.arange(N))
    np.testing.assert_array_equal(framework.numpy(z), np.full(N, 6))
    del exported, doubled, z
    kept.clear()
    gc.collect()
    with tdx.init(backend="cuda") as again:
        assert (again.array(np.arange(5)).numpy() == np.arange(5)).all()


@pytest.mark.parametrize("setting", _ALLOCATORS)
def test_register_memory_of_expandable_segments(setting):
    """In a process of its own: the setting counts before PyTorch's first allocation."""
    if why := missing("torch", "cuda"):
        pytest.skip(why)
    changes = {setting: "expandable_segments:True", "TDX_BACKEND": "cuda"}
    environment = tdx_environment(**changes)
    for other in {*_ALLOCATORS} - {setting}:
        environment.pop(other, None)
    done = subprocess.run(
        [sys.executable, "-c", _REGISTERED],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "fine\n"


@pytest.mark.parametrize("name", NAMES)
def test_register_refuses_what_cannot_be_shared(world, name):
    """What the frameworks allocate by default; the error says what will do."""
    if any("expandable_segments:True" in os.environ.get(each, "") for each in _ALLOCATORS):
        pytest.skip("PyTorch's memory can be shared here")
    framework = neighbour(name, world)
    x = framework.full(2)
    # JAX's arrays cannot be written to, wherever they are
    kind, words = (
        (InvalidArgument, "read-only") if name == "jax" else (Unsupported, "expandable_segments")
    )
    with pytest.raises(kind, match=words):
        world.register(x)
    np.testing.assert_array_equal(framework.numpy(tdx.all_reduce(x)), np.full(N, 2))
