"""What README.md says is so."""

from __future__ import annotations

import re
import tomllib

import pytest

import tdx
from tests.helpers.commands import ROOT, run_tdx
from tests.helpers.framework_table import COLUMNS, REFUSALS, columns_of, replaced, table
from tests.helpers.measured_table import (
    MEASURED,
    MEASURED_PRODUCTS,
    floor_table,
    measured_table,
    product_table,
    products_page,
)

_TEXT = (ROOT / "README.md").read_text()
_DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
_PROGRAMS = re.findall(r"^```python\n(.*?)^```", _TEXT, re.M | re.S)
_COMMANDS = re.findall(r"^```sh\n(.*?)^```", _TEXT, re.M | re.S)


def test_two_commands_set_everything_up():
    assert len(_COMMANDS) == 2
    assert all(len(command.splitlines()) == 1 for command in _COMMANDS)
    assert _COMMANDS[0].endswith("tdx demo\n")
    assert "pytest" in _COMMANDS[1]
    assert re.search(r"<!-- ci:test -->\n```sh\n[^`]*pytest\n```", _TEXT)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for list_ in re.findall(r'"\.\[(.*?)\]"', _TEXT) for name in list_.split(",")}
    assert {"mpi", "test"} <= extras <= set(project["optional-dependencies"])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("program", _PROGRAMS, ids=["script", "kernel"])
def test_program_runs(program, ranks, tmp_path):
    assert len([line for line in program.splitlines() if line.strip()]) <= 25
    path = tmp_path / "script.py"
    path.write_text(program)
    done = run_tdx("run", "-n", str(ranks), str(path), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    prose = re.sub(r"`[^`\n]*`", "", _without_blocks(path))
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if not target.startswith("https://"):
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            assert file.exists(), target
            assert not anchor or anchor in _anchors(file), target


def _without_blocks(path):
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)


def _anchors(path):
    """Those of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", _without_blocks(path), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_operations_exist_and_missing_ones_do_not():
    table = _TEXT[_TEXT.index("## Operations") : _TEXT.index("## Errors")]
    named = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert len(named) >= 6
    assert all(hasattr(tdx, name) for name in named)
    missing = re.search(r"^\| Not offered yet \| (.*) \|$", _TEXT, re.M)
    assert missing is not None
    for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", missing[1]):
        assert not hasattr(tdx, name), f"{name} is there: take it off the list"


def test_measured_figures_are_those_of_the_benchmarks():
    for gpus in MEASURED:
        assert measured_table(gpus) in _TEXT
    for gpus in MEASURED_PRODUCTS:
        assert product_table(gpus) in _TEXT
    folder = ROOT / "docs" / "benchmarks"
    assert floor_table() in (folder / "README.md").read_text()
    assert products_page() == (folder / "products.md").read_text()


def test_table_of_frameworks_could_have_been_printed():
    """What its cells say is for the rank case framework_table.py."""
    columns = columns_of(_TEXT)
    assert {"NumPy", "JAX", "PyTorch"} <= set(columns) <= set(COLUMNS.values())
    assert replaced(_TEXT, _TEXT) == _TEXT
    assert ("\nGPU columns: " in _TEXT) == any(name.endswith("GPU") for name in columns)
    fine = "|".join(["yes", "no", r"no: \w+", "-", *(error.__name__ for error in REFUSALS)])
    for cells in columns.values():
        assert all(re.fullmatch(fine, cell) for cell in cells.values()), cells


def test_printed_table_of_frameworks_gets_into_the_readme():
    columns = columns_of(_TEXT)
    host = {name: columns[name] for name in ("NumPy", "JAX", "PyTorch")}
    found = {"CuPy, GPU": dict.fromkeys(columns["NumPy"], "no: ValueError")}
    printed = table(host | found, "\nGPU columns: 2 x some GPU.\n")
    text = replaced(_TEXT, f"said before\n{printed}said after\n")
    assert columns_of(text) == columns | found
    assert "|\n\nGPU columns: 2 x some GPU.\n\n" in text
    assert "said before" not in text
    assert replaced(text, table(host, "")) == text


def test_errors_are_named_with_their_built_ins():
    text = " ".join(_TEXT[_TEXT.index("## Errors") :].split())
    for name in tdx.errors.__all__:
        error = getattr(tdx.errors, name)
        if name == "TdxError":
            assert "`tdx.errors.TdxError`" in text
        else:
            built_in = error.__mro__[2].__name__
            assert re.search(rf"`{name}`[^`]*\({built_in}\)|`{name}`.*?\({built_in}\)", text), name
