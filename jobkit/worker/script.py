"""jobkit.init(): the same context in a script that a launcher started, or that a YAML's `command:` names."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from jobkit.display import Display
from jobkit.errors import InputError, JobkitError
from jobkit.run import layout
from jobkit.run.config import Config, load
from jobkit.run.events import Event
from jobkit.run.files import read_json, write_json
from jobkit.run.identity import run_name
from jobkit.run.rundir import RunDir, default_runs_dir
from jobkit.run.status import State, Status
from jobkit.worker.context import Context, Stopped
from jobkit.worker.failure import show_stacks_when_asked, write_report
from jobkit.worker.launcher import Topology, find_topology
from jobkit.worker.meeting import existing_group, inherited, meet
from jobkit.worker.notices import NOTICES, kill_children
from jobkit.worker.output import survive_full_disks
from jobkit.worker.results import literal
from jobkit.worker.session import Session, join


class Script(Context):
    """A Context that ends with its script; `finish(result)`, on every rank, may end it earlier, with a result."""

    _stopped = False
    """Whether all ranks have left the loop together, with a checkpoint."""
    _closed = False
    _display: Display | None = None
    """Where rank 0 tells how far it is; in a `command:`, whoever follows the run does."""
    _in_command = False
    """Whether jobkit started the script, and writes down how it ended."""
    _lock: FileLock | None = None

    def finish(self, result: Any = None) -> None:
        """Record the result, export the weights and close; all ranks together."""
        super().finish(result)
        self._close()
        self._say(f"finished at step {self.step}{f': {result}' if result is not None else ''}")

    def _close(self) -> None:
        self._closed = True
        kill_children()
        self._session.close()

    def _say(self, text: str) -> None:
        if self._display is not None:
            self._display.say(text)

    @property
    def _loop_is_over(self) -> bool:
        return self._total is None or self.step == self._total

    def _stop_if_told(self) -> None:
        if not self._in_command:  # nobody outside knows more than that one rank was signalled
            self._session.notices.signal = signal.SIGTERM
        super()._stop_if_told()

    def _stop(self, cause: str) -> None:
        try:
            super()._stop(cause)
        except Stopped as stopped:
            self._stopped = True
            kept = "its checkpoint is safe" if self.saver.durable_step == stopped.step else "no checkpoint of it"
            self._say(f"stopped at step {stopped.step}, {kept}; the same command continues the run")
            raise


def init(
    config: Path | str | None = None,
    *,
    name: str | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    gpus: int | None = None,
    runs_dir: Path | str | None = None,
) -> Script:
    """A context for a script under python, torchrun, mpirun, srun or Submitit: checkpoints, and exit code 75 on a stop.

    `config` is a YAML as `jobkit.submit` takes it, except that the launcher decides how many ranks there are; without
    one, `name` (default: the script's) and `params` make it. `gpus`, of each rank, is the YAML's, or 1 where there are
    any. Every rank calls this, and `finish(result)` at the end; the same call continues the same run under whatever
    launcher. A process group that exists is used. Where the run is finished already, all ranks exit with 0.

    In the `command:` of a YAML it is that run: the YAML decides, and `params` only adds what it does not name.

    Raises DistributedError on every rank where they do not form one world, JobkitError where somebody else runs it.
    """
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
    meeting = meet(launch, run.launch_file(launch.key))
    chosen = meeting.together(lambda: _with_ranks(chosen, meeting.topology, gpus))
    lock = run.alive_lock()
    attempt = meeting.lead(lambda: _begin(run, chosen, launch.launcher, lock))
    if attempt == 0:
        raise SystemExit(0)
    NOTICES.install()
    context = _script(join(meeting, run, chosen, attempt))
    context._lock = lock  # held until this process ends: two scripts never write one run
    if context.is_main:
        _draw_progress(context)
        goes_on = f"goes on from step {context.step}" if context.step else "begins"
        context._say(f"{run.name} {goes_on}; run directory: {run.path}")
    return _unless_finished(context)


def _config(name: str | None, params: Mapping[str, Any] | None, seed: int) -> Config:
    script = Path(sys.argv[0]).stem or "interactive"
    with contextlib.suppress(InputError):
        return Config(name=name or script, task=f"{script}:main", params=dict(params or {}), seed=seed)
    raise InputError(f"jobkit.init: {name!r} cannot name a run")


def _with_ranks(config: Config, topology: Topology, gpus: int | None) -> Config:
    """`config` with the ranks that the launcher started."""
    even = topology.nodes * topology.local_world_size == topology.world_size
    per_node = topology.local_world_size if even else 1
    resources = dataclasses.replace(
        config.resources,
        nodes=topology.world_size // per_node,
        tasks_per_node=per_node,
        gpus_per_task=config.resources.gpus_per_task if gpus is None else gpus,
    )
    try:
        layout.check(config.parallel, config.comm, resources, config.precision)
    except ValueError as error:
        raise InputError(f"parallel: {error} (started were {topology.world_size} rank(s))") from None
    return dataclasses.replace(config, resources=resources)


def _make_folders(run: RunDir) -> None:
    """On every rank: each learns by itself whether it can write where the others are."""
    try:
        for folder in (run.launch_file("").parent, run.checkpoints, run.tensorboard):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}; set runs_dir=... or JOBKIT_RUNS") from None


def _begin(run: RunDir, config: Config, launcher: str, lock: FileLock) -> int:
    """On rank 0: own the run and begin an attempt; its number, or 0 where the run is finished."""
    try:
        lock.acquire(timeout=10)
    except Timeout:
        raise JobkitError(f"{run.name} is being run by another process already") from None
    before = run.status()
    if before.state == State.FINISHED:
        print(f"already finished, at step {before.step}: {run.path}; other params or another name make a new run")
        return 0
    close_lost_attempt(run, before)
    run.write_config(config)
    attempt = len(before.attempts) + 1
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    write_json(run.lease_file, {"attempt": attempt, "host": socket.gethostname(), "pid": os.getpid()})
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    run.record(Event.STARTED, attempt=attempt, job_id=str(os.getpid()), host=socket.gethostname(), launcher=launcher)
    return attempt


def close_lost_attempt(run: RunDir, before: Status) -> None:
    """Write the end of an attempt whose launcher killed it before it could."""
    if before.attempt is not None and before.attempt.ended is None:
        report = _first_report(run, before.attempt.id)
        cause = "crashed" if report else "lost"
        run.record(
            Event.INTERRUPTED, attempt=before.attempt.id, cause=cause, failure=report, step=before.checkpoint or 0
        )


def _first_report(run: RunDir, attempt: int) -> dict[str, Any] | None:
    """What the first rank that failed wrote down; what the others then saw are its consequences."""
    reports = [read_json(file) for file in run.logs(attempt).glob("error_*.json")]
    return min((one for one in reports if isinstance(one, dict)), key=lambda one: float(one["time"]), default=None)


# In the `command:` of a YAML


def _run_of_command() -> RunDir | None:
    """The run whose `command:` this script is part of."""
    path, attempt = os.environ.get("JOBKIT_RUN"), os.environ.get("JOBKIT_ATTEMPT")
    if not path or not attempt:
        return None
    run = RunDir(path)
    return run if run.exists() and run.config().command else None


def _continue_command(run: RunDir, params: Mapping[str, Any]) -> Script:
    """The context of an attempt that jobkit has begun, and will end."""
    NOTICES.install()
    survive_full_disks()
    show_stacks_when_asked()
    attempt, topology = int(os.environ["JOBKIT_ATTEMPT"]), Topology(rank=int(os.environ.get("RANK") or 0))
    config = run.config()
    merged: Any = OmegaConf.to_container(OmegaConf.merge(literal(dict(params)), literal(config.params)))
    try:
        launch = find_topology(inherited(), existing_group())
        meeting = meet(launch, run.rendezvous_file(attempt))
        topology = meeting.topology
        context = _script(join(meeting, run, dataclasses.replace(config, params=merged), attempt))
    except BaseException as error:
        write_report(run, attempt, topology, None, error)
        raise
    context._in_command = True
    return _unless_finished(context)


# The end


def _script(session: Session) -> Script:
    context = Script(session)
    atexit.register(_at_exit, context)
    return context


def _unless_finished(context: Script) -> Script:
    """`context`, unless an earlier attempt had made the result durable and died before it could record it."""
    if not context.has_returned:
        return context
    context.finish_again()
    context._close()
    raise SystemExit(0)


def _draw_progress(context: Script) -> None:
    """The bar that a follower would draw outside."""
    display = context._display = Display(context.run_dir.name)
    context._session.on_progress = display.show
    atexit.register(display.close)


def _at_exit(context: Script) -> None:
    """The script ended: on a stop, by an exception, or by an oversight."""
    session = context._session
    if context._stopped and not context._closed:
        context._close()  # together: a launcher that sees one rank end with 75 kills the others
    if context._closed:
        return
    error = getattr(sys, "last_value", None)  # what the interpreter has just printed the traceback of
    if error is not None:
        write_report(session.run, session.attempt, session.topology, context, error)
        context.saver.wait(seconds=3.0)  # the other ranks, without which it is not complete, may be gone
    else:
        session.checkpointer.wait()
    kill_children()
    if session.metrics is not None:
        session.metrics.close()
    if session.is_main:
        _record_end(context, error)


def _record_end(context: Script, error: BaseException | None) -> None:
    session = context._session
    attempt = session.run.status().attempt
    if attempt is None or attempt.ended is not None:
        return
    if context._in_command and (error is not None or context._loop_is_over):
        return  # jobkit outside sees how the ranks end
    if error is not None and not isinstance(error, KeyboardInterrupt):
        report = _first_report(session.run, session.attempt) or {"rank": 0, "error": repr(error)}
        who = f"rank {report['rank']}: " if session.topology.world_size > 1 else ""
        session.record(Event.FAILED, cause="crashed", error=f"{who}{report['error']}", failure=report)
    else:
        session.record(Event.INTERRUPTED, cause="left", step=context.saver.durable_step or 0)
