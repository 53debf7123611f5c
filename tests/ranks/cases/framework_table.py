"""The README's table of frameworks is what comes out when one tries."""

from __future__ import annotations

import pytest

import tdx
from tests.helpers.cases import isolated, limit, worlds
from tests.helpers.commands import ROOT
from tests.helpers.framework_table import COLUMNS, column, columns_of
from tests.helpers.frameworks import needs


@isolated  # a program with PyTorch launches kernels on its stream
@worlds(1, 2)
@limit(120)
@pytest.mark.parametrize(("module", "on"), COLUMNS)
def case_column(comm, backend, module, on):
    if on != backend:
        pytest.skip(f"a column of the backend {on}")
    needs(module, backend)
    published = columns_of((ROOT / "README.md").read_text()).get(COLUMNS[module, on], {})
    with tdx.init(comm, backend=backend) as world:
        found = column(world, module)
    different = {
        row: f"README {published.get(row)}, found {found.get(row)}"
        for row in published | found
        if published.get(row) != found.get(row)
    }
    assert not different
