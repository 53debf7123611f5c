"""docs/migration.md, and the tutorial's table of device functions, name only what is there."""

from __future__ import annotations

import inspect
import re

import pytest

import tdx
import tdx.language as tdl
from tests.helpers.commands import ROOT

_TEXT = (ROOT / "docs" / "migration.md").read_text()
_HERE = [  # the second column of all tables
    cells[2]
    for line in _TEXT.splitlines()
    if line.startswith("| ") and len(cells := re.split(r"(?<!\\)\|", line)) >= 4
]


def named(prefix: str) -> list[str]:
    return sorted({name for cell in _HERE for name in re.findall(rf"\b{prefix}\.(\w+)", cell)})


def test_every_table_was_read():
    assert len(_HERE) > 80
    assert {"all_reduce", "put", "init"} <= set(named("tdx"))


@pytest.mark.parametrize("name", named("tdx"))
def test_public_name(name):
    assert hasattr(tdx, name)


@pytest.mark.parametrize("name", named("tdl"))
def test_device_function(name):
    assert name in tdl.__all__


@pytest.mark.parametrize("name", named("world"))
def test_attribute_of_a_world(name):
    assert hasattr(tdx.World, name) or name in inspect.getdoc(tdx.World)


@pytest.mark.parametrize("name", named("x"))
def test_attribute_of_an_array(name):
    assert hasattr(tdx.Array, name)


@pytest.mark.parametrize(
    ("name", "keyword"),
    sorted(
        {
            (name, keyword)
            for cell in _HERE
            for name, inside in re.findall(r"\btdx\.(\w+)\(([^)]*)\)", cell)
            for keyword in re.findall(r"(\w+)=", inside)
        }
    ),
)
def test_keyword(name, keyword):
    assert keyword in inspect.signature(getattr(tdx, name)).parameters


@pytest.mark.parametrize(
    ("name", "given"),
    sorted({pair for cell in _HERE for pair in re.findall(r"\btdl\.(\w+)\(([\w, ]+)\)", cell)}),
)
def test_arguments_of_a_device_function(name, given):
    """Positional arguments stand for the first parameters, under their names or a rank's."""
    parameters = inspect.signature(getattr(tdl, name).fn).parameters
    for word, parameter in zip(given.split(", "), parameters, strict=False):
        assert word == parameter or (word, parameter) in {("ok", "token"), ("pe", "peer")}


def test_table_of_device_functions():
    """That of the tutorial has all of them, with their parameters in order."""
    text = (ROOT / "docs" / "tutorials" / "own_kernel.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", text, re.MULTILINE))
    assert set(rows) == {name for name in tdl.__all__ if callable(getattr(tdl, name))}
    for name, parameters in rows.items():
        written = [each.split("=")[0] for each in parameters.split(", ") if each]
        function = getattr(tdl, name)
        assert written == list(inspect.signature(getattr(function, "fn", function)).parameters)
