"""Would the task start? Answered from its source: importing it would cost seconds of torch at every submission."""

from __future__ import annotations

import ast
import contextlib
import glob
import importlib.machinery
import importlib.util
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from jobkit.errors import InputError, InvalidValue, NoSuchModule, nearest
from jobkit.run.command_line import find_program, is_python, target
from jobkit.run.installed import PACKAGES, is_installed
from jobkit.run.places import TYPE_THERE


class _NotFound(Exception):
    """A module is not there; whoever looks for it knows who needs it."""


class _NotInstalled(_NotFound):
    """A package of somebody else's is not there."""


@dataclass
class Checked:
    """What a check of a task or a command has found."""

    files: list[Path] = field(default_factory=list)
    """The user's own Python files and extension modules that it imports, at its start or later, relative to `root`."""
    warnings: list[str] = field(default_factory=list)
    """A line for each thing that may be as it should, or not."""


def check_task(task: str, root: Path, *, has_setup: bool = False) -> Checked:
    """Check that `module:callable` can be imported from `root`.

    Looked at: the module is there, it and the modules of the user's own that it imports at their top are valid Python,
    what they import at their top can be found, and the callable is defined. What they import elsewhere, in a function
    or a `try`, may be missing. A missing package is a warning where the job `has_setup`, shell lines that may provide
    it, and where the code changes sys.path. So is a package in a folder that is neither installed nor copied. Raises
    InvalidValue, or InputError for a file of the user's, saying which of these is not so.
    """
    module, _, name = task.partition(":")
    parts = module.split(".")
    own = _OwnModules(root, root, has_setup=has_setup)
    try:
        spec = _find(module, root)
        for depth in range(1, len(parts) + 1):  # importing a module runs the packages that it is in
            own.check(".".join(parts[:depth]))
    except _NotFound as error:
        raise NoSuchModule("task", f"{task}: {error}", module) from None
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise InvalidValue("task", f"{task}: {module} is not a Python file (found {spec.origin or 'a plain folder'})")
    file = Path(spec.origin)
    defined = own.check_file(file, module)
    if defined is not None and name not in defined:
        raise InvalidValue("task", f"{task}: {file} defines no {name!r}{nearest(name, defined)}")
    if (line := _line_of_constant(parse(file), name)) is not None:
        raise InvalidValue("task", f"{task}: {file}:{line}: {name} is a plain value there, not a function")
    own.look_for_later_imports()
    return own.found


def check_command(command: list[str], root: Path, *, has_setup: bool = False) -> Checked:
    """Check that a command typed in `root` would start.

    Looked at: the program is there; for a Python, that its script is and can be parsed, or that its module is found.
    What they import is not refused: a script may extend sys.path first. A missing program or module is a warning where
    the job `has_setup`: shell lines that may provide it. So is a shell script that keeps the snapshot from its Pythons.
    Raises InvalidValue, or InputError for a file of the user's, saying which of these is not so.
    """
    checked = _check_program(command, root, has_setup)
    scripts = [word for word in command if word.endswith(".sh") and (root / word).is_file()]
    checked.warnings += [line for word in scripts if (line := _loses_snapshot(root / word)) is not None]
    return checked


_NEW_PYTHONPATH = re.compile(r"^[^#\n]*\b(unset\b[^#\n]*\bPYTHONPATH\b|PYTHONPATH=(?!.*PYTHONPATH))", re.MULTILINE)


def _loses_snapshot(script: Path) -> str | None:
    """What to say of a shell script that replaces PYTHONPATH, by which Python comes to import from the snapshot."""
    text = script.read_text(encoding="utf-8", errors="replace")
    found = _NEW_PYTHONPATH.search(text)
    if found is None:
        return None
    place = f"{script}:{text.count(chr(10), 0, found.end()) + 1}"
    what = "PYTHONPATH without $PYTHONPATH: what is started there imports the code as it is then, not as submitted"
    return f"{place}: {what}; write PYTHONPATH=...:$PYTHONPATH"


