"""The device library: its files against tdx/abi.py and each other, and its injection."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from triton.backends.amd.compiler import HIPBackend
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from tdx import abi
from tdx.runtime import triton_driver

FILES = {
    "nvidia": Path(triton_driver.device_library("cuda")["tdx"]),
    "amd": Path(triton_driver.device_library("hip")["tdx"]),
}
# Triton 3.6 finds cached kernels by the library's path: a changed file needs another name.
# Raise triton_driver.LIBRARY_VERSION, rename the files, then enter the new digests.
DIGESTS = {
    "tdx_nvidia_4.ll": "223c9f560a981f3e",
    "tdx_amd_4.ll": "1ab140edf98f6671",
}
BACKENDS = [
    (CUDABackend, GPUTarget("cuda", 90, 32)),
    (HIPBackend, GPUTarget("hip", "gfx942", 64)),
]


def shared_part(vendor: str) -> str:
    return FILES[vendor].read_text().split("; ---- shared\n")[1]


@pytest.mark.parametrize("vendor", FILES)
def test_a_changed_library_has_a_new_version(vendor):
    content = FILES[vendor].read_bytes()
    assert hashlib.sha256(content).hexdigest()[:16] == DIGESTS[FILES[vendor].name]


def test_vendors_share_one_text():
    assert shared_part("nvidia") == shared_part("amd")


def test_layout_numbers_are_those_of_abi():
    named = re.findall(r"i64 (\d+)(?: monotonic.*)?\s+; ([A-Z_]+)$", shared_part("amd"), re.M)
    names = {name for _, name in named}
    control = {"CONTROL_CLAIM", "CONTROL_TIMEOUT_NS", "CONTROL_RECORD"}
    assert control | {"RECORD_KIND", "RECORD_PROGRAM"} <= names
    assert all(int(number) == getattr(abi, name) for number, name in named)
    assert (abi.CONTROL_FAULT, abi.RECORD_STATE, abi.FAULT_TIMEOUT) == (0, 0, 1)


@pytest.mark.parametrize("vendor", FILES)
def test_functions_are_inlined_and_found_by_name(vendor):
    text = FILES[vendor].read_text()
    defined = re.findall(r"^define \w+ @(\w+)\([^)]*\) ?([#\w]*)", text, re.M)
    assert defined
    assert all(name.startswith("tdx_") for name, _ in defined)
    # on NVIDIA one slow path is called: it spares the fast one its instructions
    rare = {name for name, how in defined if how != "alwaysinline"}
    assert rare == {"tdx_settle_missing"}
    assert f"#0 = {{ {'noinline cold' if vendor == 'nvidia' else 'alwaysinline'} }}" in text


@pytest.mark.parametrize(("backend", "target"), BACKENDS)
def test_injection_is_idempotent_and_restorable(backend, target):
    before = backend.parse_options
    with triton_driver.device_library_installed():
        triton_driver.install_device_library()
        installed = backend.parse_options
        triton_driver.install_device_library()
        assert backend.parse_options is installed
        options = backend(target).parse_options({"extern_libs": {"mine": __file__}})
        libraries = dict(options.extern_libs)
        assert Path(libraries["tdx"]).exists()
        assert libraries["mine"] == __file__
        again = backend(target).parse_options(dict(options.__dict__))
        assert dict(again.extern_libs) == libraries
    assert backend.parse_options is before
    assert "tdx" not in dict(backend(target).parse_options({}).extern_libs)
