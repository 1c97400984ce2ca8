"""Would the task import? Answered from its source: importing it would cost seconds of torch at every submission."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

from jobkit.errors import InputError, nearest


def check_task(task: str, root: Path) -> Path | None:
    """Check that `module:callable` can be imported from `root`, and return the module's file, relative to `root`.

    Looked at: the module is there, it and the modules of the user's own that it imports at their top are valid Python,
    what they import at their top can be found, and the callable is defined. None for a module installed elsewhere.
    Raises InputError saying which of these is not so.
    """
    module, _, name = task.partition(":")
    spec = _find(module, root, f"task: {task}")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise InputError(f"task: {task}: {module} is not a Python file (found {spec.origin or 'a plain folder'})")
    file = Path(spec.origin)
    defined = _check_file(file, module, root, set())
    if defined is not None and name not in defined:
        raise InputError(f"task: {task}: {file} defines no {name!r}{nearest(name, defined)}")
    return file.relative_to(root) if root in file.parents else None


def _find(module: str, root: Path, what: str) -> importlib.machinery.ModuleSpec:
    """The spec of a dotted module, without running any code of it or of its parents."""
    parts = module.split(".")
    # A file of the user's own shadows an installed module of the same name, as it will in the job.
    spec = importlib.machinery.PathFinder.find_spec(parts[0], [str(root)])
    if spec is None or (spec.origin is None and not spec.submodule_search_locations):
        spec = importlib.util.find_spec(parts[0])
    for depth, _ in enumerate(parts[1:], start=2):
        if spec is None:
            break
        spec = importlib.machinery.PathFinder.find_spec(
            ".".join(parts[:depth]), list(spec.submodule_search_locations or [])
        )
    if spec is None:
        candidates = [file.stem for file in root.glob("*.py")]
        raise InputError(f"{what}: no module {module!r} from {root}{nearest(parts[0], candidates)}")
    return spec


def _check_file(file: Path, module: str, root: Path, seen: set[Path]) -> set[str] | None:
    """The names a module defines at its top, or None when a star import leaves that open."""
    seen.add(file)
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise InputError(f"{file}:{line or 1}: not valid Python: {getattr(error, 'msg', error)}") from None
    names: set[str] = set()
    star = False
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            star |= any(alias.name == "*" for alias in node.names)
            for wanted in _imported(node, module, file.name == "__init__.py"):
                _check_import(wanted, f"{file}:{node.lineno}", root, seen)
        names |= _bound(node)
    return None if star else names


def _imported(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not node.level:
        return [node.module or ""]
    parents = module.split(".")[: (None if is_package else -1)]
    base = parents[: len(parents) - (node.level - 1)]
    return [".".join([*base, node.module] if node.module else base)]


def _check_import(wanted: str, place: str, root: Path, seen: set[Path]) -> None:
    top = wanted.split(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names:
        return
    own = importlib.machinery.PathFinder.find_spec(top, [str(root)])
    if own is None:
        if importlib.util.find_spec(top) is None:
            raise InputError(f"{place}: import {wanted}: no module {top!r}; install it, or correct the name")
        return  # an installed package: what is in it is not ours to read
    spec = _find(wanted, root, f"{place}: import {wanted}")
    if spec.origin and spec.origin.endswith(".py") and Path(spec.origin) not in seen:
        _check_file(Path(spec.origin), wanted, root, seen)


def _bound(node: ast.stmt) -> set[str]:
    """Names that one statement at a module's top gives a value."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)} | {
        one.name for one in ast.walk(node) if isinstance(one, (ast.FunctionDef, ast.ClassDef))
    }
