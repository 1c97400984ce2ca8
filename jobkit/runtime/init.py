"""jobkit.init(): the same context in a script that jobkit did not start."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch.distributed import HashStore  # type: ignore[attr-defined]

from jobkit.display import Display
from jobkit.errors import InputError, JobkitError
from jobkit.run.config import Config, load
from jobkit.run.files import write_json
from jobkit.run.identity import run_name
from jobkit.run.rundir import RunDir, default_runs_dir
from jobkit.run.status import FINISHED
from jobkit.runtime.context import Context
from jobkit.runtime.distributed import Topology, check_alone
from jobkit.runtime.notices import NOTICES
from jobkit.runtime.session import open_session


class Script(Context):
    """A Context that ends with its script; `finish(result)` may end it earlier, with a result."""

    _finished = False
    _lock: FileLock

    def finish(self, result: Any = None) -> None:
        """Record the result, export the weights and close."""
        super().finish(result)
        self._finished = True
        self._session.close()


def init(
    config: Path | str | None = None,
    *,
    name: str | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    gpus: int | None = None,
    runs_dir: Path | str | None = None,
) -> Script:
    """A context for a plain `python train.py`: one process, with checkpoints, TensorBoard and exit code 75 on a stop.

    `config` is a YAML as `jobkit.submit` takes it; without one, `name` (default: the script's) and `params` make it.
    `gpus` is 1 where there is a GPU, else 0. The same call continues the same run. Call `finish(result)` at the end.
    Raises DistributedError where a launcher started several tasks: they would all write the same run.
    """
    check_alone(os.environ)
    chosen = load(Path(config)).config if config is not None else _config(name, params, seed)
    run = RunDir(Path(runs_dir or default_runs_dir()).absolute() / run_name(chosen))
    for folder in (run.path, run.checkpoints, run.tensorboard):
        folder.mkdir(parents=True, exist_ok=True)
    run.write_config(chosen)
    lock = run.alive_lock()
    try:
        lock.acquire(timeout=10)
    except Timeout:
        raise JobkitError(f"{run.name} is being run by another process on this machine already") from None
    before = run.status()
    if before.state == FINISHED:
        print(f"already finished, at step {before.step}: {run.path}; other params or another name make a new run")
        raise SystemExit(0)
    attempt = len(before.attempts) + 1
    run.logs(attempt).mkdir(parents=True, exist_ok=True)
    write_json(run.lease_file, {"attempt": attempt, "host": socket.gethostname(), "pid": os.getpid()})
    run.record("submitting", cluster="local", scheduler="local")
    run.record("started", attempt=attempt, job_id=str(os.getpid()), host=socket.gethostname())
    NOTICES.install()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if gpus is None:
        gpus = 1 if torch.cuda.is_available() else 0
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    context = Script(open_session(run, chosen, attempt, Topology(), device))
    context._lock = lock  # held until this process ends: two scripts never write one run
    _draw_progress(context)
    atexit.register(_at_exit, context)
    return context


def _config(name: str | None, params: Mapping[str, Any] | None, seed: int) -> Config:
    script = Path(sys.argv[0]).stem or "interactive"
    with contextlib.suppress(InputError):
        return Config(name=name or script, task=f"{script}:main", params=dict(params or {}), seed=seed)
    raise InputError(f"jobkit.init: {name!r} cannot name a run")


def _draw_progress(context: Script) -> None:
    """The bar that a follower would draw outside."""
    display = Display(context.run_dir.name)
    context._session.on_progress = display.show
    atexit.register(display.close)


def _at_exit(context: Script) -> None:
    """The script ended without `finish`: on a stop, by an exception, or by an oversight."""
    if context._finished:
        return
    session = context._session
    session.checkpointer.wait()
    if session.metrics is not None:
        session.metrics.close()
    status = session.run.status()
    if status.attempt is None or status.attempt.ended is not None:
        return
    error = getattr(sys, "last_value", None)  # what the interpreter has just printed the traceback of
    if error is not None and not isinstance(error, KeyboardInterrupt):
        session.record("failed", cause="crashed", error=f"{type(error).__name__}: {error}")
    else:
        session.record("interrupted", cause="left", step=context.saver.durable_step or 0)
