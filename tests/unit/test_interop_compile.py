"""Calls of tdx in programs that PyTorch compiles: left out of it, whoever is imported first."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tdx.interop import torch_tensors
from tdx.runtime.errors import InvalidArgument
from tests.helpers.commands import tdx_environment
from tests.helpers.frameworks import needs

# Dynamo is what matters; its backend "eager" needs no C++ compiler, and no time
_CALLS = """
    world = tdx.init(backend="host")
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    x = world.array(np.ones((8, 16), np.float32))
    plan = tdx.AllReduce(world, (8, 16), "float32")
    out = torch.zeros(8, 16)

    functions = {
        "function": lambda a: tdx.all_reduce(a * 2) + 1,
        "out": lambda a: tdx.all_reduce(a * 2, out=out) + 1,
        "plan": lambda a: torch.from_dlpack(plan(a * 2)) + 1,
        "plan, out": lambda a: plan(a * 2, out) + 1,
        "new plan": lambda a: tdx.AllReduce(world, (8, 16), "float32")(a * 2, out) + 1,
        "two calls": lambda a: tdx.all_gather(tdx.all_reduce(a * 2) + 1),
        "product": lambda a: (tdx.all_gather_matmul(a, b) / 8)[:, :1].expand(8, 16) + 1,
        "array": lambda a: torch.from_dlpack(world.array(a * 2)) + 1,
        "methods": lambda a: (x.copy_from(a * 2), torch.from_numpy(x.numpy()) + 1)[1],
        "exchange": lambda a: torch.from_dlpack(x) + a * 0 + 1,
        "barrier": lambda a: (world.barrier(), a * 2 + 1)[1],
    }
    for name, function in functions.items():
        expected = torch.full((8, 16), 3.0)
        run = torch.compile(function, backend="eager")
        for _ in range(2):
            assert torch.equal(run(a), expected), name
    world.close()
"""


def _run(*parts: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(textwrap.dedent(part) for part in parts)],
        env=tdx_environment(TDX_BACKEND="host"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_calls_are_left_out():
    needs("torch", "host")
    _run("import tdx, torch, numpy as np", _CALLS)


# -- with a package in place of PyTorch, as it may be or become

_LOADS = """
    import importlib, sys
    import tdx
    before = list(sys.meta_path)
    tdx.init
    rules = importlib.import_module("torch._dynamo.trace_rules")
    assert "exec_module" not in vars(rules.__spec__.loader), "the loader is as it was"
"""


@pytest.fixture
def rules(tmp_path):
    """Writes the module with Dynamo's list."""

    def write(content: str) -> None:
        folder = tmp_path / "torch" / "_dynamo"
        folder.mkdir(parents=True)
        (tmp_path / "torch" / "__init__.py").touch()
        (folder / "__init__.py").touch()
        (folder / "trace_rules.py").write_text(textwrap.dedent(content))

    return write


def _run_beside(folder, *parts: str) -> None:
    _run(f"import sys; sys.path.insert(0, {str(folder)!r})", *parts)


@pytest.mark.parametrize(
    ("content", "check"),
    [
        ("added = []; add = added.append", "assert rules.added == ['tdx']"),
        ("", ""),
        ("def add(name): raise ValueError", ""),
        ("add = None", ""),
    ],
    ids=["as it is", "no list", "fails", "another thing"],
)
def test_the_list_is_met_when_it_is_loaded(tmp_path, rules, content, check):
    rules(content)
    _run_beside(tmp_path, _LOADS, "assert sys.meta_path == before", check)


def test_the_list_was_loaded_before(tmp_path, rules):
    rules("added = []; add = added.append")
    code = """
        import torch._dynamo.trace_rules as rules
        before = list(sys.meta_path)
        import tdx
        tdx.init
        assert rules.added == ["tdx"]
        assert sys.meta_path == before
    """
    _run_beside(tmp_path, code)


def test_a_failed_import_is_the_programs_own(tmp_path, rules):
    """It sees the same error as without tdx, and may try again."""
    rules("""
        import builtins
        builtins.tries = getattr(builtins, "tries", 0) + 1
        if builtins.tries == 1:
            raise ImportError("not yet")
        added = []
        add = added.append
    """)
    first = """
        import tdx
        tdx.init
        try:
            import torch._dynamo.trace_rules
        except ImportError as error:
            assert str(error) == "not yet"
        else:
            raise AssertionError
        import torch._dynamo.trace_rules as rules
        assert rules.added == ["tdx"]
    """
    _run_beside(tmp_path, first)


def test_what_is_not_there_is_not_found(tmp_path, rules):
    rules("")
    (tmp_path / "torch" / "_dynamo" / "trace_rules.py").unlink()
    code = """
        import tdx
        tdx.init
        try:
            import torch._dynamo.trace_rules
        except ModuleNotFoundError as error:
            assert error.name == "torch._dynamo.trace_rules"
        else:
            raise AssertionError
    """
    _run_beside(tmp_path, code)


# -- tensors without memory


def _zero(torch, describe):
    describe(torch._efficientzerotensor((3,)))


def _meta(torch, describe):
    describe(torch.ones(3, device="meta"))


def _fake(torch, describe):
    from torch._subclasses.fake_tensor import FakeTensorMode

    describe(FakeTensorMode().from_tensor(torch.ones(3)))


def _functional(torch, describe):
    describe(torch._to_functional_tensor(torch.ones(3)))


def _emptied(torch, describe):
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    describe(x)


def _vmap(torch, describe):
    torch.func.vmap(describe)(torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("use", [_zero, _meta, _fake, _functional, _emptied, _vmap])
def test_tensors_without_memory(use):
    needs("torch", "host")
    import torch

    with pytest.raises(InvalidArgument, match="has no memory"):
        use(torch, torch_tensors.describe)


def test_tensors_without_elements_need_no_memory():
    needs("torch", "host")
    import torch

    assert torch_tensors.describe(torch.ones(0, 3)).shape == (0, 3)
    assert torch_tensors.describe(torch._efficientzerotensor((3,)).clone()).shape == (3,)
