"""Break one documented promise at a time, and see the tests fail that guard it.

    tests/mutants.yaml --> a copy of the project with one line broken --> pytest --> killed, or survived

The exit code is 1 if a mutant survives, and 2 if the table or the unbroken code is wrong. Tools that make mutants by
rule (mutmut, cosmic-ray) do not take a broken line that a person wrote, nor the tests that must fail for it.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from queue import SimpleQueue

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests/mutants.yaml"

LIMIT_SECONDS = 900
"""A test that has not ended by then has noticed the break: each wait of the tests ends before."""

PATIENCE_SECONDS = 100
"""For `JOBKIT_TEST_PATIENCE`: many breaks show as something that never comes, and 300 s for each are too long."""


MOVED = "after a move of files: tools/test mutants --rekey"


class WrongTable(Exception):
    """An entry does not apply to the code."""


@dataclass(frozen=True)
class Mutant:
    """An entry of the table."""

    promise: str
    place: str
    """`module:qualified.name`, `module:` for a module, or a path below the project for another file."""
    line: str
    """The text of one line there, or of several in a row."""
    broken: str
    """The text in its place."""
    tests: str
    """pytest's names of the tests that must fail, all of them."""

    def broken_text(self, root: Path) -> tuple[Path, str]:
        """Return the file, and its text with the line broken. Raises WrongTable."""
        file = root / path_of(self.place)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise WrongTable(f"{self.promise}: there is no text in {file} ({MOVED})") from None
        lines, name = text.splitlines(), self.place.partition(":")[2]
        places = [(b, e) for n, b, e in _definitions(text) if n == name] if name else [(0, len(lines))]
        if not places:
            raise WrongTable(f"{self.promise}: {path_of(self.place)} has no {name} ({MOVED})")
        searched = [line.strip() for line in self.line.splitlines()]
        matches = [
            i for b, e in places for i in range(b, e) if [x.strip() for x in lines[i : i + len(searched)]] == searched
        ]
        if len(matches) != 1:
            raise WrongTable(f"{self.promise}: {self.place} has {len(matches)} times the line {self.line!r} ({MOVED})")
        indent = lines[matches[0]][: -len(lines[matches[0]].lstrip())] if lines[matches[0]][:1].isspace() else ""
        lines[matches[0] : matches[0] + len(searched)] = [indent + line for line in self.broken.splitlines()]
        text = "\n".join(lines) + "\n"
        if file.suffix == ".py":
            try:
                compile(text, str(file), "exec")
            except SyntaxError as error:
                raise WrongTable(f"{self.promise}: the broken line does not compile: {error}") from None
        return file, text

    def missing_tests(self, root: Path) -> list[str]:
        """Return the tests that do not exist."""
        return [name for name in self.tests.split() if not _is_test(root, name)]


def path_of(place: str) -> str:
    """Return the path of the file of a place, from the project's folder."""
    module = place.partition(":")[0]
    return module if "/" in module else f"{module.replace('.', '/')}.py"


