"""Imports the user's modules from the snapshot of their code, whatever led to the folder where it may have changed.

No module of jobkit's, and for Python 3.6 and later: the Python of a `command:` need not be jobkit's own.
"""

import importlib.machinery
import importlib.util
import os
import sys
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Dict, Iterable, List, Mapping, MutableMapping, Optional, Sequence

CODE = "JOBKIT_CODE"
"""Environment variable of a rank and what it starts: the folder of the snapshot."""

SOURCE = "JOBKIT_SOURCE"
"""The same: the folder that the snapshot is a copy of, where the command was typed."""


@lru_cache(maxsize=None)
def _realpath(folder: str) -> str:
    """As os.path.realpath, with one look at the disk for each of a process's thousand folders."""
    parent, name = os.path.split(folder)
    full = os.path.join(_realpath(parent), name) if name else folder
    return os.path.realpath(full) if os.path.islink(full) else full


class SnapshotFinder(MetaPathFinder):
    """Finds each module where Python would, and takes the snapshot's copy of it if there is one.

    So it does not matter how Python comes to a folder: by sys.path, a .pth file, the finder of an editable install, or
    a link in site-packages.
    """

    def __init__(self, source: str, code: str) -> None:
        self._source, self._code = os.path.realpath(source), code
        self._copies = {}  # type: Dict[str, Optional[str]]
        self._replaced = []  # type: List[str]
        """What was on sys.path: it may hold what an installation says of the user's package, such as its version."""

    def copy_of(self, path: str) -> Optional[str]:
        """The snapshot's copy of a file or a folder; None for what it has no copy of."""
        full = os.path.abspath(path)
        folder, name = os.path.split(full)
        candidates = [full, os.path.join(_realpath(folder), name)]
        if os.path.islink(candidates[1]):
            candidates.append(os.path.realpath(full))
        for one in filter(self._has, candidates):
            copy = os.path.join(self._code, one[len(self._source) + 1 :]).rstrip(os.sep)
            if os.path.exists(copy):
                return copy
        return None

    def original_of(self, path: str) -> str:
        """What a path in the snapshot is a copy of; any other path as it is."""
        full = os.path.abspath(path)
        inside = full == self._code or full.startswith(self._code + os.sep)
        return os.path.join(self._source, full[len(self._code) + 1 :]).rstrip(os.sep) if inside else path

    def _has(self, full: str) -> bool:
        return full == self._source or full.startswith(self._source + os.sep)

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        """The spec that the other finders have, for the copy."""
        if _is_jobkit(fullname):
            return None
        others = [one for one in sys.meta_path if not _is_snapshot_finder(one) and hasattr(one, "find_spec")]
        folders = list(sys.path if path is None else path)
        copies = [self._folder(one) for one in folders]
        # The copies first: a file that came into the folder later would hide a module of the snapshot, or an installed.
        if copies != folders:
            for finder in others:
                where = copies if finder is importlib.machinery.PathFinder else path
                spec = finder.find_spec(fullname, where, target)
                if spec is not None:
                    return self._moved(spec)
            others = [importlib.machinery.PathFinder]
        for finder in others:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return self._moved(spec)
        return None

    def _folder(self, entry: str) -> str:
        """The copy of a folder that Python looks in; the folder itself where there is none."""
        if not isinstance(entry, str):
            return entry
        full = entry if os.path.isabs(entry) else os.path.abspath(entry)  # it is asked for each import
        if full not in self._copies:
            self._copies[full] = self.copy_of(full)
        return self._copies[full] or entry

    def _moved(self, spec: ModuleSpec) -> ModuleSpec:
        copy = self.copy_of(spec.origin) if spec.has_location and spec.origin else None
        if copy is None:
            return spec
        # Of the same class: another finder may have chosen one that rewrites the source.
        loader = spec.loader
        if isinstance(loader, importlib.machinery.SourceFileLoader):
            loader = type(loader)(spec.name, copy)
        else:
            loader = None
        inside = [os.path.dirname(copy)] if spec.submodule_search_locations is not None else None
        moved = importlib.util.spec_from_file_location(
            spec.name, copy, loader=loader, submodule_search_locations=inside
        )
        return moved or spec

    def find_distributions(self, context: Any = None) -> Iterable[Any]:
        """What installations say of the user's packages, beside the code that they are installed from."""
        if "path" in vars(context):
            return []  # somebody asks for certain folders
        try:
            from importlib.metadata import DistributionFinder, MetadataPathFinder
        except ImportError:  # Python 3.7, where a package of another name asks
            return []
        name = getattr(context, "name", None)
        return MetadataPathFinder.find_distributions(DistributionFinder.Context(name=name, path=self._replaced))

    def use(self) -> None:
        """From here on, import from this snapshot, and from no other.

        What was imported from elsewhere before is imported again.
        """
        others = _snapshot_finders()
        for other in others:
            other.leave()
        copies = [(entry, self.copy_of(entry)) for entry in sys.path]
        self._replaced = [entry for entry, copy in copies if copy is not None]
        sys.path[:] = _each_once(copy or entry for entry, copy in copies)
        sys.meta_path.insert(0, self)
        for name, module in list(sys.modules.items()):
            origin = getattr(getattr(module, "__spec__", None), "origin", None)
            if name == "__main__" or _is_jobkit(name) or not isinstance(origin, str):
                continue
            for other in others:
                origin = other.original_of(origin)
            # By their folders first: a rank has 3000 modules, and hardly one of the user's.
            if self._has(_realpath(os.path.dirname(origin))) and self.copy_of(origin):
                del sys.modules[name]

    def leave(self) -> None:
        """From here on, import what is in the folder itself."""
        sys.meta_path[:] = [one for one in sys.meta_path if one is not self]
        sys.path[:] = _each_once(map(self.original_of, sys.path))


