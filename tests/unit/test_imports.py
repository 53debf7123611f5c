"""What may import what, read from the source; and what `import tdx` loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tdx").rglob("*.py"))
LONGEST_FILE = 400

# package -> the packages of tdx it may import, besides itself
ALLOWED = {
    "abi": set(),
    "language": {"abi"},
    "runtime": {"abi"},
    "interop": {"runtime"},
    "kernels": {"language", "runtime", "interop", "abi"},
    "bench": {"language", "runtime", "interop", "kernels", "abi", "tools"},
    "tools": {"language", "runtime", "interop", "kernels", "abi", "bench"},
}
# other modules that only the named files of a package may import
RESTRICTED = {
    "mpi4py": ("tdx/runtime/comm.py", "tdx/tools/"),
    "triton": (
        "tdx/runtime/triton_driver", "tdx/runtime/driver/", "tdx/language/", "tdx/kernels/",
        "tdx/tools/", "tdx/bench/",
    ),
    "greenlet": ("tdx/runtime/driver/host/", "tdx/tools/"),
    "cuda": ("tdx/runtime/driver/cuda", "tdx/tools/"),
    "hip": ("tdx/runtime/driver/hip", "tdx/tools/"),
    "torch": ("tdx/interop/torch", "tdx/runtime/triton_driver", "tdx/tools/", "tdx/bench/"),
    "jax": ("tdx/interop/jax", "tdx/tools/", "tdx/bench/"),
    "cupy": ("tdx/interop/cupy", "tdx/tools/", "tdx/bench/"),
}  # fmt: skip
# imported where a function needs them, never when a module of tdx is loaded
LATE = ("mpi4py", "torch", "jax", "cupy")
ENVIRONMENT = ("tdx/runtime/config.py", "tdx/runtime/comm.py", "tdx/tools/")


def _relative(path):
    return path.relative_to(ROOT).as_posix()


def _imports(path):
    """(module, at the top level, only for type checkers) of every import of a file."""
    tree = ast.parse(path.read_text())
    package = _relative(path).removesuffix(".py").removesuffix("/__init__").split("/")
    if path.name != "__init__.py":
        package = package[:-1]

    def visit(node, top, typing):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, top, typing
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    yield f"{module}.{alias.name}", top, typing
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(child, top, True)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from visit(child, False, typing)
            else:
                yield from visit(child, top, typing)

    yield from visit(tree, True, False)


@pytest.mark.parametrize("path", FILES, ids=_relative)
def test_directions(path):
    name = _relative(path)
    parts = name.removesuffix(".py").split("/")
    own = parts[1] if len(parts) > 1 else ""
    for module, top, typing in _imports(path):
        if typing:
            continue
        names = module.split(".")
        if names[0] == "tdx" and len(names) > 1 and own in ALLOWED and own != names[1]:
            assert names[1] in ALLOWED[own] or names[1] not in ALLOWED, f"{name} imports {module}"
        if names[0] in RESTRICTED:
            assert name.startswith(RESTRICTED[names[0]]), f"{name} imports {module}"
        if names[0] in LATE:
            assert not top, f"{name} imports {module} when it is loaded"


def test_no_circles():
    graph = {}
    modules = {_module(path): path for path in FILES}
    for module, path in modules.items():
        found = set()
        for imported, top, typing in _imports(path):
            if top and not typing:
                parent = imported.rpartition(".")[0]
                found.add(imported if imported in modules else parent)
        graph[module] = {m for m in found if m in modules and m != "tdx" and m != module}
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            path.append(module)
            for imported in sorted(graph[module]):
                visit(imported)
            path.pop()
            done.add(module)

    for module in graph:
        visit(module)


def _module(path):
    return _relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.mark.parametrize("path", FILES, ids=_relative)
def test_files_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST_FILE, f"{lines} lines"


@pytest.mark.parametrize("path", FILES, ids=_relative)
def test_the_environment_is_read_in_one_place(path):
    if _relative(path).startswith(ENVIRONMENT):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
        assert not read, f"{_relative(path)}:{node.lineno} reads the environment"


@pytest.mark.smoke
def test_import_is_cheap():
    """Best of three: no framework, no binding, no MPI, no Triton, in under 0.3 s."""
    code = (
        "import json, sys, time; before = set(sys.modules); "  # a .pth file may import some
        "start = time.perf_counter(); import tdx; t = time.perf_counter() - start; "
        "print(json.dumps([t, sorted(set(sys.modules) - before)]))"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        time_s, modules = json.loads(done.stdout)
        seconds.append(time_s)
        loaded = {m.partition(".")[0] for m in modules}
        assert not loaded & {"triton", "greenlet", "cuda", "hip", *LATE}
    assert min(seconds) < 0.3
