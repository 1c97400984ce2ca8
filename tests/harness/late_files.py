"""What an NFS client does: it remembers that a file was not there, until the folder is read that it should be in."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class RememberedAbsence:
    """Files of one folder that were looked for in vain stay away for this process, be they there by now."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.absent: set[Path] = set()
        self._stat = os.stat
        for module, name in ((os, "stat"), (os, "open"), (io, "open")):
            monkeypatch.setattr(module, name, self._looking(getattr(module, name)))
        for name in ("scandir", "listdir"):
            monkeypatch.setattr(os, name, self._reading(getattr(os, name)))

    def _looking(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, (str, Path)) and self.folder in Path(path).parents:
                creates = real is not self._stat and self._creates(args)
                self._remember(Path(path), creates)
            return real(path, *args, **options)

        return look

    @staticmethod
    def _creates(args: tuple[Any, ...]) -> bool:
        how = args[0] if args else "r"
        return bool(how & os.O_CREAT) if isinstance(how, int) else how[0] in "wax"

    def _remember(self, path: Path, creates: bool) -> None:
        for one in reversed([path, *path.parents]):
            if self.folder not in one.parents:
                continue
            if one in self.absent and not creates:
                raise FileNotFoundError(2, "No such file or directory", str(path))
            try:
                self._stat(one, follow_symlinks=False)
            except FileNotFoundError:
                if not creates:
                    self.absent.add(one)
                return

    def _reading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(folder: Any = ".", *args: Any) -> Any:
            if isinstance(folder, (str, Path)):
                if self.absent & {Path(folder), *Path(folder).parents}:
                    raise FileNotFoundError(2, "No such file or directory", str(folder))
                found = real(folder, *args)
                self.absent = {one for one in self.absent if one.parent != Path(folder)}
                return found
            return real(folder, *args)

        return read


def made_elsewhere(path: Path, content: str) -> None:
    """Write a file as another host would: nothing here learns of it."""
    # A process of its own: what this one has opened, it knows.
    os.spawnlp(os.P_WAIT, "sh", "sh", "-c", 'mkdir -p "$(dirname "$1")" && printf %s "$2" > "$1"', "sh", path, content)
