"""The README's table of frameworks is what comes out when one tries."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest

from tests.helpers.cases import skip, worlds
from tests.helpers.framework_table import DTYPES, column, published


@contextlib.contextmanager
def wide_jax():
    """JAX with 64-bit types, as a user of them sets it."""
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@worlds(1)
@pytest.mark.parametrize(
    ("name", "module"), [("NumPy", "numpy"), ("JAX", "jax"), ("PyTorch", "torch")]
)
def case_column(world, backend, name, module):
    if backend != "host":
        pytest.skip("the table is that of the host tier")
    if not importlib.util.find_spec(module):
        skip(f"{module} is not installed")
    with wide_jax() if module == "jax" else contextlib.nullcontext():
        found = column(world, module)
    assert set(DTYPES) < set(found)
    assert published()[name] == found
