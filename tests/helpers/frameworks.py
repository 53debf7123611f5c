"""Frameworks in tests: which can be used here, and where their arrays belong."""

from __future__ import annotations

import os
from typing import Any

from tdx.tools.facts import frameworks
from tests.helpers.cases import skip

__all__ = ["jax_device", "missing", "needs"]


def missing(module: str, backend: str) -> str:
    """Why tests on the backend cannot use the framework; "" if they can."""
    version = frameworks()[module]
    if version is None:
        return f"{module} is not installed"
    if backend != "host" and ("CPU" in version or version.endswith("+cpu")):
        return f"{module} {version} has no GPU support"
    return ""


def needs(module: str, backend: str) -> None:
    """Skip the test if it cannot use the framework."""
    if why := missing(module, backend):
        skip(why)


def jax_device(world: Any) -> Any:
    """The device of this rank as JAX knows it. Call it before anything else of JAX."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else it takes most of every GPU
    import jax

    return jax.devices("cpu")[0] if world.backend == "host" else jax.devices()[world.device.index]
