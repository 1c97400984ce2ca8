"""The imports of an agent, which its ranks do not repeat: jobkit's own, and the YAML's `preload:`.

A fork has none of the other threads of its parent, and no use of its devices: where an import has started a thread or
opened a device, ranks are started as new processes. agent.py calls it once, before its first Ready.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from jobkit.config.schema import Config
from jobkit.log import log
from jobkit.run.rundir import RunDir
from jobkit.worker import snapshot_path
from jobkit.worker.task import PLAIN_RANKS

MODULES = ("submitit.core.submission", "jobkit.worker.main", "jobkit.worker.task", "jobkit.config.load")
"""The modules that each rank imports before the user's code."""

MODULES_OF_TASKS = ("jobkit.loop.context", "jobkit.loop.join", "torch._dynamo")
"""The same for a rank of a `task:`: torch is among them. The first optimizer of a process imports torch._dynamo, which
takes 0.4 s."""

IMPORT_SECONDS = 900.0
"""After so long an import hangs: the agent shows where, and ends. From a cold disk, which all nodes of a large job read
at once, imports take minutes."""

DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/davinci")
"""Files that a process opens when it touches a device."""


def import_for_ranks(run: RunDir, config: Config, say: Callable[[str], None] = lambda words: None) -> str:
    """Import the modules of ranks before the fork; return the reason against a fork, or an empty text.

    `say` is told before each import that may take long: nobody can tell afterwards if it hangs.
    """
    if config.task:
        # numpy's OpenBLAS starts its threads when it is imported; ranks have as many cores as they were given.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        os.environ.setdefault("OMP_NUM_THREADS", str(config.resources.cpus_per_task))
    faulthandler.dump_traceback_later(IMPORT_SECONDS, exit=True)
    gc.disable()  # what an import makes stays: to look through it while it grows takes a tenth of the time
    say("it imports jobkit and torch")
    has_torch = bool(config.task) and not os.environ.get(PLAIN_RANKS)
    for name in (*MODULES, *(MODULES_OF_TASKS if has_torch else ())):
        importlib.import_module(name)
    from submitit.core.plugins import get_job_environments

    get_job_environments()  # it reads the entry points of all packages
    before = list(sys.path)
    snapshot_path.use(run.code.resolve(), Path.cwd())
    for name in config.preload:
        say(f"it imports {name}")
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):  # each rank imports it again, and its RankReport tells of the error
            traceback.print_exc()
    sys.path[:] = before
    reason = _against_forking()
    faulthandler.cancel_dump_traceback_later()
    gc.freeze()  # the ranks share this memory until somebody writes to it, as each garbage collection would
    gc.enable()
    if reason:
        log.warning("ranks start as new processes, which takes longer: an import has %s", reason)
    return reason


def _against_forking() -> str:
    """The reason against a fork of this process: other threads, which it does not have, or the state of a device."""
    if (
        len(list(Path("/proc/self/task").iterdir())) > 2
    ):  # ours, and faulthandler's, which goes some time after its cancel
        return "started a thread"
    opened = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
    return next((f"opened {name}" for name in opened if name.startswith(DEVICE_FILES)), "")
