"""The pages are as old as the code, and what they name exists. tests/docs runs their commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobkit.config.identity import run_name
from jobkit.config.load import load

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/README.md")]


def test_the_generated_pages_are_those_of_the_code() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/reference.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["guarantees.md", "evidence.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    names = set(re.findall(r"\b[a-z]+(?:/[a-z]+)?/test_\w+", (ROOT / "docs" / page).read_text(encoding="utf-8")))
    assert len(names) > 5
    assert [name for name in sorted(names) if not (TESTS / f"{name.removeprefix('tests/')}.py").exists()] == []


def test_every_row_of_the_guarantees_names_a_test() -> None:
    rows = [line for line in (ROOT / "docs/guarantees.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert [row for row in rows if "/test_" not in row and "---" not in row and not row.endswith("| test |")] == []


def test_the_readme_names_the_run_of_its_first_command() -> None:
    config = load(ROOT / "experiments/imagenet64.yaml").config
    assert f"{run_name(config)} finished: " in (ROOT / "README.md").read_text(encoding="utf-8")


def test_links_between_pages_lead_to_a_file_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", page.read_text(encoding="utf-8")):
            target = (page.parent / link[0]).resolve() if link[0] else page
            if not target.exists() or (link[1] and link[1] not in _anchors(target)):
                broken.append(f"{page.name}: {''.join(link)}")
    assert broken == []


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
