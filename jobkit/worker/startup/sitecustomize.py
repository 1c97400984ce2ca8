"""Lets each Python of a `command:` run the submitted copy of its program. Python imports this file as it starts.

    bash run.sh --> python train.py --exec--> python <snapshot>/train.py

A script's folder, and for `-m` the current one, come before PYTHONPATH on a Python's import path. The environment's own
file of this name runs after this one. It must load in Pythons that jobkit does not know.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

RUN_MODULE = """\
import runpy, sys
code, module = sys.argv.pop(1), sys.argv.pop(1)
sys.path[0] = code
runpy._run_module_as_main(module)
"""


def in_snapshot(typed: list[str], words: list[str], code: str, source: str) -> list[str] | None:
    """Return the words of a Python with its program from the snapshot `code` of `source`; None where it has none.

    `typed` is sys.orig_argv, `words` sys.argv: at this moment it begins with the script as typed, or with `-m`.
    """
    options, arguments = typed[1 : len(typed) - len(words)], words[1:]
    if words[0] == "-m" and os.path.samefile(os.curdir, source):
        before, module = typed[len(typed) - len(arguments) - 2 : len(typed) - len(arguments)]
        options = typed[1 : len(typed) - len(arguments) - 2]
        if not before.endswith("m") or before.startswith("--"):
            return None
        options += [before[:-1]] if len(before) > 2 else []
        return [*options, "-c", RUN_MODULE, code, module, *arguments]
    name = os.path.relpath(os.path.abspath(words[0]), source)
    copy = os.path.join(code, name)
    if name.startswith(os.pardir) or not os.path.isfile(copy):
        return None
    return [*options, copy, *arguments]


def _run_the_next() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    spec = importlib.machinery.PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules[__name__] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if sys.version_info >= (3, 10) and os.environ.get("JOBKIT_CODE"):
        words = in_snapshot(sys.orig_argv, sys.argv, os.environ["JOBKIT_CODE"], os.environ["JOBKIT_SOURCE"])
        if words is not None:
            os.execv(sys.executable, [sys.executable, *words])
    _run_the_next()
