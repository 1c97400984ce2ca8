"""TensorBoard's HPARAMS page has a row for each run, and the same columns for all, as its own plugin makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, metadata
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from jobkit.run import records
from jobkit.run.records import Lease
from jobkit.run.rundir import RunDir
from jobkit.worker.hyperparameters import session_start
from jobkit.worker.reporter import RunReporter


def attempt(run: RunDir, parameters: Mapping[str, Any], position: dict[str, int], *, finished: bool) -> dict[str, int]:
    """What an attempt writes that begins at a checkpoint's position; the position at its end."""
    reporter = RunReporter(run, 1, True, on_lost_lease=lambda error: None)
    reporter.start_metrics(position, 0, parameters)
    if finished:
        reporter.log({"final/accuracy": parameters["lr"] * 2})
        reporter.log_session_end()
    reporter.end_step(10)
    position = reporter.mark_metrics()()
    reporter.close()
    return position


def test_params_that_no_number_and_no_text_of_tensorboard_holds_end_no_run() -> None:
    content = session_start({"huge": 10**400, "half": "\ud800", "n\udcff": float("nan")}).value[0].metadata.plugin_data
    start = HParamsPluginData.FromString(content.content).session_start_info.hparams
    assert start["huge"].string_value == str(10**400) and start["half"].string_value == "?"
    assert math.isnan(start["n?"].number_value)


def provider(runs: Path) -> MultiplexerDataProvider:
    multiplexer = EventMultiplexer(tensor_size_guidance={"hparams": 0, "scalars": 0})
    multiplexer.AddRunsFromDirectory(str(runs))
    multiplexer.Reload()
    return MultiplexerDataProvider(multiplexer, str(runs))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[api_pb2.Experiment, list[api_pb2.SessionGroup], Any]:
    """The columns and the rows of the page for three runs, one of which was interrupted twice."""
    runs = tmp_path_factory.mktemp("runs")
    for name, parameters, ends in (
        ("digits-a", {"seed": 0, "lr": 0.1, "net": "mlp"}, [True]),
        ("digits-b", {"seed": 1, "lr": 0.3, "net": "cnn", "depth": 3}, [False, False, True]),
        ("digits-c", {"seed": 0, "lr": 1, "net": "mlp", "amp": True}, [False]),
    ):
        run, position = RunDir(runs / name), {}
        run.tensorboard.mkdir(parents=True)
        records.write(run.lease_file, Lease(attempt=1))
        for finished in ends:
            position = attempt(run, parameters, position, finished=finished)
    data = provider(runs)
    context = Context(TBContext(data_provider=data))
    request = RequestContext()
    metadata_of_runs = context.hparams_metadata(request, "")
    experiment = context.experiment_from_metadata(request, "", True, metadata_of_runs, [])
    columns = [api_pb2.ColParams(metric=one.name) for one in experiment.metric_infos]
    columns += [api_pb2.ColParams(hparam=one.name) for one in experiment.hparam_infos]
    statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
    asked = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=10, col_params=columns, allowed_statuses=statuses
    )
    rows = Handler(request_context=request, backend_context=context, experiment_id="", request=asked).run()
    return experiment, list(rows.session_groups), metadata_of_runs


def test_columns_are_those_of_all_runs_with_the_seed(shown: Any) -> None:
    experiment, _, _ = shown
    assert {one.name for one in experiment.hparam_infos} == {"seed", "lr", "net", "depth", "amp"}
    assert "final/accuracy" in {one.name.tag for one in experiment.metric_infos}


def test_every_run_is_one_row_however_often_it_was_interrupted(shown: Any) -> None:
    _, groups, _ = shown
    rows = {group.sessions[0].name: group for group in groups}
    assert sorted(rows) == [f"digits-{letter}/tensorboard" for letter in "abc"]
    assert [len(group.sessions) for group in groups] == [1, 1, 1]
    finished = rows["digits-b/tensorboard"]
    assert finished.hparams["lr"].number_value == 0.3
    assert finished.hparams["depth"].number_value == 3
    values = {one.name.tag: one.value for one in finished.metric_values}
    assert values["final/accuracy"] == pytest.approx(0.6)
    assert finished.sessions[0].status == api_pb2.STATUS_SUCCESS
    assert rows["digits-c/tensorboard"].sessions[0].status != api_pb2.STATUS_SUCCESS
    assert rows["digits-c/tensorboard"].hparams["amp"].bool_value is True


def test_a_run_declares_no_experiment_of_its_own(shown: Any) -> None:
    _, _, metadata_of_runs = shown
    assert all(metadata.EXPERIMENT_TAG not in tags for tags in metadata_of_runs.values())