def _check_program(command: list[str], root: Path, has_setup: bool) -> Checked:
    program = command[0]
    if find_program(program) is None:
        what = "no such program, or it may not be executed" if "/" in program else "no such program on PATH"
        if has_setup and "/" not in program:
            return Checked(warnings=[f"command: {program}: {what} here; {_SETUP_MUST}"])
        hint = "" if "/" in program else nearest(program, ["python", "torchrun", "accelerate", "bash"])
        raise InvalidValue("command", f"{program}: {what}{hint}")
    if not is_python(program):
        named = (root / word for word in command[1:] if word.endswith(".py"))
        return _imports_of_script(next((one for one in named if one.is_file()), None), root)
    runs = target(command)
    if runs is None:
        raise InvalidValue("command", f"{program} with nothing to run: name a script, -m module or -c statements")
    if runs.kind == "code":
        return Checked()
    module = runs.text
    if runs.kind == "module":
        try:
            spec = _find(module, root)
            if spec.submodule_search_locations:
                module = f"{module}.__main__"
                spec = _find(module, root)
        except _NotFound as error:
            if has_setup and isinstance(error, _NotInstalled):
                return Checked(warnings=[f"command: {program} -m {runs.text}: {error}; {_SETUP_MUST}"])
            raise InvalidValue("command", f"{program} -m: {error}") from None
        file = Path(spec.origin or "")
    else:
        file = root / runs.text
        if not file.exists():
            scripts = [str(one.relative_to(root)) for one in root.glob("*.py")]
            below = (
                next((one.parent for one in sorted(root.glob(f"*/{glob.escape(runs.text)}"))), None)
                if "/" not in runs.text
                else None
            )
            hint = f"; it is in {below}: type the command there" if below else nearest(runs.text, scripts)
            raise InvalidValue("command", f"{runs.text}: no such file in {root}{hint}")
    own = _OwnModules(root, root if runs.kind == "module" else file.parent, refuses=False)
    if file.suffix == ".py" and (runs.kind == "script" or _name_below(root, file) is not None):
        own.check_file(file, module)
    elif runs.kind == "module":
        own.check(module.split(".")[0])
    own.note(file)
    own.look_for_later_imports()
    return own.found


def _imports_of_script(file: Path | None, root: Path) -> Checked:
    """What a script imports that another program, as torchrun, is to run."""
    if file is None:
        return Checked()
    own = _OwnModules(root, file.parent, refuses=False)
    with contextlib.suppress(InputError):
        own.check_file(file, "__main__")
    own.look_for_later_imports()
    return own.found


def parse(file: Path) -> ast.Module:
    """A file's syntax tree; InputError with file and line where it is not Python."""
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise InputError(f"{file}:{line or 1}: not valid Python: {getattr(error, 'msg', error)}") from None


_SETUP_MUST = "the run fails unless the cluster's `setup` lines provide it"


def _find(module: str, first: Path) -> importlib.machinery.ModuleSpec:
    """The spec of a dotted module, without running any code of it or of its parents.

    `first` is the folder that Python looks in before all others.
    """
    parts = module.split(".")
    spec = _find_top(parts[0], first)
    for part in parts[1:]:
        if spec is None:
            break
        _refuse_empty(spec)
        # By its last name: with all of them Python looks for the parent among the imported modules.
        spec = importlib.machinery.PathFinder.find_spec(part, list(spec.submodule_search_locations or []))
    if spec is None:
        candidates = [file.stem for file in first.glob("*.py")]
        where = f"in {first}, where the command was typed, and none is installed"
        is_there = _find_top(parts[0], first) is not None
        error = _NotFound if is_there else _NotInstalled
        files = (f"{parts[0]}.py", f"{'/'.join(parts)}.py")
        above = (one for one in first.parents if any((one / name).exists() for name in files))
        folder = None if is_there else next(above, None)
        hint = f"; it is in {folder}{TYPE_THERE}" if folder else nearest(parts[0], candidates)
        raise error(f"no module {module!r} {where}{hint}")
    _refuse_empty(spec)
    return spec


