"""A run's curves at the services of its config: each point once, whatever interrupts the run or this."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import IO, Any

from filelock import Timeout

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

    def close(self) -> None:
        """Wait until what was sent is there."""
        target, self._target = self._target, None
        if target is not None:
            target.close()

    def _connect(self) -> Target:
        name = page_name(self._run)
        kept = _kept(self._run).get(self.service, {}).get(name, {})
        sent, params = records.of(Sent, kept), _params(self._run)
        if self.service == "wandb" and self._config.mirror.wandb is not None:
            from jobkit.mirror.to_wandb import WandbRun

            return WandbRun(self._config.mirror.wandb, self._config.name, self._run.path, name, params, sent)
        assert self._config.mirror.mlflow is not None
        from jobkit.mirror.to_mlflow import MlflowRun

        return MlflowRun(self._config.mirror.mlflow, self._config.name, name, params, sent)

    def _keep(self, sent: Sent) -> None:
        kept = _kept(self._run)
        kept.setdefault(self.service, {})[page_name(self._run)] = asdict(sent)
        write_json(self._run.mirror_file, kept)


def page_name(run: RunDir) -> str:
    """What a run is called at a service: its name; after each `jobkit rewind` another, as no service goes back."""
    rewound = sum(event["event"] == Event.REWOUND for event in run.journal.read())
    return f"{run.name}-branch-{rewound + 1}" if rewound else run.name


def mirrors_of(run: RunDir) -> list[Mirror]:
    """The copies that a run's config asks for."""
    config = read_resolved(run.config_file)
    return [Mirror(run, config, service) for service in config.mirror.chosen]


def follow(run: RunDir, ended: IO[bytes]) -> None:
    """Keep the copies up to date until `ended` is at its end, and once more then; what fails is tried again later."""
    with contextlib.ExitStack() as closing:
        if not _locked(run, ended, closing):
            return
        mirrors = mirrors_of(run)
        for mirror in mirrors:
            closing.push(lambda *_, mirror=mirror: _suppressed(mirror.close))
        due, failures = dict.fromkeys(mirrors, 0.0), dict.fromkeys(mirrors, 0)
        is_over = False
        while not is_over:
            is_over = bool(select.select([ended], [], [], LOOK_SECONDS)[0])
            for mirror in mirrors:
                if not is_over and time.monotonic() < due[mirror]:
                    continue
                try:
                    mirror.update()
                    failures[mirror] = 0
                except Exception as error:  # whatever it is, the training goes on
                    if not failures[mirror]:
                        log.warning("%s: %s", SERVICES[mirror.service], _told(error))
                    due[mirror] = time.monotonic() + PAUSES[min(failures[mirror], len(PAUSES) - 1)]
                    failures[mirror] += 1


def _locked(run: RunDir, ended: IO[bytes], closing: contextlib.ExitStack) -> bool:
    """Whether this is the one process that copies; it waits for that of an attempt before, until `ended`."""
    while True:
        with contextlib.suppress(Timeout):
            closing.enter_context(run.mirror_lock().acquire(timeout=LOOK_SECONDS))
            return True
        if select.select([ended], [], [], 0)[0]:
            return False


def _told(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{line}; it is tried again, and the training goes on"


def _suppressed(action: Any) -> bool:
    with contextlib.suppress(Exception):
        action()
    return False


def _kept(run: RunDir) -> dict[str, dict[str, dict[str, Any]]]:
    """Service -> name there -> what was sent."""
    kept = read_json(run.mirror_file)
    return kept if isinstance(kept, dict) else {}


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
