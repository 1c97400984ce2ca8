"""The code snapshot: a copy of the user's code, so that a run executes what was submitted, requeues included.

    folder of the command --take--> runs/.code/<digest>/     <--link-- runs/<run>/code
                                    .snapshot.json: file -> digest of its content

Equal code is stored once for all runs of a runs directory. A snapshot belongs to one user, and nobody else can write
in it: its modules are executed. `take` is called by the submission alone.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobkit.errors import InputError
from jobkit.run.files import foreign_owner, read_json, write_json

FOLDER = ".code"
MANIFEST = ".snapshot.json"

MODULES = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
PROGRAMS = (*MODULES, *[".pyi", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".sh"])
SOURCES = (*PROGRAMS, *[".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt", ".j2"])
"""Files that are code where no git says what is."""

MAX_FILE_BYTES = 2 << 20
"""A larger file that is no program is data."""
MUCH_BYTES = 50 << 20
"""A larger snapshot gets a remark: most projects have less than one MiB."""
MAX_FILES = 5000
"""More files are a home directory rather than a project."""
MAX_LINKED = 1000
"""More files behind a link are a data set."""
UNUSED_SECONDS = 3600
"""A snapshot without a run may belong to a submission that has not made its run yet."""

_SKIPPED = (".", "__pycache__", "node_modules")


@dataclass(frozen=True)
class Snapshot:
    """A copy of the user's code."""

    path: Path
    remarks: list[str]
    """Lines for the user about files that were left out."""

    @property
    def digest(self) -> str:
        """The name of its folder."""
        return self.path.name


def take(folder: Path, runs_dir: Path) -> Snapshot:
    """A snapshot of the code below a folder, in the runs directory: a new copy, or an equal one that exists.

    Copied are the files that git does not ignore, in submodules and nested clones too; without git, source files.
    Raises InputError if git refuses to list them, or if the folder is no project's.
    """
    if folder.resolve() == runs_dir.resolve():
        raise InputError(
            "it is the folder of the code", key="--runs-dir", found=str(runs_dir), hint="try --runs-dir runs"
        )
    search = _Search(folder, runs_dir)
    search.add_folder(Path(), folder.resolve())
    search.add_built_modules()
    names = search.kept()
    code = _code_folder(runs_dir)
    for existing in (code / name for name in _names({name: _digest(folder / name) for name in names})):
        if is_intact(existing):
            os.utime(existing)
            return Snapshot(existing, search.remarks)
    staging = code / f".{os.getpid()}.{time.time_ns()}.tmp"
    copied = _copy(folder, names, staging)  # a file may have changed since: the digests of the copies count
    paths = [code / name for name in _names(copied)]
    path = next(path for path in paths if not (path.exists() and foreign_owner(path)))
    if path.exists() and not is_intact(path):
        aside = staging.with_suffix(".old")
        path.rename(aside)
        shutil.rmtree(aside)
    try:
        staging.rename(path)
    except OSError:
        if not is_intact(path):  # else another submission was faster
            raise
        shutil.rmtree(staging)
    return Snapshot(path, search.remarks)


def is_intact(path: Path) -> bool:
    """Whether a snapshot exists, belongs to this user and has the files that were copied."""
    files = read_json(path / MANIFEST, fresh=True)
    if not isinstance(files, dict) or foreign_owner(path):
        return False
    return all((path / name).is_file() and _digest(path / name) == digest for name, digest in files.items())


def changes(old: Path, new: Path) -> list[str]:
    """The difference of two snapshots as lines `+ added`, `- removed` and `~ changed`; none if one has gone."""
    before, after = read_json(old / MANIFEST), read_json(new / MANIFEST)
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    signs = {name: "+" if name not in before else "-" if name not in after else "~" for name in before | after}
    return [f"{sign} {name}" for name, sign in sorted(signs.items()) if before.get(name) != after.get(name)]


def remove_unused(runs_dir: Path) -> list[str]:
    """Remove the snapshots that no run of a runs directory has; returns their names."""
    used = {(entry / "code").resolve().name for entry in runs_dir.iterdir() if (entry / "code").is_symlink()}
    old = time.time() - UNUSED_SECONDS
    unused = [path for path in _folders(runs_dir / FOLDER) if path.name not in used and path.stat().st_mtime < old]
    for path in unused:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in unused]


def _code_folder(runs_dir: Path) -> Path:
    """The folder of all snapshots, with the permissions of the runs directory, which a group may share."""
    code = runs_dir / FOLDER
    if not code.is_dir():
        code.mkdir(parents=True, exist_ok=True)
        code.chmod(stat.S_IMODE(runs_dir.stat().st_mode))
    return code


def _names(digests: Mapping[str, str]) -> list[str]:
    """The names that a snapshot may have. The second is for the second user with equal code in a shared directory."""
    listed = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    digest = hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()[:12]
    return [digest, f"{digest}-{os.geteuid()}"]


def _digest(file: Path) -> str:
    """Of the content, with an `x` if the file can be executed; empty for a file that has gone."""
    try:
        can_be_executed = file.stat().st_mode & stat.S_IXUSR
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16] + ("x" if can_be_executed else "")
    except FileNotFoundError:
        return ""


def _copy(folder: Path, names: list[str], staging: Path) -> dict[str, str]:
    """Copy files, links as the files they lead to; returns the digests of the copies."""
    staging.mkdir(parents=True)
    copied = {}
    for name in names:
        target = staging / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(folder / name, target)
            # No more than for the file itself, which may hold a secret; and nobody else writes.
            target.chmod((folder / name).stat().st_mode & 0o755 & (target.stat().st_mode | 0o111))
        except FileNotFoundError:
            continue
        copied[name] = _digest(target)
    write_json(staging / MANIFEST, copied, durable=False, mode=0o644)
    for path in (staging, *_folders(staging, deep=True)):
        path.chmod(path.stat().st_mode & 0o755)
    return copied


