"""jobkit.init(): the same context in a script that a launcher started, or that a YAML's `command:` names."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from jobkit.display import Display
from jobkit.errors import InputError, JobkitError
from jobkit.log import configure
from jobkit.run import layout, records
from jobkit.run.config import AUTO, Config, load
from jobkit.run.events import Event
from jobkit.run.identity import run_name
from jobkit.run.records import Failure
from jobkit.run.rundir import RunDir
from jobkit.run.runs import default_runs_dir
from jobkit.run.status import State
from jobkit.supervisor import attempt as attempts
from jobkit.supervisor.diagnosis import EndCause, own_failure
from jobkit.worker.context import Context
from jobkit.worker.disks import find_disks
from jobkit.worker.failure import show_stacks_when_asked, write_report
from jobkit.worker.launcher import Topology, find_topology
from jobkit.worker.lease import LostLease, end_after_lost_lease
from jobkit.worker.output import survive_full_disks
from jobkit.worker.rank import Rank, join
from jobkit.worker.rendezvous import existing_group, inherited, rendezvous
from jobkit.worker.results import literal
from jobkit.worker.stop import STOP_SIGNALS, kill_children
from jobkit.worker.task import GRACE_SECONDS, open_context
from jobkit.worker.torch_threads import wait_until_at_rest

REPORT_SECONDS = 10.0
"""How long rank 0, which has only lost a connection, waits for the report of the rank that failed: that one may still
be printing its traceback. Launchers give the ranks 30 s between SIGTERM and SIGKILL."""


def init(
    config: Path | str | None = None,
    *,
    name: str | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    gpus: int | None = None,
    runs_dir: Path | str | None = None,
) -> Context:
    """A context for a script under python, torchrun, mpirun, srun or Submitit: checkpoints, and exit code 75 on a stop.

    `config` is a YAML as `jobkit.submit` takes it, except that the launcher decides how many ranks there are; without
    one, `name` (default: the script's) and `params` make it. `gpus`, of each rank, is the YAML's, or 1 where there are
    any. Every rank calls this, and `finish(result)` at the end; the same call continues the same run under whatever
    launcher. A process group that exists is used. Where the run is finished already, all ranks exit with 0.

    In the `command:` of a YAML it is that run: the YAML decides, and `params` only adds what it does not name.

    Raises DistributedError on every rank where they do not form one world, JobkitError where somebody else runs it.
    """
    configure("stdout")
    atexit.register(wait_until_at_rest)  # the last of what is registered from here on
    run = _run_of_command()
    if run is not None:
        return _continue_command(run, params or {})
    if config is not None and (name is not None or params is not None):
        raise InputError(f"jobkit.init: {config} has name and params; give either the YAML or them")
    chosen = load(Path(config)).config if config is not None else _config(name, params, seed)
    if config is None and gpus is None:
        gpus = int(torch.accelerator.is_available())
    run = RunDir(Path(runs_dir or default_runs_dir()).absolute() / run_name(chosen))
    launch = find_topology(inherited(), existing_group())
    _make_folders(run)
    found = rendezvous(launch, run.launch_file(launch.key))
    chosen = found.group.all_or_none(lambda: _with_ranks(chosen, found.topology, gpus))
    disks = find_disks(run, chosen, found.topology, found.group)
    lock = run.alive_lock()
    number = found.group.on_main(lambda: _begin(run, chosen, launch.launcher, lock))
    if number is None:
        raise SystemExit(0)
    STOP_SIGNALS.install()
    rank = join(found, run, chosen, number, disks)
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


def _config(name: str | None, params: Mapping[str, Any] | None, seed: int) -> Config:
    script = Path(sys.argv[0]).stem or "interactive"
    try:
        return Config(name=name or script, task=f"{script}:main", params=dict(params or {}), seed=seed)
    except InputError:
        raise InputError(f"jobkit.init: {name!r} cannot name a run") from None


def _with_ranks(config: Config, topology: Topology, gpus: int | None) -> Config:
    even = topology.nodes * topology.local_world_size == topology.world_size
    per_node = topology.local_world_size if even else 1
    resources = dataclasses.replace(
        config.resources,
        nodes=topology.world_size // per_node,
        tasks_per_node=per_node,
        gpus_per_task=_gpus_of_rank(config) if gpus is None else gpus,
    )
    try:
        layout.check(config.parallel, config.comm, resources, config.precision)
    except ValueError as error:
        raise InputError(f"parallel: {error} (started were {topology.world_size} rank(s))") from None
    return dataclasses.replace(config, resources=resources)


def _gpus_of_rank(config: Config) -> int:
    each = config.resources.gpus_per_task
    return int(torch.accelerator.is_available()) if each == AUTO else int(each)


def _make_folders(run: RunDir) -> None:
    """On every rank: each learns by itself whether it can write where the others are."""
    try:
        for folder in (run.launch_file("").parent, run.checkpoints, run.tensorboard):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; set runs_dir=... or JOBKIT_RUNS") from None


def _begin(run: RunDir, config: Config, launcher: str, lock: FileLock) -> int | None:
    """On rank 0: own the run and begin an attempt; its number, or None where the run is finished.

    `lock` is held until this process ends: two scripts never write one run.
    """
    try:
        lock.acquire(timeout=10)  # whoever asks whether the run lives takes the lock for an instant
    except Timeout:
        raise JobkitError(f"{run.name} is being run by another process already") from None
    before = run.status()
    if before.state == State.FINISHED:
        print(f"already finished, at step {before.step}: {run.path}; other params or another name make a new run")
        return None
    run.write_config(config)  # before the event: whoever sees a run in the journal may read its config
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    return attempts.begin(run, job_id=str(os.getpid()), scheduler="local", launcher=launcher).number


# In the `command:` of a YAML


def _run_of_command() -> RunDir | None:
    path, attempt = os.environ.get("JOBKIT_RUN"), os.environ.get("JOBKIT_ATTEMPT")
    if not path or not attempt:
        return None
    run = RunDir(path)
    return run if run.exists() and run.config().command else None


def _continue_command(run: RunDir, params: Mapping[str, Any]) -> Context:
    """The context of an attempt that jobkit has begun, and will end."""
    STOP_SIGNALS.install()
    survive_full_disks()
    show_stacks_when_asked()
    number, topology = int(os.environ["JOBKIT_ATTEMPT"]), Topology(rank=int(os.environ.get("RANK") or 0))
    config = run.config()
    merged: Any = OmegaConf.to_container(OmegaConf.merge(literal(dict(params)), literal(config.params)))
    try:
        found = rendezvous(find_topology(inherited(), existing_group()), run.rendezvous_file(number))
        topology = found.topology
        rank = join(found, run, dataclasses.replace(config, params=merged), number)
        context = open_context(rank)
    except BaseException as error:
        write_report(run, number, topology, error, None, ())
        raise
    ScriptEnd(context, rank, in_command=True).register()
    return _unless_finished(context)


def _unless_finished(context: Context) -> Context:
    """`context`, unless an earlier attempt had made the result durable and died before it could record it."""
    if not context.has_returned:
        return context
    context.finish_again()
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

    def register(self) -> None:
        """Run when the script ends: after an error at once, for at exit Python waits for the script's threads first."""
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
        try:
            if isinstance(error, LostLease):
                raise error
            if self.context.stopped is not None and not self.context.is_closed:
                kill_children()
                self.context.close()  # together: a launcher that sees one rank end with 75 kills the others
            if not self.context.is_closed:
                self._end_early(error)
        except LostLease as lost:
            end_after_lost_lease(lost)
        if self.display is not None:
            self.display.close()

    def _end_early(self, error: BaseException | None) -> None:
        """The script ended without `finish`, and maybe on this rank alone."""
        rank, context = self.rank, self.context
        if error is not None:
            write_report(rank.run, rank.attempt, rank.topology, error, *context.position())
        # After an error the other ranks, without which it does not become complete, may be gone.
        context.wait_for_checkpoint(None if error is None else GRACE_SECONDS)
        kill_children()
        context.close_reports()
        if rank.is_main:
            self._record_end(error)

    def _record_end(self, error: BaseException | None) -> None:
        attempt = self.rank.run.status().attempt
        if attempt is None or attempt.id != self.rank.attempt or attempt.ended is not None:
            return
        if self.in_command and (error is not None or self.context.loop_is_over):
            return  # jobkit outside sees how the ranks end
        if error is not None and not isinstance(error, KeyboardInterrupt):
            cause = self._cause_of_failure(error)
            failure = cause.failure
            self.context.record_end(
                Event.FAILED, cause=cause.cause, error=failure.error, failure=records.known(failure)
            )
        else:
            self.context.record_end(Event.INTERRUPTED, cause="left", step=self.context.durable_step or 0)

    def _cause_of_failure(self, error: BaseException) -> EndCause:
        """What the rank that failed first has written down, once it has: this one may only have missed it."""
        deadline = time.monotonic() + (REPORT_SECONDS if self.rank.topology.world_size > 1 else 0.0)
        while (cause := own_failure(self.rank.run, self.rank.attempt)) is None and time.monotonic() < deadline:
            time.sleep(0.1)  # a look at a shared disk, ten times a second at most
        return cause or EndCause("crashed", Failure(rank=self.rank.topology.rank, error=repr(error)))
