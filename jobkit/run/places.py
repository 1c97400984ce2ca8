"""Where a person wrote each value of a config: the beginning of every message about one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobkit.errors import InputError, InvalidValue, NoSuchModule

TYPE_THERE = ": type the command there"


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a person wrote each value of a config, for the errors about it."""

    path: Path
    lines: Mapping[str, int]
    """The line of each dotted key in the file."""
    own_lines: Mapping[str, int] = field(default_factory=dict)
    """The same in the user's own file of clusters, `own_file`."""
    own_file: Path | None = None
    demo: bool = False
    """Whether the file's `demo:` was merged over the rest of it."""
    stage: str = ""
    """The stage of the file's `pipeline:` that was merged over the rest of it."""
    overridden: dict[str, str] = field(default_factory=dict)
    """Dotted keys that the command line or a sweep has set, each with the place where it stands."""

    def of(self, key: str) -> str:
        """A dotted key's place, `file:line: key`: the beginning of an error message about it."""
        for one in reversed(self.overridden):
            if key == one or key.startswith(f"{one}."):
                return f"{self.overridden[one]}: {key}"
        if key in self.own_lines:
            return f"{self.own_file}:{self.own_lines[key]}: {key}"
        in_stage = (f"pipeline.{self.stage}.{key}",) if self.stage else ()
        for candidate in (*in_stage, *((f"demo.{key}",) if self.demo else ()), key):
            line = self.lines.get(re.sub(r"\[(\d+)\]", r".\1", candidate))  # OmegaConf's `inputs[0]`
            if line is not None:
                return f"{self.path}:{line}: {candidate}"
        for one in self.overridden if key else ():
            if one.startswith(f"{key}."):
                return f"{self.overridden[one]}: {key}"
        return f"{self.path}: {key}" if key else f"{self.path}"

    @contextlib.contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Put the place before what is said of a value within this context."""
        try:
            yield
        except InvalidValue as error:
            raise InputError(f"{self.of(error.key)}: {error.problem}{self._folder_of_module(error)}") from None

    def _folder_of_module(self, error: InvalidValue) -> str:
        """`; it is in ...: type the command there` for a module that is in a folder above the YAML."""
        if not isinstance(error, NoSuchModule) or error.problem.endswith(TYPE_THERE):
            return ""
        file = error.module.replace(".", "/")
        above = self.path.absolute().parents
        found = (one for one in above if (one / f"{file}.py").is_file() or (one / file / "__init__.py").is_file())
        folder = next(found, None)
        return f"; it is in {folder}{TYPE_THERE}" if folder is not None else ""
