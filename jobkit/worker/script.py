"""jobkit.init(): the same context in a script that a launcher started, or that a YAML's `command:` names."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock
from omegaconf import OmegaConf

from jobkit.display import Display
from jobkit.errors import InputError
from jobkit.log import configure, log
from jobkit.run import records
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.experiment import load
from jobkit.run.identity import name_in
from jobkit.run.own_outputs import check_outputs, refuse_misspelt
from jobkit.run.records import Failure
from jobkit.run.rundir import RunDir
from jobkit.run.runs import default_runs_dir
from jobkit.supervisor.diagnosis import EndCause, own_failure
from jobkit.worker.advice import without_checkpoints
from jobkit.worker.context import Context
from jobkit.worker.disks import disks_of_command, find_disks
from jobkit.worker.failure import MistakesInALine, show_stacks_when_asked, write_report
from jobkit.worker.launched import begin, make_folders, refuse_different_configs, with_ranks
from jobkit.worker.launcher import Topology, find_topology
from jobkit.worker.lease import LostLease, end_after_lost_lease
from jobkit.worker.no_loop import SignalsBeforeLoop
from jobkit.worker.output import survive_full_disks
from jobkit.worker.params import check_same_run, plain_params
from jobkit.worker.rank import Rank, join
from jobkit.worker.rendezvous import existing_group, inherited, rendezvous
from jobkit.worker.results import literal
from jobkit.worker.startup.jobkit_torch_threads import wait_at_exit
from jobkit.worker.stop import STOP_SIGNALS, CauseFinder, kill_children
from jobkit.worker.task import GRACE_SECONDS, open_context

REPORT_SECONDS = 10.0
"""How long rank 0, which has only lost a connection, waits for the report of the rank that failed: that one may still
be printing its traceback. Launchers give the ranks 30 s between SIGTERM and SIGKILL."""


def init(
    config: Path | str | None = None,
    *,
    name: str | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int | None = 0,
    gpus: int | None = None,
    runs_dir: Path | str | None = None,
) -> Context:
    """A context for a script under python, torchrun, mpirun, srun or Submitit: checkpoints, and exit code 75 on a stop.

    `config` is a YAML as `jobkit.submit` takes it, except that the launcher decides how many ranks there are; without
    one, `name` (default: the script's) and `params` make it. `gpus`, of each rank, is the YAML's, or 1 where there are
    any. With `seed=None` the script's own random numbers are left alone: they are in the checkpoints, and what it draws
    between here and its loop is the same in each attempt. Every rank calls this, and `finish(result)` at the end; the
    same call continues the same run under whatever launcher. A process group that exists is used. Where the run is
    finished already, all ranks exit with 0.

    In the `command:` of a YAML it is that run: the YAML decides, and `params` only adds what it does not name.

    Raises DistributedError on every rank where they do not form one world, JobkitError where somebody else runs it.
    """
    configure("stdout")
    MistakesInALine.install()
    wait_at_exit()
    run = _run_of_command()
    if run is not None:
        return _continue_command(run, params or {}, keeps_generators=seed is None)
    if config is not None and (name is not None or params is not None):
        raise InputError(f"jobkit.init: {config} has name and params; give either the YAML or them")
    chosen = load(Path(config)).config if config is not None else _config(name, params, seed)
    if chosen.start_from.run:
        raise InputError(
            f"jobkit.init: {config} has start_from, which jobkit submit alone carries out: make the script its command"
        )
    if seed is None:
        chosen = dataclasses.replace(chosen, seed=None)
    if config is None and gpus is None:
        gpus = int(torch.accelerator.is_available())
    folder = Path(runs_dir or default_runs_dir()).absolute()
    run = RunDir(folder / name_in(folder, chosen))
    launch = find_topology(inherited(), existing_group())
    make_folders(run)
    found = rendezvous(launch, run.launch_file(launch.key))
    if config is None:
        check_same_run(found.group, chosen)
    else:  # all of it: its other keys are what is trained, too
        refuse_different_configs(chosen, found.group)
    chosen = found.group.all_or_none(lambda: with_ranks(chosen, found.topology, gpus))
    disks = find_disks(run, chosen, found.topology, found.group)
    lock = run.alive_lock()
    number = found.group.on_main(lambda: begin(run, chosen, launch.launcher, lock))
    if number is None:
        raise SystemExit(0)
    STOP_SIGNALS.install()
    return open_run(join(found, run, chosen, number, disks), lock)


def open_run(rank: Rank, lock: FileLock) -> Context:
    """The context of a rank that somebody else's launcher has started, and on rank 0 a line that says where it is.

    `lock` is the run's alive_lock, which rank 0 holds. Ends this process, with 0, where the run had returned already.
    """
    run, disks = rank.run, rank.disks
    display = Display(run.name) if rank.is_main else None  # what a follower would draw outside
    # Nobody outside knows more than that one rank got a signal.
    context = open_context(rank, display=display, unknown_cause="user")
    ScriptEnd(context, rank, in_command=False, display=display, lock=lock).register()
    if display is not None:
        goes_on = f"goes on from step {context.step}" if context.step else "begins"
        display.say(f"{run.name} {goes_on}; run directory: {run.path}")
        if disks:
            display.say(f"{len(disks)} nodes have disks of their own: each keeps a whole copy of every checkpoint")
    return _unless_finished(context)


def _config(name: str | None, params: Mapping[str, Any] | None, seed: int | None) -> Config:
    script, given = Path(sys.argv[0]).stem or "interactive", plain_params(params or {})
    refuse_misspelt(given)
    try:
        task = f"{re.sub(r'[^A-Za-z0-9_.]', '_', script)}:main"  # of train-gan.py, which no module could be called
        made = Config(name=name or script, task=task, params=given, seed=seed)
    except InputError:
        raise InputError(f"jobkit.init: {name!r} cannot name a run") from None
    check_outputs(made)
    return made


# In the `command:` of a YAML


def _run_of_command() -> RunDir | None:
    path, attempt = os.environ.get("JOBKIT_RUN"), os.environ.get("JOBKIT_ATTEMPT")
    if not path or not attempt:
        return None
    run = RunDir(path)
    return run if run.exists() and run.config().command else None


def _continue_command(run: RunDir, params: Mapping[str, Any], *, keeps_generators: bool) -> Context:
    """The context of an attempt that jobkit has begun, and will end."""
    survive_full_disks()
    show_stacks_when_asked()
    number, topology = int(os.environ["JOBKIT_ATTEMPT"]), Topology(rank=int(os.environ.get("RANK") or 0))
    config = run.config()
    merged: Any = OmegaConf.to_container(OmegaConf.merge(literal(plain_params(params)), literal(config.params)))
    try:
        found = rendezvous(find_topology(inherited(), existing_group()), run.rendezvous_file(number))
        topology = found.topology
        seed = None if keeps_generators else config.seed
        config = dataclasses.replace(config, params=merged, seed=seed)
        rank = join(found, run, config, number, disks_of_command(os.environ))
        # Not before: a rank that waits for one which has ended of the signal has nothing to save, and would call no
        # handler until torch gives up, after minutes.
        STOP_SIGNALS.install()
        context = open_context(rank)
    except BaseException as error:
        write_report(run, number, topology, error, None, ())
        raise
    ScriptEnd(context, rank, in_command=True).register()
    return _unless_finished(context)


def _unless_finished(context: Context) -> Context:
    """`context`, unless an earlier attempt had made the result durable and died before it could record it."""
    if not context.ending.has_returned:
        return context
    context.ending.finish_again()
    raise SystemExit(0)


@dataclasses.dataclass
class ScriptEnd:
    """What follows when the interpreter ends: after a stop, an exception, `finish`, or none of them."""

    context: Context
    rank: Rank
    in_command: bool
    """Whether jobkit started the script, and records how it ended."""
    display: Display | None = None
    lock: FileLock | None = None
    """Held until this process ends."""
    has_run: bool = False
    signals: SignalsBeforeLoop = dataclasses.field(init=False)

    def register(self) -> None:
        """Run when the script ends: after an error at once, for at exit Python waits for the script's threads first."""
        self.signals = SignalsBeforeLoop(self.context, STOP_SIGNALS, self._record_signal)
        self.signals.begin()
        show = sys.excepthook

        def show_and_run(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            show(kind, error, trace)
            if error is getattr(sys, "last_value", None):  # else the script only shows it, and goes on
                self.run(error)

        sys.excepthook = show_and_run
        # The script may have put a hook of its own in this one's place since.
        atexit.register(lambda: self.run(getattr(sys, "last_value", None)))

    def run(self, error: BaseException | None = None) -> None:
        if self.has_run:
            return
        self.has_run = True
        self.signals.end()
        try:
            if isinstance(error, LostLease):
                raise error
            if self.context.ending.stopped is not None and not self.context.ending.is_closed:
                kill_children()
                self.context.ending.close()  # together: a launcher that sees one rank end with 75 kills the others
            if error is None and self.context.ending.ends_by_itself:
                self.context.ending.finish_by_itself()
            if not self.context.ending.is_closed:
                self._end_early(error)
        except LostLease as lost:
            end_after_lost_lease(lost)
        if self.display is not None:
            self.display.close()

    def _end_early(self, error: BaseException | None) -> None:
        """The script ended without `finish`, and maybe on this rank alone."""
        rank, context = self.rank, self.context
        if error is not None:
            write_report(rank.run, rank.attempt, rank.topology, error, *context.ending.position())
        # After an error the other ranks, without which it does not become complete, may be gone.
        context.ending.wait_for_checkpoint(None if error is None else GRACE_SECONDS)
        kill_children()
        context.ending.close_reports()
        if rank.is_main:
            self._record_end(error)
            if error is None:
                log.info("%s", self._without_finish())

    def _without_finish(self) -> str:
        """What to tell of a script that has just ended, by its last line or sys.exit."""
        context, said = self.context, "the script ended without ctx.finish(result), which is to be its last line"
        if not context.ending.has_begun:
            return f"{said}; {without_checkpoints()}"
        if self.in_command and context.ending.loop_is_over:
            return f"{said}: the run has no result and no final/ weights"
        kept = context.ending.durable_step or 0
        return f"{said}: the run is not finished, and the same command continues it from step {kept}"

    def _has_ended(self) -> bool:
        """Whether this attempt's end is recorded, or is another's by now."""
        attempt = self.rank.run.status().attempt
        return attempt is None or attempt.id != self.rank.attempt or attempt.ended is not None

    def _record_signal(self) -> None:
        """A signal ends the process next; what jobkit has started it sees from outside."""
        if not self.rank.is_main or self.in_command or self._has_ended():
            return
        cause = CauseFinder(self.rank.run, self.rank.attempt, STOP_SIGNALS, "user").find()
        with contextlib.suppress(LostLease):
            self._record_interrupted(cause)

    def _record_end(self, error: BaseException | None) -> None:
        if self._has_ended():
            return
        if self.in_command and (error is not None or self.context.ending.loop_is_over):
            return  # jobkit outside sees how the ranks end
        if error is not None and not isinstance(error, KeyboardInterrupt):
            cause = self._cause_of_failure(error)
            failure = cause.failure
            self.context.ending.record_end(
                Event.FAILED, cause=cause.cause, error=failure.error, failure=records.known(failure)
            )
        else:
            self._record_interrupted("left" if error is None else "user")

    def _record_interrupted(self, cause: str | None) -> None:
        kept = self.context.ending.durable_step or 0
        self.context.ending.record_end(Event.INTERRUPTED, cause=cause, step=kept, reached=self.context.step)

    def _cause_of_failure(self, error: BaseException) -> EndCause:
        """What the rank that failed first has written down, once it has: this one may only have missed it."""
        deadline = time.monotonic() + (REPORT_SECONDS if self.rank.topology.world_size > 1 else 0.0)
        while (cause := own_failure(self.rank.run, self.rank.attempt)) is None and time.monotonic() < deadline:
            time.sleep(0.1)  # a look at a shared disk, ten times a second at most
        return cause or EndCause("crashed", Failure(rank=self.rank.topology.rank, error=repr(error)))
