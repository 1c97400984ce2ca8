"""The code snapshot on the import path: a run imports the code that was submitted, not what the folder holds today.

snapshot runs/<run>/code --first on sys.path--> this rank
                         --PYTHONPATH--> the Pythons that it starts, and those of a `command:` (startup/)

task.py, command.py and the agent's preload call it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def use(code: Path, source: Path) -> None:
    """Import modules from the snapshot `code` of the folder `source`, in this process and in the Pythons it starts."""
    sys.path[:] = _paths(code, source, sys.path)
    os.environ.update(environment(code, source, os.environ))


def environment(code: Path, source: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which another Python imports from the snapshot."""
    before = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(_paths(code, source, before))}


def for_programs(code: Path, source: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a `command:`: a Python, also one that a shell script starts, runs the copy of its program."""
    variables = environment(code, source, environ)
    startup = Path(__file__).with_name("startup")
    variables["PYTHONPATH"] = os.pathsep.join([str(startup), variables["PYTHONPATH"]])
    return {**variables, "JOBKIT_CODE": str(code), "JOBKIT_SOURCE": str(source)}


def _paths(code: Path, source: Path, before: list[str]) -> list[str]:
    """An import path with the snapshot first, and with its copy of each folder below the user's own."""
    paths = [str(code)]
    for entry in before:
        path = Path(source, entry)
        if path != source:
            copy = code / path.relative_to(source) if path.is_relative_to(source) else path
            # A folder `src` of the project may be on the path; an environment `.venv` in it is in no snapshot.
            paths.append(str(copy if copy.is_dir() else path))
    return list(dict.fromkeys(paths))
