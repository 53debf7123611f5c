"""How the source of a kernel is rewritten for the interpreter, beyond what Triton does."""

from __future__ import annotations

import ast
import contextlib
import types
from typing import Any

from triton import knobs
from triton.runtime import interpreter

from tdx.runtime.driver.host import logic

__all__ = ["LOGIC", "Transformer", "refuse_globals"]

LOGIC = "_tdx_logic"  # the name of logic.py in a kernel's globals
_CALLED = ("max", "min", "range")


class Transformer(interpreter.ASTTransformer):
    """Makes what Python would do with the truth of blocks, or loops, what a compiled kernel does.

    `assert` is `tl.device_assert`; for the rest see logic.py.
    """

    _loops = 0  # around the node that is visited, without those that compilers unroll

    def visit_For(self, node: ast.For) -> Any:
        function = node.iter.func if isinstance(node.iter, ast.Call) else None
        name = getattr(function, "attr", getattr(function, "id", ""))
        return self._visit_loop(node, name != "static_range")

    def visit_While(self, node: ast.While) -> Any:
        return self._visit_loop(node, True)

    def _visit_loop(self, node: ast.AST, counts: bool) -> Any:
        self._loops += counts
        try:
            return self.generic_visit(node)
        finally:
            self._loops -= counts

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        if not self._loops:
            return node
        refusal = ast.Expr(_logic_call("returned_in_loop"))
        return [ast.copy_location(refusal, node), node]

    def visit_Assert(self, node: ast.Assert) -> Any:
        self.generic_visit(node)
        message = node.msg or ast.Constant("")
        truth = _semantic_call("to_tensor", node.test)
        check = _semantic_call("device_assert", truth, message, ast.Constant(None))
        return ast.copy_location(ast.Expr(check), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """As Triton's, some versions of which do not look into the value."""
        if len(node.targets) > 1:
            raise ValueError("Multiple assignments are not supported")
        self.generic_visit(node)
        node.value = _semantic_call("to_tensor", node.value, ast.Constant(False))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        self.generic_visit(node)
        name = "both" if isinstance(node.op, ast.And) else "either"
        result, *others = node.values
        for value in others:
            nothing = ast.arguments([], [], None, [], [], None, [])
            result = _logic_call(name, result, ast.Lambda(nothing, value))
        return ast.copy_location(result, node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(_logic_call("negated", node.operand), node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _CALLED and not node.keywords:
            return ast.copy_location(_logic_call("called", node.func, *node.args), node)
        return node


class _Globals(ast.NodeTransformer):
    """Has the values of some names looked at where they are used."""

    def __init__(self, names: set[str]):
        self._names = names

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id not in self._names or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(_logic_call("used_global", ast.Constant(node.id), node), node)


def refuse_globals(definition: ast.AST, function: types.FunctionType) -> None:
    """Refuse, where they are used, the globals that a compiler would refuse the kernel."""
    if knobs.compilation.allow_non_constexpr_globals:
        return
    code = function.__code__
    known = {name: function.__globals__.get(name) for name in code.co_names}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            known[name] = cell.cell_contents
    local = {*code.co_varnames, *code.co_cellvars}
    names = {name for name, x in known.items() if name not in local and logic.is_plain(x)}
    if names:
        _Globals(names).visit(definition)


def _semantic_call(name: str, *args: ast.expr) -> ast.Call:
    return _call_of("interpreter_semantic", name, *args)


def _logic_call(name: str, *args: ast.expr) -> ast.Call:
    return _call_of(LOGIC, name, *args)


def _call_of(owner: str, name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(owner, ast.Load()), name, ast.Load()), list(args), [])
