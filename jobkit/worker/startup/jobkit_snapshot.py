"""Imports the user's modules from the snapshot of their code, whatever led to the folder where it may have changed.

No module of jobkit's: the Python of a `command:` need not have it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

CODE = "JOBKIT_CODE"
"""Environment variable of a rank and what it starts: the folder of the snapshot."""

SOURCE = "JOBKIT_SOURCE"
"""The same: the folder that the snapshot is a copy of, where the command was typed."""


@cache
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
        self._replaced: list[str] = []
        """What was on sys.path: it may hold what an installation says of the user's package, such as its version."""

    def copy_of(self, path: str) -> str | None:
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

    def _has(self, full: str) -> bool:
        return full == self._source or full.startswith(self._source + os.sep)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have, for the copy."""
        if _is_jobkit(fullname):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(fullname, path, target)) is not None:
                return self._moved(spec)
        return None

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

    def find_distributions(self, context: object = None) -> Iterable[object]:
        """What installations say of the user's packages, beside the code that they are installed from."""
        from importlib.metadata import DistributionFinder, MetadataPathFinder

        if "path" in vars(context):
            return []  # somebody asks for certain folders
        name = getattr(context, "name", None)
        return MetadataPathFinder.find_distributions(DistributionFinder.Context(name=name, path=self._replaced))

    def use(self) -> None:
        """From here on, import from the snapshot. What was imported from elsewhere before is imported again."""
        entries = [(entry, self.copy_of(entry)) for entry in sys.path]
        self._replaced = [entry for entry, copy in entries if copy is not None]
        sys.path[:] = list(dict.fromkeys(copy or entry for entry, copy in entries))
        sys.meta_path.insert(0, self)
        for name, module in list(sys.modules.items()):
            origin = getattr(getattr(module, "__spec__", None), "origin", None)
            if name == "__main__" or _is_jobkit(name) or not isinstance(origin, str):
                continue
            # By their folders first: a rank has 3000 modules, and hardly one of the user's.
            if self._has(_realpath(os.path.dirname(origin))) and self.copy_of(origin):
                del sys.modules[name]


def environment(source: str, code: str, before: Mapping[str, str]) -> dict[str, str]:
    """The variables by which what a rank starts imports from the snapshot, too, in an environment `before`."""
    finder = SnapshotFinder(source, code)
    entries = before.get("PYTHONPATH", "").split(os.pathsep) if before.get("PYTHONPATH") else []
    paths = [finder.copy_of(os.path.join(source, entry)) or os.path.join(source, entry) for entry in entries]
    startup = os.path.dirname(os.path.abspath(__file__))
    return {CODE: code, SOURCE: source, "PYTHONPATH": os.pathsep.join(dict.fromkeys([startup, *paths]))}


def start(variables: Mapping[str, str]) -> None:
    """Make this process, which has just started, run the snapshot that its environment names, if it names one."""
    if CODE in variables and SOURCE in variables:
        finder = SnapshotFinder(variables[SOURCE], variables[CODE])
        _run_script_of_snapshot(finder)
        finder.use()


def _run_script_of_snapshot(finder: SnapshotFinder) -> None:
    """Start again with the snapshot's copy of the script, where a shell has named that of the folder itself."""
    script = sys.argv[0] if hasattr(sys, "argv") and sys.argv else ""
    copy = finder.copy_of(script) if script not in ("", "-", "-c", "-m") else None
    if copy is not None and os.path.isfile(copy) and sys.executable:
        options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
        os.execv(sys.executable, [sys.executable, *options, copy, *sys.argv[1:]])


def _is_jobkit(module: str) -> bool:
    """jobkit runs from where it is installed, as its parents of ranks do, although that may be in the user's folder."""
    return module == "jobkit" or module.startswith("jobkit.")