def _definitions(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the qualified names of functions and classes in a module, and their lines [begin, end)."""
    todo: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while todo:
        prefix, node = todo.pop()
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}.{child.name}".removeprefix(".")
                yield name, child.lineno - 1 - len(child.decorator_list), child.end_lineno or child.lineno
            todo.append((name, child))


def _is_test(root: Path, name: str) -> bool:
    file, _, function = name.partition("::")
    try:
        text = (root / file).read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(rf"^def {re.escape(function.partition('[')[0])}\(", text, re.MULTILINE) is not None


def read_table(file: Path = TABLE) -> list[Mutant]:
    """Return the entries of the table. Raises WrongTable."""
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise WrongTable(str(error)) from None
    mutants: list[Mutant] = []
    keys = [field.name for field in fields(Mutant)]
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
        texts = entry.values() if isinstance(entry, dict) and entry.keys() == set(keys) else [None]
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise WrongTable(f"entry {number}: {', '.join(keys)} are needed, each a text: {entry}")
        mutants.append(Mutant(**entry))
        if mutants[-1].line == mutants[-1].broken:
            raise WrongTable(f"entry {number}: nothing is broken: {entry}")
    if twice := [entry.promise for n, entry in enumerate(mutants) if entry.promise in {m.promise for m in mutants[:n]}]:
        raise WrongTable(f"two entries have the same promise: {', '.join(twice)}")
    return mutants


# Places after a move


def rekey(table: Path, root: Path) -> list[str]:
    """Write the new places of lines and tests that were moved into the table; returns what has changed."""
    blocks = re.split(r"(?m)^(?=- promise:)", table.read_text(encoding="utf-8"))
    changes = []
    for number, mutant in enumerate(read_table(table), 1):
        names = {name: _new_test(root, name) for name in mutant.missing_tests(root)}
        try:
            mutant.broken_text(root)
        except WrongTable:
            names[mutant.place] = _new_place(root, mutant)
        for old, new in names.items():
            blocks[number] = blocks[number].replace(old, new)
            changes.append(f"{mutant.promise}: {old} -> {new}")
    table.write_text("".join(blocks), encoding="utf-8")
    return changes


def _new_place(root: Path, mutant: Mutant) -> str:
    first = mutant.line.splitlines()[0].strip()
    places = []
    for file in sorted((root / "jobkit").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for i, line in enumerate(text.splitlines()):
            if line.strip() == first:
                around = [(end - begin, name) for name, begin, end in _definitions(text) if begin <= i < end]
                places.append(f"{module}:{min(around)[1] if around else ''}")
    name = mutant.place.partition(":")[2]
    return _the_only(
        f"{mutant.promise}: {mutant.place}", [place for place in places if place.partition(":")[2] == name] or places
    )


def _new_test(root: Path, name: str) -> str:
    function = name.partition("::")[2]
    files = [str(file.relative_to(root)) for file in sorted((root / "tests").rglob("test_*.py"))]
    return _the_only(name, [f"{file}::{function}" for file in files if _is_test(root, f"{file}::{function}")])


def _the_only(old: str, places: list[str]) -> str:
    if len(places) != 1:
        raise WrongTable(f"{old} may be at {len(places)} places: {', '.join(places) or 'none'}; correct it by hand")
    return places[0]


# Runs


class Copy:
    """A copy of the project whose Python imports the copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
        # An environment of its own and not PYTHONPATH: programs that the tests start may drop variables.
        venv.create(folder / ".venv")
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")}))
        libraries = sysconfig.get_path("purelib")
        (packages / "copy.pth").write_text(f"{folder}\nimport site; site.addsitedir({libraries!r})\n", encoding="utf-8")

    def run(self, mutant: Mutant) -> tuple[bool, str]:
        """Break the line, run its tests, and mend the line; returns whether all of them failed, and their output."""
        file, text = mutant.broken_text(self.folder)
        whole = file.read_text(encoding="utf-8")
        file.write_text(text, encoding="utf-8")
        tests = mutant.tests.split()
        done = self.pytest(*tests)
        file.write_text(whole, encoding="utf-8")
        names = [re.escape(test) for test in tests]
        have_failed = all(re.search(rf"^(FAILED|ERROR) {name}(\[| |$)", done.stdout, re.MULTILINE) for name in names)
        never_ended = done.returncode in (124, 137)
        return never_ended or (done.returncode == pytest.ExitCode.TESTS_FAILED and have_failed), done.stdout

    def pytest(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run pytest in the copy to its end. The first signal is Ctrl-C, after which fixtures end what they started.

        It stays in the terminal's process group, so that a person's Ctrl-C reaches it, too.
        """
        limit = ["timeout", "--foreground", "--signal=INT", "--kill-after=60", str(LIMIT_SECONDS)]
        words = (str(self.folder / ".venv/bin/python"), "-m", "pytest", "-p", "no:cacheprovider", "-rfE", *words)
        # Bytecode is known by its second and size: a line that was broken within the same second would not count.
        environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "JOBKIT_TEST_PATIENCE": str(PATIENCE_SECONDS)}
        # `python` in a `command:` of a test is the copy's, too.
        environ["PATH"] = os.pathsep.join([str(self.folder / ".venv/bin"), environ.get("PATH", os.defpath)])
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.run([*limit, *words], cwd=self.folder, env=environ, **options)


def run_all(mutants: list[Mutant], workers: int) -> int:
    """Run the tests of the unbroken code once, then those of each mutant; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(workers) as threads:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(workers):
            copies.put(Copy(Path(folder) / str(number)))
        tests = sorted({test for mutant in mutants for test in mutant.tests.split()})
        print(f"{len(mutants)} mutants; the unbroken code first, {len(tests)} tests", flush=True)
        copies.put(copy := copies.get())
        # In a thread, as all runs: after a Ctrl-C they end before their folder goes.
        done = threads.submit(copy.pytest, *tests, "-n", str(2 * workers), "--dist", "worksteal").result()
        if done.returncode != 0:
            is_red = done.returncode == pytest.ExitCode.TESTS_FAILED
            why = "The unbroken code fails: a failure would prove nothing." if is_red else "pytest finds not all tests."
            print(done.stdout, why, sep="\n")
            return 2

        def run(mutant: Mutant) -> str:
            copy, began = copies.get(), time.monotonic()
            is_killed, output = copy.run(mutant)
            copies.put(copy)
            word, seconds = "killed" if is_killed else "SURVIVED", time.monotonic() - began
            print(f"{word:8} {seconds:6.1f} s  {mutant.promise}", flush=True)
            return "" if is_killed else f"\nSURVIVED: {mutant}\n{output}"

        began = time.monotonic()
        survivors = list(filter(None, threads.map(run, mutants)))
        print(*survivors, f"{len(mutants) - len(survivors)} killed, {len(survivors)} survived, ", end="")
        print(f"{time.monotonic() - began:.0f} s")
        return 1 if survivors else 0


def chosen(mutants: list[Mutant], words: list[str], tenth: bool) -> list[Mutant]:
    """Return the entries that contain a word; of these every tenth, beginning where the commit's number says."""
    if words:
        mutants = [mutant for mutant in mutants if any(word in f"{mutant.promise} {mutant.place}" for word in words)]
    if tenth and mutants:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
        mutants = mutants[int(commit, 16) % min(10, len(mutants)) :: 10]
    return mutants


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/test mutants", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar='"WORDS"', help="a text in the promise or the place of an entry")
    parser.add_argument("--tenth", action="store_true", help="every tenth entry; the commit chooses the first")
    parser.add_argument("--rekey", action="store_true", help="write the new places of moved lines into the table")
    parser.add_argument("--table", type=Path, default=TABLE, help="default: tests/mutants.yaml")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="default: one a core")
    arguments = parser.parse_args()
    try:
        if arguments.rekey:
            print("\n".join(rekey(arguments.table, ROOT)) or "nothing was moved")
            return 0
        mutants = chosen(read_table(arguments.table), arguments.words, arguments.tenth)
        if not mutants:  # pytest would take no test for all of them
            parser.error(f"no promise or place of {arguments.table} contains one of these texts: {arguments.words}")
        for mutant in mutants:
            mutant.broken_text(ROOT)
            if missing := mutant.missing_tests(ROOT):
                raise WrongTable(f"{mutant.promise}: there is no {' '.join(missing)} ({MOVED})")
        return run_all(mutants, max(1, min(arguments.workers, len(mutants))))
    except WrongTable as error:
        print(f"{arguments.table}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
