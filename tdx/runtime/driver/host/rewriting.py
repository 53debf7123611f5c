"""How the source of a kernel is rewritten for the interpreter, beyond what Triton does."""

from __future__ import annotations

import ast
from typing import Any

from triton.runtime import interpreter

__all__ = ["LOGIC", "Transformer"]

LOGIC = "_tdx_logic"  # the name of logic.py in a kernel's globals
_CALLED = ("max", "min", "range")


class Transformer(interpreter.ASTTransformer):
    """Makes what Python would do with the truth of blocks, or loops, what a compiled kernel does.

    `assert` is `tl.device_assert`; for the rest see logic.py.
    """

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


def _semantic_call(name: str, *args: ast.expr) -> ast.Call:
    return _call_of("interpreter_semantic", name, *args)


def _logic_call(name: str, *args: ast.expr) -> ast.Call:
    return _call_of(LOGIC, name, *args)


def _call_of(owner: str, name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(owner, ast.Load()), name, ast.Load()), list(args), [])