def _find_top(name: str, first: Path) -> importlib.machinery.ModuleSpec | None:
    # A file of the user's own shadows an installed module of the same name, as it will in the job.
    spec = importlib.machinery.PathFinder.find_spec(name, [str(first), *sys.path])
    if spec is None or spec.origin is None:  # nothing, or a folder without __init__.py, before which a package comes
        installed = importlib.util.find_spec(name)
        if spec is None or (installed is not None and installed.origin is not None):
            spec = installed
    return spec


def _refuse_empty(spec: importlib.machinery.ModuleSpec) -> None:
    """Raise _NotFound for a folder that Python would import although nothing is in it."""
    if spec.origin is not None or not spec.submodule_search_locations:
        return
    folders = [Path(one) for one in spec.submodule_search_locations]
    if all(one.is_dir() and not any(one.iterdir()) for one in folders):
        what = f"{folders[0]} is empty; if it is a submodule that is not checked out"
        raise _NotFound(f"no module {spec.name!r}: {what}: git submodule update --init {folders[0]}")


def _location(spec: importlib.machinery.ModuleSpec) -> Path | None:
    """The file of a module, or the folder of a package without __init__.py; None for what is in no folder."""
    if spec.has_location and spec.origin:
        return Path(spec.origin)
    return next((Path(one) for one in spec.submodule_search_locations or ()), None)


def _name_below(root: Path, path: Path) -> Path | None:
    """The name of a file or a folder relative to `root`; None where it is not below it, or installed there."""
    for one in (path, path.resolve()):
        if one.is_relative_to(root) and not set(PACKAGES).intersection(one.relative_to(root).parts):
            return one.relative_to(root)
    return None


