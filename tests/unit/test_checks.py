"""Which values count as numbers: Python's and NumPy's alike, never bools."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tdx.kernels.all_reduce import Config
from tdx.kernels.matmul import Config as Tile
from tdx.runtime.checks import as_float, as_int, check_flag, check_int
from tdx.runtime.errors import InvalidArgument
from tdx.runtime.init import _checked


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_integers(value):
    assert as_int(value) == 3
    assert type(as_int(value)) is int
    assert check_int(value, "n", 3, 3) == 3


@pytest.mark.parametrize("value", [True, np.True_, 3.0, np.float32(3), "3", None, [3]])
def test_no_integers(value):
    assert as_int(value) is None
    with pytest.raises(InvalidArgument, match=r"n=.* must be an int from 1 to 5"):
        check_int(value, "n", 1, 5)


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.float16(2), np.int64(2), Fraction(2)])
def test_floats(value):
    assert as_float(value) == 2
    assert type(as_float(value)) is float


def test_flags():
    for value in (True, np.True_, False, np.False_):
        assert check_flag("plan", "bias", value) is bool(value)
    for value in (1, 0, None, "yes", np.array(True), [True]):
        with pytest.raises(InvalidArgument, match=r"^plan: bias=.* must be True or False"):
            check_flag("plan", "bias", value)


def test_no_floats():
    for value in (True, np.True_, "2", None, 2j, [2.0]):
        assert as_float(value) is None
    assert as_float(10**400) == math.inf


def test_limits():
    for value in (0, np.int64(-1)):
        with pytest.raises(InvalidArgument, match=r"must be an int >= 1"):
            check_int(value, "n", 1)


def test_configs_become_plain():
    config = Config("one_shot", np.int64(64), num_warps=np.int32(4), blocks=np.int64(2))
    assert config == Config("one_shot", 64, num_warps=4, blocks=2)
    assert {type(v) for v in (config.block, config.num_warps, config.blocks)} == {int}
    assert type(Tile(np.int64(16), 16, 16).block_m) is int
    for make in (lambda: Config("one_shot", 64.0), lambda: Tile(16, "16", 16)):
        with pytest.raises(InvalidArgument, match="must be an int"):
            make()


def test_settings_of_init_become_plain():
    chosen, heap, timeout = _checked("host", np.int64(1 << 20), np.float32(2.5), "raise")
    assert (chosen, heap, timeout) == ("host", 1 << 20, 2.5)
    assert (type(heap), type(timeout)) == (int, float)
    for wrong in ({"heap_bytes": True}, {"heap_bytes": 1e6}, {"timeout_s": np.True_}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            _checked(
                "host", **{"heap_bytes": None, "timeout_s": 1, "on_peer_failure": "raise"} | wrong
            )
