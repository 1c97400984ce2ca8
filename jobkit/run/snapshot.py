"""The code snapshot: a copy of the user's code, so that a run executes what was submitted, requeues included.

    folder of the command --take--> runs/.code/<digest>/     <--link-- runs/<run>/code
                                    .snapshot.json: file -> digest of its content

Equal code of a user is stored once for all runs of a runs directory. Nobody else can write in a snapshot: its modules
are executed. `link` is called by the submission, `put_unused` by `rm`.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import shutil
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from jobkit.errors import InputError
from jobkit.log import log
from jobkit.run.files import foreign_owner, read_json, replace_link, write_json
from jobkit.run.locks import Lock, make_folder

MANIFEST = ".snapshot.json"

MODULES = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
PROGRAMS = (*MODULES, *[".pyi", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".sh"])
SOURCES = (*PROGRAMS, *[".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt", ".j2"])
"""Endings of code files, for a folder without git."""

MAX_FILE_BYTES = 2 << 20
"""A larger file that is no program is data."""

MAX_FILES = 5000
"""More files are a home directory rather than a project."""

_SKIPPED = (".", "__pycache__", "node_modules")


def take(folder: Path, runs_dir: Path, exclude: Sequence[str] = ()) -> Path:
    """A snapshot of the code below a folder, in the runs directory: a new copy, or an equal one that exists.

    Copied are the files that git does not ignore, in submodules and nested clones too; without git, source files. A
    link to a folder stays a link. `exclude` is `code.exclude` of the config. Raises InputError if git refuses to list
    files, or if the folder is no project's.
    """
    if folder.resolve() == runs_dir.resolve():
        problem, hint = "it is the folder of the code", "try --runs-dir runs"
        raise InputError(problem, key="--runs-dir", found=str(runs_dir), hint=hint)
    search = _Search(folder, runs_dir.resolve(), exclude)
    search.add_folder(Path())
    search.add_built_modules()
    names = search.kept()
    code = runs_dir / ".code"
    path = code / _name({name: _digest(folder / name) for name in names})
    if is_intact(path):
        return path
    make_folder(code)
    staging = code / f".{os.getpid()}.{time.time_ns()}.tmp"
    path = code / _name(_copy(folder, names, staging))  # a file may have changed since: the copies count
    if is_intact(path):  # another submission was faster
        shutil.rmtree(staging)
    else:
        shutil.rmtree(path, ignore_errors=True)  # a damaged copy
        staging.rename(path)
    return path


def link(name: Path, folder: Path, runs_dir: Path, code: Path | None = None, exclude: Sequence[str] = ()) -> Path:
    """Make `name` a link to a snapshot of a folder, and return that; from then on no `rm` deletes it.

    `code` is a snapshot that was taken already: the runs of a sweep have the same.
    """
    code = code or take(folder, runs_dir, exclude)
    with _lock(runs_dir):
        if not code.exists():  # the last run that had it was removed in this moment
            code = take(folder, runs_dir, exclude)
        replace_link(name, code)
    return code


def is_excluded(name: Path, patterns: Sequence[str]) -> bool:
    """Return whether `code.exclude` leaves a file out, or a folder above it."""
    return any(fnmatchcase(str(part), text.rstrip("/")) for text in patterns for part in (name, *name.parents))


def put_unused(runs_dir: Path, names: Iterable[str], aside: Path) -> None:
    """Move the snapshots of these names that no run has any more into the folder `aside`, for their deletion."""
    with _lock(runs_dir):
        used = {link.readlink().name for link in runs_dir.glob("*/code") if link.is_symlink()}
        for path in (runs_dir / ".code" / name for name in set(names) - used):
            if path.is_dir() and foreign_owner(path) is None:
                path.rename(aside / f"{path.name}.{time.time_ns()}")


def _lock(runs_dir: Path) -> Lock:
    return Lock(runs_dir / ".locks" / "code")


def is_intact(path: Path) -> bool:
    """Return whether a snapshot exists, belongs to this user and has the files that were copied."""
    files = read_json(path / MANIFEST, fresh=True)
    if not isinstance(files, dict) or foreign_owner(path):
        return False
    return all(_digest(path / name) == digest for name, digest in files.items())


def _name(digests: Mapping[str, str]) -> str:
    """The name of a snapshot. Two users with equal code in a shared directory have a snapshot each."""
    listed = "\n".join([str(os.geteuid()), *(f"{name} {digests[name]}" for name in sorted(digests))])
    return hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()[:12]


def _digest(file: Path) -> str:
    """Of the content, with an `x` if the file can be executed; of a link to a folder its end; empty without a file."""
    try:
        if file.is_dir():
            return str(file.resolve())
        can_be_executed = file.stat().st_mode & stat.S_IXUSR
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] + ("x" if can_be_executed else "")
    except FileNotFoundError:
        return ""


def _copy(folder: Path, names: Iterable[str], staging: Path) -> dict[str, str]:
    """Copy files, links to files as these files; returns the digests of the copies."""
    staging.mkdir()
    copied = {}
    for name in names:
        source, target = folder / name, staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            if source.is_dir():
                target.symlink_to(source.resolve())
            else:
                shutil.copyfile(source, target)
                target.chmod(source.stat().st_mode & 0o755)  # it may hold a secret; and nobody else writes
        except FileNotFoundError:
            continue
        copied[name] = _digest(target)
    write_json(staging / MANIFEST, copied, durable=False, mode=0o644)
    for parent, _, _ in os.walk(staging):
        Path(parent).chmod(Path(parent).stat().st_mode & 0o755)
    return copied


# The files that are code


class _Search:
    """Collects the code below `folder`. Files have their names relative to it."""

    def __init__(self, folder: Path, runs_dir: Path, exclude: Sequence[str]) -> None:
        self.folder = folder
        self.runs_dir = runs_dir
        self.exclude = exclude
        self.sizes: dict[Path, int] = {}
        self.unreadable: set[Path] = set()
        """This user may not read them; nor may the job, so that the run cannot need them."""
        self._runs = {Path(): False}  # the code itself may lie in a run, or beside runs

    def add_folder(self, name: Path) -> None:
        """Add the files that git lists in a folder; source files where it lists none."""
        listed = _git_files(self.folder / name)
        for text in listed or self._walk(name):
            self._add(name / text)

    def add_built_modules(self) -> None:
        """Add extension modules beside Python files, and all modules of packages: git ignores the ones that a build
        makes (`_version.py`, `ops.so`), and an import of the package needs them."""
        for parent in {name.parent for name in self.sizes if name.suffix == ".py"}:
            suffixes = MODULES if parent / "__init__.py" in self.sizes else MODULES[1:]
            try:
                for entry in os.scandir(self.folder / parent):
                    if entry.name.endswith(suffixes):
                        self._add(parent / entry.name)
            except PermissionError:
                self.unreadable.add(parent)

    def kept(self) -> list[str]:
        """The names of the files to copy; the user hears of the others. Raises InputError if there are too many."""
        if len(self.sizes) > MAX_FILES:
            raise self._too_many(f"{MAX_FILES} code files", Counter(map(_place, self.sizes)))
        large = {name: size for name, size in self.sizes.items() if size > MAX_FILE_BYTES}
        data = {name: size for name, size in large.items() if not name.name.endswith(PROGRAMS)}
        if data:
            largest_first = sorted(data, key=lambda name: -data[name])
            listed = ", ".join(f"{name} ({data[name] / 2**20:.1f} MiB)" for name in largest_first[:5])
            what = f"{len(data)} files of more than {MAX_FILE_BYTES >> 20} MiB are not in the code snapshot"
            log.warning("%s; the largest: %s", what, listed)
        if self.unreadable:
            names = ", ".join(sorted(map(str, self.unreadable))[:5])
            what = f"{len(self.unreadable)} that you may not read are not in the code snapshot"
            log.warning("%s: %s; `chmod u+r` takes them in, `code: {exclude: [...]}` ends this line", what, names)
        return sorted(str(name) for name in self.sizes if name not in data)

    def _add(self, name: Path) -> None:
        if is_excluded(name, self.exclude):
            return
        try:
            self._add_wanted(name)
        except PermissionError:
            self.unreadable.add(name)
        except OSError:
            return  # git still lists a file that was removed; a link may lead nowhere

    def _add_wanted(self, name: Path) -> None:
        path = self.folder / name
        if any(map(self._is_runs, name.parents)):
            return
        info = path.stat()
        if stat.S_ISREG(info.st_mode):
            if not _may_read(path):
                raise PermissionError
            self.sizes[name] = info.st_size
        elif not stat.S_ISDIR(info.st_mode):
            return  # nobody may ever write into a FIFO
        elif path.is_symlink():
            self.sizes |= {} if self._is_runs(name) else {name: 0}
        elif (path / ".git").exists() and not any(part.startswith(_SKIPPED) for part in name.parts):
            self.add_folder(name)  # a submodule, or a nested clone; in a hidden folder another working tree

    def _walk(self, name: Path) -> list[str]:
        """The source files below a folder, and links to folders."""
        listed, counts = [], Counter[str]()
        for parent, folders, files in os.walk(self.folder / name):
            folder = Path(parent).relative_to(self.folder)
            folders[:] = [child for child in folders if self._may_have_code(folder / child)]
            counts.update(_place(folder / child) for child in files)
            if counts.total() > 20 * MAX_FILES:
                raise self._too_many(f"{20 * MAX_FILES} files", counts)
            sources = [file for file in files if file.endswith(SOURCES)]
            sources += [child for child in folders if Path(parent, child).is_symlink()]
            listed += [os.path.relpath(Path(parent, source), self.folder / name) for source in sources]
        return listed

    def _may_have_code(self, name: Path) -> bool:
        folder = self.folder / name
        if name.name.startswith(_SKIPPED) or is_excluded(name, self.exclude):
            return False
        if not _may_read(folder):
            self.unreadable.add(name)
            return False
        return not ((folder / "pyvenv.cfg").exists() or (folder / "conda-meta").is_dir())

    def _too_many(self, number: str, counts: Counter[str]) -> InputError:
        ((largest, count),) = counts.most_common(1)
        hint = f"type the command in the project's own folder, or leave them out: code: {{exclude: ['{largest}']}}"
        return InputError(f"more than {number}, {count} of them are {largest}", hint=hint).at(self.folder)

    def _is_runs(self, name: Path) -> bool:
        """Return whether a folder is a runs directory: this one, or another with its locks."""
        if name not in self._runs:
            path = self.folder / name
            self._runs[name] = (path / ".locks").is_dir() or path.resolve() == self.runs_dir
        return self._runs[name]


def _may_read(path: Path) -> bool:
    return os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0), effective_ids=True)


def _place(name: Path) -> str:
    """The pattern of `code.exclude` for a file and its like: the folder at the top, or the ending."""
    return f"{name.parts[0]}/" if len(name.parts) > 1 else f"*{name.suffix}" if name.suffix else str(name)


def _git_files(folder: Path) -> list[str]:
    """The files below a folder that git tracks or would track; none without a repository, or if it ignores the folder.

    Raises InputError if git refuses ("dubious ownership"): a guess would copy files that .gitignore names.
    """
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return []
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=60, check=False)  # the disk may be cold
        problem, hint = answer.stderr.decode(errors="replace").strip().partition("\n")[0], ""
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"git does not list the code: {error}").at(folder) from None
    if answer.returncode == 0:
        return list(filter(None, os.fsdecode(answer.stdout).split("\0")))
    if "dubious ownership" in problem:
        hint = f"type first: git config --global --add safe.directory {folder}"
    raise InputError(f"git does not list the code: {problem}", hint=hint).at(folder)