def environment(source: str, code: str, before: Mapping[str, str]) -> Dict[str, str]:
    """The variables by which what a rank starts imports from the snapshot, too, in an environment `before`."""
    finder = SnapshotFinder(source, code)
    entries = before["PYTHONPATH"].split(os.pathsep) if before.get("PYTHONPATH") else []
    # Relative to where Python starts, as it takes them, or where `setup` lines have left it: to the user's folder.
    full = [os.path.abspath(one) if os.path.exists(one) else os.path.join(source, one) for one in entries]
    paths = [finder.copy_of(one) or one for one in full]
    return {CODE: code, SOURCE: source, "PYTHONPATH": os.pathsep.join(_each_once([_STARTUP] + paths))}


def leave(variables: MutableMapping[str, str]) -> None:
    """Take out of this process, and of its environment `variables`, the snapshot of the run that it was started in.

    What a submission within a run starts has its own.
    """
    for finder in _snapshot_finders():
        finder.leave()
    source, code = variables.pop(SOURCE, None), variables.pop(CODE, None)
    entries = variables["PYTHONPATH"].split(os.pathsep) if variables.get("PYTHONPATH") else []
    if _STARTUP in entries and source and code:
        original_of = SnapshotFinder(source, code).original_of
        kept = os.pathsep.join(original_of(entry) for entry in entries if entry != _STARTUP)
        if kept:
            variables["PYTHONPATH"] = kept
        else:
            del variables["PYTHONPATH"]


def start(variables: Mapping[str, str]) -> None:
    """Make this process, which has just started, run the snapshot that its environment names, if it names one."""
    if CODE in variables and SOURCE in variables:
        finder = SnapshotFinder(variables[SOURCE], variables[CODE])
        _run_script_of_snapshot(finder)
        finder.use()


def _run_script_of_snapshot(finder: SnapshotFinder) -> None:
    """Start again with the snapshot's copy of the script, where a shell has named that of the folder itself."""
    words = _command_line()
    index = _place_of_script(words)
    copy = finder.copy_of(words[index]) if index else None
    if copy is not None and os.path.isfile(copy) and sys.executable:
        os.execv(sys.executable, [sys.executable] + words[1:index] + [copy] + words[index + 1 :])


def _command_line() -> List[str]:
    """The words that this process was started with; none where nobody knows them."""
    words = getattr(sys, "orig_argv", None)  # from Python 3.10 on
    if words is None:
        try:
            with open("/proc/self/cmdline", "rb") as file:
                words = [os.fsdecode(one) for one in file.read().split(b"\0")[:-1]]
        except OSError:
            words = []
    return list(words)


def _place_of_script(words: Sequence[str]) -> int:
    """Which of a Python's words is the script that it runs; 0 where it runs a module, statements or its input."""
    index = 1
    while index < len(words) and words[index] != "-":
        word = words[index]
        if not word.startswith("-"):
            return index
        takes_next = word == "--check-hash-based-pycs"
        for place, letter in enumerate(word[1:] if not word.startswith("--") else "", 2):
            if letter in "cm":
                return 0
            if letter in "WX":  # its value is the rest of the word, or the next
                takes_next = place == len(word)
                break
        index += 2 if takes_next else 1
    return 0


def _is_snapshot_finder(finder: object) -> bool:
    """By its name: sitecustomize and a rank import this module under two names."""
    return type(finder).__name__ == SnapshotFinder.__name__


def _snapshot_finders() -> List[Any]:
    return [one for one in sys.meta_path if _is_snapshot_finder(one)]


def _is_jobkit(module: str) -> bool:
    """jobkit runs from where it is installed, as its parents of ranks do, although that may be in the user's folder."""
    return module == "jobkit" or module.startswith("jobkit.")


def _each_once(entries: Iterable[str]) -> List[str]:
    """In the order of their first: a dict keeps it from Python 3.6 on."""
    return list(dict.fromkeys(entries))


_STARTUP = os.path.dirname(os.path.abspath(__file__))
