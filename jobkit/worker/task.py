"""The program of one rank: the function of the YAML's `task:`, or the program of its `command:`.

Worker() -> run_rank -> join -> Context -> load_task("mytask:train")(ctx) -> finish -> RankReport (ending.py)

main.py calls it, and __main__.py under a foreign launcher.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jobkit.errors import Stopped, UsageError, nearest
from jobkit.loop.rank import Rank
from jobkit.run.rundir import RunDir
from jobkit.worker import snapshot_path
from jobkit.worker.command import become_command
from jobkit.worker.ending import run_recorded

if TYPE_CHECKING:
    from jobkit.loop.context import Context

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of all its threads to its error log: the agent sends it before it kills a hung rank."""

PLAIN_RANKS = "PLAIN_RANKS"
"""A variable with which a task gets the bare Rank, without torch: for tests about scheduling."""


def run_rank(run: RunDir) -> int:
    """Run the program of the rank that this process is, record how it ended, and return its exit code."""
    # From C: also while a thread that holds the interpreter never lets go of it.
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    os.register_at_fork(after_in_child=lambda: faulthandler.unregister(STACKS_SIGNAL))
    rank = Rank.of_environment(run)
    return run_recorded(rank, lambda: _run_program(rank))


def _run_program(rank: Rank) -> Any:
    if rank.stop_asked:  # the agent was told before it could fork this rank
        raise Stopped
    if rank.config.command:
        become_command(rank)
    # Here: a `command:` needs no torch, and the agent has imported it for the ranks of a task.
    is_plain = bool(os.environ.get(PLAIN_RANKS))
    if not is_plain:
        from jobkit.loop.join import join, leave, take_threads

        take_threads(rank.config.resources.cpus_per_task)
    snapshot_path.use(rank.run.code.resolve(), Path.cwd())
    for name in rank.config.preload:  # in the agent already, unless the import failed there: this is where it is told
        _import(name)
    function = load_task(rank.config.task)
    if is_plain:
        return function(rank)
    from jobkit.loop.context import Context

    context = Context(rank, join(rank), os.environ)
    result = finish_task(context, function)
    leave()
    return result


def finish_task(context: Context, function: Callable[[Any], Any]) -> Any:
    """Return the result of a training function; it is not called where only its end was lost."""
    if context.is_done:
        return context.finish_again()
    try:
        result = function(context)
    except SystemExit as error:
        if error.code in (None, 0):  # else half a training would count as finished
            raise UsageError("the training function called sys.exit: it has finished where it returns") from error
        raise
    return context.finish(result)


def _import(module: str) -> ModuleType:
    """Import a module of the user's. Raises UsageError if it calls sys.exit: a rank that exits with 0 has finished."""
    try:
        return importlib.import_module(module)
    except SystemExit as error:
        raise UsageError(f"the import of {module} ended with sys.exit({error.code})") from error


def load_task(task: str) -> Callable[[Any], Any]:
    """The callable that `module:callable` names. Raises UsageError if there is none."""
    module, _, name = task.partition(":")
    imported = _import(module)
    function: Callable[[Any], Any] | None = getattr(imported, name, None)
    if not callable(function):
        problem = f"is a {type(function).__name__}, not a function" if hasattr(imported, name) else "does not exist"
        hint = nearest(name, (key for key, value in vars(imported).items() if callable(value)))
        raise UsageError("; ".join(part for part in (f"task: {task} {problem}", hint) if part))
    return function
