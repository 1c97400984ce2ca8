"""Makes a Python process of a job run the snapshot of the user's code. Python imports this file when it starts.

The environment's own sitecustomize, which has the same name, runs after it, whatever happens here.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_own_sitecustomize():  # type: () -> None
    spec = importlib.machinery.PathFinder.find_spec(__name__, sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


def _leave_this_folder():  # type: () -> None
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(__file__)]


def _use_snapshot():  # type: () -> None
    try:
        import jobkit_snapshot  # type: ignore[import-not-found]
        import jobkit_torch_threads  # type: ignore[import-not-found]

        _leave_this_folder()
        jobkit_torch_threads.wait_at_exit()
        jobkit_snapshot.start(os.environ)
    except Exception:  # as a Python older than it is written for: the program runs as it would without jobkit
        _leave_this_folder()


if __name__ == "sitecustomize":
    _use_snapshot()
    _run_own_sitecustomize()
