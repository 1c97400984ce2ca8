"""The layout is as docs/internals.md says: imports run downwards, and nothing heavy is on the way to sbatch."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from harness.imports import HEAVY

import jobkit

ROOT = Path(jobkit.__file__).parent
REPOSITORY = Path(__file__).parents[2]

# What each part may import of the others, beside itself and jobkit.errors.
BELOW = {
    "errors": set(),
    "log": set(),
    "slurm": set(),
    "start": set(),
    "run": set(),
    "addresses": {"run"},
    "display": {"run"},
    "group": {"run"},
    "checkpoint": {"run", "group"},
    "train": {"run", "group", "checkpoint"},
    "supervisor": {"run", "slurm", "start", "addresses"},
    "worker": {"run", "slurm", "start", "addresses", "display", "group", "checkpoint", "train", "supervisor"},
    "huggingface": {"run", "checkpoint", "train", "worker"},
    "lightning": {"run", "train", "worker"},
    "report": {"run"},
    "mirror": {"run", "report", "checkpoint.store"},
    "submission": {"run", "slurm", "start", "display", "supervisor", "worker.main", "checkpoint.store"},
    "pipeline": {"run", "submission"},
    "sweep": {"run", "submission", "worker.startup.jobkit_snapshot"},
    "submit": {"run", "pipeline", "slurm", "submission", "supervisor", "sweep", "worker.startup.jobkit_snapshot"},
    "cli": {"run", "slurm", "report", "mirror", "submission", "submit", "supervisor"},
    "__main__": {"cli"},
}
OUTSIDE = (
    *("cli", "report", "mirror", "submission", "supervisor", "run", "slurm", "submit", "sweep", "pipeline", "errors"),
    *("log", "addresses"),
)
"""The parts that work on a login node."""


@cache
def modules() -> dict[str, Path]:
    """Dotted name without `jobkit.` -> file; packages by their own name."""
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in sorted(ROOT.rglob("*.py"))
        if file != ROOT / "__init__.py"
    }


def imports(module: str, types: bool = False) -> Iterator[str]:
    """Every module that an import statement names, in functions too; with `types` those for type checkers alone, too.

    Modules of jobkit are named as in `modules`.
    """
    yield from _imports(module, types)


@cache
def _imports(module: str, types: bool) -> tuple[str, ...]:
    return tuple(named_in(modules()[module], set(modules()), types))


def named_in(file: Path, own: set[str], types: bool) -> Iterator[str]:
    """The modules that the import statements of a file name, those of `own` by their names there."""
    tree = ast.parse(file.read_text())
    only_types = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in only_types and not types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("jobkit.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            base = (node.module or "").removeprefix("jobkit.")
            for alias in node.names:
                inner = alias.name if base == "jobkit" else f"{base}.{alias.name}"
                yield inner if inner in own else base


def own_imports(module: str) -> set[str]:
    return {name for name in imports(module, types=True) if name in modules()}


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


def test_every_part_has_its_place_in_the_layout() -> None:
    assert {module.split(".")[0] for module in modules()} == set(BELOW)


def test_a_picture_of_all_imports_has_no_circle() -> None:
    TopologicalSorter({module: own_imports(module) for module in modules()}).prepare()  # raises with the circle


def test_tests_and_tools_import_each_other_in_no_circle_and_tools_know_no_tests() -> None:
    folders = [REPOSITORY / folder for folder in ("tests", "tests/soak", "tools")]  # pytest's pythonpath
    files = {
        ".".join(file.relative_to(folder).with_suffix("").parts): file
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
    }
    found = {name: set(named_in(file, set(files), types=True)) & set(files) for name, file in files.items()}
    TopologicalSorter(found).prepare()
    tests = {name for name, file in files.items() if REPOSITORY / "tests" in file.parents}
    assert {name: found[name] & tests for name in set(files) - tests if found[name] & tests} == {}


@pytest.mark.parametrize("module", [name for name in modules() if name.split(".")[0] in OUTSIDE])
def test_what_runs_on_a_login_node_never_reaches_torch(module: str) -> None:
    reached, waiting = {}, [(module, module)]
    while waiting:
        name, path = waiting.pop()
        # The messages alone take a fiftieth of a second, and `jobkit report` reads event files with them.
        assert name.split(".")[0] not in HEAVY or name.startswith("tensorboard.compat.proto."), path
        # worker.main is what Submitit pickles: only in the job does it go on to import the rest.
        light = ("worker.main", "worker.startup.jobkit_snapshot", "checkpoint.store")
        assert name in light or name.split(".")[0] not in ("worker", "train", "checkpoint"), path
        if name in modules() and name not in reached and name != "worker.main":
            reached[name] = path
            waiting += [(other, f"{path} -> {other}") for other in imports(name)]


def test_the_worker_is_a_thin_pickle() -> None:
    tree = ast.parse(modules()["worker.main"].read_text())
    top = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert set(top) == {"__future__", "dataclasses"}


# Documentation


CALLED_BY_USERS = ("worker.context.Context", "checkpoint.writer.", "checkpoint.store.", "train.")
"""Beginnings of the names of classes whose methods have a docstring each, as those of every Protocol have."""

SAYS_IT_ALL = ("state_dict", "load_state_dict")


def public(module: str) -> Iterator[tuple[str, Any]]:
    """(name, object) of what a module defines for others: classes, functions, and the methods that users call.

    A verb's `add_arguments` and `run` are described once, in jobkit/cli/__init__.py. What overrides something of a
    class that is not ours is described there.
    """
    loaded = importlib.import_module(f"jobkit.{module}")
    for name, value in vars(loaded).items():
        if name.startswith("_") or getattr(value, "__module__", None) != loaded.__name__:
            continue
        if inspect.isclass(value):
            yield f"{module}.{name}", value
            if f"{module}.{name}".startswith(CALLED_BY_USERS) or getattr(value, "_is_protocol", False):
                yield from methods(f"{module}.{name}", value)
        elif inspect.isfunction(value) and not (module.startswith("cli.") and name in ("add_arguments", "run")):
            yield f"{module}.{name}", value


def methods(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    for inner in vars(cls):
        overrides = any(inner in vars(base) and not base.__module__.startswith("jobkit") for base in cls.__mro__[1:])
        if not inner.startswith("_") and inner not in SAYS_IT_ALL and callable(getattr(cls, inner)) and not overrides:
            yield f"{name}.{inner}", getattr(cls, inner)


@pytest.mark.parametrize("module", EACH_MODULE)
def test_what_others_call_has_a_docstring(module: str) -> None:
    assert ast.get_docstring(ast.parse(modules()[module].read_text())), f"{module} itself"
    assert [name for name, value in public(module) if not inspect.getdoc(value)] == []


def test_the_packages_are_found_by_importing_too() -> None:
    found = {info.name.removeprefix("jobkit.") for info in pkgutil.walk_packages([str(ROOT)], "jobkit.")}
    assert found == set(modules())


def test_no_two_test_files_have_one_name() -> None:
    names = Counter(file.name for file in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == [], "pytest would not collect the second one"
