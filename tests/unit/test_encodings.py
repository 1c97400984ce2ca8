"""No file is read or written in the encoding of whatever locale a node happens to have.

ruff's PLW1514 sees it only where it knows that a name is a Path, and not what a process prints; with the previews that
it needs other rules find more, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODES = set("rwax+t")


def without_encoding(source: str) -> Iterator[int]:
    """The lines of the calls that open a text, or a process that prints one, and do not say in which encoding."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(one.arg in ("encoding", None) for one in call.keywords):
            continue
        named = {one.arg: one.value for one in call.keywords}
        is_method = isinstance(call.func, ast.Attribute)
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owner = getattr(call.func.value, "id", "") if isinstance(call.func, ast.Attribute) else ""
        if (
            (name in ("read_text", "write_text") and is_method)
            or (name in ("run", "Popen", "check_output") and named.keys() & {"text", "universal_newlines"})
            or (name in ("open", "fdopen") and _is_text(call, named, 0 if name == "open" and is_method else 1, owner))
        ):
            yield call.lineno


def _is_text(call: ast.Call, named: dict[str | None, ast.expr], place: int, owner: str) -> bool:
    if (owner == "os" and place == 0) or owner in ("tarfile", "archive", "Image", "av", "webbrowser"):
        return False  # no open() of texts
    mode = named.get("mode", call.args[place] if len(call.args) > place else None)
    if mode is None:  # `run.open()` is no file
        return place == 1
    return not isinstance(mode, ast.Constant) or set(str(mode.value)) <= MODES


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("self.file.read_text()", True),
        ("file.write_text(text)", True),
        ("read_text(file)", False),
        ("open(file)", True),
        ("open(file, 'rb')", False),
        ("file.open('a')", True),
        ("file.open('a', encoding='utf-8')", False),
        ("os.open(file, os.O_RDONLY)", False),
        ("os.fdopen(descriptor)", True),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command, encoding='utf-8')", False),
    ],
)
def test_what_counts(line: str, is_found: bool) -> None:
    assert bool(list(without_encoding(line))) is is_found


@pytest.mark.parametrize("folder", ["jobkit", "experiments", "tools"])
def test_each_text_has_its_encoding(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [f"{file}:{line}" for file in files for line in without_encoding(file.read_text(encoding="utf-8"))]
    assert not found
