"""The disk that a power cut would leave, from a record of a program's calls: strace writes it, from outside.

    strace PROGRAM --calls--> Disk: a file's bytes are sure after its fsync, a name after the fsync of its folder

SIGKILL cannot show a missing fsync: the kernel has the bytes.

    disk = Disk(tmp_path)
    for call in traced([sys.executable, "save.py"], tmp_path):
        disk.follow(call)
    assert disk.unsure(tmp_path / "checkpoint") == []
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

WRITES = ("write", "pwrite64", "writev", "pwritev", "sendfile", "copy_file_range", "ftruncate")
SYNCS = ("fsync", "fdatasync")
MAKES = ("openat", "open", "creat", "mkdir", "mkdirat", "symlink", "symlinkat")
MOVES = ("rename", "renameat", "renameat2")
REMOVES = ("unlink", "unlinkat", "rmdir")

SLOW_DISK = "20ms"
"""What an fsync takes at least: whoever does not wait for it is seen."""

_CALL = re.compile(r"(\w+)\((.*)\) += (\d+)")
_FILE = re.compile(r"\d+<(/[^>]*)>")
_NAME = re.compile(r'(?:\w+<([^>]*)>, )?"([^"]*)"')


@dataclass(frozen=True)
class Call:
    """A call that has succeeded."""

    process: int
    name: str
    paths: tuple[Path, ...]
    """The open file that it is about, or the names."""
    words: str


def traced(words: Sequence[str], folder: Path, below: Path, **options: Any) -> Iterator[Call]:
    """Run a program, and yield the calls of it and of its children below a path, in the order in which they returned.

    The record is in `folder`. What Python compiles is elsewhere, and no call of these.
    """
    skip_without_strace()
    record = folder / "strace"
    calls = ",".join(f"?{call}" for call in (*WRITES, *SYNCS, *MAKES, *MOVES, *REMOVES))  # ?: some processors lack it
    strace = ["strace", "-f", "-y", "-s0", "--seccomp-bpf", "-esignal=none", f"-etrace={calls}", f"-o{record}"]
    strace.append(f"-einject={','.join(SYNCS)}:delay_enter={SLOW_DISK}")
    options.setdefault("env", {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    done = subprocess.run([*strace, *words], capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    begun: dict[str, str] = {}
    for line in record.read_text(errors="replace").splitlines():
        process, _, text = line.partition(" ")
        text = text.lstrip()
        if text.endswith("<unfinished ...>"):
            begun[process] = text.removesuffix("<unfinished ...>")
            continue
        if text.startswith("<... "):
            text = begun.pop(process, "") + text.partition("resumed>")[2]
        if not (match := _CALL.match(text)):
            continue
        name, arguments = match[1], match[2]
        if name.startswith("open") and not re.search("O_CREAT|O_TRUNC", arguments):
            continue
        found = _FILE.match(arguments) if name in (*WRITES, *SYNCS) else None
        paths = [Path(found[1])] if found else [Path(at or "/", path) for at, path in _NAME.findall(arguments)]
        if paths and paths[-1].is_relative_to(below):
            yield Call(int(process), name, tuple(paths), arguments)


def skip_without_strace() -> None:
    """Skip the test where no program can be traced; fail it where strace is missing and JOBKIT_REQUIRE_SLURM is set."""
    if shutil.which("strace") is None:
        (pytest.fail if os.environ.get("JOBKIT_REQUIRE_SLURM") else pytest.skip)("strace is not installed")
    tried = subprocess.run(["strace", "-f", "--seccomp-bpf", "-o/dev/null", "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this machine lets nobody trace a program: {tried.stderr.strip()}")


@dataclass(eq=False)
class _Node:
    """A file or a folder."""

    names: dict[str, _Node] = field(default_factory=dict)
    sure_names: dict[str, _Node] = field(default_factory=dict)
    """The names that a power cut leaves."""
    is_sure: bool = True
    """Whether a power cut leaves its bytes."""


class Disk:
    """The files below a folder, after the calls so far."""

    def __init__(self, folder: Path, *, is_empty: bool = False) -> None:
        """All that is there now is sure; `is_empty` for a folder that the calls made."""
        self.folder = folder
        self._root = _Node() if is_empty else self._scan(folder)

    def _scan(self, path: Path) -> _Node:
        is_folder = path.is_dir() and not path.is_symlink()
        names = {child.name: self._scan(child) for child in path.iterdir()} if is_folder else {}
        return _Node(names, dict(names))

    def follow(self, call: Call) -> None:
        """Take in a call.

        A folder that one process makes may be used by another before strace writes the first one's return down: what
        is made in it tells that it is there.
        """
        paths = [path for path in call.paths if path.is_relative_to(self.folder)]
        if paths and call.name in MAKES:
            self._make(paths[-1].parent)
        if not paths or (node := self._find(paths[0].parent)) is None:
            return
        name = paths[0].name
        here = self._root if paths[0] == self.folder else node.names.get(name)
        if call.name in MAKES:
            if call.name not in ("open", "openat") or (here is None and "O_CREAT" in call.words):
                path = paths[-1]  # a link's target comes first
                if call.name.startswith("mkdir"):
                    self._make(path)
                else:
                    self._parent(path).names[path.name] = _Node()
            elif here is not None and "O_TRUNC" in call.words:
                here.is_sure = False
        elif call.name in MOVES:
            self._parent(paths[1]).names[paths[1].name] = node.names.pop(name)
        elif call.name in REMOVES:
            node.names.pop(name, None)
        elif here is not None and call.name in WRITES:
            here.is_sure = False
        elif here is not None and call.name in SYNCS:
            here.is_sure, here.sure_names = True, dict(here.names)

    def unsure(self, path: Path) -> list[str]:
        """Return what a power cut may take of a file, or of a folder and all in it; [] where it leaves all."""
        lost, node = [], self._root
        for name in path.relative_to(self.folder).parts:
            if name not in node.names:
                return [f"there is no {path}"]
            if node.sure_names.get(name) is not node.names[name]:
                lost.append(f"the name {name}")
            node = node.names[name]
        return [*lost, *self.unsure_within(path)]

    def unsure_within(self, path: Path) -> list[str]:
        """The same of its bytes alone, and of all in it, for a file or a folder that is about to get its name."""
        node, lost = self._find(path), []
        assert node is not None, path
        if not node.is_sure:
            lost.append(f"the bytes of {path.name}")
        for name, child in node.names.items():
            if node.sure_names.get(name) is not child:
                lost.append(f"the name {path.name}/{name}")
            lost += self.unsure_within(path / name)
        return lost

    def _find(self, path: Path) -> _Node | None:
        node: _Node | None = self._root
        for name in path.relative_to(self.folder).parts if path.is_relative_to(self.folder) else ():
            node = node.names.get(name) if node is not None else None
        return node

    def _make(self, path: Path) -> None:
        node = self._root
        for name in path.relative_to(self.folder).parts:
            node = node.names.setdefault(name, _Node())

    def _parent(self, path: Path) -> _Node:
        node = self._find(path.parent)
        assert node is not None, path
        return node
