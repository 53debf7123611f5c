"""tdx.config: values, types, and the environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tdx.runtime.config import Config


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
    with pytest.raises(AttributeError, match="no setting 'seed'; it has backend, debug"):
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


@pytest.mark.parametrize(
    ("name", "text"), [("DEBUG", "maybe"), ("HOST_SEED", "x"), ("HOST_MULTIPROCESSORS", "0")]
)
def test_bad_environment(name, text):
    done = subprocess.run(
        [sys.executable, "-c", "import tdx"],
        env={**os.environ, f"TDX_{name}": text},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ValueError" in done.stderr
    assert name.lower() in done.stderr.lower()
