"""Copies of a run's curves at Weights & Biases and MLflow, made beside the training by a process for each service.

    rank 0's reporter --starts, gives the result--> jobkit/start.py jobkit.mirror RUN SERVICE --points--> service
                      <--------what fails----------     reads tensorboard/ up to the newest checkpoint

A point cannot be deleted at these services. So a point is copied only when no later attempt can log it again: when a
checkpoint on the disk holds its step, or the run has finished. The process keeps no record: it asks the service for the
points that it has. Any error ends the process, and the reporter starts another one. `python -m jobkit.mirror RUN`
copies the missing points of a run that is over.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from jobkit import start
from jobkit.config.schema import MirrorConfig
from jobkit.config.yamlfile import read_yaml
from jobkit.run.files import as_plain, leaves, read_json
from jobkit.run.journal import events, read_status
from jobkit.run.locks import Lock
from jobkit.run.rundir import RunDir
from jobkit.run.secrets import masked
from jobkit.run.status import State

LOOK_SECONDS = 5.0
"""How often a process looks for a new checkpoint."""

AGAIN_SECONDS = 60.0
"""How long after a failure the next process starts."""

MARK = "JOBKIT_MIRROR=1"
"""In the environment of each process, and of what it starts. After rank 0's death an agent lets it end by itself:
MLflow's folder of an experiment cannot be read any more if a process is killed while it makes a run there."""

Point = tuple[int, str, float, float]
"""Step, tag, value, seconds since the epoch."""


def services(config: MirrorConfig) -> list[str]:
    """Return the services that a config asks for."""
    return [name for name in ("wandb", "mlflow") if getattr(config, name) is not None]


class Mirror:
    """Rank 0's side of one copy. Only `wait` waits."""

    def __init__(self, run: RunDir, service: str, warn: Callable[[str], None]) -> None:
        self._run, self._service, self._warn = run, service, warn
        self._process: subprocess.Popen[str] | None = None
        self._start_at = 0.0

    def keep_running(self) -> None:
        """Start a process where none runs, and warn of its failure. Called each half second."""
        if self._process is not None and self._process.poll() is not None:
            self._say(self._process.communicate()[0])
            self._process = None
        if self._process is None and time.monotonic() >= self._start_at:
            words, pipe = start.words("jobkit.mirror", str(self._run.path), self._service), subprocess.PIPE
            self._start_at = time.monotonic() + AGAIN_SECONDS
            env = os.environ | dict([MARK.split("=")])
            try:  # a session of its own: the Ctrl-C of a script's terminal is not for it
                self._process = subprocess.Popen(
                    words, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True
                )
            except OSError as error:
                self._say(str(error))

    def end(self, result: Any) -> None:
        """The run has finished with this result."""
        self._start_at = 0.0
        self.keep_running()
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # the process has failed: `wait` says it
                print(json.dumps(as_plain(result)), file=self._process.stdin, flush=True)

    def wait(self, seconds: float) -> None:
        """Return once everything is copied, or so many seconds later."""
        if self._process is None:
            return
        try:
            self._say(self._process.communicate(timeout=max(0.0, seconds))[0])
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._say("the copy was not complete in time")

    def _say(self, problem: str) -> None:
        if problem.strip():
            command = f"`python -m jobkit.mirror {self._run.path}` copies what is missing once the run is over"
            self._warn(f"mirror.{self._service}: {problem.strip()}; {command}")
            self._warn = lambda text: None  # once


# The process beside


