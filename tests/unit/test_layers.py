"""The house stands as its plan says: imports run downwards, and nothing heavy is on the way to sbatch."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from harness.imports import HEAVY

import jobkit

ROOT = Path(jobkit.__file__).parent

# What each part may import of the others, beside itself and jobkit.errors.
BELOW = {
    "errors": set(),
    "log": set(),
    "slurm": set(),
    "run": set(),
    "display": {"run"},
    "group": {"run"},
    "checkpoint": {"run", "group"},
    "train": {"run", "checkpoint"},
    "supervisor": {"run", "slurm"},
    "worker": {"run", "slurm", "display", "group", "checkpoint", "train", "supervisor"},
    "submission": {"run", "slurm", "display", "supervisor", "worker.main"},
    "submit": {"run", "slurm", "submission"},
    "cli": {"run", "slurm", "submission", "submit"},
    "__main__": {"cli"},
}
OUTSIDE = ("cli", "submission", "supervisor", "run", "slurm", "submit", "errors", "log")
"""The parts that work on a login node."""


@cache
def modules() -> dict[str, Path]:
    """Dotted name without `jobkit.` -> file; packages by their own name."""
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted(ROOT.rglob("*.py"))
        if file != ROOT / "__init__.py"
    }


def imports(module: str) -> Iterator[str]:
    """Every module that an import statement names, in functions too, except those for type checkers alone.

    Modules of jobkit are named as in `modules`.
    """
    tree = ast.parse(modules()[module].read_text())
    only_types = [
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    ]
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("jobkit.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            base = (node.module or "").removeprefix("jobkit.")
            for alias in node.names:
                inner = alias.name if base == "jobkit" else f"{base}.{alias.name}"
                yield inner if inner in modules() else base


def own_imports(module: str) -> set[str]:
    return {name for name in imports(module) if name in modules()}


EACH_MODULE = [name for name in modules() if not name.endswith("__main__")]


@pytest.mark.parametrize("module", EACH_MODULE)
def test_imports_run_downwards(module: str) -> None:
    part = module.split(".")[0]
    wrong = [
        f"{module} -> {other}"
        for other in own_imports(module)
        if other.split(".")[0] not in {part, "errors", "log", *BELOW[part]} and other not in BELOW[part]
    ]
    assert wrong == []


def test_every_part_of_the_house_has_its_place_in_the_plan() -> None:
    assert {module.split(".")[0] for module in modules()} == set(BELOW)


def test_no_module_imports_itself_in_a_circle_at_its_top() -> None:
    def top_level(module: str) -> set[str]:
        tree = ast.parse(modules()[module].read_text())
        found = set()
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jobkit"):
                base = (node.module or "").removeprefix("jobkit").removeprefix(".")
                names = [f"{base}.{alias.name}".removeprefix(".") for alias in node.names]
                found |= {name if name in modules() else base for name in names}
        return found & set(modules())

    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in top_level(module):
                visit(other, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())


@pytest.mark.parametrize("module", [name for name in modules() if name.split(".")[0] in OUTSIDE])
def test_what_runs_on_a_login_node_never_reaches_torch(module: str) -> None:
    reached, waiting = {}, [(module, module)]
    while waiting:
        name, path = waiting.pop()
        assert name.split(".")[0] not in HEAVY, path
        # worker.main is what Submitit pickles: only in the job does it go on to import the rest.
        assert name == "worker.main" or name.split(".")[0] not in ("worker", "train", "checkpoint"), path
        if name in modules() and name not in reached and name != "worker.main":
            reached[name] = path
            waiting += [(other, f"{path} -> {other}") for other in imports(name)]


def test_the_worker_is_a_thin_pickle() -> None:
    tree = ast.parse(modules()["worker.main"].read_text())
    top = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert set(top) == {"__future__", "dataclasses"}


# Documentation


def public(module: str) -> Iterator[tuple[str, Any]]:
    """(name, object) of the module's own public classes, functions, methods and properties."""
    loaded = importlib.import_module(f"jobkit.{module}")
    for name, value in vars(loaded).items():
        if name.startswith("_") or getattr(value, "__module__", None) != loaded.__name__:
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            yield f"{module}.{name}", value
        if inspect.isclass(value):
            for inner in vars(value):
                member = getattr(value, inner)
                if not inner.startswith("_") and (callable(member) or isinstance(member, property)):
                    yield f"{module}.{name}.{inner}", member


def inherits(name: str, member: Any) -> bool:
    """Whether this overrides something of a class that is not ours, which is where it is described."""
    module, _, rest = name.rpartition(".")
    parent, _, owner = module.rpartition(".")
    if parent not in modules():
        return False
    cls = getattr(importlib.import_module(f"jobkit.{parent}"), owner)
    return any(rest in vars(base) and not base.__module__.startswith("jobkit") for base in cls.__mro__[1:])


SAYS_IT_ALL = {"run.rundir.RunDir"}
"""Classes whose short properties are file names and say no more than their own."""


@pytest.mark.parametrize("module", EACH_MODULE)
def test_everything_public_has_a_docstring(module: str) -> None:
    assert ast.get_docstring(ast.parse(modules()[module].read_text())), f"{module} itself"
    missing = [
        name
        for name, value in public(module)
        if not inspect.getdoc(value) and not inherits(name, value) and name.rpartition(".")[0] not in SAYS_IT_ALL
    ]
    assert missing == []


def test_the_packages_are_found_by_importing_too() -> None:
    found = {info.name.removeprefix("jobkit.") for info in pkgutil.walk_packages([str(ROOT)], "jobkit.")}
    assert found == set(modules())
