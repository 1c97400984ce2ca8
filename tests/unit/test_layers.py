"""Imports run downwards only, and what runs outside of ranks imports no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import jobkit

ROOT = Path(jobkit.__file__).parent
LEVELS = {
    "cli": 12,
    "submit": 12,
    "verify": 11,
    "submission": 10,
    "report": 10,
    "huggingface": 10,
    "lightning": 10,
    "agent": 9,
    "worker": 8,
    "loop": 7,
    "parallel": 6,
    "supervisor": 5,
    "checkpoint": 5,
    "mirror": 5,
    "usage": 5,
    "display": 5,
    "wire": 4,
    "run": 3,
    "config": 2,
    "slurm": 2,
    "data": 2,
}


def imports() -> Iterator[tuple[str, str, str]]:
    """Yield (file, its part of jobkit, imported module)."""
    for file in ROOT.rglob("*.py"):
        name = str(file.relative_to(ROOT))
        part = Path(name).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "jobkit":
                yield from ((name, part, f"jobkit.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield name, part, node.module
            elif isinstance(node, ast.Import):
                yield from ((name, part, alias.name) for alias in node.names)


def test_imports_run_downwards_only() -> None:
    """Neither upwards nor between two parts of a level, for type checkers and inside functions too."""
    wrong = {
        (file, module)
        for file, part, module in imports()
        if module.startswith("jobkit.") and module.split(".")[1] != part
        if LEVELS.get(module.split(".")[1], 0) >= LEVELS.get(part, 13) > 0
        if {module.split(".")[1], part} != {"cli", "submit"}  # a verb with an address of its own
    }
    assert wrong == set()


def imported_at_start(body: list[ast.stmt]) -> Iterator[str]:
    """Yield what a module imports when it is imported itself: not in functions, not for type checkers."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)):
            yield from imported_at_start(node.body)


def imports_at_start() -> dict[str, set[str]]:
    graph = {}
    for file in ROOT.rglob("*.py"):
        name = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = set(imported_at_start(ast.parse(file.read_text(encoding="utf-8")).body)) - {name}
    return {name: {other for other in others if other in graph} for name, others in graph.items()}


def test_no_circle_of_imports() -> None:
    edges = imports_at_start()
    assert sum(map(len, edges.values())) > len(edges)
    list(TopologicalSorter(edges).static_order())  # CycleError names a circle


def test_help_waits_for_no_import() -> None:
    """The modules of `jobkit.submit --help`: records and status alone would take half as long again."""
    assert imports_at_start()["jobkit.submit"] == {"jobkit.errors", "jobkit.usage"}


def test_every_part_has_a_level() -> None:
    below = {
        "__init__",
        "__main__",
        "addresses",
        "disk",
        "duration",
        "errors",
        "log",
        "optim",
        "schedule",
        "start",
        "weather",
    }
    assert {Path(name).parts[0].removesuffix(".py") for name, _, _ in imports()} - below == set(LEVELS)


LAUNCH_HALF = {
    "cli",
    "submit",
    "submission",
    "supervisor",
    "config",
    "run",
    "slurm",
    "usage",
    "display",
    "start",
    "duration",
    "errors",
    "log",
}


def test_the_launch_half_imports_neither_torch_nor_what_imports_it() -> None:
    of_ranks = (
        "torch.",
        "jobkit.checkpoint.",
        "jobkit.data.",
        "jobkit.parallel.",
        "jobkit.loop.",
        "jobkit.wire.group.",
    )
    assert {
        file for file, part, module in imports() if part in LAUNCH_HALF and f"{module}.".startswith(of_ranks)
    } == set()
