"""Makes a Python process of a job run the snapshot of the user's code. Python imports this file when it starts.

The environment's own sitecustomize, which has the same name, runs after it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys


def _run_own_sitecustomize() -> None:
    spec = importlib.machinery.PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    import jobkit_snapshot  # type: ignore[import-not-found]

    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(__file__)]
    jobkit_snapshot.start(os.environ)
    _run_own_sitecustomize()
