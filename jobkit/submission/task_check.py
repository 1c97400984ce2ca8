"""Would the task start? Answered from its source: importing it would cost seconds of torch at every submission."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

from jobkit.errors import InputError, InvalidValue, nearest
from jobkit.run.command_line import find_program, is_python, target


class _NotFound(Exception):
    """A module is not there; whoever looks for it knows who needs it."""


def check_task(task: str, root: Path) -> Path | None:
    """Check that `module:callable` can be imported from `root`, and return the module's file, relative to `root`.

    Looked at: the module is there, it and the modules of the user's own that it imports at their top are valid Python,
    what they import at their top can be found, and the callable is defined. None for a module installed elsewhere.
    Raises InvalidValue, or InputError for a file of the user's, saying which of these is not so.
    """
    module, _, name = task.partition(":")
    parents = module.split(".")[:-1]
    seen: dict[Path, set[str] | None] = {}
    try:
        for depth in range(1, len(parents) + 1):  # importing a module runs the packages that it is in
            _check_module(".".join(parents[:depth]), root, seen)
        spec = _find(module, root)
    except _NotFound as error:
        raise InvalidValue("task", f"{task}: {error}") from None
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise InvalidValue("task", f"{task}: {module} is not a Python file (found {spec.origin or 'a plain folder'})")
    file = Path(spec.origin)
    defined = _check_file(file, module, root, seen)
    if defined is not None and name not in defined:
        raise InvalidValue("task", f"{task}: {file} defines no {name!r}{nearest(name, defined)}")
    return file.relative_to(root) if root in file.parents else None


def check_command(command: list[str], root: Path) -> Path | None:
    """Check that a command typed in `root` would start, and return the user's Python file in it, relative to `root`.

    Looked at: the program is there; for a Python, that its script is and can be parsed, or that its module is found.
    What they import is not: a script may extend sys.path first. None where it names no Python file of the user's.
    Raises InvalidValue, or InputError for a file of the user's, saying which of these is not so.
    """
    program = command[0]
    if find_program(program) is None:
        what = "no such program, or it may not be executed" if "/" in program else "no such program on PATH"
        hint = "" if "/" in program else nearest(program, ["python", "torchrun", "accelerate", "bash"])
        raise InvalidValue("command", f"{program}: {what}{hint}")
    if not is_python(program):
        return next((Path(word) for word in command[1:] if _is_own_file(word, root)), None)
    runs = target(command)
    if runs is None:
        raise InvalidValue("command", f"{program} with nothing to run: name a script, -m module or -c statements")
    if runs.kind == "code":
        return None
    if runs.kind == "module":
        try:
            spec = _find(runs.text, root)
            if spec.submodule_search_locations:
                spec = _find(f"{runs.text}.__main__", root)
        except _NotFound as error:
            raise InvalidValue("command", f"{program} -m: {error}") from None
        file = Path(spec.origin or "")
    else:
        file = root / runs.text
        if not file.exists():
            scripts = [str(one.relative_to(root)) for one in root.glob("*.py")]
            raise InvalidValue("command", f"{runs.text}: no such file in {root}{nearest(runs.text, scripts)}")
    if file.suffix == ".py" and (runs.kind == "script" or root in file.parents):
        parse(file)
    return file.relative_to(root) if file.is_file() and root in file.parents else None


def _is_own_file(word: str, root: Path) -> bool:
    return word.endswith(".py") and not Path(word).is_absolute() and (root / word).is_file()


def parse(file: Path) -> ast.Module:
    """A file's syntax tree; InputError with file and line where it is not Python."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise InputError(f"{file}:{line or 1}: not valid Python: {getattr(error, 'msg', error)}") from None


def _find(module: str, root: Path) -> importlib.machinery.ModuleSpec:
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
        raise _NotFound(f"no module {module!r} from {root}{nearest(parts[0], candidates)}")
    return spec


def _check_file(file: Path, module: str, root: Path, seen: dict[Path, set[str] | None]) -> set[str] | None:
    """The names a module defines at its top, or None when a star import leaves that open."""
    seen[file] = None  # a circle of imports ends here
    tree = parse(file)
    names: set[str] = set()
    star = False
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            star |= any(alias.name == "*" for alias in node.names)
            _check_import(node, module, file, root, seen)
        names |= _bound(node)
    seen[file] = None if star else names
    return seen[file]


def _check_import(
    node: ast.Import | ast.ImportFrom, module: str, file: Path, root: Path, seen: dict[Path, set[str] | None]
) -> None:
    place = f"{file}:{node.lineno}"
    if isinstance(node, ast.Import):
        for alias in node.names:
            _check_needed(alias.name, root, f"{place}: import {alias.name}", seen)
        return
    source = "." * node.level + (node.module or "")
    wanted = _absolute(node, module, file)
    if wanted is None:
        raise InputError(f"{place}: import {source}{node.names[0].name}: a relative import in a module of no package")
    found = _check_needed(wanted, root, f"{place}: import {wanted}", seen)
    if found is None:
        return  # an installed package: what is in it is not ours to read
    folder, defined = found
    for alias in node.names:
        if alias.name == "*" or defined is None or alias.name in defined or alias.name.startswith("__"):
            continue
        statement = f"{place}: from {source} import {alias.name}"
        if folder is None:
            raise InputError(f"{statement}: {wanted} defines no {alias.name!r}{nearest(alias.name, defined)}")
        _check_needed(f"{wanted}.{alias.name}", root, statement, seen)


def _check_needed(
    wanted: str, root: Path, statement: str, seen: dict[Path, set[str] | None]
) -> tuple[str | None, set[str] | None] | None:
    """`_check_module`, for an import statement of the user's own, which an error names."""
    try:
        return _check_module(wanted, root, seen)
    except _NotFound as error:
        raise InputError(f"{statement}: {error}") from None


def _absolute(node: ast.ImportFrom, module: str, file: Path) -> str | None:
    """The dotted module of a `from` import; None for a relative one that leaves the packages there are."""
    if not node.level:
        return node.module
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - (node.level - 1)] if node.level > 1 else package
    return ".".join([*base, *([node.module] if node.module else [])]) if base else None


def _check_module(
    wanted: str, root: Path, seen: dict[Path, set[str] | None]
) -> tuple[str | None, set[str] | None] | None:
    """Check a module of the user's own: (its folder if it is a package, the names it defines); None for others'."""
    top = wanted.split(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names or top == "__main__":
        return None
    if importlib.machinery.PathFinder.find_spec(top, [str(root)]) is None:
        if importlib.util.find_spec(top) is None:
            raise _NotFound(f"no module {top!r}; install it, or correct the name")
        return None
    spec = _find(wanted, root)
    folder = next(iter(spec.submodule_search_locations), None) if spec.submodule_search_locations else None
    if not (spec.origin and spec.origin.endswith(".py")):
        return folder, set()
    file = Path(spec.origin)
    if file not in seen:
        _check_file(file, wanted, root, seen)
    return folder, seen[file]


def _bound(node: ast.stmt) -> set[str]:
    """Names that one statement at a module's top gives a value."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)} | {
        one.name for one in ast.walk(node) if isinstance(one, (ast.FunctionDef, ast.ClassDef))
    }
