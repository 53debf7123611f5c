"""The README's table of frameworks is what comes out when one tries."""

from __future__ import annotations

import pytest

from tests.helpers.cases import limit, worlds
from tests.helpers.commands import ROOT
from tests.helpers.framework_table import COLUMNS, column, columns_of
from tests.helpers.frameworks import needs


@worlds(1, 2)
@limit(120)
@pytest.mark.parametrize(("module", "on"), COLUMNS)
def case_column(world, backend, module, on):
    if on != backend:
        pytest.skip(f"a column of the backend {on}")
    needs(module, backend)
    published = columns_of((ROOT / "README.md").read_text()).get(COLUMNS[module, on], {})
    found = column(world, module)
    different = {
        row: f"README {published.get(row)}, found {found.get(row)}"
        for row in published | found
        if published.get(row) != found.get(row)
    }
    assert not different
