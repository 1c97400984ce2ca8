"""MLflow: a run found again by a tag; what it has is asked from it, so that nothing is there twice after a crash."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from jobkit.mirror.target import Point, Sent
from jobkit.run.config import MlflowMirror

TAG = "jobkit.run"
"""The tag that has the run's name."""

BATCH = 1000
"""As many metrics as MLflow takes at once; and a tenth of it as params."""

LONGEST_PARAM = 500
"""Characters of a param that every version of MLflow takes."""


class MlflowRun:
    """A run of an MLflow server, or of its files."""

    def __init__(self, config: MlflowMirror, default: str, name: str, params: Mapping[str, Any], sent: Sent) -> None:
        uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not re.match(r"[a-z]{2,}[a-z+]*://|databricks", uri) or uri.startswith("file:"):
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # newer versions ask whether it is meant
        self._client = MlflowClient(tracking_uri=uri or None)
        self.sent = sent
        experiment = self._experiment(config.experiment or default)
        self._run = self._found(experiment, name) or self._made(experiment, name, params)
        sent.id = self._run
        self._names = {}
        for key in self._client.get_run(self._run).data.metrics:
            history = self._client.get_metric_history(self._run, key)
            self._names[key] = max((metric.step for metric in history), default=-1)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another run of a sweep was quicker
            return str(self._client.get_experiment_by_name(name).experiment_id)

    def _found(self, experiment: str, name: str) -> str | None:
        if self.sent.id:
            try:
                return str(self._client.get_run(self.sent.id).info.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        found = self._client.search_runs([experiment], filter_string=f"tags.`{TAG}` = '{name}'", max_results=1)
        return str(found[0].info.run_id) if found else None

    def _made(self, experiment: str, name: str, params: Mapping[str, Any]) -> str:
        run = str(self._client.create_run(experiment, run_name=name, tags={TAG: name}).info.run_id)
        texts = [Param(_name(key), str(value)[:LONGEST_PARAM]) for key, value in params.items()]
        for at in range(0, len(texts), BATCH // 10):
            self._client.log_batch(run, params=texts[at : at + BATCH // 10])
        return run

    def send(self, points: Sequence[Point]) -> None:
        new = [one for one in points if one.step > self._names.get(_name(one.tag), -1)]
        metrics = [Metric(_name(one.tag), one.value, round(one.time * 1000), one.step) for one in new]
        for at in range(0, len(metrics), BATCH):
            self._client.log_batch(self._run, metrics=metrics[at : at + BATCH])
        self._names |= {metric.key: metric.step for metric in metrics}
        self.sent.steps |= {one.tag: one.step for one in points}

    def finish(self, result: Any) -> None:
        self._client.set_terminated(self._run, "FINISHED")

    def close(self) -> None:
        pass


def _name(tag: str) -> str:
    """A tag as MLflow takes it: letters, digits, `_`, `-`, `.`, blanks and slashes within."""
    return re.sub(r"[^\w\-. /]", "_", tag, flags=re.ASCII).strip("/") or "_"