def _folders(folder: Path, *, deep: bool = False) -> Iterator[Path]:
    paths = folder.rglob("*") if deep else folder.glob("*")
    return (path for path in paths if path.is_dir())


# The files that are code


@dataclass
class _Search:
    """Collects the code below `folder`. Files have their names relative to it."""

    folder: Path
    runs_dir: Path
    sizes: dict[Path, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    _runs: dict[Path, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        real = self.folder.resolve()
        self._runs |= dict.fromkeys((real, *real.parents), False)  # the code may lie within a run or below runs

    def add_folder(self, name: Path, real: Path) -> None:
        """Add the files that git lists in a folder; source files where it lists none."""
        listed = _git_files(real)
        for text in listed:
            self._add(name / text, real / text)
        if not listed:
            self._walk(name, real, 20 * MAX_FILES)

    def add_built_modules(self) -> None:
        """Add extension modules beside Python files, and all modules of packages: git ignores the ones that a build
        makes (`_version.py`, `ops.so`), and an import of the package needs them."""
        for parent in {name.parent for name in self.sizes if name.suffix == ".py"}:
            suffixes = MODULES if parent / "__init__.py" in self.sizes else MODULES[1:]
            for entry in os.scandir(self.folder / parent):
                if entry.name.endswith(suffixes) and entry.is_file():
                    self._add(parent / entry.name, Path(entry.path))

    def kept(self) -> list[str]:
        """The names of the files to copy. Raises InputError if there are too many."""
        if len(self.sizes) > MAX_FILES:
            ((largest, count),) = Counter(name.parts[0] for name in self.sizes).most_common(1)
            hint = "type the command in the project's own folder, or let git ignore what is no code"
            raise InputError(f"more than {MAX_FILES} code files ({count} in {largest})", hint=hint).at(self.folder)
        is_data = {
            name: size > MAX_FILE_BYTES and not name.name.endswith(PROGRAMS) for name, size in self.sizes.items()
        }
        data = {name: size for name, size in self.sizes.items() if is_data[name]}
        code = {name: size for name, size in self.sizes.items() if not is_data[name]}
        if data:
            what = f"files of more than {MAX_FILE_BYTES >> 20} MiB are not in the code snapshot"
            self.remarks.append(f"{what}: {_largest(data)}")
        if (total := sum(code.values())) > MUCH_BYTES:
            what = f"the code snapshot has {total >> 20} MiB in {len(code)} files"
            self.remarks.append(f"{what}; the largest: {_largest(code)}; let git ignore what is no code")
        return sorted(map(str, code))

    def _add(self, name: Path, real: Path) -> None:
        if any(self._is_runs(parent) for parent in (real, *real.parents)):
            return
        try:
            info = real.stat()
        except OSError:
            return  # git still lists a file that was removed; a link may lead nowhere
        if stat.S_ISREG(info.st_mode):
            self.sizes[name] = info.st_size
        elif real.is_symlink():
            self._follow(name, real.resolve())
        elif any(part.startswith(_SKIPPED) for part in name.parts):
            return  # another working tree of the repository, in a hidden folder
        elif (real / ".git").exists():  # a submodule, or a nested clone
            self.add_folder(name, real)
        elif not any(real.iterdir()):
            todo = f"git submodule update --init {name}"
            self.remarks.append(f"the submodule {name} is not checked out, so it is not in the code snapshot: {todo}")

    def _follow(self, name: Path, target: Path) -> None:
        """Add the source behind a link to a folder, unless it is a data set or leads back."""
        inside = self.folder.resolve()
        if target == inside or target in inside.parents or self._is_runs(target):
            return
        before = dict(self.sizes)
        if not self._walk(name, target, MAX_LINKED):
            self.sizes = before
            self.remarks.append(f"{name}, a link to {target}, has too many files for code: it is not in the snapshot")

    def _walk(self, name: Path, real: Path, limit: int) -> bool:
        """Add the source files below a folder; returns False if there are more entries than `limit`."""
        for parent, folders, files in os.walk(real):
            here = name / Path(parent).relative_to(real)
            folders[:] = [child for child in folders if self._may_have_code(Path(parent, child))]
            limit -= len(folders) + len(files)
            if limit < 0:
                return False
            for file in files:
                if file.endswith(SOURCES):
                    self._add(here / file, Path(parent, file))
        return True

    def _may_have_code(self, folder: Path) -> bool:
        is_environment = (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").is_dir()
        return not (folder.name.startswith(_SKIPPED) or is_environment or self._is_runs(folder))

    def _is_runs(self, path: Path) -> bool:
        """Whether a folder is the runs directory, a run, or jobkit's own beside runs."""
        if path not in self._runs:
            is_run = (path / "config.yaml").exists() and (path / "events.jsonl").exists()
            is_beside = path.name in (FOLDER, ".locks") and (path.parent / ".locks").is_dir()
            self._runs[path] = is_run or is_beside or path == self.runs_dir.resolve()
        return self._runs[path]


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


def _largest(sizes: Mapping[Path, int]) -> str:
    names = sorted(sizes, key=lambda name: -sizes[name])
    listed = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in names[:5])
    return listed + (f" and {len(names) - 5} more" if len(names) > 5 else "")
