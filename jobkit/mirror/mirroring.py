"""A run's curves at the services of its config: each point once, whatever interrupts the run or this."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import IO, Any

from filelock import FileLock, Timeout

from jobkit.log import log
from jobkit.mirror.points import SurePoints
from jobkit.mirror.target import Point, Sent, Target
from jobkit.run import records
from jobkit.run.config import Config, read_resolved
from jobkit.run.events import Event
from jobkit.run.files import read_json, write_json
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.run.yamlfile import read_yaml

LOOK_SECONDS = 5.0
"""How often is looked for points that have become sure."""

PAUSES = (30.0, 60.0, 120.0, 300.0, 600.0)
"""Seconds until a service that did not take them is tried again; the last one from then on."""

SERVICES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}


class Mirror:
    """One service's copy of one run."""

    def __init__(self, run: RunDir, config: Config, service: str) -> None:
        self.service = service
        self.copied = 0
        """Points sent by this process."""
        self._run, self._config = run, config
        self._points, self._waiting = SurePoints(run), list[Point]()
        self._target: Target | None = None
        self._is_finished = False

    def update(self) -> None:
        """Send what has become sure; raises whatever the service's package raises, and can be called again then."""
        status = self._run.status()
        self._waiting += self._points.new()
        finishes = status.state == State.FINISHED and not self._is_finished
        if not (self._waiting or finishes):
            return
        if self._target is None:
            self._target = self._connect()
        known = self._target.sent.steps
        # By tag and step the last: a step that was logged twice is one point.
        new = {(one.step, one.tag): one for one in self._waiting if one.step > known.get(one.tag, -1)}
        if new:
            self._target.send(list(new.values()))
            self.copied += len(new)
        self._waiting.clear()
        if finishes:
            self._target.finish(status.result)
            self._is_finished = True
        self._keep(self._target.sent)

    def lock(self) -> FileLock:
        """Held by the one process that copies."""
        return self._run.mirror_lock(self.service)

    def close(self) -> None:
        """Wait until what was sent is there."""
        target, self._target = self._target, None
        if target is not None:
            target.close()

    def _connect(self) -> Target:
        name = page_name(self._run)
        sent, params = records.of(Sent, self._kept().get(name, {})), _params(self._run)
        if self.service == "wandb" and self._config.mirror.wandb is not None:
            from jobkit.mirror.to_wandb import WandbRun

            return WandbRun(self._config.mirror.wandb, self._config.name, self._run.path, name, params, sent)
        assert self._config.mirror.mlflow is not None
        from jobkit.mirror.to_mlflow import MlflowRun

        return MlflowRun(self._config.mirror.mlflow, self._config.name, name, params, sent)

    def _kept(self) -> dict[str, Any]:
        """By the name of a page what was sent there."""
        kept = read_json(self._run.mirror_file(self.service))
        return kept if isinstance(kept, dict) else {}

    def _keep(self, sent: Sent) -> None:
        kept = self._kept() | {page_name(self._run): asdict(sent)}
        write_json(self._run.mirror_file(self.service), kept)


def page_name(run: RunDir) -> str:
    """What a run is called at a service: its name; after each `jobkit rewind` another, as no service goes back."""
    rewound = sum(event["event"] == Event.REWOUND for event in run.journal.read())
    return f"{run.name}-branch-{rewound + 1}" if rewound else run.name


def mirrors_of(run: RunDir) -> list[Mirror]:
    """The copies that a run's config asks for."""
    config = read_resolved(run.config_file)
    return [Mirror(run, config, service) for service in config.mirror.chosen]


def follow(mirror: Mirror, ended: IO[bytes]) -> None:
    """Keep a copy up to date until `ended` says something or ends, and once more then; what fails is tried again later.

    It is the one process that does: that of an attempt before is waited for.
    """
    is_over = False
    with contextlib.ExitStack() as closing:
        while not is_over:
            with contextlib.suppress(Timeout):
                closing.enter_context(mirror.lock().acquire(timeout=LOOK_SECONDS))
                break
            is_over = _has_ended(ended, 0.0)
        closing.callback(_suppressed, mirror.close)
        due, failures = 0.0, 0
        while not is_over:
            is_over = _has_ended(ended, LOOK_SECONDS)
            if time.monotonic() < due and not is_over:
                continue
            try:
                mirror.update()
                failures = 0
            except Exception as error:  # whatever it is, the training goes on
                if not failures:
                    log.warning("%s: %s", SERVICES[mirror.service], _told(error))
                due = time.monotonic() + PAUSES[min(failures, len(PAUSES) - 1)]
                failures += 1


def _has_ended(stream: IO[bytes], seconds: float) -> bool:
    """Whether a stream ends, or says something, within so many seconds."""
    return bool(select.select([stream], [], [], seconds)[0])


def _told(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{line}; it is tried again, and the training goes on"


def _suppressed(action: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        action()


def _params(run: RunDir) -> Mapping[str, Any]:
    """The params and the seed by dotted name, as others may see them: in the config's file they are masked."""
    values = read_yaml(run.config_file)[0]
    return {"seed": values.get("seed"), **dict(_dotted(values.get("params") or {}, ""))}


def _dotted(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
