"""Starts jobkit's own programs: `python .../jobkit/start.py MODULE ARGUMENT ...` calls the `main` of a module.

They run in the user's folder. There `python -m` would take a secrets.py or a queue.py of the user for the standard
library's. For a program that is a file, Python puts the folder of that file on sys.path, and not the current one.
"""

from __future__ import annotations

import os
import sys

FILE = os.path.abspath(__file__)

ROOT = os.path.dirname(os.path.dirname(FILE))
"""The folder that this jobkit is imported from."""

MOVED = {"jobkit.worker.agent": "jobkit.agent.agent", "jobkit.supervisor.gpus": "jobkit.agent.gpus"}
"""Modules by the names of the edition before: its processes may live while jobkit is replaced under them."""

COPY = "JOBKIT_COPY_"
"""Variables that begin so hold `NAME=VALUE` each, for a NAME that shells on the way drop (config/machine.py)."""


def words(module: str, *arguments: str) -> list[str]:
    """The command that runs `main(arguments)` of a module."""
    return [sys.executable, "-u", FILE, module, *arguments]


def leave_current_folder() -> None:
    """Import nothing from the current folder from here on, except jobkit itself where it is there."""
    current = os.path.realpath(os.getcwd())
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != current]
    if os.path.realpath(ROOT) == current:
        sys.path.append(ROOT)  # jobkit's checkout: its metadata is nowhere else


def _run(module: str, *arguments: str) -> object:
    for copy in [name for name in os.environ if name.startswith(COPY)]:
        name, _, value = os.environ.pop(copy).partition("=")
        os.environ.setdefault(name, value)
    if sys.path[0] == os.path.dirname(FILE):  # not so with PYTHONSAFEPATH
        del sys.path[0]
    leave_current_folder()
    sys.path.insert(0, ROOT)
    import jobkit  # noqa: F401 - the jobkit of this file, whichever others are installed

    del sys.path[0]
    for stream in (sys.stdout, sys.stderr):  # jobkit reads its own logs as UTF-8, whatever the locale is
        if stream is not None:
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    from importlib import import_module

    del sys.argv[1]
    return import_module(MOVED.get(module, module)).main(list(arguments))


if __name__ == "__main__":
    sys.exit(_run(*sys.argv[1:]))  # type: ignore[arg-type]
