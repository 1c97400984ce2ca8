"""Where the user's code assigns, tracks or logs something: `train.py:41`. It is read, never run.

forgotten.py and runs.py call it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

Use = Literal["condition", "result", "value"]
"""In an `if` or `while`, in what a `return` or ctx.finish gives, or elsewhere."""


def assigned(file: Path, name: str, scope: str, folder: Path) -> str:
    """Return `train.py:41`, where a variable of a function, or an attribute (`scope` is ""), is assigned first; the
    file alone where no line does."""
    tree = _tree(file)
    lines = [node.lineno for node in _named(_within(tree, scope), name, scope) if isinstance(node.ctx, ast.Store)]
    return _place(file, min(lines, default=None), folder)


def uses(file: Path, name: str, scope: str) -> set[Use]:
    """Return how a variable or an attribute is read, but for the statements that only change it, as `n = n + 1` and
    `losses.append(loss)`."""
    ways: set[Use] = set()
    tree = _within(_tree(file), scope)
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt) or name in _changed_by(statement):
            continue
        parts: dict[Use, list[ast.AST]] = {"condition": [], "result": [], "value": []}
        for field, part in ast.iter_fields(statement):
            use: Use = "condition" if field == "test" else "result" if _ends(statement) else "value"
            parts[use] += [node for node in (part if isinstance(part, list) else [part]) if isinstance(node, ast.expr)]
        ways |= {use for use, nodes in parts.items() if any(True for part in nodes for _ in _named(part, name, scope))}
    return ways


def _ends(statement: ast.stmt) -> bool:
    """Return whether a statement gives a result, by `return` or by `ctx.finish(...)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    finishes = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "finish"
    return finishes or isinstance(statement, ast.Return)


def _changed_by(statement: ast.stmt, *, with_variables: bool = True) -> set[str]:
    """Return the names that a statement assigns, or of which it calls a method for its effect alone."""
    targets: list[ast.AST] = []
    if isinstance(statement, ast.Assign):
        targets = list(statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        targets = [statement.value.func.value] if isinstance(statement.value.func, ast.Attribute) else []
    return {name for target in targets for name in _spine(target, with_variables)}


def _spine(node: ast.AST, with_variables: bool) -> Iterator[str]:
    """Yield the names of what is changed, as `self` and `ema` of `self.ema[name].mul_(rate)`: no index, no argument."""
    if isinstance(node, (ast.Tuple, ast.List)):
        for element in node.elts:
            yield from _spine(element, with_variables)
    elif isinstance(node, ast.Name):
        yield from [node.id] if with_variables else []
    elif isinstance(node, ast.Attribute):
        yield node.attr
        yield from _spine(node.value, with_variables)
    elif isinstance(node, (ast.Subscript, ast.Starred)):
        yield from _spine(node.value, with_variables)
    elif isinstance(node, ast.Call):
        yield from _spine(node.func, with_variables)


def is_of_a_for(file: Path, name: str, scope: str) -> bool:
    """Return whether a `for` assigns a variable: each of its passes does so before anything reads it."""
    loops = [node for node in ast.walk(_within(_tree(file), scope)) if isinstance(node, ast.For)]
    return any(True for loop in loops for _ in _named(loop.target, name, scope))


@cache
def changed_by_methods(file: Path, name: str) -> frozenset[str]:
    """Return the attributes that methods of a class assign, or assign into, but for its constructor."""
    changed = set()
    for node in ast.walk(_tree(file)):
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for method in node.body:
            if isinstance(method, FUNCTIONS) and method.name != "__init__":
                statements = [node for node in ast.walk(method) if isinstance(node, ast.stmt)]
                changed |= {name for statement in statements for name in _changed_by(statement, with_variables=False)}
    return frozenset(changed)


def mentioned(files: Iterable[Path], name: str, folder: Path) -> str:
    """Return `train.py:41`, where `name=` is given to a call, as to ctx.track, or "name" is a key, as for ctx.log; ""
    where no line does."""
    for file in files:
        lines = list(_lines_with(_tree(file), name))
        if lines:
            return _place(file, min(lines), folder)
    return ""


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _within(tree: ast.AST, scope: str) -> ast.AST:
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and node.name == scope]
    return functions[0] if functions else tree


def _named(tree: ast.AST, name: str, scope: str) -> Iterator[ast.Name | ast.Attribute]:
    """Yield where a variable stands, of that function; or an attribute too, of any object."""
    for node in ast.walk(tree):
        is_name = isinstance(node, ast.Name) and node.id == name
        if is_name or (isinstance(node, ast.Attribute) and node.attr == name and not scope):
            yield node  # type: ignore[misc]


def _lines_with(tree: ast.AST, name: str) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (keyword.value.lineno for keyword in node.keywords if keyword.arg == name)
        elif isinstance(node, ast.Constant) and node.value == name:
            yield node.lineno


def _place(file: Path, line: int | None, folder: Path) -> str:
    name = str(file.relative_to(folder)) if file.is_relative_to(folder) else file.name
    return name if line is None else f"{name}:{line}"


@cache
def _tree(file: Path) -> ast.AST:
    try:
        return ast.parse(file.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])
