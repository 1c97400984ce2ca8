"""jobkit.init: the context in a script of the user's own, under any launcher, or in the `command:` of a YAML.

    python train.py | torchrun train.py | srun python train.py --> jobkit.init() --> Context ... ctx.finish(result)
    the interpreter's end --> End, as for a task (ending.py)

Nothing of the script's is patched: an exception hook and an exit function note how the script ended. Neither of them
sees the code of a sys.exit, so that a script has finished where ctx.finish has returned, and nowhere else.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, InputError, JobkitError, LostLease, Stopped
from jobkit.log import configure, log
from jobkit.run.identity import run_name
from jobkit.run.load import Loaded, load
from jobkit.run.rundir import RunDir
from jobkit.run.runs import runs_dir_of
from jobkit.run.schema import Config
from jobkit.run.yamlfile import Places
from jobkit.worker import launched
from jobkit.worker.context import Context
from jobkit.worker.ending import end_of, record
from jobkit.worker.join import join, leave
from jobkit.worker.launched import Launched
from jobkit.worker.launcher import find_launch
from jobkit.worker.rank import Rank
from jobkit.worker.signals import STOP_SIGNALS, take_stop_signals


def init(
    config: Path | str | None = None,
    *,
    name: str | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int | None = 0,
    runs_dir: Path | str | None = None,
) -> Context:
    """Return the context of this rank, in a script under python, torchrun, mpirun or srun. All ranks call it.

    ctx = jobkit.init(params={"lr": 1e-3})
    for epoch in ctx.epochs(10, model=model, optimizer=optimizer):
        for x, y in ctx.batches(loader): ...
    ctx.finish({"loss": loss.item()})

    `config` is a YAML as `jobkit submit` takes it; without one `name` (the script's by default) and `params` name the
    run. The same call continues the same run. With `seed=None` the script's own random numbers are left alone. In the
    `command:` of a YAML it is that run, and the arguments do not count. Where the run has finished already, the script
    ends with 0. Raises DistributedError where the ranks do not form one world.
    """
    configure("stdout")
    if os.environ.get("JOBKIT_RUN") and os.environ.get("JOBKIT_ATTEMPT"):
        rank = Rank.of_environment(RunDir(os.environ["JOBKIT_RUN"]))
        take_stop_signals()
        return _opened(rank, join(rank), None)
    loaded = load(Path(config)) if config is not None else _loaded(name, params, seed)
    import torch.distributed as dist

    stands = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None
    launch = find_launch(os.environ, stands)
    folder = runs_dir_of(Path(runs_dir) if runs_dir is not None else None)
    begun = launched.begin(loaded, RunDir(folder / run_name(loaded.config)), launch)
    if begun is None:
        raise SystemExit(EXIT_FINISHED)
    return _opened(begun.rank, begun.joined, begun)


def _loaded(name: str | None, params: Mapping[str, Any] | None, seed: int | None) -> Loaded:
    script = Path(sys.argv[0]).stem or "interactive"
    if not isinstance(params, (Mapping, type(None))):
        raise InputError(key="jobkit.init(params=...)", found=params, allowed="a mapping of names to plain values")
    # No `task` that others could import: the script itself is the program.
    config = Config(name=name or script, command=[sys.executable, sys.argv[0]], params=dict(params or {}), seed=seed)
    return Loaded(config=config, places=Places(Path(sys.argv[0])), notes=[], sweep=None, expressions={})


def _opened(rank: Rank, joined: Any, begun: Launched | None) -> Context:
    end = _ScriptEnd(rank, begun)
    end.register()  # first: a checkpoint that cannot be read is an end as well
    context = end.context = Context(rank, joined, os.environ)
    if context.is_done:
        context.finish_again()
        raise SystemExit(EXIT_FINISHED)
    if rank.rank == 0 and begun is not None:
        where = f"goes on from step {context.step}" if context.step else "begins"
        log.info("%s %s; run directory: %s", rank.run.name, where, rank.run.path)
    return context


class _ScriptEnd:
    """Notes how the script ended, once."""

    context: Context | None = None

    def __init__(self, rank: Rank, begun: Launched | None) -> None:
        self._rank, self._begun = rank, begun
        self._is_noted = False

    def register(self) -> None:
        shown = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, LostLease):
                log.warning("%s", error)
                os._exit(EXIT_RESUMABLE)
            if isinstance(error, JobkitError):
                print(f"error: {error}", file=sys.stderr)
            else:
                shown(kind, error, trace)
            self._note(error)

        sys.excepthook = hook
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if self.context is not None:
            self._note(self.context.stopped or self._unfinished(self.context))

    def _unfinished(self, context: Context) -> JobkitError | None:
        """Return the error of a script that ended by itself before ctx.finish."""
        if self._is_noted or context.is_finished:
            return None
        error = JobkitError(
            f"the script ended at step {context.step} without ctx.finish(result), which has to be its last line; "
            "the same command continues it"
        )
        print(f"error: {error}", file=sys.stderr)
        return error

    def _note(self, error: BaseException | None) -> None:
        if self._is_noted:
            return
        self._is_noted = True
        if isinstance(error, Stopped):  # the interpreter's end takes its handlers away: a signal would change the code
            for number in (*STOP_SIGNALS, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        if self.context is not None and (error is None or isinstance(error, Stopped)):
            self.context.close()
            leave()  # threads of a process group that stands would abort the interpreter's end, now and then
        end = end_of(self._rank, error, self.context.result if self.context is not None else None)
        record(self._rank, end)
        codes = {"finished": EXIT_FINISHED, "stopped": EXIT_RESUMABLE, "failed": EXIT_FAILED}
        if self._begun is not None:
            self._begun.close(end, codes[end.kind])
