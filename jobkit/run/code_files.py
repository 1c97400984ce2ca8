"""Which files below a folder are the user's code: what git knows there, or what looks like source; links followed."""

from __future__ import annotations

import importlib.machinery
import os
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jobkit.errors import InputError
from jobkit.run import sweeps
from jobkit.run.rundir import BESIDE, CONFIG, JOURNAL, SHARED_CODE

COMPILED_SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)
"""Of extension modules: they are imported as Python files are, and git seldom knows them."""

_MODULES = (".py", *COMPILED_SUFFIXES)

_PROGRAMS = ".py .pyi .pyx .c .cc .cpp .cu .cuh .h .hpp .sh"
PROGRAM_SUFFIXES = (*_PROGRAMS.split(), *COMPILED_SUFFIXES)
"""Of files that are code whatever their size."""

_TEXTS = ".yaml .yml .json .toml .cfg .ini .txt .j2"
SOURCE_SUFFIXES = (*PROGRAM_SUFFIXES, *_TEXTS.split())
"""Of files that count as code where no git says what does."""

MAX_FILE_BYTES = 2 << 20
"""A bigger file that is no program is data, not code."""

MUCH_BYTES = 50 << 20
"""A snapshot that is bigger in all is worth a line: most projects have less than one MiB."""

MAX_FILES = 5000
"""More are no project's folder but a home directory, which a submission would copy for minutes."""

MAX_LINKED_FILES = 1000
"""More behind a link, where no git says what is code, are a data set."""

NAMED = 5
"""How many files a line names."""

BESIDE_RUNS = (BESIDE, sweeps.FOLDER, SHARED_CODE)
"""Folders of jobkit's in a runs directory."""

MANY_FILES = 200
"""So many files in a folder without a program are results or data rather than code, and worth a line."""

_SKIPPED = (".", "__pycache__", "node_modules")
"""Beginnings of the names of folders without code of the user's."""


@dataclass(frozen=True)
class CodeFiles:
    """What a submission copies of a folder."""

    sizes: Mapping[Path, int]
    """Bytes of each file, by its name relative to the folder."""
    remarks: list[str]
    """A line for each thing of which somebody may expect something else."""


def find(source: Path, skip: Path, needed: Iterable[Path] = ()) -> CodeFiles:
    """The code below `source`: the files git tracks or would, in submodules and nested clones too; without git, source.

    Links to folders are followed. A file that git ignores is code if it is one of `needed`, and then what looks like
    source beside it is, too; so are modules beside Python files and below packages. Nothing below `skip` (the runs
    directory) or in the run directories of another one is code, nor is a big file that is no program.
    Raises InputError when there are too many files for this to be a project's folder.
    """
    real, runs = source.resolve(), skip.resolve()
    search = _Search(source, None if runs in real.parents else runs)  # above the code only runs themselves are skipped
    search.add_folder(Path(), real, ())
    required = set(needed)
    for name in required:
        search.add_needed(name)
    search.add_modules()
    if len(search.sizes) > MAX_FILES:
        ((folder, count),) = Counter(name.parts[0] for name in search.sizes).most_common(1)
        where = "run the command in the project's own folder, or let git ignore what is no code"
        raise InputError(f"{source}: more than {MAX_FILES} code files ({count} in {folder}); {where}")
    kept = {
        name: size for name, size in sorted(search.sizes.items()) if name in required or not _is_big_data(name, size)
    }
    return CodeFiles(kept, [*search.remarks, *_remarks_on_sizes(kept, search.sizes)])


def is_program(name: str | Path) -> bool:
    """Whether a file is code by its name, whatever its size."""
    return str(name).endswith(PROGRAM_SUFFIXES)


def _is_big_data(name: Path, size: int) -> bool:
    return size > MAX_FILE_BYTES and not is_program(name)


def _remarks_on_sizes(kept: Mapping[Path, int], found: Mapping[Path, int]) -> list[str]:
    remarks = []
    if big := {name: size for name, size in found.items() if name not in kept}:
        what = f"data of more than {MAX_FILE_BYTES >> 20} MiB is not in the code snapshot"
        remarks.append(f"{what}: {_largest(big)}")
    for folder, count, size in _folders_without_programs(kept):
        what = f"{folder}/ has no program, and {count} file(s), {size / (1 << 20):.0f} MiB, of the code snapshot"
        remarks.append(f"{what}: git can be told to ignore it, or the run to write to ${{run_dir}}/outputs")
    if (total := sum(kept.values())) > MUCH_BYTES:
        what = f"the code snapshot has {total / (1 << 20):.0f} MiB in {len(kept)} file(s)"
        remarks.append(f"{what}; the largest: {_largest(kept)}; git can be told to ignore what is no code")
    return remarks