class WandbRun:
    """A run of W&B, whose id is the page's name. An offline run is written anew, whole, by each process."""

    def __init__(self, run: RunDir, page: str, params: Mapping[str, Any]) -> None:
        import wandb

        config = run.config()
        mirror = config.mirror.wandb
        assert mirror is not None
        self._older = [*run.path.glob(f"wandb/offline-run-*-{page}")]
        self._run = wandb.init(
            project=mirror.project or config.name,
            entity=mirror.entity or None,
            id=page,
            name=page,
            resume="allow" if mirror.mode == "online" else None,
            mode=mirror.mode,
            dir=str(run.path),
            config=dict(params),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def send(self, points: Sequence[Point]) -> None:
        for step, of_step in groupby(points, key=lambda point: point[0]):
            if step >= self._run.starting_step:
                self._run.log({tag: value for _, tag, value, _ in of_step}, step=step)

    def finish(self, result: Mapping[str, float]) -> None:
        self._run.summary.update(dict(result))

    def close(self) -> None:
        self._run.finish()
        for folder in self._older:
            shutil.rmtree(folder)


class MlflowRun:
    """A run of MLflow, which a tag with the page's name finds again."""

    def __init__(self, run: RunDir, page: str, params: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow asks whether `file:` is meant
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        config = run.config()
        mirror = config.mirror.mlflow
        assert mirror is not None
        self._metric, self._client = Metric, MlflowClient(tracking_uri=mirror.uri or None)
        name = mirror.experiment or config.name
        experiment = self._client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else self._client.create_experiment(name)
        runs = self._client.search_runs([where], f"tags.`jobkit.run` = '{page}'", max_results=1)
        made = runs[0] if runs else self._client.create_run(where, run_name=page, tags={"jobkit.run": page})
        self._id = made.info.run_id
        texts = [Param(_key(name), str(value)[:500]) for name, value in params.items()]
        for at in range(0, len(texts), 100):  # MLflow takes no more at once
            self._client.log_batch(self._id, params=texts[at : at + 100])
        histories = {key: self._client.get_metric_history(self._id, key) for key in made.data.metrics}
        self._steps = {key: max(metric.step for metric in history) for key, history in histories.items()}

    def send(self, points: Sequence[Point]) -> None:
        metrics = [self._metric(_key(tag), value, round(at * 1000), step) for step, tag, value, at in points]
        metrics = [metric for metric in metrics if metric.step > self._steps.get(metric.key, -1)]
        for at in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[at : at + 1000])
        self._steps |= {metric.key: metric.step for metric in metrics}

    def finish(self, result: Mapping[str, float]) -> None:
        step = max(self._steps.values(), default=0)
        self.send([(step, name, value, time.time()) for name, value in result.items() if _key(name) not in self._steps])
        self._client.set_terminated(self._id, "FINISHED")

    def close(self) -> None:
        pass


def _key(name: str) -> str:
    """Return a name with the letters that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII).strip("/") or "_"


def _connect(run: RunDir, service: str) -> WandbRun | MlflowRun:
    # After a rewind the old page's points are not the run's any more.
    rewound = sum(event.kind == "rewound" for event in events(run))
    values = read_yaml(run.config_file)[0]  # with `${oc.env:X}` unresolved: no secret leaves the machine
    params = {"seed": values["seed"], **dict(leaves(masked(values["params"])))}
    make = WandbRun if service == "wandb" else MlflowRun
    return make(run, f"{run.name}-branch-{rewound + 1}" if rewound else run.name, params)


def _new_points(run: RunDir, read: dict[str, int], *, is_finished: bool) -> list[Point]:
    """Return the points that no attempt logs again, by step; `read` has the bytes of event files that were read."""
    from jobkit.run import metrics

    if is_finished:
        sure = {file.name: file.stat().st_size for file in run.tensorboard.glob(metrics.PATTERN)}
    else:
        manifest = read_json(run.checkpoints / "latest" / "manifest.json", fresh=True)
        sure = manifest["extra"]["tensorboard"] if manifest else {}
    points = [
        (event.step, value.tag, value.simple_value, event.wall_time)
        for name, size in sure.items()
        for event in metrics.events(run.tensorboard / name, read.get(name, 0), size)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]
    read.update(sure)
    return sorted(points, key=lambda point: point[0])


def _copy(run: RunDir, service: str, *, is_beside: bool) -> None:
    """Copy all points that are sure; `is_beside`: until standard input has the result, or ends with rank 0."""
    status, read = read_status(run), dict[str, int]()
    line = None if is_beside else json.dumps(status.result) if status.state == State.FINISHED else ""
    target: WandbRun | MlflowRun | None = None
    while True:
        if is_beside and select.select([sys.stdin], [], [], LOOK_SECONDS)[0] and not (line := sys.stdin.readline()):
            return  # the next attempt goes on
        points = _new_points(run, read, is_finished=bool(line))
        if points or line is not None:
            target = target or _connect(run, service)
            target.send(points)
        if target is not None and line is not None:
            break
    if line:
        result = json.loads(line) or {}
        target.finish({name: value for name, value in result.items() if type(value) in (int, float)})
    target.close()


def main(arguments: Sequence[str]) -> int:
    """`RUN SERVICE`: copy for rank 0, and print a line where that fails. `RUN`: copy once."""
    run = RunDir(arguments[0])
    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the packages print belongs in the log
    os.nice(10)
    for service in arguments[1:] or services(run.config().mirror):
        try:
            with Lock(run.path.parent / ".locks" / f"{run.name}.{service}"):
                _copy(run, service, is_beside=len(arguments) > 1)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".partition("\n")[0], file=say, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
