"""One rank of one attempt, from the run directory to the end of the training function."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from submitit.core.job_environment import JobEnvironment

from jobkit.errors import EXIT_RESUMABLE
from jobkit.run.disk import is_full
from jobkit.run.rundir import RunDir
from jobkit.worker.context import Context, Stopped
from jobkit.worker.failure import show_stacks_when_asked, write_report
from jobkit.worker.launcher import Launch, topology_of
from jobkit.worker.meeting import meet
from jobkit.worker.notices import kill_children
from jobkit.worker.output import survive_full_disks
from jobkit.worker.session import join


def run_rank(path: str) -> None:
    """Run the task of the run directory `path` as the rank that Submitit's environment says this process is."""
    survive_full_disks()
    show_stacks_when_asked()
    run = RunDir(path)
    config = run.config()
    attempt = int(os.environ["JOBKIT_ATTEMPT"])
    topology = topology_of(JobEnvironment())
    context: Context | None = None
    try:
        topology.check(config.resources.world_size)
        _use_snapshot(Path(os.environ["JOBKIT_CODE"]))
        function = load_task(config.task)  # before the group forms: an import that fails should not keep others waiting
        meeting = meet(Launch("jobkit", topology, "file"), run.rendezvous_file(attempt))
        session = join(meeting, run, config, attempt)
        context = Context(session)
        if context.has_returned:
            context.finish_again()
        else:
            context.finish(function(context))
    except Stopped as stopped:
        print(f"jobkit: stopped at step {stopped.step}: {stopped.cause}", flush=True)
    except BaseException as error:
        write_report(run, attempt, topology, context, error)
        if context is not None:
            context.saver.wait(seconds=3.0)
        if is_full(error):
            traceback.print_exc()
            raise SystemExit(EXIT_RESUMABLE) from error  # the report may not have fit on the disk: this says it too
        raise
    finally:
        kill_children()
    session.close()


def _use_snapshot(code: Path) -> None:
    """Import the user's modules from the snapshot, not from the folder where they may have changed since."""
    here = Path.cwd()
    sys.path[:] = [str(code)] + [entry for entry in sys.path if entry != "" and Path(entry) != here]


def load_task(task: str) -> Callable[[Context], Any]:
    """The callable that `module:callable` names."""
    module, _, name = task.partition(":")
    function: Callable[[Context], Any] = getattr(importlib.import_module(module), name)
    return function
