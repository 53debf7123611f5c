"""tdx.config: values, types, and the environment."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tdx.runtime.config import _SETTINGS, Config
from tdx.runtime.errors import InvalidArgument
from tests.helpers.commands import ROOT, run_tdx, tdx_environment


def test_defaults():
    config = Config()
    assert config.backend == ""
    assert config.debug is False
    assert config.host_multiprocessors == 8
    assert "host_seed=0" in repr(config)


def test_settings_are_checked():
    config = Config()
    config.host_seed = 3
    assert config.host_seed == 3
    with pytest.raises(AttributeError, match="no setting 'seed'; it has backend, cublas, debug"):
        config.seed = 3
    for name, value in [("debug", 1), ("host_seed", "3"), ("host_seed", True), ("backend", None)]:
        with pytest.raises(TypeError, match=f"tdx.config.{name} takes"):
            setattr(config, name, value)
    for value in (0, -1, 1025):
        with pytest.raises(ValueError, match=r"in 1..1024"):
            config.host_multiprocessors = value


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DEBUG", "1", True), ("DEBUG", "off", False), ("DEBUG", "", False),
        ("HOST_SEED", "17", 17), ("HOST_SEED", "0x10", 16), ("BACKEND", "host", "host"),
    ],
)  # fmt: skip
def test_environment(monkeypatch, name, text, value):
    monkeypatch.setenv(f"TDX_{name}", text)
    assert getattr(Config(), name.lower()) == value


_BAD = {
    "BACKEND": "gpu", "CUBLAS": "2", "DEBUG": "maybe", "HOST_SEED": "abc",
    "HOST_MULTIPROCESSORS": "0", "QUIET": "2", "SHARE_GPU": "y", "LAUNCH_BLOCKING": "-",
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), _BAD.items())
def test_bad_environment(name, text, monkeypatch):
    """Whoever uses it is told the variable, the value and what it takes."""
    monkeypatch.setenv(f"TDX_{name}", text)
    done = run_tdx("run", "-n", "1", __file__)
    assert done.returncode == 2
    assert re.fullmatch(rf"tdx run: .*TDX_{name}.*\n", done.stderr)
    assert f"'{text}'" in done.stderr
    assert re.search(r"it takes|is not one of cuda, hip, host", done.stderr)
    config = Config()
    if name != "BACKEND":  # a matter of the machine too: see backends.py
        with pytest.raises(InvalidArgument, match=rf"TDX_{name}='{text}' .*it takes"):
            config.check()
        monkeypatch.delenv(f"TDX_{name}")
        setattr(config, name.lower(), getattr(Config(), name.lower()))
    config.check()


def test_init_refuses_a_bad_environment(tmp_path):
    """The import does not fail: a rank that raised there would leave its peers waiting."""
    path = tmp_path / "script.py"
    path.write_text(
        "import tdx\ntry:\n    tdx.init()\n"
        "except tdx.errors.TdxError as error:\n    print(repr(error))\n"
    )
    done = subprocess.run(
        [sys.executable, str(path)],
        env=tdx_environment(TDX_HOST_SEED="abc"),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "TDX_HOST_SEED='abc'" in done.stdout
    assert "takes an integer" in done.stdout


def test_every_variable_is_in_the_readme():
    rows = []
    for name, setting in _SETTINGS.items():
        is_switch = isinstance(setting.default, bool)
        default = ("off", "on")[setting.default] if is_switch else setting.default
        rows.append(f"| `TDX_{name.upper()}` | {default} | {setting.meaning} |")
    text = (ROOT / "README.md").read_text()
    assert rows == re.findall(r"^\| `TDX_.*\|$", text, re.M)
    assert set(_BAD) == {name.upper() for name in _SETTINGS}