class _OwnModules:
    """Checks modules of the user's own below `root`, each once, with those that they import at their top.

    With `refuses` off nothing is refused, and what is not there is passed over.
    """

    def __init__(self, root: Path, first: Path, *, has_setup: bool = False, refuses: bool = True) -> None:
        self.root, self.found = root, Checked()
        self._first, self._has_setup, self._refuses = first, has_setup, refuses
        self._defined: dict[Path, set[str] | None] = {}
        """The names that a file's module defines at its top; None where a star import leaves that open."""
        self._told: set[str] = set()
        """Packages of somebody else's that there is a warning about."""
        self._changes_path = False
        """Whether a file that was looked at uses sys.path: what it finds by that cannot be known here."""
        self._later: list[tuple[ast.stmt, str, Path]] = []
        """Imports that are not at the top of a file, and may be meant to fail, with its module and the file."""

    def check(self, module: str) -> tuple[str | None, set[str] | None] | None:
        """Check a module: (its folder if it is a package, the names it defines); None for one of somebody else's."""
        top = module.split(".")[0]
        if top in sys.builtin_module_names or top in sys.stdlib_module_names or top in ("__main__", "jobkit"):
            return None
        spec = _find_top(top, self._first)
        if spec is None:
            raise _NotInstalled(f"no module {top!r}")
        location = _location(spec)
        if location is None or _name_below(self.root, location) is None:
            self._tell_if_elsewhere(top, location)
            return None
        spec = _find(module, self._first)
        folder = next(iter(spec.submodule_search_locations), None) if spec.submodule_search_locations else None
        if not (spec.origin and spec.origin.endswith(".py")):
            self.note(_location(spec))
            return folder, set()
        return folder, self.check_file(Path(spec.origin), module)

    def note(self, file: Path | None) -> None:
        """Note a file as one that is needed, if it is the user's own."""
        name = _name_below(self.root, file) if file is not None and file.is_file() else None
        if name is not None and name not in self.found.files:
            self.found.files.append(name)

    def check_file(self, file: Path, module: str) -> set[str] | None:
        """The names a module defines at its top, or None when a star import leaves that open."""
        if file in self._defined:
            return self._defined[file]
        self._defined[file] = None  # a circle of imports ends here
        self.note(file)
        names: set[str] = set()
        star = False
        tree = parse(file)
        self._changes_path |= any(map(_is_sys_path, ast.walk(tree)))
        for node in tree.body:
            star |= isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
            with contextlib.nullcontext() if self._refuses else contextlib.suppress(InputError):
                self._check_imports(node, module, file)
            self._later += [(one, module, file) for one in ast.walk(node) if one is not node and _is_import(one)]
            names |= _bound(node)
        self._defined[file] = None if star else names
        return self._defined[file]

    def look_for_later_imports(self) -> None:
        """Note the files that are imported elsewhere than at a top, once all that must be there has been checked."""
        self._refuses = self._has_setup = False
        while self._later:
            node, module, file = self._later.pop()
            with contextlib.suppress(InputError):
                self._check_imports(node, module, file)

    def _check_imports(self, node: ast.stmt, module: str, file: Path) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._check_needed(alias.name, f"{file}:{node.lineno}: import {alias.name}")
        elif isinstance(node, ast.ImportFrom):
            self._check_from(node, module, file)

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
        except _NotInstalled as error:
            if not self._has_setup and not self._changes_path:
                raise InputError(f"{statement}: {error}; install it, or correct the name") from None
            where = _SETUP_MUST if self._has_setup else "the code changes sys.path itself, and must find it there"
            self._warn(wanted.split(".")[0], f"{statement}: {error} here; {where}")
            return None
        except _NotFound as error:
            raise InputError(f"{statement}: {error}") from None

    def _tell_if_elsewhere(self, package: str, location: Path | None) -> None:
        """Warn about a package that is neither installed nor in the snapshot."""
        if location is None:
            return
        folder = location.parent.resolve()  # of a package installed by a link to its folder: that folder
        is_package = location.name == "__init__.py" or location.is_dir()
        if not is_installed(str(folder / location.name)):
            where = folder if is_package and not location.is_dir() else folder / location.name
            what = f"{package} is imported from {where}, which is outside the snapshot"
            self._warn(package, f"{what}: later changes there reach the run")

    def _warn(self, package: str, line: str) -> None:
        if package not in self._told:
            self._told.add(package)
            self.found.warnings.append(line)


def _is_sys_path(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "path"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    )


def _is_import(node: ast.AST) -> TypeGuard[ast.stmt]:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _absolute(node: ast.ImportFrom, module: str, file: Path) -> str | None:
    """The dotted module of a `from` import; None for a relative one that leaves the packages there are."""
    if not node.level:
        return node.module
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return None


_PLAIN = (ast.Constant, ast.List, ast.Dict, ast.Set, ast.Tuple, ast.JoinedStr)


def _line_of_constant(tree: ast.Module, name: str) -> int | None:
    """The line at a module's top that alone binds a name, and to a value that nobody can call; None where none does."""
    stars = any(isinstance(one, ast.ImportFrom) and any(alias.name == "*" for alias in one.names) for one in tree.body)
    binding = [one for one in tree.body if name in _bound(one)]
    if stars or len(binding) != 1 or not isinstance(binding[0], (ast.Assign, ast.AnnAssign)):
        return None
    targets = binding[0].targets if isinstance(binding[0], ast.Assign) else [binding[0].target]
    is_plain = isinstance(binding[0].value, _PLAIN) and all(isinstance(one, ast.Name) for one in targets)
    return binding[0].lineno if is_plain else None


def _bound(node: ast.stmt) -> set[str]:
    """Names that one statement at a module's top gives a value."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)} | {
        one.name for one in ast.walk(node) if isinstance(one, (ast.FunctionDef, ast.ClassDef))
    }
