"""docs/adopting.md shows the scripts of examples/ as they are, and how few lines they took."""

from __future__ import annotations

import difflib
import re

import pytest
from harness.documents import ROOT
from harness.examples import ACCELERATE, BY_BOUNDARY, EXAMPLES, USUAL

PAGE = (ROOT / "docs/adopting.md").read_text()
NAMES = [example.name for example in (*USUAL, ACCELERATE, *BY_BOUNDARY)]

MOST_LINES = 5
"""That a script gets or has changed, and one more for each plain value."""

LONGEST_INTEGRATION = 25
"""Lines of code that a framework needs; a script that calls ctx.boundary itself is one."""


def text_of(name: str, file: str) -> list[str]:
    return (EXAMPLES / name / file).read_text().splitlines()


def diff_of(name: str) -> list[str]:
    """What `diff -U1` says."""
    files = (f"examples/{name}/before.py", f"examples/{name}/after.py")
    return list(difflib.unified_diff(text_of(name, "before.py"), text_of(name, "after.py"), *files, n=1, lineterm=""))


def changed(name: str, sign: str) -> int:
    """How many lines begin with it, empty ones aside."""
    return sum(line.startswith(sign) and line[1:].strip() != "" for line in diff_of(name)[2:])


def plain_values(name: str) -> int:
    """How many values it gives to ctx.values, or has set by ctx.batch."""
    text = (EXAMPLES / name / "after.py").read_text()
    calls = re.findall(r"ctx\.values\((.*)\)", text)
    return text.count("= ctx.batch\n") + sum(len(re.findall(r"\b\w+=", call)) for call in calls)


def integration() -> str:
    """The framework's, without its docstring."""
    return (EXAMPLES / "framework/integration.py").read_text().split('"""', 2)[2].strip()


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_difference_of_the_two_files(name: str) -> None:
    expected = "\n".join(["```diff", *diff_of(name), "```"])
    assert expected in PAGE, expected


@pytest.mark.parametrize("name", [*(example.name for example in (*USUAL, ACCELERATE)), "framework"])
def test_a_script_is_adopted_in_at_most_five_lines_and_one_for_each_plain_value(name: str) -> None:
    assert changed(name, "+") <= MOST_LINES + plain_values(name)
    assert changed(name, "-") <= changed(name, "+")


@pytest.mark.parametrize("name", ["fabric", "torchtitan", "deepspeed"])
def test_a_script_with_a_boundary_of_its_own_is_adopted_in_at_most_25_lines(name: str) -> None:
    assert changed(name, "+") <= LONGEST_INTEGRATION


def test_the_integration_of_a_framework_has_at_most_25_lines_and_is_on_the_page() -> None:
    assert len(integration().splitlines()) <= LONGEST_INTEGRATION
    assert f"```python\n# examples/framework/integration.py\n{integration()}\n```" in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_the_table_says_how_many_lines_were_changed(name: str) -> None:
    gone = changed(name, "-")
    count = f"+{changed(name, '+')}" + (f" -{gone}" if gone else "")
    assert re.search(rf"^\|.*\(`?examples/{name}`?\).*\| {re.escape(count)}\b", PAGE, re.MULTILINE), count


def test_no_script_of_before_has_heard_of_jobkit() -> None:
    for name in NAMES:
        assert "jobkit" not in "\n".join(text_of(name, "before.py"))
    assert "import jobkit" not in (EXAMPLES / "framework/framework.py").read_text()
