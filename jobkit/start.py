"""Starts jobkit's own programs: `python .../jobkit/start.py MODULE ARGUMENT ...` calls the `main` of a module.

They run in the user's folder, where `python -m` would take a secrets.py or a queue.py for the standard library's, one
of next week, too. Of a file's program Python puts the file's folder on sys.path, and not the current one.
"""

from __future__ import annotations

import os
import sys

FILE = os.path.abspath(__file__)

ROOT = os.path.dirname(os.path.dirname(FILE))
"""Where jobkit is imported from."""


def words(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this jobkit's."""
    return [sys.executable, "-u", FILE, module, *arguments]


def leave_current_folder() -> None:
    """Import nothing from the current folder from here on, however it came onto sys.path.

    Where jobkit itself is there, as in its checkout, what is nowhere else is still found: its own metadata is.
    """
    here = os.path.realpath(os.getcwd())
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
    if os.path.realpath(ROOT) == here:
        sys.path.append(ROOT)


def _run(module: str, *arguments: str) -> object:
    if sys.path[0] == os.path.dirname(FILE):  # not with PYTHONSAFEPATH
        del sys.path[0]
    leave_current_folder()
    sys.path.insert(0, ROOT)
    import jobkit  # noqa: F401 - the one that this file is of, whichever others there are

    del sys.path[0]
    for stream in (sys.stdout, sys.stderr):  # a file or a pipe, which jobkit reads as UTF-8 whatever the locale
        if stream is not None:  # not what the user's own programs print: a `command:` replaces this one
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    from importlib import import_module

    del sys.argv[1]
    return import_module(module).main(list(arguments))


if __name__ == "__main__":
    sys.exit(_run(*sys.argv[1:]))  # type: ignore[arg-type]
