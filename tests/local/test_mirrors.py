"""Curves at Weights & Biases and MLflow, by their own packages: one curve over all attempts, each point once."""

from __future__ import annotations

import json
import socket
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from harness import in_process
from harness.made_run import made_run
from harness.project import Project, causes, describe, names, wait_for
from harness.wandb_files import rows
from mlflow.tracking import MlflowClient

from jobkit.checkpoint.store import MANIFEST, Manifest
from jobkit.errors import InvalidValue
from jobkit.mirror.mirroring import Mirror, mirrors_of, page_name
from jobkit.report.logged import finite, read
from jobkit.run.config import Config, MirrorConfig, MlflowMirror, WandbMirror
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.submission.mirror_check import check_mirrors

Curves = dict[str, list[tuple[int, float]]]


def logged(run: RunDir) -> Curves:
    """What TensorBoard has."""
    return {tag: finite(points) for tag, points in read(run.tensorboard).scalars.items()}


def at_mlflow(folder: Path, experiment: str) -> dict[str, Curves]:
    """By the tag `jobkit.run` what the runs of an experiment have."""
    client = MlflowClient(tracking_uri=folder.as_uri())
    found = client.get_experiment_by_name(experiment)
    curves: dict[str, Curves] = {}
    for run in client.search_runs([found.experiment_id]):
        histories = {tag: client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
        name = run.data.tags["jobkit.run"]
        assert name not in curves, "two runs of one name"
        curves[name] = {tag: [(one.step, one.value) for one in history] for tag, history in histories.items()}
    return curves


def at_wandb(run: RunDir) -> Curves:
    curves: Curves = defaultdict(list)
    found = rows(run.path)
    assert [row["_step"] for row in found] == list(range(len(found)))  # W&B takes no row twice
    for row in found:
        for tag in set(row) - {"step"}:
            if not tag.startswith("_"):
                curves[tag].append((row["step"], row[tag]))
    return dict(curves)


@pytest.fixture(autouse=True)
def _file_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def with_mirrors(project: Project, mirror: str) -> None:
    with (project.path / "toy.yaml").open("a") as file:
        file.write(f"checkpoint: {{every: 10}}\nmirror: {mirror}\n")


ONE_RANK = ("resources.nodes=1", "resources.tasks_per_node=1")


def test_a_run_that_dies_and_goes_on_is_one_curve_at_both(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    store = tmp_path / "mlruns"
    with_mirrors(project, f"{{wandb: {{mode: offline}}, mlflow: {{uri: '{store.as_uri()}', experiment: numbers}}}}")
    (project.path / "orders.py").write_text(
        """\
import os
import signal


def at_step(ctx, step):
    if step == 35 and ctx.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    # Workers of a loader that are forked later have all that rank 0 holds open.
    project.submit("--local", *ONE_RANK, "+params.workers=2")
    (path,) = project.runs
    run = RunDir(path)
    assert causes(path) == ["killed", "finished"], describe(path)
    expected = logged(run)
    assert [step for step, _ in expected["train/loss"]] == list(range(60))
    assert at_mlflow(store, "numbers") == {run.name: expected}
    assert {tag: sorted(points) for tag, points in at_wandb(run).items()} == expected


def test_a_service_that_never_answers_keeps_the_others_from_nothing(tmp_path: Path) -> None:
    project = Project(tmp_path, {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with_mirrors(project, f"{{wandb: {{mode: offline}}, mlflow: {{uri: '{address}'}}}}")
        command = project.start("submit", "toy.yaml", "--local", *ONE_RANK)
        wait_for("all at W&B", lambda: project.runs and step_at_wandb(project.runs[0]) == 59)
        (run,) = project.runs
        wait_for("the end", lambda: "finished" in names(run), run)
    assert command.wait(120) == 0  # once the service hangs up, at the latest when nobody waits any longer


def step_at_wandb(run: Path) -> int:
    sent = json.loads((run / "mirror-wandb.json").read_text()) if (run / "mirror-wandb.json").exists() else {}
    return max((page["steps"].get("train/loss", -1) for page in sent.values()), default=-1)


def test_a_service_that_is_away_costs_a_run_a_line_and_nothing_else(tmp_path: Path) -> None:
    # Port 9 is refused at once; MLflow itself would try seven times, with pauses.
    project = Project(tmp_path, {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
    with_mirrors(project, "{mlflow: {uri: 'http://127.0.0.1:9'}}")
    project.submit("--local", *ONE_RANK)
    (path,) = project.runs
    said = (path / "logs/1/rank_0.err").read_text()
    assert said.count("it is tried again, and the training goes on") == 1
    done = project.jobkit("mirror", path.name, expect=1)
    assert done.stderr.startswith(f"error: {path.name}: MLflow: ")
    assert len(done.stderr.splitlines()) == 1


# What is copied when


def make(path: Path, state: str = "running") -> RunDir:
    """A run with the curves of 100 steps, a config that asks for MLflow, and no checkpoint yet."""
    run = made_run(path / "runs" / "made-00000000", state=state)
    uri = (path / "mlruns").as_uri()
    run.write_config(Config(name="made", task="mytask:train", mirror=MirrorConfig(mlflow=MlflowMirror(uri=uri))))
    return run


def save(run: RunDir, step: int, part: float) -> None:
    """A checkpoint that was written when a part of the event file was there."""
    (file,) = run.tensorboard.iterdir()
    whole, data = 0, file.read_bytes()
    while whole < part * len(data):  # to the end of a record
        whole += 16 + int.from_bytes(data[whole : whole + 8], "little")
    folder = run.checkpoints / f"step_{step:08}"
    folder.mkdir(parents=True)
    manifest = Manifest(step, 1, {}, extra={"tensorboard": {file.name: whole}})
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json()))


def copied(run: RunDir) -> Curves:
    """What another process copies, and then is there."""
    (mirror,) = mirrors_of(run)
    mirror.update()
    mirror.close()
    return at_mlflow(run.path.parents[1] / "mlruns", "made").get(run.name, {})


def assert_is_beginning(part: Curves, whole: Curves) -> None:
    assert part
    for tag, points in part.items():
        assert points == whole[tag][: len(points)], tag


def test_only_what_a_checkpoint_holds_is_copied(tmp_path: Path) -> None:
    run = make(tmp_path)
    (mirror,) = mirrors_of(run)
    mirror.update()
    assert mirror.copied == 0
    assert not run.mirror_file("mlflow").exists()
    save(run, 40, 0.4)
    first = copied(run)
    assert_is_beginning(first, logged(run))
    assert 20 < len(first["train/loss"]) < 60
    save(run, 70, 0.7)
    second = copied(run)
    assert_is_beginning(second, logged(run))
    assert len(first["train/loss"]) < len(second["train/loss"]) < 100


def test_nothing_is_there_twice_where_nobody_could_write_down_what_was_sent(tmp_path: Path) -> None:
    run = make(tmp_path)
    save(run, 40, 0.4)
    first = copied(run)
    run.mirror_file("mlflow").unlink()
    assert copied(run) == first
    run.record(Event.FINISHED, attempt=2, step=100, result={"score": 0.5})
    run.mirror_file("mlflow").unlink()
    whole = copied(run)
    assert [step for step, _ in whole["train/loss"]] == [*range(100), 100]  # the last one is not a number


def test_points_that_are_logged_again_are_not_copied_again(tmp_path: Path) -> None:
    run = make(tmp_path)
    save(run, 40, 0.4)
    first = copied(run)
    # The checkpoint is damaged: the next attempt begins anew, in another file, and logs the same steps again.
    (file,) = run.tensorboard.iterdir()
    file.rename(file.with_name(f"{file.name}.again"))
    (run.checkpoints / "step_00000040" / MANIFEST).unlink()
    (run.checkpoints / "step_00000040").rmdir()
    save(run, 30, 0.3)
    assert copied(run) == first


def test_after_a_rewind_there_is_a_page_of_its_own(tmp_path: Path) -> None:
    run = make(tmp_path)
    assert page_name(run) == "made-00000000"
    run.record(Event.REWOUND, step=40, branch="checkpoints/branches/1")
    assert page_name(run) == "made-00000000-branch-2"


def test_an_error_of_a_service_is_not_the_end(tmp_path: Path) -> None:
    run = make(tmp_path)
    save(run, 40, 0.4)
    (tmp_path / "mlruns").write_text("a file where a folder should be")
    mirror = Mirror(run, run.config(), "mlflow")
    with pytest.raises(Exception, match=r"."):
        mirror.update()
    (tmp_path / "mlruns").unlink()
    mirror.update()
    assert mirror.copied > 0


# The command line


def test_a_package_that_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # as W&B leaves it where it has run
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.split(".")[0] in ("wandb", "mlflow")]:
        monkeypatch.delitem(sys.modules, name)
    for service, package, mirror in (
        ("wandb", "wandb", {"wandb": WandbMirror()}),
        ("mlflow", "mlflow-skinny", {"mlflow": MlflowMirror()}),
    ):
        with pytest.raises(InvalidValue, match=rf"mirror.{service}: .*-m pip install {package}$"):
            check_mirrors(MirrorConfig(**mirror))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("mirror.wandb.mode=ofline", "found 'ofline', allowed: online, offline; did you mean 'offline'?"),
        ("mirror.mlfow={}", "mirror.mlfow: unknown key; did you mean 'mlflow'? (allowed: wandb, mlflow)"),
        ("mirror.mlflow=true", "mirror.mlflow: found True, expected a mapping with uri, experiment"),
    ],
)
def test_bad_values_are_refused(tmp_path: Path, override: str, said: str) -> None:
    project = Project(tmp_path)
    done = in_process.jobkit(project, "submit", "toy.yaml", "--dry-run", "--local", override, expect=2)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_without_mirrors_says_so(tmp_path: Path) -> None:
    project = Project(tmp_path)
    run = made_run(tmp_path / "runs" / "made-00000000")
    run.write_config(Config(name="made", task="mytask:train"))
    done = in_process.jobkit(project, "mirror", run.name, expect=2)
    assert "its config has no `mirror:`" in done.stderr