def _folders_without_programs(kept: Mapping[Path, int]) -> list[tuple[str, int, int]]:
    """(name, files, bytes) of the folders at the top that have many files and no program."""
    found = []
    for folder in sorted({name.parts[0] for name in kept if len(name.parts) > 1}):
        inside = {name: size for name, size in kept.items() if name.parts[0] == folder}
        if len(inside) > MANY_FILES and not any(map(is_program, inside)):
            found.append((folder, len(inside), sum(inside.values())))
    return found


def _largest(sizes: Mapping[Path, int]) -> str:
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    listed = ", ".join(f"{name} ({sizes[name] / (1 << 20):.1f} MiB)" for name in names[:NAMED])
    return listed + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


class _TooMuch(Exception):
    """There is more than code."""


class _Search:
    """Collects the code below `source`. Folders are given by their names relative to it and by their real paths."""

    def __init__(
        self, source: Path, skip: Path | None, *, is_limited: bool = False, only_modules: bool = False
    ) -> None:
        self._source, self._skip, self._is_limited = source, skip, is_limited
        self._only_modules = only_modules
        """Whether only what an import can name is code, where no git says what is."""
        self._looked_at = 0
        self._runs: dict[Path, bool] = {}
        """Which folders are run directories, as far as that was asked."""
        self.sizes: dict[Path, int] = {}
        self.remarks: list[str] = []

    def add_folder(self, name: Path, real: Path, followed: tuple[Path, ...]) -> None:
        """Add what git knows of a folder; all that looks like source where it knows nothing.

        `followed` are the real paths of the folders whose links have led there.
        """
        listed = _git_files(real)
        if not listed:
            self._walk(name, real, (*followed, real))
        for text in listed:
            is_clone = text.endswith("/")  # a repository that git does not track: it names the folder only
            if not (is_clone and any(part.startswith(_SKIPPED) for part in Path(text).parts)):
                self._add(name / text, real / text, (*followed, real))

    def add_needed(self, name: Path) -> None:
        """Add a file that the task imports, with the source beside it: what it imports later is there, too."""
        if name in self.sizes:
            return
        folder = Path(*name.parts[:1]) if len(name.parts) > 1 else Path()
        real = (self._source / folder).resolve()
        self._walk(folder, real, (self._source.resolve(), real))
        self._add(name, (self._source / name).resolve(), ())

    def add_modules(self) -> None:
        """Add the modules beside Python files, and below packages: those made in place are ignored by git.

        An import at run time may name them, and a shell script may lead there. The top of a repository has folders
        that are no packages, with environments and results: of it only what is beside the others is added.
        """
        folders = {name.parent for name in self.sizes if name.suffix == ".py"}
        for folder in folders:
            real = (self._source / folder).resolve()
            is_top = folder == Path() or (real / ".git").exists()
            for entry in _entries(real):
                name, there = folder / entry.name, real / entry.name
                if entry.name.endswith(_MODULES):
                    self._add(name, there, ())
                elif not is_top and name not in folders and entry.is_dir(follow_symlinks=False):
                    self._add_package(name, there)

    def _add_package(self, name: Path, real: Path) -> None:
        """Add the modules of a folder that may be a package, unless it is a data set."""
        behind = _Search(self._source, self._skip, is_limited=True, only_modules=True)
        if behind._may_have_code(real):
            what = f"{name} has too much for code, so what git ignores there is not in the code snapshot"
            self._take_over(behind, partial(behind._walk, name, real, (real,)), what)

    def _add(self, name: Path, real: Path, followed: tuple[Path, ...]) -> None:
        if self._is_skipped(real) or self._is_of_runs(name):
            return
        try:
            info = real.stat()
        except OSError:
            return  # git still knows a file that was removed; a link may lead nowhere
        if stat.S_ISREG(info.st_mode):
            self.sizes[name] = info.st_size
        elif stat.S_ISDIR(info.st_mode) and real.is_symlink():
            self._follow(name, real.resolve(), followed)
        elif stat.S_ISDIR(info.st_mode):
            self._add_repository(name, real, followed)

    def _is_of_runs(self, name: Path) -> bool:
        """Whether a file is in a run directory, or one of jobkit's own beside them: of whichever runs directory."""
        folders = [*reversed(name.parents)][1:]
        return any(map(self._is_run, folders)) or any(
            folder.name in BESIDE_RUNS and self._has_runs(folder.parent) for folder in folders
        )

    def _is_run(self, name: Path) -> bool:
        if name not in self._runs:
            self._runs[name] = is_run(self._source / name)
        return self._runs[name]

    def _has_runs(self, name: Path) -> bool:
        return (self._source / name / BESIDE).is_dir()

    def _add_repository(self, name: Path, real: Path, followed: tuple[Path, ...]) -> None:
        """Add a submodule or a nested clone."""
        if (real / ".git").exists():
            self.add_folder(name, real, followed)
        elif any(_entries(real)):
            self._walk(name, real, (*followed, real))
        else:
            todo = f"git submodule update --init {name}"
            self.remarks.append(f"the submodule {name} is not checked out, so it is not in the code snapshot: {todo}")

    def _is_skipped(self, real: Path) -> bool:
        return self._skip is not None and (real == self._skip or self._skip in real.parents)

    def _follow(self, name: Path, target: Path, followed: tuple[Path, ...]) -> None:
        """Add a linked folder's files under the link's name, unless it is a data set."""
        if self._is_skipped(target):
            return
        if any(target == one or target in one.parents for one in followed):
            return  # the link leads back
        behind = _Search(self._source, self._skip, is_limited=True)
        what = f"{name}, a link to {target}, leads to too much for code, so it is not in the code snapshot"
        self._take_over(behind, partial(behind.add_folder, name, target, followed), f"{what}: link the package itself")

    def _take_over(self, behind: _Search, search: Callable[[], None], remark: str) -> None:
        """Add what another search finds, unless that is a data set: with Python files in it there is a remark."""
        try:
            search()
            copied = [size for one, size in behind.sizes.items() if not _is_big_data(one, size)]
            if len(behind.sizes) > MAX_FILES or sum(copied) > MUCH_BYTES:
                raise _TooMuch
        except _TooMuch:
            if any(one.suffix == ".py" for one in behind.sizes):
                self.remarks.append(remark)
            return
        self.sizes.update(behind.sizes)
        self.remarks += behind.remarks

    def _walk(self, name: Path, real: Path, followed: tuple[Path, ...]) -> None:
        """Add what looks like source."""
        suffixes = _MODULES if self._only_modules else SOURCE_SUFFIXES
        waiting = [(name, real)]
        while waiting:
            name, real = waiting.pop()
            for entry in _entries(real):
                here, there = name / entry.name, real / entry.name
                is_link = entry.is_symlink()
                if not (there.is_dir() if is_link else entry.is_dir()):
                    if entry.name.endswith(suffixes):
                        self._add(here, there, followed)
                elif self._may_have_code(there):
                    if is_link:
                        self._add(here, there, followed)
                    else:
                        waiting.append((here, there))
                self._count()

    def _may_have_code(self, folder: Path) -> bool:
        if folder.name.startswith(_SKIPPED) or (self._only_modules and not folder.name.isidentifier()):
            return False
        return folder != self._skip and not _is_environment(folder) and not is_run(folder)

    def _count(self) -> None:
        self._looked_at += 1
        if self._is_limited and (len(self.sizes) > MAX_LINKED_FILES or self._looked_at > MAX_FILES):
            raise _TooMuch
        if self._looked_at > 20 * MAX_FILES:
            where = "run the command in the project's own folder"
            raise InputError(f"{self._source}: too many files to look for code in; {where}")


def _entries(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        yield from os.scandir(folder)  # not a list: a data set's folder may have a million
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return  # nobody can import from there, or it has gone since its name was read


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return (folder / CONFIG).exists() and (folder / JOURNAL).exists()


def _is_environment(folder: Path) -> bool:
    """Whether a folder is a Python environment."""
    return (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").is_dir()


def _git_files(folder: Path) -> list[str]:
    """Tracked and would-be-tracked files below a folder; none where git does not answer, or ignores all of it."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=20, check=False)  # a cold shared disk
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if answer.returncode else os.fsdecode(answer.stdout).split("\0")[:-1]
