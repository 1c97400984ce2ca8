"""tests/contract.yaml names, for everything that a user can type, write or read, the tests that show it.

    names of the code (argparse, schema, ast) --equal?--> rows of contract.yaml --exist?--> test functions (ast)

A row `TODO` is of a name that the code does not have yet: once the code has it, the row needs a test. The first test of
a row is its own: no other row names it first. `test_x[id]` is one of the tests that pytest makes of test_x.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobkit.cli.main import VERBS
from jobkit.config.schema import SECTIONS
from jobkit.run import rundir
from jobkit.run.rundir import RunDir

ROOT = Path(__file__).parents[2]
CODE = ROOT / "jobkit"
TODO = "TODO"
TEST = re.compile(rf"tests/\S+?::\w+(?:\[[^]]*\])?|{TODO}")


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def class_in(file: str, name: str) -> ast.ClassDef:
    return next(node for node in parsed(CODE / file).body if isinstance(node, ast.ClassDef) and node.name == name)


def public(names: Iterator[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def commands() -> set[str]:
    """Return the verbs, and each option of each: `list --sort`."""
    modules = {verb: "jobkit.submit" if verb == "submit" else f"jobkit.cli.{verb}" for verb in VERBS}
    modules["python -m jobkit.worker"] = "jobkit.worker.__main__"
    names = set(modules)
    for verb, module in modules.items():
        parser = argparse.ArgumentParser(add_help=False)
        import_module(module).add_arguments(parser)
        longest = (max(action.option_strings, key=len) for action in parser._actions if action.option_strings)
        names |= {f"{verb} {option.replace('_', '-')}" for option in longest}
    return names


def keys() -> set[str]:
    """Return the keys of a YAML that code reads: `resources.nodes`."""
    popped = set(re.findall(r'values\.pop\("(\w+)"', (CODE / "config/load.py").read_text(encoding="utf-8")))
    return {
        f"{section}.{key}".rstrip(".")
        for section, inner in [*SECTIONS.items(), *((key, []) for key in popped)]
        for key in inner or [""]
        if section in attributes()
    }


@functools.cache
def attributes() -> frozenset[str]:
    """Return the names of all attributes that code reads. What the submission refuses as not yet there is not read."""
    names = {"demo"}  # load.py merges it
    for file in CODE.rglob("*.py"):
        for node in parsed(file).body if file.name != "schema.py" else ():
            if not (isinstance(node, ast.FunctionDef) and node.name == "_refuse_later_keys"):
                names |= {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    return frozenset(names)


def of_class(file: str, name: str) -> set[str]:
    """Return the public methods of a class, and the attributes that its constructor sets."""
    methods = [node for node in class_in(file, name).body if isinstance(node, ast.FunctionDef)]
    made = (
        node.attr
        for method in methods
        if method.name == "__init__"
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    )
    return public(made) | public(method.name for method in methods)


def library() -> set[str]:
    """Return what `import jobkit` gives, what `jobkit.open_run` returns, and the callbacks."""
    names = set()
    for node in ast.walk(parsed(CODE / "__init__.py")):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            names |= {alias.asname for inner in node.body if isinstance(inner, ast.ImportFrom) for alias in inner.names}
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "name":
            names |= {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
    opened = {f"open_run(...).{name}" for name in of_class("checkpoint/export.py", "OpenedRun")}
    callbacks = {
        f"{package}.{name}"
        for package in ("huggingface", "lightning")
        for name in re.findall(r"\bJobkit\w+", (CODE / package / "__init__.py").read_text(encoding="utf-8"))
    }
    return {str(name) for name in names} | opened | callbacks


class Blank(str):
    """A parameter in the place of its value: it has the same form in any format."""

    def __format__(self, spec: str) -> str:
        return str(self)


def files() -> set[str]:
    """Return the names in a run directory: `logs/<attempt>/rank_<rank>.out`."""
    run, names = RunDir("/run"), set()
    for name, value in vars(RunDir).items():
        if isinstance(value, rundir._Path):
            names.add(value.name)
        elif not name.startswith("_") and getattr(value, "__annotations__", {}).get("return") == "Path":
            given: list[Any] = [Blank(f"<{parameter}>") for parameter in inspect.signature(value).parameters][1:]
            names.add(str(value(run, *given).relative_to(run.path)))
    for node in (*parsed(CODE / "run/rundir.py").body, *parsed(CODE / "checkpoint/store.py").body):
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.Tuple)):
            names |= {f"checkpoints/{ast.literal_eval(item)}" for item in getattr(node.value, "elts", [node.value])}
    return names


def exit_codes() -> set[int]:
    """Return the values of the constants EXIT_... of commands."""
    return {
        node.value.value
        for file in (CODE / "errors.py", CODE / "usage.py", *(CODE / "cli").glob("*.py"))
        for node in parsed(file).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("EXIT_")
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int)
    }


def promises() -> dict[str, str]:
    """Return the rows of docs/guarantees.md: the first cell -> the last, which names test files."""
    lines = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return {row[0]: row[-1] for row in rows if row[-1] not in ("test", "---")}


@functools.cache
def names_of_code() -> dict[str, set[Any]]:
    return {
        "commands": commands(),
        "keys": keys(),
        "ctx": of_class("loop/context.py", "Context"),
        "jobkit": library(),
        "files": files(),
        "exit codes": exit_codes(),
        "guarantees": set(promises()),
    }


@functools.cache
def contract() -> dict[str, dict[Any, list[str]]]:
    content = yaml.safe_load((ROOT / "tests/contract.yaml").read_text(encoding="utf-8"))
    return {part: {name: TEST.findall(row) for name, row in rows.items()} for part, rows in content.items()}


PARTS = ["commands", "keys", "ctx", "jobkit", "files", "exit codes", "guarantees"]


@pytest.mark.parametrize("part", PARTS)
def test_each_name_of_the_code_has_a_row_with_a_test_and_no_other_has(part: str) -> None:
    names, rows = names_of_code()[part], contract()[part]
    assert {name for name in names if name not in rows} == set(), "these need a row in tests/contract.yaml"
    assert {name for name in names if rows[name] in ([], [TODO])} == set(), "the code has these: name their tests"
    surplus = {name for name, row in rows.items() if name not in names and row != [TODO]}
    assert surplus == set(), "the code does not have these"


def test_each_test_that_the_table_names_exists() -> None:
    """Of `test_x[id]` the file must hold the id, or its first word: others are made of values."""
    lacking = set()
    for test in {test for rows in contract().values() for row in rows.values() for test in row if test != TODO}:
        file, name, ids = re.match(r"(.*?)::(\w+)\[?(.*?)\]?$", test).groups()  # type: ignore[union-attr]
        tree = parsed(ROOT / file)
        nodes = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        words = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)} - {""}
        marks = [ast.unparse(mark) for mark in nodes[name].decorator_list] if name in nodes else []
        is_made = "parametrize" in str(marks) and {ids, ids.partition("-")[0], ids.rstrip("0123456789-")} & words
        if name not in nodes or not (is_made or not ids):
            lacking.add(test)
    assert lacking == set()


def test_the_first_test_of_a_row_is_its_own() -> None:
    firsts = [row[0] for rows in contract().values() for row in rows.values() if row[:1] != [TODO]]
    assert [test for test, rows in Counter(firsts).items() if rows > 1] == []
    assert [test for test in firsts if "[" in test and test.partition("[")[0] in firsts] == []


def test_each_file_that_the_guarantees_name_has_a_test_in_the_table() -> None:
    rows = contract()["guarantees"]
    lacking = {
        (promise, file)
        for promise, cell in promises().items()
        for file in cell.split(", ")
        if not any(test.startswith(f"tests/{file}") for test in rows[promise])
    }
    assert lacking == set()
