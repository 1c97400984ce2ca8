"""Refuse a task or a command that is not there: a module, a name in it, a program, a script that is no Python.

Answers come from file names and syntax. Nothing of the user is imported: that would cost seconds of torch.
checks.py calls `check_task` or `check_command`. Raises InputError with one hint.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from jobkit.errors import InputError, nearest


class NotInstalled(InputError):
    """A program or a package is not here. In the job a container, or setup lines of the cluster, may provide it."""


def check_task(task: str, folder: Path) -> Iterator[str]:
    """Refuse `module:callable` where the module is not found, is no valid Python or defines no such name; yield
    warnings."""
    module, _, name = task.partition(":")
    spec = _find(module, folder, "task")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise InputError("not a Python file", key="task", found=spec.origin or f"the folder {module}")
    yield from _imports_from_above(Path(spec.origin), folder)
    names = _names_in(Path(spec.origin))
    if names is not None and name not in names:
        raise InputError(f"{spec.origin} does not define it", key="task", found=name, hint=nearest(name, sorted(names)))


def _find(module: str, folder: Path, key: str) -> ModuleSpec:
    """The spec of a dotted module. Its parents are not imported."""
    path: list[str] = [str(folder), *sys.path]
    spec: ModuleSpec | None = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None and path[:1] == [str(folder)]:
            spec = importlib.util.find_spec(part)  # an editable install has a finder of its own
        if spec is None:
            break
        path = [*(spec.submodule_search_locations or ())]
    if spec is None:
        top = module.partition(".")[0]
        hint = nearest(module, [file.stem for file in folder.glob("*.py")])
        if (above := _folder_above(top, folder)) is not None:
            hint = f"{top} is in {above}: type the command there"
        raise NotInstalled(f"no such module in {folder}, and none is installed", key=key, found=module, hint=hint)
    return spec


def _imports_from_above(file: Path, folder: Path) -> Iterator[str]:
    """Yield a line for each module that a file may import from a folder above, by `__file__`: its copy in the job has
    other folders above."""
    if not file.is_relative_to(folder) or b"__file__" not in _read(file):
        return
    for node in _parse(file).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in {name.partition(".")[0] for name in names}:
            above = _folder_above(name, folder)
            if above is None or PathFinder.find_spec(name, [str(file.parent), str(folder)]):
                continue
            if importlib.util.find_spec(name) is None:
                yield f"warning: {file.name} imports {name}; if that is {above / name}, type the command in {above}"


def _folder_above(module: str, folder: Path) -> Path | None:
    """The folder above that has a module."""
    places = ((above, above / module) for above in folder.parents)
    is_there = (above for above, path in places if path.with_suffix(".py").exists() or any(path.glob("*.py")))
    return next(is_there, None)


def _names_in(file: Path) -> set[str] | None:
    """The names that a module's top defines; None where a star import, or a test, leaves that open."""
    names: set[str] = set()
    for node in _parse(file).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            stored = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
            names |= {inner.id for inner in stored if isinstance(inner.ctx, ast.Store)}
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                return None
    return None if "*" in names else names


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}").at(file) from None


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(_read(file), filename=str(file))
    except (SyntaxError, ValueError) as error:
        message = getattr(error, "msg", str(error))
        raise InputError(f"not valid Python: {message}").at(file, getattr(error, "lineno", 1)) from None


def check_command(command: list[str], folder: Path) -> Iterator[str]:
    """Refuse a program that is not on PATH, and for a Python a script or module that is not there; yield
    warnings."""
    program, *words = command
    if shutil.which(program, path=None if os.sep not in program else str(folder)) is None:
        if (folder / program).is_file():
            raise InputError("it may not be executed", key="command", found=program, hint=f"chmod +x {program}")
        hint = nearest(program, ["python", "torchrun", "accelerate", "bash"])
        raise NotInstalled("no such program on PATH", key="command", found=program, hint=hint)
    if not re.fullmatch(r"python[\d.]*", Path(program).name):
        return
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[2:] if words[0] in ("-W", "-X") else words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        _find(words[1], folder, "command")
    elif words[:1] != ["-c"]:
        if not words:
            raise InputError("it runs nothing", key="command", found=program, allowed="a script, -m MODULE or -c CODE")
        if "${" not in words[0] and not (folder / words[0]).exists():
            hint = nearest(words[0], [file.name for file in folder.glob("*.py")])
            raise InputError(f"no such file in {folder}", key="command", found=words[0], hint=hint)
        if words[0].endswith(".py") and (folder / words[0]).is_file():
            _parse(folder / words[0])
            yield from _imports_from_above(folder / words[0], folder)
