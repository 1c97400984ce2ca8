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
    own = _OwnModules(root)
    try:
        for depth in range(1, len(parents) + 1):  # importing a module runs the packages that it is in
            own.check(".".join(parents[:depth]))
        spec = _find(module, root)
    except _NotFound as error:
        raise InvalidValue("task", f"{task}: {error}") from None
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise InvalidValue("task", f"{task}: {module} is not a Python file (found {spec.origin or 'a plain folder'})")
    file = Path(spec.origin)
    defined = own.check_file(file, module)
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
        own = (Path(word) for word in command[1:] if word.endswith(".py"))
        return next((one for one in own if not one.is_absolute() and (root / one).is_file()), None)
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
        where = f"in {root}, where the command was typed, and none is installed"
        raise _NotFound(f"no module {module!r} {where}{nearest(parts[0], candidates)}")
    return spec


class _OwnModules:
    """Checks modules of the user's own below `root`, each once, with those that they import at their top."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._defined: dict[Path, set[str] | None] = {}
        """The names that a file's module defines at its top; None where a star import leaves that open."""

    def check(self, module: str) -> tuple[str | None, set[str] | None] | None:
        """Check a module: (its folder if it is a package, the names it defines); None for one of somebody else's."""
        top = module.split(".")[0]
        if top in sys.builtin_module_names or top in sys.stdlib_module_names or top == "__main__":
            return None
        if importlib.machinery.PathFinder.find_spec(top, [str(self.root)]) is None:
            if importlib.util.find_spec(top) is None:
                raise _NotFound(f"no module {top!r}; install it, or correct the name")
            return None
        spec = _find(module, self.root)
        folder = next(iter(spec.submodule_search_locations), None) if spec.submodule_search_locations else None
        if not (spec.origin and spec.origin.endswith(".py")):
            return folder, set()
        return folder, self.check_file(Path(spec.origin), module)

    def check_file(self, file: Path, module: str) -> set[str] | None:
        """The names a module defines at its top, or None when a star import leaves that open."""
        if file in self._defined:
            return self._defined[file]
        self._defined[file] = None  # a circle of imports ends here
        names: set[str] = set()
        star = False
        for node in parse(file).body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._check_needed(alias.name, f"{file}:{node.lineno}: import {alias.name}")
            elif isinstance(node, ast.ImportFrom):
                star |= any(alias.name == "*" for alias in node.names)
                self._check_from(node, module, file)
            names |= _bound(node)
        self._defined[file] = None if star else names
        return self._defined[file]

    def _check_from(self, node: ast.ImportFrom, module: str, file: Path) -> None:
        place, source = f"{file}:{node.lineno}", "." * node.level + (node.module or "")
        wanted = _absolute(node, module, file)
        if wanted is None:
            what = f"import {source}{node.names[0].name}"
            raise InputError(f"{place}: {what}: a relative import in a module of no package")
        found = self._check_needed(wanted, f"{place}: import {wanted}")
        if found is None:
            return  # an installed package: what is in it is not ours to read
        folder, defined = found
        for alias in node.names:
            if alias.name == "*" or defined is None or alias.name in defined or alias.name.startswith("__"):
                continue
            statement = f"{place}: from {source} import {alias.name}"
            if folder is None:
                raise InputError(f"{statement}: {wanted} defines no {alias.name!r}{nearest(alias.name, defined)}")
            self._check_needed(f"{wanted}.{alias.name}", statement)

    def _check_needed(self, wanted: str, statement: str) -> tuple[str | None, set[str] | None] | None:
        """`check`, for an import statement of the user's own, which an error names."""
        try:
            return self.check(wanted)
        except _NotFound as error:
            raise InputError(f"{statement}: {error}") from None


def _absolute(node: ast.ImportFrom, module: str, file: Path) -> str | None:
    """The dotted module of a `from` import; None for a relative one that leaves the packages there are."""
    if not node.level:
        return node.module
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return None


def _bound(node: ast.stmt) -> set[str]:
    """Names that one statement at a module's top gives a value."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)} | {
        one.name for one in ast.walk(node) if isinstance(one, (ast.FunctionDef, ast.ClassDef))
    }
