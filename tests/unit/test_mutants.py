"""The table of broken promises applies to the code; tools/mutants.py breaks a line, and finds it after a move."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import ROOT, Mutant, WrongTable, read_table, rekey

CODE = '''\
"""A module."""


class Counter:
    def add(self, n: int) -> int:
        if n:
            self.n += n
        return self.n


def add(n: int) -> int:
    return n
'''
TABLE = """\
# A comment stays.

- promise: adds
  place: jobkit.old:Counter.add
  line: self.n += n
  broken: pass
  tests: tests/test_old.py::test_add
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("jobkit", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "jobkit/counter.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "tests/test_counter.py").write_text("def test_add() -> None:\n    pass\n", encoding="utf-8")
    (tmp_path / "mutants.yaml").write_text(TABLE, encoding="utf-8")
    return tmp_path


def mutant(place: str, line: str, broken: str = "pass") -> Mutant:
    return Mutant("adds", place, line, broken, "tests/test_counter.py::test_add")


def test_each_entry_of_the_table_applies_and_its_tests_exist() -> None:
    mutants = read_table()
    assert len({entry.promise for entry in mutants}) == len(mutants)
    for entry in mutants:
        file, text = entry.broken_text(ROOT)
        assert text != file.read_text(encoding="utf-8"), entry.promise
        assert entry.missing_tests(ROOT) == [], entry.promise


@pytest.mark.parametrize(
    ("place", "line", "broken", "expected"),
    [
        ("jobkit.counter:Counter.add", "self.n += n", "self.n -= n", "            self.n -= n\n"),
        (
            "jobkit.counter:Counter.add",
            "if n:\nself.n += n",
            "if not n:\n    pass",
            "        if not n:\n            pass\n",
        ),
        ("jobkit.counter:add", "return n", "return -n", "    return -n\n"),
        ("jobkit.counter:", '"""A module."""', '"""Another."""', '"""Another."""\n'),
        ("jobkit/counter.py:", '"""A module."""', '"""Another."""', '"""Another."""\n'),
    ],
)
def test_one_line_is_broken(root: Path, place: str, line: str, broken: str, expected: str) -> None:
    _, text = mutant(place, line, broken).broken_text(root)
    assert expected in text
    assert len(text.splitlines()) == len(CODE.splitlines())


@pytest.mark.parametrize(
    ("place", "line", "broken"),
    [
        ("jobkit.counter:Counter.add", "self.n *= n", "pass"),  # no such line
        ("jobkit.counter:", "def add", "pass"),  # not the whole line
        ("jobkit.gone:add", "return n", "pass"),
        ("jobkit.counter:gone", "return n", "pass"),
        ("jobkit.counter:add", "return n", "return ("),
    ],
)
def test_an_entry_that_does_not_apply_is_an_error(root: Path, place: str, line: str, broken: str) -> None:
    with pytest.raises(WrongTable):
        mutant(place, line, broken).broken_text(root)


def test_a_moved_line_and_a_moved_test_are_found_again(root: Path) -> None:
    table = root / "mutants.yaml"
    assert len(rekey(table, root)) == 2
    (entry,) = read_table(table)
    assert (entry.place, entry.tests) == ("jobkit.counter:Counter.add", "tests/test_counter.py::test_add")
    assert table.read_text(encoding="utf-8").startswith("# A comment stays.\n")
    assert rekey(table, root) == []


def test_a_line_that_is_gone_is_an_error_and_the_table_stays(root: Path) -> None:
    (root / "jobkit/counter.py").write_text("", encoding="utf-8")
    with pytest.raises(WrongTable):
        rekey(root / "mutants.yaml", root)
    assert (root / "mutants.yaml").read_text(encoding="utf-8") == TABLE


ENTRY = TABLE.partition("\n\n")[2]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (ENTRY + ENTRY.replace("place", "plcae"), "entry 2: .*plcae"),
        (ENTRY.replace("  broken: pass\n", ""), "entry 1: .*broken"),
        (ENTRY.replace("adds", "{"), "line 3"),
        (ENTRY * 2, "same promise: adds"),
        (ENTRY + ENTRY.replace("adds", "more").replace("broken: pass", "broken: 1"), "entry 2: .*each a text"),
        (ENTRY.replace("tests: tests/test_old.py::test_add", "tests: ''"), "entry 1: .*each a text"),
        (ENTRY.replace("broken: pass", "broken: self.n += n"), "entry 1: nothing is broken"),
        ("", "entry 1: .*None"),
        (None, "No such file"),
    ],
)
def test_a_table_that_cannot_be_read_is_an_error_that_says_where(tmp_path: Path, table: str | None, words: str) -> None:
    file = tmp_path / "mutants.yaml"
    if table is not None:
        file.write_text(table, encoding="utf-8")
    with pytest.raises(WrongTable, match=words):
        read_table(file)
    done = subprocess.run([sys.executable, ROOT / "tools/mutants.py", "--table", file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_word_that_no_entry_has_runs_nothing() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/mutants.py", "no such word"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no such word" in done.stderr
