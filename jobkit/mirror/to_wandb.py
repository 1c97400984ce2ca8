"""Weights & Biases: a run whose id is the run's name; each attempt goes on where the one before has stopped.

W&B counts the rows of a run, and takes none twice. A curve's steps are a value of each row, `step`, which it is drawn
over: a value that is known later than those of later steps, as the seconds of a checkpoint, is a row like another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import wandb

from jobkit.mirror.target import Point, Sent
from jobkit.run.config import WandbMirror

STEP = "step"
"""The name of a row's step."""

INIT_SECONDS = 60.0
"""How long W&B's server may take to answer."""


class WandbRun:
    """A run of W&B: at its server, or in files of `folder` for `wandb sync`."""

    def __init__(
        self, config: WandbMirror, default: str, folder: Path, name: str, params: Mapping[str, Any], sent: Sent
    ) -> None:
        quiet = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self.sent = sent
        sent.id = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        self._run = wandb.init(
            project=config.project or default,
            entity=config.entity or None,
            id=sent.id,
            name=name,
            resume="allow",
            mode=config.mode,
            dir=str(folder),
            config=dict(params),
            settings=quiet,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def send(self, points: Sequence[Point]) -> None:
        for step, of_step in groupby(points, key=lambda point: point.step):
            values = {point.tag: point.value for point in of_step}
            self._run.log({**values, STEP: step}, step=self.sent.rows)
            self.sent.rows += 1
            self.sent.steps |= dict.fromkeys(values, step)

    def finish(self, result: Any) -> None:
        if isinstance(result, Mapping):
            self._run.summary.update(dict(result))

    def close(self) -> None:
        self._run.finish()
