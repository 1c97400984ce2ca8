"""Imports run downwards only, and nothing of the launch half imports torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import jobkit

ROOT = Path(jobkit.__file__).parent
LEVELS = {
    "cli": 6,
    "submit": 6,
    "submission": 5,
    "worker": 4,
    "supervisor": 3,
    "usage": 2,
    "display": 2,
    "run": 1,
    "slurm": 1,
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
    upwards = {
        (file, module)
        for file, part, module in imports()
        if module.startswith("jobkit.") and LEVELS.get(module.split(".")[1], 0) > LEVELS.get(part, 0) > 0
    }
    assert upwards == set()


def test_nothing_imports_torch() -> None:
    assert {file for file, _, module in imports() if module.split(".")[0] == "torch"} == set()
