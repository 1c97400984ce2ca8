"""One rank of a YAML's `task:`, from the run directory to the end of the training function."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from typing import Any

from submitit.core.job_environment import JobEnvironment

from jobkit.display import Display
from jobkit.errors import EXIT_RESUMABLE, UsageError
from jobkit.log import log
from jobkit.run.disk_errors import is_full
from jobkit.run.rundir import RunDir
from jobkit.worker.context import Context
from jobkit.worker.failure import show_stacks_when_asked, write_report
from jobkit.worker.imported import write_imported
from jobkit.worker.launcher import Launch, topology_of
from jobkit.worker.lease import LostLease, end_after_lost_lease
from jobkit.worker.output import survive_full_disks
from jobkit.worker.rank import Rank, join
from jobkit.worker.rendezvous import rendezvous
from jobkit.worker.reporter import RunReporter
from jobkit.worker.startup.jobkit_snapshot import SnapshotFinder, environment
from jobkit.worker.stop import STOP_SIGNALS, CauseFinder, Stopped, kill_children

GRACE_SECONDS = 3.0
"""What a checkpoint that is being written gets to become durable when the function has failed: the supervisor kills
the ranks beside a failed one that soon, and then no checkpoint becomes complete."""


def run_rank(path: str) -> None:
    """Run the task of the run directory `path` as the rank that Submitit's environment says this process is."""
    before = frozenset(sys.modules)
    survive_full_disks()  # before anything may print
    show_stacks_when_asked()
    run = RunDir(path)
    config = run.config()
    attempt = int(os.environ["JOBKIT_ATTEMPT"])
    topology = topology_of(JobEnvironment())
    context: Context | None = None
    try:
        topology.check(config.resources.ranks_per_node, config.resources.fewest_nodes, config.resources.nodes)
        _use_snapshot(os.environ["JOBKIT_SOURCE"], os.environ["JOBKIT_CODE"])
        function = load_task(config.task)  # before the group forms: an import that fails should not keep others waiting
        found = rendezvous(Launch("jobkit", topology, "file"), run.rendezvous_file(attempt))
        rank = join(found, run, config, attempt)
        context = open_context(rank, on_first_step=_tell_imports(rank, before))
        if context.ending.has_returned:
            context.ending.finish_again()
        else:
            context.finish(function(context))
    except Stopped as stopped:
        log.info("stopped at step %d: %s", stopped.step, stopped.cause)
        kill_children()
        if context is not None:
            context.ending.close()
    except LostLease as error:
        end_after_lost_lease(error)
    except BaseException as error:
        step, samples = context.ending.position() if context is not None else (None, ())
        # Before the wait: the supervisor blames the rank whose report is the first, and kills this one soon.
        write_report(run, attempt, topology, error, step, samples)
        if context is not None:
            context.ending.wait_for_checkpoint(GRACE_SECONDS)
        if is_full(error):
            traceback.print_exc()
            raise SystemExit(EXIT_RESUMABLE) from error  # the report may not have fit on the disk: this says it too
        raise
    finally:
        kill_children()


def open_context(
    rank: Rank,
    *,
    display: Display | None = None,
    unknown_cause: str | None = None,
    on_first_step: Callable[[], None] = lambda: None,
) -> Context:
    """The context of a rank, on all ranks together; `display` is drawn by rank 0 itself.

    `on_first_step` is called when this attempt's first step is done. `unknown_cause` is that of a stop of which neither
    jobkit nor the scheduler knows; None makes it a false alarm.
    """
    finder = CauseFinder(rank.run, rank.attempt, STOP_SIGNALS, unknown_cause)
    if rank.is_main:
        finder.look_around()
    reporter = RunReporter(
        rank.run,
        rank.attempt,
        rank.is_main,
        on_lost_lease=end_after_lost_lease,
        display=display,
    )
    return Context(rank, reporter, finder, on_first_step)


def _tell_imports(rank: Rank, before: Collection[str]) -> Callable[[], None]:
    """What lets rank 0 tell the parents what it has imported since, beside the training."""
    if not rank.is_main:
        return lambda: None
    return threading.Thread(target=write_imported, args=(rank.run, before), daemon=True).start


def _use_snapshot(source: str, code: str) -> None:
    """Import the user's modules from the snapshot, not from the folder `source`, where they may have changed since."""
    os.environ.update(environment(source, code, os.environ))  # for what this rank starts
    sys.path[:] = [source, *filter(None, sys.path)]
    SnapshotFinder(source, code).use()


def load_task(task: str) -> Callable[[Context], Any]:
    """The callable that `module:callable` names; UsageError where it is none."""
    module, _, name = task.partition(":")
    function: Callable[[Context], Any] = getattr(importlib.import_module(module), name)
    if not callable(function):
        kind = type(function).__name__
        raise UsageError(f"task: {task} is {'an' if kind[0] in 'aeiou' else 'a'} {kind}, not a function")
    return function
