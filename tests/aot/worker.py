"""What the processes of tests/aot/harness.py do with a job."""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tdx.runtime import triton_driver

DIVISIBLE = [["tt.divisibility", 16]]


class World(NamedTuple):
    control: Any
    packed: Any
    stride: Any
    is_team: Any


class Channel(NamedTuple):
    words: Any
    control: Any
    packed: Any


def compile_job(job: dict[str, Any]) -> dict[str, Any]:
    kernel = getattr(importlib.import_module(job["module"]), job["kernel"])
    library = triton_driver.device_library_installed if job["library"] else contextlib.nullcontext
    with library():
        compiled = triton.compile(source(kernel, job), gpu_target(job["target"]), job["options"])
    outcome = {"ttgir": compiled.asm["ttgir"], "shared": compiled.metadata.shared}
    if job["target"].startswith("sm_"):
        return {**outcome, "code": compiled.asm["ptx"], **resources(compiled.asm["cubin"])}
    code = compiled.asm["amdgcn"]
    return {
        **outcome,
        "code": code,
        "spills": find(r"\.vgpr_spill_count:\s*(\d+)", code)
        + find(r"\.sgpr_spill_count:\s*(\d+)", code),
        "stack": find(r"\.private_segment_fixed_size:\s*(\d+)", code),
        "registers": find(r"\.vgpr_count:\s*(\d+)", code),
    }


def gpu_target(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64)


def source(kernel, job: dict[str, Any]) -> ASTSource:
    types, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = job["signature"][name]
        types[name] = kind
        if kind in ("world", "team"):
            types[name] = World("*i64", "i32", "i64", "constexpr")
            constants[(index, 3)] = kind == "team"
            attributes[(index, 0)] = attributes[(index, 2)] = DIVISIBLE
        elif kind == "channel":
            types[name] = Channel("*i32", "*i64", "i32")
            attributes[(index, 0)] = attributes[(index, 1)] = DIVISIBLE
        elif kind == "constexpr":
            constants[(index,)] = job["constexprs"][name]
        elif name in job["divisible"] or (kind[0] == "*" and name not in job["unaligned"]):
            attributes[(index,)] = DIVISIBLE
    return ASTSource(kernel, types, constants, attributes)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack; spilled registers live on the stack."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    stack = find(r"STACK:(\d+)", done.stdout)
    return {"registers": find(r"REG:(\d+)", done.stdout), "stack": stack, "spills": stack}


def find(pattern: str, text: str) -> int:
    return sum(int(number) for number in re.findall(pattern, text))
